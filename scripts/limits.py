"""A pytest plugin: how long a test may take, and that no process outlives it.

A test that takes longer than a minute is stopped where it is and fails; the others still run. Setting up,
running and tearing down have a minute each. Tests that have more to do say how long, and why::

    @pytest.mark.limit(240, reason='compiles for TPUs')

Python cannot stop a test that is stuck in another language's code. Such a test ends the whole run a moment
later, with the lines that all threads are at.

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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from scripts import left_behind

LIMIT_S = 60.0
LAST_S = 20.0  # how much later the run ends, if the test does not
RUNNING = 'SCALAX_RUNNING_TEST'
MARK = f'SCALAX_TESTS_{os.getpid()}'
_stderr = pytest.StashKey[int]()


class TookTooLong(BaseException):
    """No Exception: code under test that catches those must not swallow it, nor hypothesis try it again."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        'markers', 'limit(seconds, reason): how long the test may take, where a minute is not enough, and why'
    )
    config.stash[_stderr] = os.dup(2)  # the terminal's: output of tests is captured later
    os.environ[MARK] = '1'


def pytest_unconfigure(config: pytest.Config) -> None:
    os.environ.pop(MARK, None)
    os.close(config.stash[_stderr])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _limited(item, 'to set up'):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limited(item, 'to run'):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _limited(item, 'to tear down'):
        return (yield)


def pytest_enter_pdb() -> None:
    """Whoever debugs may think."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope='module', autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before the module's other fixtures, and asked after they have ended what they have started."""
    yield
    if left := left_behind.end(MARK):
        pytest.fail(f'tests of {request.node.name} left processes behind:\n' + '\n'.join(left), pytrace=False)


def seconds_of(item: pytest.Item) -> float:
    """How long each part of a test may take."""
    marker = item.get_closest_marker('limit')
    if marker is None:
        return LIMIT_S
    (seconds,) = marker.args
    assert marker.kwargs.get('reason'), f'{item.nodeid}: a limit needs a reason'
    return float(seconds)


@contextlib.contextmanager
def _limited(item: pytest.Item, doing: str) -> Iterator[None]:
    seconds = seconds_of(item)

    def stop(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(2)  # what the other threads are doing; pytest captures it
        raise TookTooLong(f'{item.nodeid} took more than {seconds:g} s {doing}')

    if path := os.environ.get(RUNNING):
        Path(path).write_text(item.nodeid, encoding='utf-8')
    before = signal.signal(signal.SIGALRM, stop)
    faulthandler.dump_traceback_later(seconds + LAST_S, exit=True, file=item.config.stash[_stderr])
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
