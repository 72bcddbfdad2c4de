"""Snapshots are stored, compared with a diff, rewritten, and never stale."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.snapshots import FOLDER, SnapshotFile, files

TESTS = """
import pytest

@pytest.mark.parametrize('word', ['b', 'a'])
def test_words(word, snapshot):
    for text in (f'{word}\\n\\n', f'{word}\\n\\n', 'x'):
        snapshot(text)
"""
WRITTEN = (
    '=== test_words[b]\nb\n\n\n=== test_words[b] 2\nx\n=== test_words[a]\na\n\n\n=== test_words[a] 2\nx\n'
)


def run(folder: Path, *flags: str) -> str:
    """Runs tests in a folder with a copy of the plugin, like this repository."""
    command = [
        sys.executable,
        '-m',
        'pytest',
        '-q',
        '-p',
        'snapshots',
        '-p',
        'no:cacheprovider',
    ]
    return subprocess.run(
        [*command, *flags],
        cwd=folder,
        env={'PYTHONPATH': str(folder / 'support'), 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'},
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.medium
def test_texts_are_written_compared_and_missed(tmp_path: Path) -> None:
    (tmp_path / 'support').mkdir()
    plugin = (ROOT / 'tests/support/snapshots.py').read_text(encoding='utf-8')
    (tmp_path / 'support' / 'snapshots.py').write_text(plugin, encoding='utf-8')
    test, texts = tmp_path / 'test_it.py', tmp_path / 'snapshots' / 'test_it.txt'
    test.write_text(TESTS)
    output = run(tmp_path)
    assert '`pytest --rewrite-snapshots` would store:' in output and re.search('E +b\n', output), output
    assert '2 passed' in run(tmp_path, '--rewrite-snapshots')
    assert texts.read_text() == WRITTEN
    assert SnapshotFile(texts).texts['test_words[b]'] == 'b\n\n'

    texts.write_text(WRITTEN + '=== test_words[a] 3\ny\n')
    assert 'compared 2 texts, but test_it.txt also stores test_words[a] 3' in run(tmp_path)
    run(tmp_path, '--rewrite-snapshots', 'test_it.py::test_words[a]')
    assert texts.read_text() == WRITTEN

    texts.write_text(WRITTEN + '=== test_gone\ny\n')
    run(tmp_path, '--rewrite-snapshots', 'test_it.py::test_words[a]')
    assert texts.read_text() == WRITTEN + '=== test_gone\ny\n'
    run(tmp_path, '--rewrite-snapshots')
    assert texts.read_text() == WRITTEN

    texts.write_text(WRITTEN.replace('x', 'z'))
    output = run(tmp_path)
    assert '2 failed' in output
    assert 'the text of test_words[b] 2 differs (- stored, + now):' in output
    assert '- z\n' in output and '+ x\n' in output, output


def test_every_stored_text_has_a_test() -> None:
    stale = {path: texts.stale_names() for path, texts in files.items()}
    assert {path.name: names for path, names in stale.items() if names} == {}
    tests = {path.relative_to(FOLDER).with_suffix('.py') for path in FOLDER.rglob('*.txt')}
    assert [test for test in sorted(tests) if not (FOLDER.parent / test).exists()] == []
