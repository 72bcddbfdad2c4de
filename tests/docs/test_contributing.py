"""The example rule of CONTRIBUTING.md passes the tests of that page."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.docs_blocks import read_blocks


@pytest.mark.slow
def test_the_worked_example(tmp_path):
    page = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
    rule, tests = [block.text for block in read_blocks(page) if block.is_python]
    file = tmp_path / 'test_last_dimension.py'
    file.write_text(f'{rule}\n\n{tests}\n', encoding='utf-8')
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'no:randomly']
    done = subprocess.run(
        [*command, '-c', str(ROOT / 'pyproject.toml'), '--doctest-modules', '-o', 'addopts=', str(file)],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_NUM_CPU_DEVICES': '8'},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    assert '6 passed' in done.stdout  # five tests and the example of the docstring
