"""The texts that tests compare with: read, written anew, and none left that no test says."""

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT
from tests.support.snapshots import Snapshots

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
    """A run of tests in a folder that has the plugin beside them, as ours have."""
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


def test_texts_are_written_compared_and_missed(tmp_path: Path) -> None:
    (tmp_path / 'support').mkdir()
    plugin = (ROOT / 'tests/support/snapshots.py').read_text(encoding='utf-8')
    (tmp_path / 'support' / 'snapshots.py').write_text(plugin, encoding='utf-8')
    test, texts = tmp_path / 'test_it.py', tmp_path / 'snapshots' / 'test_it.txt'
    test.write_text(TESTS)
    assert 'pytest --rewrite-snapshots writes this down' in run(tmp_path)
    assert '2 passed' in run(tmp_path, '--rewrite-snapshots')
    assert texts.read_text() == WRITTEN
    assert Snapshots(texts).known['test_words[b]'] == 'b\n\n'

    texts.write_text(WRITTEN + '=== test_gone\ny\n')
    assert 'test_it.txt: no test says: test_gone (--rewrite' in run(tmp_path)
    assert 'no test says' not in run(tmp_path, 'test_it.py::test_words[a]')
    run(tmp_path, '--rewrite-snapshots', 'test_it.py::test_words[a]')
    assert texts.read_text() == WRITTEN + '=== test_gone\ny\n'
    run(tmp_path, '--rewrite-snapshots')
    assert texts.read_text() == WRITTEN
    texts.write_text(WRITTEN.replace('x', 'z'))
    assert '2 failed' in run(tmp_path)
