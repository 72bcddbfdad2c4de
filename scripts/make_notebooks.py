"""Makes the notebooks of docs/ from Python scripts: the same cells, and their outputs.

Usage: ``make tutorial``, or ``make tutorial ARGS=--check``, which writes nothing and prints how the notebooks
differ; ``ARGS=docs/tutorial.py`` makes one. A cell begins at a line ``# %%``, a text cell at
``# %% [markdown]``. ``# %% tags=["tpu"]`` and ``["gpu"]`` mark cells that need a compiler; without it, their
outputs are kept.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [ROOT / 'docs' / 'tutorial.py', *sorted((ROOT / 'docs' / 'notebooks').glob('*.py'))]

_HEADER = re.compile(r'# %%(?P<text> \[markdown\])?(?: tags=(?P<tags>\[.*\]))?')


@dataclass(frozen=True)
class Cell:
    """A cell: its text in the notebook, the line of the script where it begins, and its tags."""

    is_code: bool
    text: str
    line: int
    tags: tuple[str, ...] = ()


def read_cells(script: str) -> list[Cell]:
    """Returns the cells of a script."""
    cells: list[Cell] = []
    lines = script.splitlines()
    starts = [(number, match) for number, line in enumerate(lines) if (match := _HEADER.fullmatch(line))]
    ends = [*(number for number, _ in starts[1:]), len(lines)]
    for (start, header), end in zip(starts, ends, strict=True):
        text = lines[start + 1 : end]
        if header['text']:
            text = [re.sub('^# ?', '', line) for line in text]
        tags = tuple(json.loads(header['tags'] or '[]'))
        cells.append(Cell(not header['text'], '\n'.join(text).strip('\n'), start + 2, tags))
    return cells


def run(cells: list[Cell], script: Path) -> Iterator[list[dict[str, Any]]]:
    """Runs the cells in order, in one module; yields the outputs of each in the notebook format."""
    # A real module, because dataclasses and pickle look up the module of a class.
    module = types.ModuleType(script.stem)
    sys.modules[module.__name__] = module
    try:
        for cell in cells:
            yield _run_cell(cell, module.__dict__, str(script)) if cell.is_code else []
    finally:
        del sys.modules[module.__name__]


def _run_cell(cell: Cell, names: dict[str, Any], script: str) -> list[dict[str, Any]]:
    tree = ast.parse('\n' * (cell.line - 1) + cell.text, script)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, script, 'exec', dont_inherit=True), names)
        if last is not None:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), script, 'eval', dont_inherit=True), names)
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
    """Returns the notebook of these cells and outputs (format 4.5)."""
    notebook_cells: list[dict[str, Any]] = []
    for number, (cell, shown) in enumerate(zip(cells, outputs, strict=True)):
        count = 1 + sum(notebook_cell['cell_type'] == 'code' for notebook_cell in notebook_cells)
        tags = {'tags': [*cell.tags]} if cell.tags else {}
        common = {'id': f'cell-{number}', 'metadata': tags, 'source': _lines(cell.text)}
        code = {'cell_type': 'code', 'execution_count': count, 'outputs': shown}
        notebook_cells.append({**common, **(code if cell.is_code else {'cell_type': 'markdown'})})
    return {
        'cells': notebook_cells,
        'metadata': {
            'kernelspec': {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'},
            'language_info': {'name': 'python'},
        },
        'nbformat': 4,
        'nbformat_minor': 5,
    }


def differences(new: dict[str, Any], old: dict[str, Any]) -> str:
    """Returns the differences between two notebooks, line by line; empty if there are none."""
    texts = [json.dumps(content, indent=1, ensure_ascii=False).splitlines() for content in (old, new)]
    return '\n'.join(difflib.unified_diff(*texts, 'notebook', 'script', lineterm='', n=5))


def with_kept(
    cells: list[Cell], outputs: list[list[dict[str, Any]]], kept: dict[str, Any]
) -> list[list[dict[str, Any]]]:
    """Returns the outputs, with those of the existing notebook for cells whose compiler is missing."""
    missing = set() if importlib.util.find_spec('libtpu') else {'tpu'}
    cuda = any(map(importlib.util.find_spec, ('jax_cuda12_plugin', 'jax_cuda13_plugin')))
    missing |= set() if cuda else {'gpu'}
    before = [cell.get('outputs', []) for cell in kept['cells']]
    both = zip(cells, outputs, before, strict=False)
    return [old if missing & {*cell.tags} else new for cell, new, old in both] + outputs[len(before) :]


def make(script: Path, check: bool) -> bool:
    """Makes or checks one notebook; returns whether it matches the script."""
    file = script.with_suffix('.ipynb')
    kept = json.loads(file.read_text(encoding='utf-8')) if file.exists() else {'cells': []}
    cells = read_cells(script.read_text(encoding='utf-8'))
    content = notebook(cells, with_kept(cells, list(run(cells, script)), kept))
    if check:
        diff = differences(content, kept)
        print(diff or f'{file.name} is as {script.name} makes it')
        return not diff
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    print(f'{file.relative_to(ROOT)}: {len(cells)} cells, {file.stat().st_size:,} bytes')
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('scripts', nargs='*', type=Path, help='the Python files; all by default')
    parser.add_argument('--check', action='store_true', help='write nothing, show differences')
    options = parser.parse_args()
    os.environ['COLUMNS'] = '100'  # text pictures are as wide as the terminal
    scripts = [script.resolve() for script in options.scripts or SCRIPTS]
    if len(scripts) == 1:
        return int(not make(scripts[0], options.check))
    # Each notebook runs in a new process, like a fresh kernel, because it chooses its number of devices.
    flags = ['--check'] if options.check else []
    codes = [subprocess.run([sys.executable, __file__, *flags, script]).returncode for script in scripts]
    return int(any(codes))


if __name__ == '__main__':
    sys.exit(main())
