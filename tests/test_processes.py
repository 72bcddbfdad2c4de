"""The harness itself: a run in several processes says what went wrong, ends, and leaves nobody behind."""

from pathlib import Path

import pytest
from processes import run_checks

MODULE = """
import os, time
import jax

def check_together():
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)

def check_fails_on_one():
    print('this is process', jax.process_index())
    assert jax.process_index() == 0, 'as it should'  # without process 0 the others end by themselves
    time.sleep(600)

def check_never_comes():
    raise AssertionError

def check_hangs():
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'made_up_checks.py').write_text(MODULE, encoding='utf-8')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))


def test_a_check_that_fails_on_one_process_ends_all() -> None:
    names = ['check_together', 'check_fails_on_one', 'check_never_comes']
    outcome = run_checks('made_up_checks', 2, 2, names)
    assert outcome.passed == {'check_together'}
    assert outcome.codes == (-9, 1)
    text = str(outcome)
    for line in ('AssertionError: as it should', 'check_fails_on_one failed', 'this is process 0'):
        assert line in text


def test_a_check_that_hangs_is_ended() -> None:
    outcome = run_checks('made_up_checks', 2, 2, ['check_hangs'], timeout=10)
    assert outcome.codes == (-9, -9)
    assert outcome.passed == frozenset()
