"""The thread that tells process 0 where this process is, and logs what process 0 has found.

`jax.distributed` keeps keys and values for its own use: JAX documents `initialize`, `shutdown` and
`is_initialized` of it, and nothing that sets a key. It would not do either: it is in process 0, so that all
who ask it wait for ever if that one is stopped.

So there are datagrams of JSON over UDP, which keep nobody waiting. Process 0 listens where the coordinator
does, at all addresses and at the number of its port (which is TCP): all processes know it. Whoever can send
there learns what logs say, and can change no more than what is shown of a process. If the variable
SCALAX_RUN_TOKEN is set, to the same everywhere, messages that are not signed with it are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import statistics
import time
from collections import deque

import jax

from scalax._watch.report import report
from scalax._watch.state import State, last, measured

LONGEST, _SIGNED = 8192, 16  # bytes: of a message, and of its signature
_PERIOD = 1.0  # seconds between two messages of a process; process 0 reads 100 a second
_MISSED = 4  # messages of a process, which counts as stuck then if the step is late
_LEAST, _TIMES, _UNKNOWN = 30.0, 10, 300.0  # the bound of a step: seconds; usual steps; seconds at first
_REPEAT = 300.0  # seconds between two reports
_KINDS = [int, str, int, int, float, str, float, str, str, float]  # of the fields of a state
_log = logging.getLogger('scalax.distributed')


class Watch:
    """What one process knows of the others; `run` is the body of its thread.

    Args:
        address: ``'host:port'`` of process 0.
        process: the index of this process.
        count: how many there are.
        step_timeout: the seconds that a step may take; None for ten times the usual ones, and at least 30.
        heartbeat_timeout: the seconds after which JAX ends the others: a process that is silent for half of
            them is named.

    Raises:
        OSError: another program uses the port, or there is no such host.
    """

    def __init__(
        self, address: str, process: int, count: int, step_timeout: float | None, heartbeat_timeout: float
    ) -> None:
        self._address, self._process, self._count = address, process, count
        self._step_timeout, self._silence = step_timeout, heartbeat_timeout / 2
        self._period = max(_PERIOD, min(count / 100, heartbeat_timeout / 8))
        self._socket = socket_of(address, listens=process == 0)
        self._heard: dict[int, tuple[State, int]] = {}  # and at which tick: one that is stopped counts none
        self._tick, self._last, self._text, self._next = 0, last.step, '', 0.0
        self._seconds = deque[float](maxlen=1000)

    def run(self) -> None:
        """Tells and asks, until the program has left `jax.distributed`."""
        own = None
        while jax.distributed.is_initialized():
            own = measured(self._process, own)
            if self._process:
                with contextlib.suppress(OSError):  # nobody listens there
                    self._socket.send(packed(0, '', own))
            self._listen(time.monotonic() + self._period)
            self._tick += 1
            self._heard[self._process] = own, self._tick
            self._judge()
        self._socket.close()

    def _listen(self, end: float) -> None:
        """Takes what comes until then, and what has come before; process 0 answers."""
        for _ in range(100 * self._count):  # however much is sent here
            self._socket.settimeout(max(end - time.monotonic(), 0))
            try:
                data, sender = self._socket.recvfrom(LONGEST)
                number, text, state = unpacked(data)
                if state and state.process in range(self._count):
                    self._heard[state.process] = state, self._tick
                if self._process:
                    self._text = text
                else:
                    answer = packed(self._count, self._text, self._states().get(number))
                    self._socket.sendto(answer, sender)
            except (TimeoutError, BlockingIOError):
                return
            except (OSError, ValueError, TypeError):  # nobody listens there; another program sends
                continue

    def _states(self) -> dict[int, State]:
        """By process, of those that were heard."""
        silent = {process: max(self._tick - tick - 1, 0) for process, (_, tick) in self._heard.items()}
        return {i: self._heard[i][0]._replace(silent=silent[i] * self._period) for i in sorted(silent)}

    def _judge(self) -> None:
        """Process 0 finds out who is behind, the others whether process 0 is silent; all log it."""
        (_, before, counted), (_, begun, count) = self._last, last.step
        if count > counted > 0:  # the first step compiles
            self._seconds.append((begun - before) / (count - counted))
        usual, bound = 0.0, _UNKNOWN
        if len(self._seconds) > 2:
            # Twice the longest: an evaluation was healthy, for it has come to an end.
            usual = statistics.median(self._seconds)
            bound = max(_LEAST, _TIMES * usual, 2 * max(self._seconds))
        self._last, states = last.step, self._states()
        bound = self._step_timeout if self._step_timeout and count > 1 else bound
        late = all(state.ago + state.silent > bound for state in states.values())
        silence = min(self._silence, _MISSED * self._period) if late else self._silence
        if self._process == 0 or (0 in states and states[0].silent > silence):
            self._text = report([*states.values()], late, usual, silence, self._address)
        if self._text and time.monotonic() > self._next:
            _log.warning('%s', self._text)
            self._next = time.monotonic() + _REPEAT
        elif not self._text:
            self._next = 0.0


def socket_of(address: str, *, listens: bool = False) -> socket.socket:
    """A socket that sends to ``'host:port'`` and takes what comes from there only, or that listens there.

    Raises:
        OSError: there is no such host, or another program uses the port.
    """
    host, _, port = address.rpartition(':')
    if listens:
        host = '::' if socket.has_dualstack_ipv6() else '0.0.0.0'
    family, kind, _, _, where = socket.getaddrinfo(host.strip('[]'), int(port), type=socket.SOCK_DGRAM)[0]
    made = socket.socket(family, kind)
    (made.bind if listens else made.connect)(where)
    return made


def packed(number: int, text: str, state: State | None) -> bytes:
    """A message: the process that is asked for, or in an answer how many there are; the report; a state."""
    data = json.dumps([number, text, state]).encode()
    return _signature(data) + data


def unpacked(data: bytes) -> tuple[int, str, State | None]:
    """What was packed.

    Raises:
        ValueError: it was not.
        TypeError: it was not.
    """
    number, text, fields = json.loads(data[_SIGNED:])
    if data[:_SIGNED] != _signature(data[_SIGNED:]) or [*map(type, fields or ())] not in ([], _KINDS):
        raise ValueError('a message of another program')
    if not ''.join(map(str, [number, str(text).replace('\n', ''), *(fields or ())])).isprintable():
        raise ValueError('not text')
    return number, text, State(*fields) if fields else None


def _signature(data: bytes) -> bytes:
    key = os.environ.get('SCALAX_RUN_TOKEN', '').encode()[:64]
    return hashlib.blake2b(data, digest_size=_SIGNED, key=key).digest()
