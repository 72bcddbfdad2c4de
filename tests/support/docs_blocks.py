"""Reads and runs the Python blocks of Markdown files.

The blocks of one file run in order and share their names, as if typed by a reader.

- `<!-- skip: reason -->` on the line before a block skips it.
- A block followed by `<!-- prints -->` and a text block has to print exactly that text.
"""

import contextlib
import io
import itertools
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import ROOT

README = ROOT / 'README.md'
FILES = [README, ROOT / 'CONTRIBUTING.md', *sorted(ROOT.glob('docs/**/*.md'))]

COMMENT = re.compile(r'\s*<!--\s*(skip|prints)\b\s*:?\s*(.*?)\s*-->\s*')


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the line number of its first line, counted from 1."""

    language: str
    line: int
    text: str
    comment: str | None = None
    reason: str = ''

    @property
    def is_python(self) -> bool:
        return self.language in ('python', 'py')


def read_blocks(markdown: str) -> list[Block]:
    blocks: list[Block] = []
    lines = markdown.splitlines()
    comment: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r'( *)(`{3,}|~{3,})\s*([\w+-]*).*', lines[number])
        if fence is None:
            if match := COMMENT.fullmatch(lines[number]):
                assert comment is None, f'line {number + 1}: two comments before one block'
                comment = match
            elif lines[number].strip():
                assert comment is None, f'line {number}: the comment has no block after it'
            number += 1
            continue
        indent, ticks, language = fence.groups()
        begin = end = number + 1
        closing = re.compile(rf' *{ticks[0]}{{{len(ticks)},}}\s*')
        while end < len(lines) and not closing.fullmatch(lines[end]):
            end += 1
        assert end < len(lines), f'line {begin}: the block is not closed'
        text = '\n'.join(line.removeprefix(indent) for line in lines[begin:end])
        kind, reason = comment.groups() if comment else (None, '')
        blocks.append(Block(language, begin + 1, text, kind, reason))
        comment = None
        number = end + 1
    assert comment is None, 'the last comment has no block after it'
    return blocks


def runnable(blocks: list[Block]) -> list[tuple[Block, Block | None]]:
    """Returns the Python blocks that are not skipped, each with the block of its expected output."""
    pairs = []
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        if block.comment == 'skip':
            assert block.is_python, f'line {block.line}: only Python blocks are skipped'
            assert block.reason, f'line {block.line}: say why: <!-- skip: reason -->'
        elif block.is_python:
            assert block.comment != 'prints', f'line {block.line}: "prints" belongs to a text block'
            pairs.append((block, after if after and after.comment == 'prints' else None))
    outputs = [block for block in blocks if block.comment == 'prints']
    used = [output for _, output in pairs if output]
    for output in outputs:
        assert output in used, f'line {output.line}: no Python block that runs prints this'
    return pairs


def tidy(text: str) -> str:
    """Returns the text without trailing white space, and without white space around it."""
    return '\n'.join(line.rstrip() for line in text.strip().splitlines())


def run_blocks(path: Path, markdown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A real module, because dataclasses and pickle look up the module of a class.
    module = types.ModuleType('docs_' + re.sub(r'\W', '_', path.stem))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block, expected in runnable(read_blocks(markdown)):
        # The empty lines keep the line numbers of the document.
        code = compile('\n' * (block.line - 1) + block.text, str(path), 'exec', dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        if expected:
            where = f'{path.name}, line {block.line}'
            same = tidy(printed.getvalue()) == tidy(expected.text)
            assert same, f'{where}: prints something else:\n{printed.getvalue()}'
