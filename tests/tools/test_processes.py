"""The harness: a run in several processes reports errors, ends, and leaves no processes."""

import os
from pathlib import Path

import pytest

from tests.support.processes import run_checks, started

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
    monkeypatch.syspath_prepend(tmp_path)  # its checks run in the order of the file


@pytest.mark.slow
def test_a_check_that_fails_on_one_process_ends_all() -> None:
    names = ['check_together', 'check_fails_on_one', 'check_never_comes']
    outcome = run_checks('made_up_checks', 2, 2, names)
    assert outcome.passed == {'check_together'}
    assert outcome.codes == (-9, 1)
    text = str(outcome)
    for line in ('AssertionError: as it should', 'check_fails_on_one failed', 'this is process 0'):
        assert line in text


@pytest.mark.slow
def test_a_check_that_hangs_is_ended() -> None:
    outcome = run_checks('made_up_checks', 2, 2, ['check_hangs'], timeout=10)
    assert outcome.codes == (-9, -9)
    assert outcome.passed == frozenset()


# As the local launcher does: the second SIGINT ends the process that it has started.
STARTS_ANOTHER = """
import signal, subprocess, sys, time
other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
asked = []
def on_signal(*_):
    asked.append(1)
    if len(asked) == 2:
        other.kill()
        other.wait()
        sys.exit(3)
signal.signal(signal.SIGINT, on_signal)
print(f'other {other.pid} other', flush=True)
while True:
    time.sleep(1)
"""


def test_a_program_that_is_left_takes_those_that_it_started_with_it() -> None:
    with started(['-c', STARTS_ANOTHER]) as program:
        program.wait_for(' other')
        other = int(program.output().split()[1])
        os.kill(other, 0)
    assert program.processes[0].returncode == 3
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)
