"""What is said while something takes long: a line on a terminal or in a notebook, else log messages.

The line ("compiling train_step ... 41 s") appears after two seconds, on stderr, and is gone at the end. It is
shown by process 0 only, and neither in pipes and files nor by pytest. The environment variable
``SCALAX_PROGRESS`` changes that: 0 never shows the line, 1 shows it anywhere. Without a line, loggers below
``scalax`` say the same at level INFO: when the wait begins, each minute, and at the end.
"""

from __future__ import annotations

import contextlib
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

Note = Callable[[str], None]
"""Takes how far it is, in words that follow the first ones: ``'3 of 12: fsdp=8'``."""


@contextlib.contextmanager
def progress(doing: str, log: logging.Logger, shown: bool | None = None) -> Iterator[Note]:
    """Says what takes long while the block runs.

    Args:
        doing: what is done, such as ``'compiling train_step'``.
        log: where it is logged, if no line is shown.
        shown: whether to show a line; by default, where somebody sees it (see above).

    Example:
        >>> with progress('loading weights', logging.getLogger('scalax.checkpoint')) as note:
        ...     note('3.2 of 16.0 GiB')
    """
    line = _is_seen() if shown is None else shown
    if not (line or log.isEnabledFor(logging.INFO)) or not _speaking.acquire(blocking=False):
        yield lambda state: None
        return
    speaker, done = _Line(doing) if line else _Messages(doing, log), False
    try:
        with repeated(speaker.say, _FIRST, speaker.every):
            yield speaker.note
        done = True
    finally:
        speaker.close(done)
        _speaking.release()


@contextlib.contextmanager
def repeated(say: Callable[[float], None], first: float, every: float) -> Iterator[None]:
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


class _Speaker:
    """What is done, and how far it is."""

    every: float

    def __init__(self, doing: str) -> None:
        self._doing, self._state = doing, ''

    def note(self, state: str) -> None:
        """Notes how far it is; said the next time that anything is."""
        self._state = state

    def text(self, seconds: float) -> str:
        """``compiling train_step ... 41 s``."""
        return f'{self._doing}{f" {self._state}" if self._state else ""} ... {seconds:.0f} s'

    def say(self, seconds: float) -> None:
        """Says how far it is."""

    def close(self, done: bool) -> None:
        """Ends what is said, after all of it is done or because of an error."""


class _Line(_Speaker):
    """One line that is written over itself, and removed at the end."""

    every = _LINE_EVERY
    _width = 0

    def say(self, seconds: float) -> None:
        """Writes the line."""
        columns = shutil.get_terminal_size().columns - 1
        text = self.text(seconds)
        if len(text) > columns:
            text = f'{text[: max(columns - 12, 0)]}... {seconds:.0f} s'
        self._write(f'\r{text:<{self._width}}')
        self._width = len(text)

    def close(self, done: bool) -> None:
        """Removes the line."""
        if self._width:
            self._write(f'\r{"":<{self._width}}\r')

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # of a stream that is closed
            sys.stderr.write(text)
            sys.stderr.flush()


class _Messages(_Speaker):
    """Log messages."""

    every = _LOG_EVERY

    def __init__(self, doing: str, log: logging.Logger) -> None:
        super().__init__(doing)
        self._log, self._start, self._said = log, time.monotonic(), False

    def say(self, seconds: float) -> None:
        """Logs how far it is."""
        self._said = True
        self._log.info('%s', self.text(seconds))

    def close(self, done: bool) -> None:
        """Logs that it is done, if it was said that it goes on."""
        if done and self._said:
            self._log.info('%s: done in %.1f s', self._doing, time.monotonic() - self._start)


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
