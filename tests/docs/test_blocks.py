"""Runs the Python blocks of README.md and docs/: everything that the documentation shows has to work."""

from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.docs_blocks import FILES, README, read_blocks, run_blocks, runnable

# These print the same if a reader runs them again in the same folder.
AGAIN = {ROOT / 'docs' / name for name in ('start.md', 'training_loop.md')}
# Trainings and searches of several seconds.
SLOW = {
    ROOT / 'docs' / name
    for name in (
        'training_loop.md',
        'auto_sharding.md',
        'cookbook.md',
        'coming_from.md',
        'lora.md',
        'pipeline_parallelism.md',
    )
}
# The packages of other projects without which the blocks of a page cannot run: equimo needs Python 3.12.
NEEDS = {ROOT / 'docs' / 'real_models.md': 'equimo'}
PAGES = [pytest.param(path, marks=[pytest.mark.slow] if path in SLOW else []) for path in FILES]


@pytest.mark.medium
@pytest.mark.parametrize('path', PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if path in NEEDS:
        pytest.importorskip(NEEDS[path], reason=f'{NEEDS[path]} is not installed')
    monkeypatch.setenv('COLUMNS', '120')  # tables are as wide as the terminal
    monkeypatch.chdir(tmp_path)  # blocks write to a scratch folder instead of the repository
    for _ in range(2 if path in AGAIN else 1):
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
