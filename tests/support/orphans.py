"""A fixture that finds processes which outlive the tests of a module; no pytest plugin does that.

An environment variable marks every process that a test starts. A process keeps it after its parent has ended,
and in a new session.
"""

import os
from collections.abc import Iterator

import psutil
import pytest

GRACE_S = float(os.environ.get('SCALAX_TESTS_GRACE_S', '30'))  # for processes that are about to end
MARK = f'SCALAX_TESTS_{os.getpid()}'


def pytest_configure() -> None:
    os.environ[MARK] = '1'


@pytest.fixture(scope='module', autouse=True)
def no_orphaned_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kills, by id, the processes that remain after the module's other fixtures ended, and fails."""
    yield
    _, left = psutil.wait_procs(marked_processes(), timeout=GRACE_S)
    alive = [process for process in left if is_running(process)]
    commands = [f'{process.pid}: {command_of(process)}' for process in alive]
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=GRACE_S)
    if commands:
        text = '\n'.join(commands)
        pytest.fail(f'tests of {request.node.name} left processes running:\n{text}', pytrace=False)


def marked_processes() -> list[psutil.Process]:
    marked = []
    for process in psutil.process_iter():
        try:
            # A zombie has no environment.
            if process.pid != os.getpid() and MARK in process.environ():
                marked.append(process)
        except (psutil.Error, OSError):
            continue
    return marked


def is_running(process: psutil.Process) -> bool:
    """Whether a process has not ended. It may then be a zombie, until its parent asks for its exit code."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    try:
        return ' '.join(process.cmdline())[:200]
    except psutil.Error:
        return '(has just ended)'
