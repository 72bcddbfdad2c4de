"""Progress of slow work: a line on a terminal or in a notebook, or log messages.

The line ("compiling train_step ... 41 s") appears on stderr after two seconds, and disappears at the end.
Only process 0 shows it, only on a terminal or in a notebook, and not while pytest runs. The environment
variable ``SCALAX_PROGRESS`` changes that: 0 never shows the line, 1 always does. Without a line, loggers
below ``scalax`` log the same text at level INFO, first after two seconds and then each minute.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

SWITCH = 'SCALAX_PROGRESS'
_TESTED = 'PYTEST_CURRENT_TEST'  # is set while pytest runs a test, with pytest -s too
_DELAY = 2.0  # seconds before the first message
_LINE_INTERVAL, _LOG_INTERVAL = 1.0, 60.0  # seconds

# Only one block reports at a time: the outermost, or the first of several threads.
_reporting = threading.Lock()

UpdateProgress = Callable[[str], None]
"""A function that takes the current state, which follows the description: ``'3 of 12: fsdp=8'``."""


@contextlib.contextmanager
def progress(doing: str, log: logging.Logger) -> Iterator[UpdateProgress]:
    """Reports the progress of the block, if it takes long.

    Args:
        doing: the work, such as ``'compiling train_step'``.
        log: the logger that is used if no line is shown.

    Example:
        >>> with progress('loading weights', logging.getLogger('scalax.checkpoint')) as note:
        ...     note('3.2 of 16.0 GiB')
    """
    shows_line = _is_line_visible()
    if not (shows_line or log.isEnabledFor(logging.INFO)) or not _reporting.acquire(blocking=False):
        yield lambda state: None
        return
    state = ''

    def update(new_state: str) -> None:
        nonlocal state
        state = f' {new_state}' if new_state else ''

    def report(seconds: float) -> None:
        write(f'{doing}{state} ... {seconds:.0f} s')

    write: Callable[[str], None] = _Line().write if shows_line else functools.partial(log.info, '%s')
    interval = _LINE_INTERVAL if shows_line else _LOG_INTERVAL
    try:
        with call_periodically(report, _DELAY, interval):
            yield update
    finally:
        if shows_line:
            write('')
        _reporting.release()


@contextlib.contextmanager
def call_periodically(function: Callable[[float], None], delay: float, interval: float) -> Iterator[None]:
    """Calls *function* with the seconds that have passed, in a thread that ends with the block.

    Args:
        function: the function.
        delay: the seconds before the first call.
        interval: the seconds between two calls.
    """
    start, ended = time.monotonic(), threading.Event()

    def run() -> None:
        pause = delay
        while not ended.wait(pause):
            function(time.monotonic() - start)
            pause = interval

    thread = threading.Thread(target=run, name='scalax-waiting', daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Line:
    """A line on stderr that is overwritten in place."""

    _width = 0

    def write(self, text: str) -> None:
        """Replaces the line by *text*; an empty text removes it."""
        text = text[: shutil.get_terminal_size().columns - 1]
        if text or self._width:
            with contextlib.suppress(OSError, ValueError):  # the stream may be closed
                sys.stderr.write(f'\r{text:<{self._width}}' if text else f'\r{"":<{self._width}}\r')
                sys.stderr.flush()
        self._width = len(text)


def _is_line_visible() -> bool:
    """Returns whether a person sees a line on stderr, unless the environment variable decides."""
    switch = os.environ.get(SWITCH)
    if switch in ('0', '1'):
        return switch == '1' and _is_first_process()
    if _TESTED in os.environ or sys.stderr is None:
        return False
    terminal = sys.stderr.isatty() and os.environ.get('TERM') != 'dumb'
    return (terminal or _in_notebook()) and _is_first_process()


def _in_notebook() -> bool:
    """Returns whether this runs in a Jupyter kernel."""
    get_ipython = getattr(sys.modules.get('IPython'), 'get_ipython', None)
    return get_ipython is not None and hasattr(get_ipython(), 'kernel')


def _is_first_process() -> bool:
    """Returns whether this is process 0, without initializing devices in a single-process program."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0
