"""The thread that tells process 0 where this process is; what process 0 finds, and all of them log.

`jax.distributed` keeps keys and values for its own use: JAX documents `initialize`, `shutdown` and
`is_initialized` of it, and nothing that sets a key. It would not do either: it is in process 0, so that all
who ask it wait for ever if that one is stopped.

So there are datagrams of JSON over UDP, which keep nobody waiting. Process 0 listens at the number of the
coordinator's port (which is TCP): all processes know it. Messages are signed with the secret of the run, and
count once; others are ignored. Without a secret process 0 listens on the loopback address only.
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
    LOADING,
    PYTHON,
    RESTORING,
    SAVING,
    ProcessState,
    recorded,
    sample_state,
)
from scalax.errors import shown

_LONGEST = 60_000  # bytes of a message
_DOCTORS = 1000  # that may ask before all have to begin anew
_PERIOD, _SILENT, _REPEAT = 1.0, 4, 60.0  # seconds between messages; how many are missing; between reports
_LEAST, _TIMES, _UNKNOWN = 30.0, 10, 300.0  # the bound of a step: seconds; usual steps; seconds at first
_KINDS = [int, str, int, int, float, str, float, str, str, float]  # of the fields of a state
_log = logging.getLogger('scalax.distributed')


class Watchdog:
    """What one process knows of the others; `run` is the body of its thread.

    Args:
        address: ``'host:port'`` of process 0.
        process: the index of this process.
        count: how many there are.
        timeout: the seconds that a step may take; None for ten times the usual ones, and at least 30.
        heartbeat: the seconds after the last heartbeat after which JAX ends the others; there are two in that
            time. A process that is silent for a quarter of it is named, which is before.
        secret: of the run; empty if all processes are on one machine.
        is_known: whether the user can have the secret too, as `scalax doctor --run` needs it.

    Raises:
        ArgumentError: process 0 would listen to other machines without a secret.
        OSError: another program uses the port, or there is no such host.
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
        # Process 0 reads 100 a second, or more where silence has to be noticed before JAX does.
        self._period = max(_PERIOD, min(count / 100, heartbeat / 8))
        self._socket = _socket(address, secret, listens=process == 0)
        self._client, self._server = Client(secret), Server(secret, 2 * count + _DOCTORS)
        self._own, self._ignored = ProcessState(process, '', 0, 0, 0.0, '', 0.0, '', '', 0.0), False
        self._heard: dict[int, ProcessState] = {}  # here `silent` is the tick of its last message
        self._tick, self._last, self._text, self._next = 0, recorded.step, '', 0.0

    def run(self) -> None:
        """Tells and asks, until the program has left `jax.distributed`."""
        own = None
        # All have joined at once: messages at once would not fit into what process 0 has not read yet.
        time.sleep(self._period * self._process / self._count)
        while jax.distributed.is_initialized():
            own = self._own = sample_state(self._process, own)
            self._heard[self._process] = own._replace(silent=self._tick)
            self._tell()
            self._listen(time.monotonic() + self._period)
            self._tick += 1
            self._detect_stragglers()
        self._socket.close()

    def _tell(self) -> None:
        """Tells process 0 where this one is."""
        if self._process:
            with contextlib.suppress(OSError):  # nobody listens there
                self._socket.send(self._client.request(_encoded('', [self._own])))

    def _listen(self, end: float) -> None:
        """Takes what comes until then, and what has come before; process 0 answers."""
        own = _encoded(self._text, [self._own])
        for _ in range(100 * self._count):  # however much is sent here
            self._socket.settimeout(max(end - time.monotonic(), 0))
            try:
                packet, sender = self._socket.recvfrom(_LONGEST)
            except (TimeoutError, BlockingIOError):
                return
            except OSError:  # nobody listens there
                continue
            try:
                if self._process:
                    self._take_answer(packet)
                else:
                    with contextlib.suppress(OSError):
                        self._socket.sendto(self._answer(packet, own), sender)
            except ForeignPacket:
                self._ignore(sender[0].removeprefix('::ffff:'))  # an IPv4 address
            except (ValueError, TypeError, RecursionError):  # it comes again, or another version sends
                continue

    def _take_answer(self, packet: bytes) -> None:
        if (data := self._client.read_response(packet)) is None:  # process 0 has begun, or begun anew
            self._tell()
        else:
            self._text, states = _decoded(data)
            self._hear(states)

    def _answer(self, packet: bytes, own: bytes) -> bytes:
        """What process 0 answers: where it is, or where all are if the question is from none of them."""
        question, is_new = self._server.read_request(packet)
        if not is_new:
            return self._server.respond(question, b'')
        _, states = _decoded(question.data)
        self._hear(states)
        return self._server.respond(question, own if states else _encoded(self._text, self._states()))

    def _hear(self, states: list[ProcessState]) -> None:
        # Modulo: whoever sends, there are no more than so many.
        self._heard |= {s.process % self._count: s._replace(silent=self._tick) for s in states}

    def _ignore(self, host: str) -> None:
        """Says once that a message is ignored: whoever sends it could fill the disk otherwise."""
        if not self._ignored:
            _log.warning(
                'a message from %s about stuck processes is ignored, and so are others like it: it is not '
                'signed with the secret of this run. If it comes from this run, or from `scalax doctor '
                '--run`, set %s to the same value for all.',
                *(host, SECRET_VARIABLE),
            )
        self._ignored = True

    def _states(self) -> list[ProcessState]:
        """Of the processes that were heard, in their order."""
        heard = sorted(self._heard.items())
        return [s._replace(silent=self._period * max(self._tick - s.silent - 1, 0)) for _, s in heard]

    def _detect_stragglers(self) -> None:
        """Process 0 finds out who is behind, the others whether process 0 is silent; all log it."""
        (_, before, counted), (_, begun, count) = self._last, recorded.step
        if count > counted > 0:  # the first step compiles
            self._seconds.append((begun - before) / (count - counted))
        self._last, states = recorded.step, self._states()
        usual = statistics.median(self._seconds) if len(self._seconds) > 2 else 0.0
        bound = (self._timeout or max(_LEAST, _TIMES * usual, 2 * max(self._seconds))) if usual else _UNKNOWN
        late = all(state.ago + state.silent > bound for state in states)
        silence = min(self._silence, _SILENT * self._period) if late else self._silence
        if states[0].silent > silence or self._process == 0:
            self._text = report(states, late, usual, silence, self._address)
        if self._text and time.monotonic() > self._next:
            self._next = time.monotonic() + max(_REPEAT, states[0].ago)
            _log.warning('%s', ''.join(x for x in self._text if x.isprintable() or x == '\n'))


def _signs(state: ProcessState) -> tuple[float, ...]:
    """What tells a process that is behind from those that wait for it, the surest first."""
    return state.phase in (LOADING, SAVING, RESTORING, ENDING, CALLED), -state.step, state.phase == PYTHON


def report(states: list[ProcessState], late: bool, usual: float, silence: float, address: str) -> str:
    """What is said if a process is silent, or a step takes longer than it may; else empty.

    Args:
        states: of the processes.
        late: whether the step does.
        usual: the seconds of a step, as far as they are known.
        silence: after how many seconds a process that says nothing counts as stuck.
        address: where `scalax doctor --run` finds the program; empty if it cannot have the secret.
    """
    stuck = [state for state in states if state.silent > silence and state.phase != ENDING]
    how = ' is stopped, dead or out of reach; last' if stuck else ' is behind'
    if late and not stuck:
        # Those with the first sign that some have and others have not.
        signs = max(zip(*map(_signs, states), strict=True), key=lambda values: len(set(values)) > 1)
        stuck = [state for state, sign in zip(states, signs, strict=True) if sign == max(signs) != min(signs)]
        # Who never notes a step may run well: what it does at this moment says nothing.
        stuck = [state for state in stuck if usual or state.since > _LEAST]
    if not stuck and not (late and usual):  # they compile, as far as anybody can tell
        return ''
    step, ago = max((state.step, state.ago + state.silent) for state in states)
    usually = f' (a step usually takes {usual:.2g} s)' if usual else ''
    dump = f'`py-spy dump --pid {stuck[0].pid}` on {stuck[0].host} shows its threads; ' if stuck else ''
    lines = [_line(state, how if stuck else '', silence) for state in stuck or states]
    doctor = f'`scalax doctor --run {address}` shows all processes.'
    if not address:
        doctor = f'in a run for which {SECRET_VARIABLE} is set, `scalax doctor --run` shows all processes.'
    return (
        f'{ago:.0f} s have passed since step {step}{usually}{"" if stuck else "; no process is behind"}:\n'
        f'{shown(lines)}\nWhat to do: {dump}{doctor}'
    )


def _line(state: ProcessState, how: str, silence: float) -> str:
    return (
        f'process {state.process} (host {state.host}, pid {state.pid}){how}: '
        f'{state.phase} for {state.since:.0f} s{state.line and f" at {state.line}"}, after step {state.step}'
        f'{state.before and f", {state.before} before that"}'
        f'{f"; silent for {state.silent:.0f} s" if state.silent > silence else ""}'
    )


def other_states(address: str) -> list[ProcessState]:
    """The states of the other processes, as process 0 knows them; none where nobody answers."""
    try:
        states, _ = query_states(address) if address else ([], '')
    except (OSError, ValueError, TypeError):
        return []
    return [state for state in states if state.process != jax.process_index()]


def lagging_processes(states: list[ProcessState]) -> list[str]:
    """A line for each of the processes that has not come to its end, or is silent."""
    silence = _SILENT * _PERIOD
    return [
        _line(state, ' is stopped, dead or out of reach; last' if state.silent > silence else '', silence)
        for state in states
        if state.silent > silence or state.phase not in (FINISHING, ENDING)
    ]


def query_states(address: str) -> tuple[list[ProcessState], str]:
    """Asks process 0 for its report, and for the states that it has heard: as many as fit into a message.

    Raises:
        ArgumentError: the secret in SCALAX_RUN_TOKEN is too short.
        OSError: nobody answers: nobody listens, or whoever does has another secret.
        ValueError: it is another program.
    """
    secret = resolve_secret('scalax doctor')
    client = Client(secret)
    with _socket(address, secret, listens=False) as way:
        way.settimeout(5)
        for _ in range(3):  # the first answer says with which nonce to ask
            way.send(client.request(_encoded('', [])))
            if (data := client.read_response(way.recv(_LONGEST))) is not None:
                text, states = _decoded(data)
                return states, text
    raise ValueError('it asks for another question each time')


def local_address() -> str:
    """The address of this host in its network, and a port that is free there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(('', 0))
        with contextlib.suppress(OSError):
            probe.connect(('192.0.2.1', 9))  # some address elsewhere: nothing is sent
        return ':'.join(map(str, probe.getsockname()))


def _socket(address: str, secret: bytes, listens: bool) -> socket.socket:
    """A socket that sends to ``'host:port'`` and takes what comes from there only, or that listens there.

    Who listens on the loopback address is reached by nobody else; all other addresses need a secret.
    """
    host, _, port = address.rpartition(':')
    if names_loopback(host):
        host = '127.0.0.1'
    elif listens:
        if not secret:
            raise missing_secret_error('initialize', address)
        host = '::' if socket.has_dualstack_ipv6() else '0.0.0.0'
    family, kind, _, _, where = socket.getaddrinfo(host.strip('[]'), int(port), type=socket.SOCK_DGRAM)[0]
    made = socket.socket(family, kind)
    if listens and family == socket.AF_INET6:  # not for IPv6 alone, which is the default of some systems
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    (made.bind if listens else made.connect)(where)
    return made


def _encoded(text: str, states: list[ProcessState]) -> bytes:
    """A report, and states, of which the first ones if all are too long for a message."""
    data = json.dumps([text, states]).encode()
    if states and len(data) > _LONGEST - HEAD:
        return _encoded(text, states[: len(states) // 2])
    return data


def _decoded(data: bytes) -> tuple[str, list[ProcessState]]:
    text, states = json.loads(data)
    if any([*map(type, fields)] != _KINDS for fields in states):
        raise ValueError('a message of another program')
    return str(text), [ProcessState(*fields) for fields in states]
