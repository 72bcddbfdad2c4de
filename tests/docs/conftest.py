"""The site, built once for all tests that read it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.fixture(scope='session')
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('site')
    command = [sys.executable, '-m', 'mkdocs', 'build', '--site-dir', str(folder)]
    environment = {**os.environ, 'NO_MKDOCS_2_WARNING': '1', 'DISABLE_MKDOCS_2_WARNING': 'true'}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr  # by the settings, a warning is an error
    return folder
