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
_watch = pytest.StashKey['Watch']()
_watched: list[str] = []  # what is said of the test that is stopped now


class StoodStill(BaseException):
    """No Exception: code under test that catches those must not swallow it, nor hypothesis try it again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--longest', type=float, default=LONGEST_S, help='seconds that a test may compute')


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # the terminal's: output of tests is captured later
    config.stash[_watch] = Watch(config.stash[_stderr], config.getoption('longest'))
    os.environ[MARK] = '1'
    signal.signal(signal.SIGALRM, _stop)
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C does: with what tests have started


def pytest_unconfigure(config: pytest.Config) -> None:
    os.environ.pop(MARK, None)
    config.stash[_watch].close()
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
    watch = item.config.stash[_watch]
    watch.begin(item.nodeid, doing)
    try:
        yield
    finally:
        try:
            watch.end()
        finally:
            _watched.clear()


class Watch:
    """Stops the main thread where a test stands still or takes too long.

    One thread looks every few seconds what runs: most tests begin and end in between.
    """

    def __init__(self, stderr: int, longest: float) -> None:
        self._stderr, self._longest = stderr, longest
        self._lock, self._over = threading.Lock(), threading.Event()
        self._running: tuple[str, str, float] | None = None  # a test, what it is doing, and since when
        self._thread = threading.Thread(target=self._look, daemon=True, name='limits')

    def begin(self, test: str, doing: str) -> None:
        self._running = test, doing, time.monotonic()
        if self._thread.ident is None:
            self._end_run_after(STILL_S + LAST_S)  # the thread may never get to it
            self._thread.start()

    def end(self) -> None:
        with self._lock:  # the thread may just have found that this takes too long
            self._running = None

    def close(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _look(self) -> None:
        seen = None
        stopped = False
        while True:
            running, now, seconds = self._running, time.monotonic(), _computed()
            if running is None or running is not seen:
                seen, stopped, still, used = running, False, now, seconds
                self._end_run_after(STILL_S + LAST_S)
            elif seconds - used > BUSY * STILL_S and not stopped:
                still, used = now, seconds
                self._end_run_after(STILL_S + LAST_S)
            if seen and not stopped:
                if now - still > STILL_S:
                    stopped = self._stop(seen, f'stood still for {STILL_S:g} s')
                elif now - seen[2] > self._longest:
                    stopped = self._stop(seen, f'took more than {self._longest:g} s')
            if self._over.wait(min(POLL_S, STILL_S / 4)):
                return

    def _stop(self, running: tuple[str, str, float], found: str) -> bool:
        with self._lock:
            if self._running is not running:
                return False
            test, doing, _ = running
            _watched.append(f'{test} {found} while {doing}')
            self._end_run_after(LAST_S)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        return True

    def _end_run_after(self, seconds: float) -> None:
        """For when this thread does not run any more either, because another holds Python's lock."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)


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
