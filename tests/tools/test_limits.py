"""Tests that hang are stopped, processes that they leave are found, and what runs all checks ends well."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import left_behind, limits, run_checks
from tests.support import ROOT

HEAD = """
import ctypes, subprocess, sys, time, pytest
from scripts import left_behind, limits
limits.STILL_S, limits.LAST_S, left_behind.GRACE_S = 1, 1, 0.1
"""


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PYTEST_DISABLE_PLUGIN_AUTOLOAD', '1')


def run(folder: Path, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """The tests of a file, in the order in which they are written."""
    (folder / 'test_made_up.py').write_text(HEAD + code)
    env = {**os.environ, 'PYTHONPATH': str(ROOT), limits.RUNNING: str(folder / 'running')}
    command = ['-m', 'pytest', '-p', 'scripts.limits', '-p', 'no:cacheprovider', '-q']
    return subprocess.run(
        [sys.executable, *command, *flags, str(folder)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
    )


WAITS = """
def test_waits():
    try:
        time.sleep(600)
    except Exception:
        pass

def test_is_quick():
    pass
"""


def test_a_test_that_waits_is_stopped_and_the_others_run(tmp_path: Path) -> None:
    done = run(tmp_path, WAITS)
    assert done.returncode == 1
    assert 'StoodStill: test_made_up.py::test_waits stood still for 1 s while running' in done.stdout
    assert '        time.sleep(600)\n' in done.stdout
    assert '1 failed, 1 passed' in done.stdout


TEARS_DOWN = """
@pytest.fixture
def slow():
    yield
    time.sleep(600)

def test_leaves(slow):
    pass
"""


def test_a_fixture_that_waits_is_stopped(tmp_path: Path) -> None:
    done = run(tmp_path, TEARS_DOWN)
    assert 'test_made_up.py::test_leaves stood still for 1 s while tearing down' in done.stdout
    assert '1 passed, 1 error' in done.stdout


# PyDLL keeps Python's lock, as a deadlock in a library may: no line of Python runs any more.
STUCK = """
def test_is_stuck():
    library, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    library.pthread_mutex_init(lock, None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)
"""


def test_a_test_that_python_cannot_stop_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, STUCK)
    assert done.returncode == 1
    assert 'Timeout (0:00:02)!' in done.stderr and 'in test_is_stuck' in done.stderr
    assert (tmp_path / 'running').read_text() == 'test_made_up.py::test_is_stuck'


LEAVES_A_THREAD = """
import threading

def test_leaves_a_thread():
    threading.Thread(target=time.sleep, args=(600,)).start()
"""


def test_a_run_that_a_thread_does_not_let_end_is_ended(tmp_path: Path) -> None:
    done = run(tmp_path, LEAVES_A_THREAD)
    assert done.returncode == 1
    assert '1 passed' in done.stdout
    assert 'Timeout (0:00:01)!' in done.stderr and '_shutdown' in done.stderr


# The second is started in a session of its own, by a process that is gone.
LEAVES = """
SLEEP = [sys.executable, '-c', 'import time; time.sleep(600)']

def test_leaves_two():
    print('left', subprocess.Popen(SLEEP).pid)
    code = f'p = subprocess.Popen({SLEEP}, start_new_session=True)'
    code = f'import subprocess; {code}; print("left", p.pid, flush=True)'
    subprocess.run([sys.executable, '-c', code], check=True)
"""


def runs(pid: int) -> bool:
    """A process that has ended may be there until its parent, or init, asks for its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_processes_that_are_left_are_named_and_ended(tmp_path: Path) -> None:
    done = run(tmp_path, LEAVES)
    assert done.returncode == 1
    left = {int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith('left ')}
    assert len(left) == 2, done.stdout
    assert 'tests of test_made_up.py left processes behind:' in done.stdout
    for pid in left:
        assert f'{pid}: {sys.executable} -c import time; time.sleep(600)' in done.stdout
        assert not runs(pid)


# In another process; this one waits.
COMPUTES = """
limits.BUSY = 0.001  # it gets little of a busy machine

def test_computes():
    code = 'import time; end = time.monotonic() + 4\\nwhile time.monotonic() < end: pass'
    subprocess.run([sys.executable, '-c', code], check=True)
"""


def test_a_test_that_computes_does_not_stand_still(tmp_path: Path) -> None:
    done = run(tmp_path, COMPUTES)
    assert '1 passed' in done.stdout


def test_a_test_that_computes_for_too_long_is_stopped(tmp_path: Path) -> None:
    done = run(tmp_path, COMPUTES, '--longest=1')
    assert 'test_made_up.py::test_computes took more than 1 s while running' in done.stdout
    assert 'left processes' not in done.stdout


ENDED = """
def test_is_ended():
    try:
        subprocess.run([sys.executable, '-c', 'import os, signal; os.kill(os.getppid(), signal.SIGTERM)'])
        time.sleep(600)
    finally:
        print('it cleans up')
"""


def test_a_run_that_is_ended_cleans_up(tmp_path: Path) -> None:
    done = run(tmp_path, ENDED, '-s')
    assert 'it cleans up' in done.stdout and 'KeyboardInterrupt' in done.stdout
    assert done.returncode == pytest.ExitCode.INTERRUPTED


# --- The command that runs all checks ------------------------------------------------------------


def step(folder: Path, code: str) -> run_checks.Step:
    """Tests of a file as a step, as `make test` runs them."""
    (folder / 'test_made_up.py').write_text(HEAD + code)
    command = [sys.executable, '-m', 'pytest', '-p', 'scripts.limits', '-p', 'no:cacheprovider', '-q']
    report = folder / 'report.xml'
    return run_checks.Step('tests', [*command, f'--junit-xml={report}', str(folder)], junit=report)


def test_a_step_says_what_was_counted(tmp_path: Path) -> None:
    passes = step(tmp_path, 'def test_it():\n    pass\n')
    run_checks.run([passes])
    assert (passes.problem, passes.counts) == ('', {'passed': 1})


def test_a_step_whose_last_test_is_stuck_says_which(tmp_path: Path) -> None:
    stuck = step(tmp_path, STUCK)
    run_checks.run([stuck])
    assert stuck.problem.startswith('exit status 1, in ')
    assert stuck.problem.endswith('test_made_up.py::test_is_stuck')


def test_a_step_that_is_too_late_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = step(tmp_path, LEAVES + '    time.sleep(600)\n')
    monkeypatch.setattr(left_behind, 'GRACE_S', 1)
    slow.start()
    end = time.monotonic() + 45
    while len(left_behind.find(slow.mark)) < 3:  # pytest, and the two
        assert time.monotonic() < end
        time.sleep(0.05)
    monkeypatch.setattr(run_checks, 'TIMEOUT_S', 0)
    slow.finish()
    assert slow.problem.startswith('ended after 0 s, in ')
    assert slow.problem.endswith('test_made_up.py::test_leaves_two')
    assert left_behind.find(slow.mark) == []


def test_a_step_that_leaves_a_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_behind, 'GRACE_S', 1)
    sleeps = [sys.executable, '-c', 'import time; time.sleep(600)']
    leaves = run_checks.Step(
        'leaves',
        [sys.executable, '-c', f'import subprocess; subprocess.Popen({sleeps}, start_new_session=True)'],
    )
    run_checks.run([leaves])
    assert leaves.problem == 'left processes behind'
    assert left_behind.find(leaves.mark) == []


def test_files_are_shared_so_that_all_parts_take_about_as_long() -> None:
    assert [file for file in run_checks.SECONDS if not (ROOT / file).is_file()] == []
    files = sorted((ROOT / 'tests').rglob('test_*.py'))
    parts = run_checks.shares(files, 6)
    assert sorted(file for part in parts for file in part) == files
    seconds = [sum(run_checks.SECONDS.get(str(file.relative_to(ROOT)), 1) for file in part) for part in parts]
    assert max(seconds) - min(seconds) <= min(run_checks.SECONDS.values())
