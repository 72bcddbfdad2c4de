"""Makes docs/tutorial.ipynb from docs/tutorial.py: the same cells, with what they print and show.

Usage: ``make tutorial``, or ``make tutorial ARGS=--check``, which writes nothing and shows in what the
notebook differs. A cell begins at a line ``# %%``, one of text at ``# %% [markdown]``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / 'docs' / 'tutorial.py'
NOTEBOOK = SCRIPT.with_suffix('.ipynb')

HEADERS = {'# %%': True, '# %% [markdown]': False}


@dataclass(frozen=True)
class Cell:
    """One cell: its text as a notebook has it, and the line of the script where that begins."""

    is_code: bool
    text: str
    line: int


def read_cells(script: str) -> list[Cell]:
    """The cells of a script."""
    cells: list[Cell] = []
    lines = script.splitlines()
    starts = [number for number, line in enumerate(lines) if line in HEADERS]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        is_code, text = HEADERS[lines[start]], lines[start + 1 : end]
        if not is_code:
            text = [re.sub('^# ?', '', line) for line in text]
        cells.append(Cell(is_code, '\n'.join(text).strip('\n'), start + 2))
    return cells


def run(cells: list[Cell]) -> Iterator[list[dict[str, Any]]]:
    """Runs the cells in order, in one module; yields the outputs of each in the notebook's format."""
    # A real module, because dataclasses and pickle look up where a class was defined.
    module = types.ModuleType('tutorial')
    sys.modules[module.__name__] = module
    try:
        for cell in cells:
            yield _run_cell(cell, module.__dict__) if cell.is_code else []
    finally:
        del sys.modules[module.__name__]


def _run_cell(cell: Cell, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse('\n' * (cell.line - 1) + cell.text, str(SCRIPT))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(SCRIPT), 'exec', dont_inherit=True), names)
        if last is not None:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), str(SCRIPT), 'eval', dont_inherit=True), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({'name': 'stdout', 'output_type': 'stream', 'text': _lines(printed.getvalue())})
    if value is not None:
        outputs.append({'data': _shown(value), 'metadata': {}, 'output_type': 'display_data'})
    return outputs


def _shown(value: Any) -> dict[str, list[str]]:
    data = {'text/plain': _lines(str(value))}
    if hasattr(value, '_repr_html_'):
        data['text/html'] = _lines(value._repr_html_())
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(cells: list[Cell], outputs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The notebook of these cells and outputs (format 4.5)."""
    made: list[dict[str, Any]] = []
    for number, (cell, shown) in enumerate(zip(cells, outputs, strict=True)):
        count = 1 + sum(each['cell_type'] == 'code' for each in made)
        common = {'id': f'cell-{number}', 'metadata': {}, 'source': _lines(cell.text)}
        code = {'cell_type': 'code', 'execution_count': count, 'outputs': shown}
        made.append({**common, **(code if cell.is_code else {'cell_type': 'markdown'})})
    return {
        'cells': made,
        'metadata': {
            'kernelspec': {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'},
            'language_info': {'name': 'python'},
        },
        'nbformat': 4,
        'nbformat_minor': 5,
    }


def differences(made: dict[str, Any], kept: dict[str, Any]) -> str:
    """In what two notebooks differ, line by line; empty if in nothing."""
    texts = [json.dumps(each, indent=1, ensure_ascii=False).splitlines() for each in (kept, made)]
    return '\n'.join(difflib.unified_diff(*texts, NOTEBOOK.name, SCRIPT.name, lineterm='', n=5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='write nothing, show differences')
    check = parser.parse_args().check
    os.environ['COLUMNS'] = '100'  # pictures as text are as wide as the terminal
    cells = read_cells(SCRIPT.read_text(encoding='utf-8'))
    made = notebook(cells, list(run(cells)))
    if check:
        found = differences(made, json.loads(NOTEBOOK.read_text(encoding='utf-8')))
        print(found or f'{NOTEBOOK.name} is as {SCRIPT.name} makes it')
        return bool(found)
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    print(f'{NOTEBOOK.relative_to(ROOT)}: {len(cells)} cells, {NOTEBOOK.stat().st_size:,} bytes')
    return 0


if __name__ == '__main__':
    sys.exit(main())
