"""Exit handler that waits for transfers between processes.

JAX's exit handler leaves the coordination service, by which XLA connects processes that exchange data. If two
processes are not connected yet, XLA waits forever, and so does the exit. Therefore this handler, which runs
before that of JAX, waits until the data of every array have arrived, and of every program whose results were
dropped.

A wait for data from a process that does not send them cannot be interrupted. So a thread waits, and the
handler waits for the thread. It logs the processes that it waits for, and ends this process after a timeout.
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
"""Exit code of a process that ends although its data have not arrived."""
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ends while it waits, as in shells."""

_FIRST, _REPEAT = 5.0, 15.0  # seconds before the first message, and between two messages
_MAX_ARRAYS = 3  # listed in a message
_ADVICE = (
    'What to do: wait for the data on every process before the program ends (jax.block_until_ready); if one '
    'process works longer at its end than the others, increase shutdown_timeout of distributed.initialize.'
)
_log = logging.getLogger('scalax.distributed')

settings = SimpleNamespace(timeout=300.0, address='')
"""Settings from `scalax.distributed.initialize`.

Attributes:
    timeout: the maximum seconds to wait for the other processes at exit. Default: the timeout of JAX.
    address: the address of process 0, which knows the states of the others; empty without a watchdog.
"""


class _Waiter:
    """A thread that waits for data after the program has ended.

    It is started before that, because Python 3.12 cannot start threads in exit handlers.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()  # a forked process inherits the exit handlers, but not the thread
        self.platforms: list[str] = []
        self.errors: list[str] = []
        self.start, self.finished = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name='scalax-exit', daemon=True).start()

    def _run(self) -> None:
        self.start.wait()
        try:
            for platform in self.platforms:
                for arrays, error in drain(platform):
                    self.errors.append(f'{_array_text(arrays)}: {type(error).__name__}: {error}')
        finally:
            self.finished.set()

    def pending_text(self) -> str:
        """Describes the arrays that have not arrived, and the processes that hold them."""
        return _array_text([array for platform in self.platforms for array in pending_arrays(platform)])


_lock = threading.Lock()
_waiter: list[_Waiter] = []  # at most one


def wait_at_exit(platform: str) -> None:
    """Makes the exit of this program wait for transfers to and from its devices of a platform.

    Call it when a mesh of several processes is first used. If JAX had no devices yet, asking it for arrays at
    exit would make it connect to the other processes, which have ended.
    """
    with _lock:
        if not _waiter or _waiter[0].pid != os.getpid():
            _waiter[:] = [_Waiter()]
        if platform not in _waiter[0].platforms:
            _waiter[0].platforms.append(platform)


# Python runs exit handlers in reverse order of registration: this one after all that a program registers once
# it has imported scalax, and before that of JAX, which is imported above.
@atexit.register
def _wait_for_transfers() -> None:
    """Waits until all data have arrived, or the time is up."""
    if not _waiter or _waiter[0].pid != os.getpid():
        return
    recorded.exits = FINISHING
    try:
        _wait(_waiter[0])
    except KeyboardInterrupt:
        pending = _waiter[0].pending_text()
        _log.error('Ctrl-C has ended this process while data still move: %s\n%s', pending, _ADVICE)
        _exit_now(INTERRUPTED)
    recorded.exits = ENDING


def _wait(waiter: _Waiter) -> None:
    """Waits until all data have arrived; ends this process when the time is up.

    Raises:
        KeyboardInterrupt: Ctrl-C. Python would ignore it, and call the handler of JAX, which waits forever.
    """
    start = time.monotonic()
    waiter.start.set()
    since, pause = start, _FIRST
    while not waiter.finished.wait(min(pause, settings.timeout)):
        pause, states = _REPEAT, other_states(settings.address)
        # If all processes have reached their exit, and others wait as well, it may be a long computation.
        lagging = lagging_processes(states)
        if any(state.phase == FINISHING for state in states) and not lagging:
            since = time.monotonic()
        lines = f'\n{shown(lagging)}' if lagging else ''
        seconds = f'{time.monotonic() - start:.0f} s after the end of the program'
        text = f'{seconds}, data still move: {waiter.pending_text()}{lines}'
        if time.monotonic() < since + settings.timeout:
            _log.warning('%s', text)
            continue
        _log.error('%s\n%s', text, _ADVICE)
        if states:
            _exit_now(FAILED)
        break  # without states, JAX waits for the other processes, and ends this one if one is missing
    for error in waiter.errors:
        _log.error('data have not arrived at the end of the program: %s', error)


def _exit_now(code: int) -> None:
    """Ends this process without the remaining exit handlers: that of JAX would wait forever."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the stream is None or closed
            stream.flush()
    os._exit(code)


def _array_text(arrays: list[jax.Array]) -> str:
    """Describes arrays and the processes that hold them."""
    if not arrays:
        return 'arrays that the program has dropped'
    devices: set[Any] = {device for array in arrays for device in array.sharding.device_set}
    holders = sorted({device.process_index for device in devices})
    texts = [type_text(array.dtype, array.shape) for array in arrays]
    more = f' and {len(texts) - _MAX_ARRAYS} more arrays' if len(texts) > _MAX_ARRAYS else ''
    return f'{", ".join(texts[:_MAX_ARRAYS])}{more} of processes {", ".join(map(str, holders))}'
