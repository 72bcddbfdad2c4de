"""The exit of a program of several processes while data still move between them.

JAX's handler at exit leaves the coordination service, by which XLA connects the processes whose data move.
Where they are not connected yet, XLA waits for ever, and so does the exit. Therefore a handler that runs
before that of JAX waits until the data have arrived: those of every array, and of every program whose results
were dropped.

Nothing can interrupt a wait for data of a process that does not send them. So a thread waits, and the handler
waits for the thread: it logs who is behind, and ends this process when the time is up.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax

from scalax._core.pytree.paths import type_text
from scalax._diagnostics.watchdog.state import ENDING, FINISHING, recorded
from scalax._diagnostics.watchdog.watch import lagging_processes, other_states
from scalax._jax.device_queue import drain, pending_arrays
from scalax.errors import shown

FAILED = 1
"""The exit code of a process that ends although its data have not arrived."""
INTERRUPTED = 130
"""That of one which Ctrl-C ends meanwhile, as shells give it."""

_FIRST, _REPEAT = 5.0, 15.0  # seconds before the first message, and between two
_SHOWN = 3  # arrays that a message lists
_ADVICE = (
    'What to do: wait for the data on every process before the program ends (jax.block_until_ready); if one '
    'process works longer at its end than the others, increase shutdown_timeout of distributed.initialize.'
)
_log = logging.getLogger('scalax.distributed')

settings = SimpleNamespace(seconds=300.0, address='')
"""What `scalax.distributed.initialize` knows.

Attributes:
    seconds: how long this process waits at its end for the others. Default: that of JAX.
    address: where process 0 says what the others do; empty if nothing watches them.
"""


class _Waiting:
    """The thread that waits for data once the program has ended.

    It is started before that: Python 3.12 starts no threads in handlers at exit.
    """

    def __init__(self) -> None:
        self.process = os.getpid()  # a fork has the handlers, and not the thread
        self.platforms: list[str] = []
        self.errors: list[str] = []
        self.begun, self.ended = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name='scalax-exit', daemon=True).start()

    def _run(self) -> None:
        self.begun.wait()
        try:
            for platform in self.platforms:
                for arrays, error in drain(platform):
                    self.errors.append(f'{_text(arrays)}: {type(error).__name__}: {error}')
        finally:
            self.ended.set()

    def moving(self) -> str:
        """The arrays that have not arrived, and whose they are."""
        return _text([array for platform in self.platforms for array in pending_arrays(platform)])


_lock = threading.Lock()
_waiting: list[_Waiting] = []


def wait_at_exit(platform: str) -> None:
    """Makes the exit of this program wait for what moves to and from its devices of a platform.

    Called when a mesh of several processes is first used: where JAX has no devices yet, asking it for arrays
    at exit would make it look for the other processes, which have ended.
    """
    with _lock:
        if not _waiting or _waiting[0].process != os.getpid():
            _waiting[:] = [_Waiting()]
        if platform not in _waiting[0].platforms:
            _waiting[0].platforms.append(platform)


# Python runs these handlers in the reverse of their order: after all that a program registers once it has
# imported scalax, and before that of JAX, which is imported above.
@atexit.register
def _finish() -> None:
    """Waits until nothing moves any more, or the time is up."""
    if not _waiting or _waiting[0].process != os.getpid():
        return
    recorded.exits = FINISHING
    try:
        _wait(_waiting[0])
    except KeyboardInterrupt:
        moving = _waiting[0].moving()
        _log.error('Ctrl-C has ended this process while data still move: %s\n%s', moving, _ADVICE)
        _end(INTERRUPTED)
    recorded.exits = ENDING


def _wait(waiting: _Waiting) -> None:
    """Waits until nothing moves any more; ends this process when the time is up.

    Raises:
        KeyboardInterrupt: Ctrl-C. Python would ignore it, and call the handler of JAX, which waits for ever.
    """
    begun = time.monotonic()
    waiting.begun.set()
    since, pause = begun, _FIRST
    while not waiting.ended.wait(min(pause, settings.seconds)):
        pause, states = _REPEAT, other_states(settings.address)
        # Where all processes have come to their end, and others wait as well, it may be a long computation.
        if any(state.phase == FINISHING for state in states) and not lagging_processes(states):
            since = time.monotonic()
        lines = f'\n{shown(lagging_processes(states))}' if lagging_processes(states) else ''
        seconds = f'{time.monotonic() - begun:.0f} s after the end of the program'
        text = f'{seconds}, data still move: {waiting.moving()}{lines}'
        if time.monotonic() < since + settings.seconds:
            _log.warning('%s', text)
            continue
        _log.error('%s\n%s', text, _ADVICE)
        if states:
            _end(FAILED)
        break  # nobody says what the others do: JAX waits for them, and ends this process if one is missing
    for error in waiting.errors:
        _log.error('data have not arrived at the end of the program: %s', error)


def _end(code: int) -> None:
    """Ends this process without the handlers that are left: that of JAX would wait for ever."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()
    os._exit(code)


def _text(arrays: list[jax.Array]) -> str:
    """Which arrays, and which processes hold them."""
    if not arrays:
        return 'arrays that the program has dropped'
    devices: set[Any] = {device for array in arrays for device in array.sharding.device_set}
    holders = sorted({device.process_index for device in devices})
    texts = [type_text(array.dtype, array.shape) for array in arrays]
    more = f' and {len(texts) - _SHOWN} more arrays' if len(texts) > _SHOWN else ''
    return f'{", ".join(texts[:_SHOWN])}{more} of processes {", ".join(map(str, holders))}'
