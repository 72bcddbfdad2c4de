"""The settings of pytest: tests that hang fail with the stacks of all threads, and orphans are found."""

import os
import re
import subprocess
import sys

import psutil
import pytest

from tests.support import ROOT
from tests.support.orphans import is_running

pytestmark = pytest.mark.medium

TESTS = """
import ctypes, pytest, subprocess, sys, threading, time

SLEEP = [sys.executable, '-c', 'import time; time.sleep(600)']

@pytest.mark.timeout(1)
def test_waits():
    threading.Thread(target=time.sleep, args=(600,), name='another thread', daemon=True).start()
    try:
        time.sleep(600)
    except Exception:
        pass

def test_holds_the_lock_of_the_interpreter():
    library, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    library.pthread_mutex_init(lock, None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)

children = []

def test_leaves_a_child_and_an_orphan():
    children.append(subprocess.Popen(SLEEP))
    print('left', children[0].pid)
    start = f'orphan = subprocess.Popen({SLEEP}, start_new_session=True)'
    code = f'import subprocess; {start}; print("left", orphan.pid, flush=True)'
    subprocess.run([sys.executable, '-c', code], check=True)

def test_passes():
    pass
"""


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp('harness')
    (folder / 'test_made_up.py').write_text(TESTS)
    plugins = ['xdist.plugin', 'pytest_timeout', 'tests.support.orphans', 'no:cacheprovider']
    settings = ['addopts=', 'timeout=60', 'faulthandler_timeout=8']
    command = [sys.executable, '-m', 'pytest', '-c', str(ROOT / 'pyproject.toml'), '--rootdir', str(folder)]
    command += [flag for plugin in plugins for flag in ('-p', plugin)]
    command += [flag for setting in settings for flag in ('-o', setting)]
    command += ['--numprocesses=1', '-q', '-rA', str(folder)]
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}
    env['SCALAX_TESTS_GRACE_S'] = '3'
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)


def test_a_test_that_waits_fails_with_all_stacks(run: subprocess.CompletedProcess[str]) -> None:
    assert 'Timeout (>1.0s) from pytest-timeout' in run.stdout
    assert 'Stack of another thread' in run.stdout + run.stderr


def test_a_test_that_cannot_be_interrupted_ends_its_process_alone(
    run: subprocess.CompletedProcess[str],
) -> None:
    assert 'Timeout (0:00:08)!' in run.stderr
    assert 'in test_holds_the_lock_of_the_interpreter' in run.stderr
    assert 'crashed while running' in run.stdout
    assert '2 failed, 2 passed, 1 error' in run.stdout
    assert run.returncode == pytest.ExitCode.TESTS_FAILED


def test_orphaned_processes_are_named_and_killed(run: subprocess.CompletedProcess[str]) -> None:
    pids = set(re.findall(r'^left (\d+)$', run.stdout, re.MULTILINE))
    assert len(pids) == 2, run.stdout
    assert 'tests of test_made_up.py left processes running:' in run.stdout
    for pid in pids:
        assert f'{pid}: {sys.executable} -c import time; time.sleep(600)' in run.stdout
        assert has_ended(int(pid))


def has_ended(pid: int) -> bool:
    try:
        return not is_running(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
