"""Reports from states of processes, messages of strangers, and the functions that find phases."""

import contextlib
import importlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scalax._core.channel import datagrams
from scalax._diagnostics.watchdog import state, watch
from scalax._diagnostics.watchdog.state import ProcessState
from scalax.errors import ArgumentError


def at(
    process: int, phase: str = state.COMPUTING, step: int = 7, silent: float = 0.0, **more: Any
) -> ProcessState:
    fields = {'line': 'train.py:30 in train', 'before': '', 'ago': 95.0, 'since': 94.0, **more}
    return ProcessState(process, 'gpu-07', 40 + process, step, phase=phase, silent=silent, **fields)


def report_text(
    *states: ProcessState, late: bool = True, usual: float = 0.8, address: str = 'gpu-00:1234'
) -> str:
    return watch.report(list(states), late, usual, 5.0, address)


def test_report_text() -> None:
    text = report_text(at(0), at(1, state.LOADING, line='data.py:88 in read_shard', before=state.COMPUTING))
    assert text == (
        '95 s have passed since step 7 (a step usually takes 0.8 s):\n'
        '  process 1 (host gpu-07, pid 41) is behind: loading for 94 s at data.py:88 in read_shard, after '
        'step 7, computing before that\n'
        'What to do: `py-spy dump --pid 41` on gpu-07 shows its threads; `scalax doctor --run gpu-00:1234` '
        'shows all processes.'
    )


def test_report_text_about_a_silent_process() -> None:
    assert report_text(at(0), at(1, silent=12.0), late=False, usual=0.0) == (
        '107 s have passed since step 7:\n'
        '  process 1 (host gpu-07, pid 41) is stopped, dead or out of reach; last: computing for 94 s at '
        'train.py:30 in train, after step 7; silent for 12 s\n'
        'What to do: `py-spy dump --pid 41` on gpu-07 shows its threads; `scalax doctor --run gpu-00:1234` '
        'shows all processes.'
    )


def test_report_text_if_no_process_is_behind() -> None:
    assert report_text(at(0), at(1, line='')) == (
        '95 s have passed since step 7 (a step usually takes 0.8 s); no process is behind:\n'
        '  process 0 (host gpu-07, pid 40): computing for 94 s at train.py:30 in train, after step 7\n'
        '  process 1 (host gpu-07, pid 41): computing for 94 s, after step 7\n'
        'What to do: `scalax doctor --run gpu-00:1234` shows all processes.'
    )


def test_report_text_if_the_user_cannot_know_the_secret() -> None:
    assert report_text(at(0), at(1, step=6), address='').endswith(
        '\nWhat to do: `py-spy dump --pid 41` on gpu-07 shows its threads; in a run for which '
        'SCALAX_RUN_TOKEN is set, `scalax doctor --run` shows all processes.'
    )


@pytest.mark.parametrize(
    ('phase', 'text'),
    [
        (state.LOADING, 'loading'),
        (state.SAVING, 'saving'),
        (state.RESTORING, 'restoring'),
        (state.WAITING, 'waiting for the others'),
        (state.PYTHON, 'in Python'),
        (state.CALLED, 'in Python that JAX calls'),
        (state.FINISHING, 'waiting at exit for data'),
        (state.ENDING, 'ending'),
    ],
)
def test_phases_in_reports(phase: str, text: str) -> None:
    assert f'pid 41) is behind: {text} for 94 s at ' in report_text(at(0), at(1, phase, step=6))


@pytest.mark.parametrize(
    ('states', 'behind'),
    [
        ((at(0, state.WAITING), at(1, state.SAVING), at(2, state.PYTHON)), {1}),
        ((at(0, state.CALLED, step=9), at(1), at(2, state.WAITING)), {0}),
        ((at(0), at(1, step=6), at(2, state.PYTHON)), {1}),
        ((at(0), at(1, state.PYTHON), at(2, state.PYTHON)), {1, 2}),
        ((at(0, state.RESTORING), at(1, silent=6.0)), {1}),
        ((at(0), at(1, state.ENDING, silent=6.0)), {1}),
    ],
)
def test_which_process_is_behind(states: tuple[ProcessState, ...], behind: set[int]) -> None:
    text = report_text(*states)
    assert {item.process for item in states if f'process {item.process} (' in text} == behind


def test_no_report_without_a_reason() -> None:
    assert report_text(at(0), at(1, state.LOADING), late=False) == ''
    assert report_text(at(0), at(1), usual=0.0) == ''  # the first step compiles
    assert report_text(at(0), at(1, state.ENDING, silent=60.0), late=False) == ''
    # A program that records no steps may run well: its phase changes.
    assert report_text(at(0), at(1, state.PYTHON, since=1.0), usual=0.0) == ''
    assert 'is behind' in report_text(at(0), at(1, state.PYTHON), usual=0.0)


SECRET = b'of this run, and long enough'


def test_messages_are_decoded() -> None:
    assert watch._decode(watch._encode('a\nb', [at(3)])) == ('a\nb', [at(3)])


def test_a_message_holds_as_many_states_as_fit() -> None:
    data = watch._encode('a', [at(i, line='x' * 200) for i in range(4096)])
    text, states = watch._decode(data)
    assert text == 'a' and [item.process for item in states] == [*range(128)]
    assert len(datagrams.Client(SECRET).request(data)) <= watch._MAX_MESSAGE


@contextlib.contextmanager
def process_0(secret: bytes = b'', count: int = 4) -> Iterator[tuple[watch.Watchdog, socket.socket]]:
    """Makes the watchdog of process 0, and a socket that is connected to it."""
    zero = watch.Watchdog('localhost:0', 0, count, None, 20, secret)
    with zero._socket:
        address = f'localhost:{zero._socket.getsockname()[1]}'
        with watch._socket(address, secret, listens=False) as other:
            other.settimeout(0)
            yield zero, other


def exchanged(zero: watch.Watchdog, other: socket.socket, packet: bytes) -> bytes:
    """Returns the response of process 0; empty if there is none."""
    other.send(packet)
    zero._listen(time.monotonic() + 0.05)
    with contextlib.suppress(BlockingIOError):
        return other.recv(60_000)
    return b''


def test_response_of_process_0_has_only_its_own_state() -> None:
    """Even before its first sample: a state that is sent only once would look like a silent process."""
    with process_0(count=4096) as (zero, other):
        zero._received = {i: at(i) for i in range(4096)}
        client, state_message = datagrams.Client(b''), watch._encode('', [at(3, step=9)])
        assert client.read_response(exchanged(zero, other, client.request(state_message))) is None
        answer = client.read_response(exchanged(zero, other, client.request(state_message)))
        assert answer is not None
        _, states = watch._decode(answer)
    assert [item.process for item in states] == [0] and zero._received[3].step == 9


def test_process_resends_its_state_after_the_first_nonce() -> None:
    with process_0(SECRET) as (zero, other):
        watchdog = watch.Watchdog(f'localhost:{other.getpeername()[1]}', 1, 4, None, 20, SECRET)
        with watchdog._socket:
            watchdog._state = at(1, step=5)
            watchdog._send_state()
            for side in (zero, watchdog, zero):
                side._listen(time.monotonic() + 0.05)
    assert zero._received[1].step == 5


def test_no_response_to_strangers(caplog: pytest.LogCaptureFixture) -> None:
    query, state_message = watch._encode('', []), watch._encode('', [at(1, step=9)])
    with process_0(SECRET) as (zero, other):
        zero._received = {0: at(0), 1: at(1)}
        client = datagrams.Client(SECRET)
        first = client.request(state_message)
        challenge = exchanged(zero, other, first)
        assert client.read_response(challenge) is None and zero._received[1].step == 7
        second = client.request(query)
        assert client.read_response(exchanged(zero, other, second))
        assert exchanged(zero, other, second) == b''  # it counts once
        # A replay of the first request gets a response that is no longer than it, and changes no state.
        assert len(exchanged(zero, other, first)) <= len(first) and zero._received[1].step == 7
        for packet in (
            b'GET / HTTP/1.1',
            bytes(60_000),
            query,
            challenge,
            datagrams.Client(b'').request(state_message),
            datagrams.Client(b'of another run, as long as that').request(state_message),
            second[:-1] + b'}',
        ):
            assert exchanged(zero, other, packet) == b'', packet
    assert [record.getMessage() for record in caplog.records] == [
        'a message from 127.0.0.1 about stuck processes is ignored, and so are others like it: it is not '
        'signed with the secret of this run. If it comes from this run, or from `scalax doctor --run`, set '
        'SCALAX_RUN_TOKEN to the same value for all.'
    ]


def test_signed_but_invalid_messages() -> None:
    with process_0(SECRET) as (zero, other):
        client = datagrams.Client(SECRET)
        assert client.read_response(exchanged(zero, other, client.request(b''))) is None
        for data in (b'[' * 50_000, b'{', b'3', b'["", 4]', b'["", [[1]]]'):
            assert exchanged(zero, other, client.request(data)) == b''


@pytest.mark.parametrize(
    ('address', 'secret', 'where'),
    [
        ('localhost:0', b'', '127.0.0.1'),
        ('127.0.1.1:0', SECRET, '127.0.0.1'),
        ('[::1]:0', b'', '127.0.0.1'),
        ('node-0:0', SECRET, ''),
    ],
)
def test_where_process_0_listens(address: str, secret: bytes, where: str) -> None:
    zero = watch.Watchdog(address, 0, 2, None, 20, secret)
    with zero._socket:
        assert zero._socket.getsockname()[0] == (
            where or ('::' if socket.has_dualstack_ipv6() else '0.0.0.0')
        )


def test_process_0_does_not_listen_to_other_machines_without_a_secret() -> None:
    with pytest.raises(ArgumentError) as error:
        watch.Watchdog('node-0:1234', 0, 2, None, 20)
    assert str(error.value) == (
        'initialize: node-0:1234 can be reached from other machines, and there is no secret to restrict who '
        'may connect. What to do: set the environment variable SCALAX_RUN_TOKEN to the same secret on both '
        "sides, or give it as secret=...; python -c 'import secrets; print(secrets.token_hex())' makes one. "
        'On one machine, localhost:1234 needs none.'
    )


def test_messages_of_all_do_not_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(watch, 'time', SimpleNamespace(sleep=slept.append))  # of no other thread
    for process in (0, 1024, 2048):
        watch.Watchdog('localhost:9', process, 4096, None, 20).run()  # ends: nothing is joined here
    assert slept == [0.0, 0.625, 1.25]


@pytest.mark.parametrize(
    'value', [3, [1, 2, 3], ['', 4], ['', [[1, 2]]], ['', [[*at(0)[:-1], 'soon']]], {}], ids=repr
)
def test_invalid_messages(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        watch._decode(json.dumps(value).encode())


def test_functions_of_phases_exist() -> None:
    homes = {
        'Prefetch.__next__': '_data.host.prefetch',
        '_load_all': '_data.host.prefetch',
        'local_data_to_global_array': '_data.host.global_batch',
        'gather': '_data.host.process_collectives',
        'barrier': 'checkpoint._agreement',
        'SaveThread.run': 'checkpoint._save',
        **dict.fromkeys(
            ('Checkpointer.save', 'Checkpointer.wait', 'Checkpointer.restore'), 'checkpoint._checkpointer'
        ),
    }
    named = {name for names in state.FUNCTIONS.values() for name in names} | {*state.THREADS.values()}
    assert named == {*homes}
    for name, home in homes.items():
        value: Any = importlib.import_module(f'scalax.{home}')
        for part in name.split('.'):
            value = getattr(value, part)
        assert value.__code__.co_qualname == name


def test_bound_of_a_step(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One process has steps of one second, and then a step that ended 25 and 35 seconds ago."""
    clock = [0.0]
    for module in (state, watch):
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(state.recorded, 'step', (0, 0.0, 0))
    monkeypatch.setattr(state.recorded, 'thread', threading.get_ident())
    watchdog = watch.Watchdog('localhost:0', 0, 1, None, 20)
    with watchdog._socket:
        for step in range(1, 8):
            clock[0] += 1.0
            state.record_step(step)
            state.record_step(step)  # by a checkpointer
            watchdog._received[0] = state.sample_state(0, None)
            watchdog._detect_stragglers()
        assert list(watchdog._seconds) == [1.0] * 6
        for later, reports in ((25.0, 0), (35.0, 1), (40.0, 1), (100.0, 2)):
            clock[0] = 7.0 + later
            watchdog._received[0] = state.sample_state(0, None)
            watchdog._detect_stragglers()
            assert len(caplog.records) == reports
        assert (
            caplog.records[0]
            .getMessage()
            .startswith('35 s have passed since step 7 (a step usually takes 1 s)')
        )
