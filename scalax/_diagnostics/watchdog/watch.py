"""Watchdog thread that reports the state of this process to process 0, and logs processes that lag behind.

It does not use the key-value store of `jax.distributed`. That has no documented way to set a key, and it is
in process 0: if process 0 is stopped, all processes that ask it wait forever.

Instead, processes send JSON in UDP datagrams, which never block. Process 0 listens at the number of the
coordinator's (TCP) port, which all processes know. Messages are signed with the secret of the run, and each
is accepted once; others are ignored. Without a secret, process 0 listens on the loopback address only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import statistics
import time
from collections import deque

import jax

from scalax._core.channel.datagrams import HEAD, Client, ForeignPacket, Server
from scalax._core.channel.secret import SECRET_VARIABLE, missing_secret_error, names_loopback, resolve_secret
from scalax._diagnostics.watchdog.state import (
    CALLED,
    ENDING,
    FINISHING,
    INITIAL,
    LOADING,
    PYTHON,
    RESTORING,
    SAVING,
    ProcessState,
    recorded,
    sample_state,
)
from scalax.errors import shown

_MAX_MESSAGE = 60_000  # bytes
_MAX_DOCTORS = 1000  # clients that may ask before process 0 forgets all clients
_PERIOD = 1.0  # seconds between messages
_MISSED = 4  # messages that a silent process has missed
_REPEAT = 60.0  # seconds between reports
# The bound of a step: at least 30 s, and 10 times the usual step; 300 s before the usual step is known.
_MIN_SECONDS, _FACTOR, _FIRST_SECONDS = 30.0, 10, 300.0
_FIELD_TYPES = [int, str, int, int, float, str, float, str, str, float]
_log = logging.getLogger('scalax.distributed')


class Watchdog:
    """The watchdog of one process; `run` is the body of its thread.

    Args:
        address: ``'host:port'`` of process 0.
        process: the index of this process.
        count: the number of processes.
        timeout: the maximum seconds of a step; None for ten times the usual step, and at least 30 s.
        heartbeat: the seconds without a heartbeat after which JAX ends the other processes; it sends two in
            that time. A process that is silent for a quarter of it is reported, before JAX ends the others.
        secret: the secret of the run; empty if all processes are on one machine.
        is_known: whether the user can know the secret, which `scalax doctor --run` needs.

    Raises:
        ArgumentError: process 0 would listen to other machines without a secret.
        OSError: another program uses the port, or the host does not exist.
    """

    def __init__(
        self,
        address: str,
        process: int,
        count: int,
        timeout: int | None,
        heartbeat: float,
        secret: bytes = b'',
        is_known: bool = True,
    ) -> None:
        self._process, self._count, self._address = process, count, address if is_known else ''
        self._timeout, self._silence, self._seconds = timeout, heartbeat / 4, deque[float](maxlen=1000)
        # Process 0 reads 100 messages per second, or more if it has to detect silence before JAX does.
        self._period = max(_PERIOD, min(count / 100, heartbeat / 8))
        self._socket = _socket(address, secret, listens=process == 0)
        self._client, self._server = Client(secret), Server(secret, 2 * count + _MAX_DOCTORS)
        self._state, self._has_warned = INITIAL._replace(process=process), False
        self._received: dict[int, ProcessState] = {}  # here `silent` is the tick of the last message
        self._tick, self._last_step, self._report, self._next_log = 0, recorded.step, '', 0.0

    def run(self) -> None:
        """Exchanges states with process 0 until the program has left `jax.distributed`."""
        state = None
        # All processes start at once: if all sent at once, the receive buffer of process 0 would overflow.
        time.sleep(self._period * self._process / self._count)
        while jax.distributed.is_initialized():
            state = self._state = sample_state(self._process, state)
            self._received[self._process] = state._replace(silent=self._tick)
            self._send_state()
            self._listen(time.monotonic() + self._period)
            self._tick += 1
            self._detect_stragglers()
        self._socket.close()

    def _send_state(self) -> None:
        """Sends the state of this process to process 0."""
        if self._process:
            with contextlib.suppress(OSError):  # nothing listens there
                self._socket.send(self._client.request(_encode('', [self._state])))

    def _listen(self, end: float) -> None:
        """Reads messages until the time *end*; process 0 responds to them."""
        state = _encode(self._report, [self._state])
        for _ in range(100 * self._count):  # a bound, however many messages arrive
            self._socket.settimeout(max(end - time.monotonic(), 0))
            try:
                packet, sender = self._socket.recvfrom(_MAX_MESSAGE)
            except (TimeoutError, BlockingIOError):
                return
            except OSError:  # nothing listens there
                continue
            try:
                if self._process:
                    self._read_response(packet)
                else:
                    with contextlib.suppress(OSError):
                        self._socket.sendto(self._respond(packet, state), sender)
            except ForeignPacket:
                self._warn_foreign(sender[0].removeprefix('::ffff:'))  # an IPv4 address
            except (ValueError, TypeError, RecursionError):  # a repeated message, or of another version
                continue

    def _read_response(self, packet: bytes) -> None:
        if (data := self._client.read_response(packet)) is None:  # process 0 has started or restarted
            self._send_state()
        else:
            self._report, states = _decode(data)
            self._update(states)

    def _respond(self, packet: bytes, state: bytes) -> bytes:
        """Returns the response of process 0: its state, or for a doctor the states of all processes."""
        request, is_new = self._server.read_request(packet)
        if not is_new:
            return self._server.respond(request, b'')
        _, states = _decode(request.data)
        self._update(states)
        return self._server.respond(request, state if states else _encode(self._report, self._states()))

    def _update(self, states: list[ProcessState]) -> None:
        # Modulo, so that no sender can add more processes than there are.
        self._received |= {state.process % self._count: state._replace(silent=self._tick) for state in states}

    def _warn_foreign(self, host: str) -> None:
        """Warns once about a message that is ignored: otherwise its sender could fill the disk with logs."""
        if not self._has_warned:
            _log.warning(
                'a message from %s about stuck processes is ignored, and so are others like it: it is not '
                'signed with the secret of this run. If it comes from this run, or from `scalax doctor '
                '--run`, set %s to the same value for all.',
                *(host, SECRET_VARIABLE),
            )
        self._has_warned = True

    def _states(self) -> list[ProcessState]:
        """Returns the states of the processes that have sent one, in their order."""
        return [
            state._replace(silent=self._period * max(self._tick - state.silent - 1, 0))
            for _, state in sorted(self._received.items())
        ]

    def _detect_stragglers(self) -> None:
        """Logs which processes are behind. Process 0 finds them; the others detect a silent process 0."""
        (_, previous_end, previous_count), (_, end, count) = self._last_step, recorded.step
        if count > previous_count > 0:  # the first step compiles
            self._seconds.append((end - previous_end) / (count - previous_count))
        self._last_step, states = recorded.step, self._states()
        usual = statistics.median(self._seconds) if len(self._seconds) > 2 else 0.0
        bound = (
            (self._timeout or max(_MIN_SECONDS, _FACTOR * usual, 2 * max(self._seconds)))
            if usual
            else _FIRST_SECONDS
        )
        late = all(state.ago + state.silent > bound for state in states)
        silence = min(self._silence, _MISSED * self._period) if late else self._silence
        if states[0].silent > silence or self._process == 0:
            self._report = report(states, late, usual, silence, self._address)
        if self._report and time.monotonic() > self._next_log:
            self._next_log = time.monotonic() + max(_REPEAT, states[0].ago)
            _log.warning('%s', ''.join(char for char in self._report if char.isprintable() or char == '\n'))


def _lag_signs(state: ProcessState) -> tuple[float, ...]:
    """Returns the signs that a process is behind, the most reliable first; larger means further behind."""
    return state.phase in (LOADING, SAVING, RESTORING, ENDING, CALLED), -state.step, state.phase == PYTHON


def report(states: list[ProcessState], late: bool, usual: float, silence: float, address: str) -> str:
    """Returns a report if a process is silent or a step takes too long; otherwise an empty string.

    Args:
        states: the states of the processes.
        late: whether the step takes too long.
        usual: the usual seconds of a step; 0 if they are not known.
        silence: the seconds after which a silent process counts as stuck.
        address: the address for `scalax doctor --run`; empty if the user cannot know the secret.
    """
    stuck = [state for state in states if state.silent > silence and state.phase != ENDING]
    condition = ' is stopped, dead or out of reach; last' if stuck else ' is behind'
    if late and not stuck:
        # The first sign in which processes differ.
        signs = max(zip(*map(_lag_signs, states), strict=True), key=lambda values: len(set(values)) > 1)
        stuck = [state for state, sign in zip(states, signs, strict=True) if sign == max(signs) != min(signs)]
        # A program that records no steps may run well, whatever its current phase.
        stuck = [state for state in stuck if usual or state.since > _MIN_SECONDS]
    if not stuck and not (late and usual):  # they may be compiling
        return ''
    step, ago = max((state.step, state.ago + state.silent) for state in states)
    usually = f' (a step usually takes {usual:.2g} s)' if usual else ''
    dump = f'`py-spy dump --pid {stuck[0].pid}` on {stuck[0].host} shows its threads; ' if stuck else ''
    lines = [_line(state, condition if stuck else '', silence) for state in stuck or states]
    doctor = f'`scalax doctor --run {address}` shows all processes.'
    if not address:
        doctor = f'in a run for which {SECRET_VARIABLE} is set, `scalax doctor --run` shows all processes.'
    return (
        f'{ago:.0f} s have passed since step {step}{usually}{"" if stuck else "; no process is behind"}:\n'
        f'{shown(lines)}\nWhat to do: {dump}{doctor}'
    )


def _line(state: ProcessState, condition: str, silence: float) -> str:
    return (
        f'process {state.process} (host {state.host}, pid {state.pid}){condition}: '
        f'{state.phase} for {state.since:.0f} s{state.line and f" at {state.line}"}, after step {state.step}'
        f'{state.before and f", {state.before} before that"}'
        f'{f"; silent for {state.silent:.0f} s" if state.silent > silence else ""}'
    )


def other_states(address: str) -> list[ProcessState]:
    """Returns the states of the other processes from process 0; none if it does not respond."""
    try:
        states, _ = query_states(address) if address else ([], '')
    except (OSError, ValueError, TypeError):
        return []
    return [state for state in states if state.process != jax.process_index()]


def lagging_processes(states: list[ProcessState]) -> list[str]:
    """Returns a line for each process that has not reached its exit, or is silent."""
    silence = _MISSED * _PERIOD
    return [
        _line(state, ' is stopped, dead or out of reach; last' if state.silent > silence else '', silence)
        for state in states
        if state.silent > silence or state.phase not in (FINISHING, ENDING)
    ]


def query_states(address: str) -> tuple[list[ProcessState], str]:
    """Returns the states and the report of process 0: as many states as fit into a message.

    Raises:
        ArgumentError: the secret in SCALAX_RUN_TOKEN is too short.
        OSError: there is no response: nothing listens there, or it has another secret.
        ValueError: it is another program.
    """
    secret = resolve_secret('scalax doctor')
    client = Client(secret)
    with _socket(address, secret, listens=False) as connection:
        connection.settimeout(5)
        for _ in range(3):  # the first response has the nonce for the next request
            connection.send(client.request(_encode('', [])))
            if (data := client.read_response(connection.recv(_MAX_MESSAGE))) is not None:
                text, states = _decode(data)
                return states, text
    raise ValueError('it sends another nonce each time')


def local_address() -> str:
    """Returns the address of this host in its network, with a free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(('', 0))
        with contextlib.suppress(OSError):
            probe.connect(('192.0.2.1', 9))  # an address for documentation; sends nothing
        return ':'.join(map(str, probe.getsockname()))


def _socket(address: str, secret: bytes, listens: bool) -> socket.socket:
    """Makes a socket that listens at ``'host:port'``, or that is connected to it.

    Other machines cannot reach a loopback address. To listen at any other address needs a secret.
    """
    host, _, port = address.rpartition(':')
    if names_loopback(host):
        host = '127.0.0.1'
    elif listens:
        if not secret:
            raise missing_secret_error('initialize', address)
        host = '::' if socket.has_dualstack_ipv6() else '0.0.0.0'
    family, kind, _, _, where = socket.getaddrinfo(host.strip('[]'), int(port), type=socket.SOCK_DGRAM)[0]
    result = socket.socket(family, kind)
    if listens and family == socket.AF_INET6:  # also IPv4, which is not the default of all systems
        result.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    (result.bind if listens else result.connect)(where)
    return result


def _encode(text: str, states: list[ProcessState]) -> bytes:
    """Encodes a report and states; only the first states if all of them do not fit into a message."""
    data = json.dumps([text, states]).encode()
    if states and len(data) > _MAX_MESSAGE - HEAD:
        return _encode(text, states[: len(states) // 2])
    return data


def _decode(data: bytes) -> tuple[str, list[ProcessState]]:
    text, states = json.loads(data)
    if any([*map(type, fields)] != _FIELD_TYPES for fields in states):
        raise ValueError('a message of another program')
    return str(text), [ProcessState(*fields) for fields in states]
