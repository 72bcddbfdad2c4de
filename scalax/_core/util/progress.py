"""What is said while something takes long: a line on a terminal or in a notebook, else log messages.

The line ("compiling train_step ... 41 s") appears after two seconds, on stderr, and is gone at the end. It is
shown by process 0 only, and neither in pipes and files nor by pytest. The environment variable
``SCALAX_PROGRESS`` changes that: 0 never shows the line, 1 shows it anywhere. Without a line, loggers below
``scalax`` say the same at level INFO, when the wait begins and each minute.
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
_FIRST = 2.0  # seconds before the first word
_LINE_EVERY, _LOG_EVERY = 1.0, 60.0  # seconds

# Of several that take long, one inside of the other or in threads, the first speaks.
_speaking = threading.Lock()

UpdateProgress = Callable[[str], None]
"""Takes how far it is, in words that follow the first ones: ``'3 of 12: fsdp=8'``."""


@contextlib.contextmanager
def progress(doing: str, log: logging.Logger) -> Iterator[UpdateProgress]:
    """Says what takes long while the block runs.

    Args:
        doing: what is done, such as ``'compiling train_step'``.
        log: where it is logged, if no line is shown.

    Example:
        >>> with progress('loading weights', logging.getLogger('scalax.checkpoint')) as note:
        ...     note('3.2 of 16.0 GiB')
    """
    line = _is_seen()
    if not (line or log.isEnabledFor(logging.INFO)) or not _speaking.acquire(blocking=False):
        yield lambda state: None
        return
    state = ''

    def note(new: str) -> None:
        nonlocal state
        state = f' {new}' if new else ''

    write: Callable[[str], None] = _Line().write if line else functools.partial(log.info, '%s')
    every = _LINE_EVERY if line else _LOG_EVERY
    try:
        with call_periodically(lambda seconds: write(f'{doing}{state} ... {seconds:.0f} s'), _FIRST, every):
            yield note
    finally:
        if line:
            write('')
        _speaking.release()


@contextlib.contextmanager
def call_periodically(say: Callable[[float], None], first: float, every: float) -> Iterator[None]:
    """Calls *say* with the seconds that have passed, after *first* seconds and then from time to time.

    A thread does, which has ended when the block is left.

    Args:
        say: the function.
        first: the seconds before the first call.
        every: the seconds between two calls.
    """
    start, ended = time.monotonic(), threading.Event()

    def run() -> None:
        pause = first
        while not ended.wait(pause):
            say(time.monotonic() - start)
            pause = every

    thread = threading.Thread(target=run, name='scalax-waiting', daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Line:
    """One line on stderr that is written over itself; an empty one removes it."""

    _width = 0

    def write(self, text: str) -> None:
        """Shows *text* in place of what was there."""
        text = text[: shutil.get_terminal_size().columns - 1]
        if text or self._width:
            with contextlib.suppress(OSError, ValueError):  # of a stream that is closed
                sys.stderr.write(f'\r{text:<{self._width}}' if text else f'\r{"":<{self._width}}\r')
                sys.stderr.flush()
        self._width = len(text)


def _is_seen() -> bool:
    """Whether somebody sees a line on stderr, and nobody has turned it off."""
    asked = os.environ.get(SWITCH)
    if asked in ('0', '1'):
        return asked == '1' and _is_first()
    if _TESTED in os.environ or sys.stderr is None:
        return False
    terminal = sys.stderr.isatty() and os.environ.get('TERM') != 'dumb'
    return (terminal or _in_notebook()) and _is_first()


def _in_notebook() -> bool:
    """Whether this runs in a kernel of Jupyter."""
    get_ipython = getattr(sys.modules.get('IPython'), 'get_ipython', None)
    return get_ipython is not None and hasattr(get_ipython(), 'kernel')


def _is_first() -> bool:
    """Whether this is process 0; asks for no devices in a program of one process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0
