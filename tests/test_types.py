"""Type checking: see tests/typed, which `make check` and `make test` check with mypy."""

import runpy

import pytest

from tests.support import ROOT


@pytest.mark.slow
def test_the_program_that_is_checked_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / 'tests/typed/program.py'), run_name='program')
    assert 'train_step on 8 cpu devices' in capsys.readouterr().out
