"""The reports in docs/verify.md and docs/testing.md equal the printed reports, except for numbers."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.docs_blocks import read_blocks


def words(text: str) -> list[str]:
    """The words of a report, with placeholders for its numbers and without the dashes of its tables."""
    return re.sub(r'[\d.]+(e-\d+)?', '#', text.replace('-', '')).split()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['verify.md', 'testing.md'])
def test_report_in_the_docs_equals_the_printed_report(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('COLUMNS', '120')
    blocks = read_blocks((ROOT / 'docs' / name).read_text(encoding='utf-8'))
    number = next(i for i, block in enumerate(blocks) if 'does not match one device' in block.text)
    assert blocks[number].language == 'text' and blocks[number].comment is None
    scope: dict[str, object] = {}
    for block in blocks[:number]:
        if block.is_python:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile('\n' * (block.line - 1) + block.text, str(Path(name)), 'exec'), scope)
    assert words(out.getvalue()) == words(blocks[number].text)
