"""Runs the Python blocks of README.md and docs/: what the documentation shows has to work.

The blocks of one file run in order and share their names, as a reader would type them.

- `<!-- skip: reason -->` on the line before a block leaves it out.
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

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / 'README.md'
FILES = [path for path in [README, *sorted(ROOT.glob('docs/**/*.md'))] if path.exists()]

COMMENT = re.compile(r'\s*<!--\s*(skip|prints)\b\s*:?\s*(.*?)\s*-->\s*')


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is where its text begins, counted from 1."""

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
            if found := COMMENT.fullmatch(lines[number]):
                assert comment is None, f'line {number + 1}: two comments before one block'
                comment = found
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
    """The Python blocks that are not skipped, each with the block of its expected output."""
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
    """The text without the white space at the ends of its lines, and of the whole."""
    return '\n'.join(line.rstrip() for line in text.strip().splitlines())


def run_blocks(path: Path, markdown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A real module, because dataclasses and pickle look up where a class was defined.
    module = types.ModuleType('docs_' + re.sub(r'\W', '_', path.stem))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block, expected in runnable(read_blocks(markdown)):
        # The empty lines give every statement its line number in the document.
        code = compile('\n' * (block.line - 1) + block.text, str(path), 'exec', dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        if expected:
            where = f'{path.name}, line {block.line}'
            same = tidy(printed.getvalue()) == tidy(expected.text)
            assert same, f'{where}: prints something else:\n{printed.getvalue()}'


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv('COLUMNS', '120')  # tables are as wide as the terminal
    monkeypatch.chdir(tmp_path)  # what a block writes does not land in the repository
    run_blocks(path, path.read_text(encoding='utf-8'), monkeypatch)


def test_readme_shows_python() -> None:
    assert README.exists()
    assert any(block.is_python for block in read_blocks(README.read_text(encoding='utf-8')))


PRINTS_TWO = """
```python
x = 1
```

Text between.

```python
print(x + 1)
```
<!-- prints -->
```text
{output}
```
"""


def test_blocks_share_names_and_output_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(Path('a.md'), PRINTS_TWO.format(output='2  '), monkeypatch)
    with pytest.raises(AssertionError, match=r'a\.md, line 9: prints something else'):
        run_blocks(Path('a.md'), PRINTS_TWO.format(output='3'), monkeypatch)


def test_error_points_at_the_line_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(Path('a.md'), '\n\n```python\nx = 0\n1 / x\n```\n', monkeypatch)
    last = caught.traceback[-1]
    assert (str(last.path).endswith('a.md'), last.lineno + 1) == (True, 5)


def test_a_skipped_block_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(Path('a.md'), '<!-- skip: needs a TPU -->\n```python\n1 / 0\n```\n', monkeypatch)


def test_a_block_inside_a_longer_fence_is_text() -> None:
    blocks = read_blocks('````markdown\n```python\n1 / 0\n```\n````\n')
    assert [block.language for block in blocks] == ['markdown']


@pytest.mark.parametrize(
    ('markdown', 'message'),
    [
        ('<!-- skip: -->\n```python\n```\n', 'line 3: say why'),
        ('<!-- skip: reason -->\n```bash\n```\n', 'line 3: only Python blocks are skipped'),
        ('<!-- prints -->\n```text\n2\n```\n', 'line 3: no Python block that runs prints this'),
        ('<!-- prints -->\n```python\n```\n', 'line 3: "prints" belongs to a text block'),
        ('<!-- prints -->\ntext\n', 'line 1: the comment has no block after it'),
        ('<!-- skip: reason -->\n', 'the last comment has no block after it'),
        ('```python\n', 'line 1: the block is not closed'),
    ],
)
def test_mistakes_in_the_markup_are_errors(markdown: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        runnable(read_blocks(markdown))
