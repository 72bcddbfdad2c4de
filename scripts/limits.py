"""A pytest plugin: how long a test may stand still, and that no process outlives it.

A test stands still where neither it nor the processes that it has started compute: one that a busy machine
makes slow does not. After a minute of that it is stopped where it is and fails, and the others still run. So
is one that computes for ten minutes. Setting up, running and tearing down count apart.

Python cannot stop a test that is stuck in another language's code. Such a test ends the whole run a moment
later, with the lines that all threads are at. So does a run whose tests have left a thread for which Python
waits at its end.

After the tests of a module no process is left that one of them, or a process of theirs, has started: those
that are there are named, and killed by their ids.

Where the environment variable SCALAX_RUNNING_TEST names a file, the name of the test that was begun last is
written there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest

from scripts import left_behind

STILL_S = 60.0
LONGEST_S = 600.0
LAST_S = 20.0  # how much later the run ends, if the test does not
BUSY = 0.05  # seconds that are computed in one, below which a test stands still
POLL_S = 5.0
RUNNING = 'SCALAX_RUNNING_TEST'
MARK = f'SCALAX_TESTS_{os.getpid()}'
_stderr = pytest.StashKey[int]()
_watched: list[str] = []  # what is said of the test that is stopped now


class StoodStill(BaseException):
    """No Exception: code under test that catches those must not swallow it, nor hypothesis try it again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--longest', type=float, default=LONGEST_S, help='seconds that a test may compute')


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # the terminal's: output of tests is captured later
    os.environ[MARK] = '1'
    signal.signal(signal.SIGALRM, _stop)
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C does: with what tests have started


def pytest_unconfigure(config: pytest.Config) -> None:
    os.environ.pop(MARK, None)
    # Python waits for threads that tests have left. The file stays open until then.
    faulthandler.dump_traceback_later(STILL_S, exit=True, file=config.stash[_stderr])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _limited(item, 'setting up'):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limited(item, 'running'):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _limited(item, 'tearing down'):
        return (yield)


@pytest.fixture(scope='module', autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before the module's other fixtures, and asked after they have ended what they have started."""
    yield
    if left := left_behind.end(MARK):
        pytest.fail(f'tests of {request.node.name} left processes behind:\n' + '\n'.join(left), pytrace=False)


@contextlib.contextmanager
def _limited(item: pytest.Item, doing: str) -> Iterator[None]:
    if path := os.environ.get(RUNNING):
        Path(path).write_text(item.nodeid, encoding='utf-8')
    if item.config.getoption('usepdb'):  # whoever debugs may think
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(item, doing, over), daemon=True, name='limits')
    thread.start()
    try:
        yield
    finally:
        over.set()
        try:
            thread.join()  # it may just have found that this takes too long
        finally:
            _watched.clear()
            faulthandler.cancel_dump_traceback_later()


def _watch(item: pytest.Item, doing: str, over: threading.Event) -> None:
    """Stops the main thread where the test stands still, or takes too long."""
    stderr, longest = item.config.stash[_stderr], item.config.getoption('longest')
    begun = still = time.monotonic()
    # For when this thread does not run any more either, because another holds Python's lock.
    faulthandler.dump_traceback_later(STILL_S + LAST_S, exit=True, file=stderr)
    used = None  # most tests are over before it is worth to ask
    while not over.wait(min(POLL_S, STILL_S / 4)):
        now, seconds = time.monotonic(), _computed()
        if used is None or abs(seconds - used) > BUSY * STILL_S:
            still, used = now, seconds
            faulthandler.dump_traceback_later(STILL_S + LAST_S, exit=True, file=stderr)
        if now - still > STILL_S:
            said = f'stood still for {STILL_S:g} s'
        elif now - begun > longest:
            said = f'took more than {longest:g} s'
        else:
            continue
        _watched.append(f'{item.nodeid} {said} while {doing}')
        faulthandler.dump_traceback_later(LAST_S, exit=True, file=stderr)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        return


def _stop(number: int, frame: FrameType | None) -> None:
    if _watched:
        faulthandler.dump_traceback(2)  # what the other threads are doing; pytest captures it
        raise StoodStill(_watched.pop())


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _computed() -> float:
    """The CPU seconds of this process and of all that it has started."""
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
