"""Strangers at the port of a Sender: whatever they send, they receive nothing, and receivers are served."""

import contextlib
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from scalax._core.channel import lines, listener
from scalax._core.channel.session import SERVER, Session
from scalax.errors import ArgumentError, TransferError
from scalax.jobs import Sender, _sender, receive
from scalax.sharding import MeshShardingHelper, PartitionSpec

SECRET, OTHER = 'of this run, and long enough', 'of another run, as long as that'
LONG, SOON = 200.0, 0.3  # seconds to wait for expected events; time limit of silent strangers
GREETING = 42  # bytes sent to everyone


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr(listener, 'HANDSHAKE_SECONDS', LONG)
    with Sender('localhost:0', secret=SECRET) as sender:
        yield sender


@contextlib.contextmanager
def short_handshakes() -> Iterator[None]:
    """Disconnects soon who is silent: strangers alone, because a receiver may be slow on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, 'HANDSHAKE_SECONDS', SOON)
        yield


def connected(sender: Sender) -> socket.socket:
    host, port = sender.address.split(':')
    return socket.create_connection((host, int(port)), timeout=LONG)


def assert_served(sender: Sender, **options: Any) -> None:
    """Checks that a receiver receives the tree."""
    helper = MeshShardingHelper([8], ['fsdp'])
    sending = threading.Thread(target=sender.send, args=[{'w': jax.device_put(np.arange(8))}])
    sending.start()
    got = receive(helper, sender.address, PartitionSpec(), secret=SECRET, **options)
    sending.join(LONG)
    np.testing.assert_array_equal(got['w'], np.arange(8))


def rest_of(connection: socket.socket) -> bytes:
    """Reads until the other side closes the connection."""
    received = b''
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(4096):
            received += data
    return received


class Recorder:
    """A connection that records the sent bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.sent = connection, b''

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._connection.sendall(data)


JOIN = {'asks': 'join', 'job': 'mine', 'seconds': 0, 'receiver': 0, 'receivers': 1}


def recorded(sender: Sender) -> bytes:
    """Records the bytes that a joining receiver sends."""
    with connected(sender) as connection:
        recorder: Any = Recorder(connection)
        channel = lines.client_handshake(recorder, SECRET.encode(), LONG)
        channel.send(JOIN, LONG)
        assert 'nothing was sent' in channel.read(4096, LONG)['fault']
        return bytes(recorder.sent)


def reflected(connection: socket.socket) -> bytes:
    """Makes a proof that uses the nonce of the sender for both sides, signed as the sender would."""
    nonce = connection.recv(GREETING)[-33:-1]
    session = Session(OTHER.encode(), bytes.fromhex(nonce.decode()), bytes.fromhex(nonce.decode()))
    return nonce + b' ' + session.signature(SERVER, 0).hex().encode() + b'\n'


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    'data',
    [
        b'GET / HTTP/1.1\r\nHost: trainer-0\r\n\r\n',
        b'\x16\x03\x01\x02\x00\x01\xff\n',
        b'\n',
        b'{"asks": "join", "job": "mine", "seconds": 0, "receiver": 0, "receivers": 1}\n',
        b'0' * 32 + b' ' + b'0' * 64 + b'\n',
        b'x' * 200,  # longer than any line of a handshake
        b'',
        b'x',
    ],
    ids=[
        'http',
        'tls',
        'nothing',
        'a question',
        'a proof',
        'a long line',
        'silence',
        'a line without an end',
    ],
)
def test_no_response_to_garbage(data: bytes, sender: Sender, caplog: pytest.LogCaptureFixture) -> None:
    with short_handshakes():
        for _ in range(2):
            with connected(sender) as stranger:
                stranger.sendall(data)
                assert len(rest_of(stranger)) == GREETING
    assert_served(sender)
    assert [record.getMessage() for record in caplog.records if record.name == 'scalax.channel'] == [
        'Sender: a connection from 127.0.0.1 was closed: it did not prove that it has the secret, was silent '
        'or sent an invalid request. If it is yours, set SCALAX_RUN_TOKEN to the same value on both sides. '
        'Others are closed without a message.'
    ]


def test_no_response_to_a_replay(sender: Sender) -> None:
    sent = recorded(sender)
    with connected(sender) as stranger:
        stranger.sendall(sent)
        assert len(rest_of(stranger)) == GREETING
    with connected(sender) as stranger:
        stranger.sendall(reflected(stranger))
        assert rest_of(stranger) == b''
    assert_served(sender)


def test_endless_line_needs_no_memory(sender: Sender) -> None:
    chunk = bytes(1 << 16).replace(b'\0', b'x')
    tracemalloc.start()
    try:
        with connected(sender) as stranger, contextlib.suppress(ConnectionError):
            for _ in range(300 << 4):  # 300 MiB
                stranger.sendall(chunk)
            pytest.fail('somebody read all of it')
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert_served(sender)


@pytest.mark.medium
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    'question',
    [
        [],
        {},
        {'asks': 'weights'},
        {'asks': ['join']},
        {**JOIN, 'job': ''},
        {**JOIN, 'receivers': 1 << 40},
        {**JOIN, 'receiver': 1},
        {**JOIN, 'seconds': 'long'},
        {**JOIN, 'more': 1},
        {'asks': 'parts', 'leaf': 0, 'parts': [[0]], 'sizes': [8], 'dtype': 'int32'},
        {'asks': 'parts', 'leaf': True, 'parts': [], 'sizes': [8], 'dtype': 'int32'},
        {'asks': 'join', 'job': 'x' * (1 << 20)},
    ],
    ids=lambda question: str(question)[:60],
)
def test_no_response_to_invalid_requests(
    question: Any, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(sender) as connection:
        channel = lines.client_handshake(connection, SECRET.encode(), LONG)
        with contextlib.suppress(ConnectionError):
            channel.send(question, LONG)
            assert rest_of(connection) == b''
    assert len([record for record in caplog.records if record.name == 'scalax.channel']) == 1


@pytest.mark.medium
@pytest.mark.parametrize('change', [lambda line: b'0' * 65 + line[65:], lambda line: line[65:]])
def test_no_response_to_a_modified_request(change: Callable[[bytes], bytes], sender: Sender) -> None:
    with connected(sender) as connection:
        recorder: Any = Recorder(connection)
        channel = lines.client_handshake(recorder, SECRET.encode(), LONG)
        recorder.sent = b''
        channel.send(JOIN, LONG)
        assert 'nothing was sent' in channel.read(4096, LONG)['fault']
        connection.sendall(recorder.sent)  # the same one again: its count is not the next one
        assert rest_of(connection) == b''
    with connected(sender) as connection:
        lines.client_handshake(connection, SECRET.encode(), LONG)
        connection.sendall(change(recorder.sent))
        assert rest_of(connection) == b''


def test_silent_receiver_is_disconnected() -> None:
    with Sender('localhost:0', timeout=SOON) as sender, connected(sender) as connection:
        lines.client_handshake(connection, b'', LONG)
        assert rest_of(connection) == b''


def test_one_job_at_a_time_receives(sender: Sender) -> None:
    sending = threading.Thread(target=sender.send, args=[{'w': jax.device_put(np.arange(8))}])
    sending.start()
    with connected(sender) as waiting, connected(sender) as another:
        first, second = (
            lines.client_handshake(connection, SECRET.encode(), LONG) for connection in (waiting, another)
        )
        first.send({**JOIN, 'seconds': LONG}, LONG)
        assert first.read(4096, LONG)['number'] == 1
        second.send({**JOIN, 'job': 'another'}, LONG)
        assert second.read(4096, LONG) == {'fault': 'nothing was sent to it within 0 s'}
        first.send({'asks': 'done'}, LONG)
        assert first.read(4096, LONG) == {}
    sending.join(LONG)


@pytest.mark.medium
def test_receiver_that_dies_while_waiting_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a receiver that is restarted again and again would fill the Sender."""
    monkeypatch.setattr(_sender, '_POLL', 0.05)
    before = set(threading.enumerate())

    def new_threads() -> list[str]:
        """Returns the names of the threads of this sender; those of earlier tests may end meanwhile."""
        return [thread.name for thread in threading.enumerate() if thread not in before]

    with Sender('localhost:0', secret=SECRET) as sender:
        for job in range(5):
            with connected(sender) as connection:
                channel = lines.client_handshake(connection, SECRET.encode(), LONG)
                channel.send({**JOIN, 'job': f'job {job}', 'seconds': 1e8}, LONG)
        deadline = time.monotonic() + LONG
        while len(new_threads()) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert new_threads() == ['scalax-sender']  # which accepts connections
        assert_served(sender)


@pytest.mark.slow
def test_a_thousand_connections(sender: Sender, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 3000:
        pytest.skip('this system allows a process fewer files')
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    before = threading.active_count()
    with short_handshakes(), contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        strangers = [stack.enter_context(connected(sender)) for _ in range(1000)]
        assert (
            threading.active_count() - before <= 2 * listener.MAX_UNAUTHENTICATED
        )  # some of them are ending
        assert_served(sender)
        received = [len(rest_of(stranger)) for stranger in strangers]
    assert set(received) <= {0, GREETING} and received.count(GREETING) >= listener.MAX_UNAUTHENTICATED
    assert len([record for record in caplog.records if record.name == 'scalax.channel']) == 1


def test_longest_silent_connection_is_closed_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, 'MAX_UNAUTHENTICATED', 2)
    monkeypatch.setattr(listener, '_MIN_SECONDS', 0.0)
    with Sender('localhost:0') as sender, contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(sender))
        assert len(first.recv(GREETING, socket.MSG_WAITALL)) == GREETING  # its thread has started
        second, third = [stack.enter_context(connected(sender)) for _ in range(2)]
        assert rest_of(first) == b''
        assert lines.client_handshake(third, b'', LONG)
        assert lines.client_handshake(second, b'', LONG)


def test_connection_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, '_MAX_CONNECTIONS', 1)
    with Sender('localhost:0') as sender:
        with connected(sender) as first:
            lines.client_handshake(first, b'', LONG)
            with connected(sender) as second, pytest.raises(lines.ConnectionClosed):
                lines.client_handshake(second, b'', LONG)
        deadline = time.monotonic() + LONG
        with contextlib.ExitStack() as stack:
            while time.monotonic() < deadline:
                with contextlib.suppress(lines.ConnectionClosed):
                    assert lines.client_handshake(stack.enter_context(connected(sender)), b'', LONG)
                    break
            else:
                pytest.fail('there is no room although the first connection has ended')


@pytest.mark.medium
@pytest.mark.parametrize(('ours', 'other_secret'), [(OTHER, SECRET), ('', SECRET), (SECRET, '')])
def test_another_secret(ours: str, other_secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('SCALAX_RUN_TOKEN', raising=False)
    helper = MeshShardingHelper([8], ['fsdp'])
    with Sender('localhost:0', secret=other_secret or None) as sender:
        with pytest.raises(TransferError) as error:
            receive(helper, sender.address, PartitionSpec(), secret=ours or None, wait=0)
        assert str(error.value) == (
            f'receive: process 0 of the sender at {sender.address} has another secret than this job, or one '
            'of the two has none. What to do: set SCALAX_RUN_TOKEN (or secret=...) to the same value in both '
            'jobs.'
        )


@contextlib.contextmanager
def in_place_of_the_sender(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """Serves one connection and closes it; yields the address."""
    with socket.create_server(('127.0.0.1', 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                serve(connection)

        serving = threading.Thread(target=accept)
        serving.start()
        yield f'127.0.0.1:{server.getsockname()[1]}'
        serving.join(LONG)


@pytest.mark.parametrize(
    ('greeting', 'text'),
    [
        (b'SSH-2.0-OpenSSH_9.6\r\n', 'is no Sender of this version of scalax'),
        (b'x' * 200, 'is no Sender of this version of scalax'),
        (
            b'scalax 1 ' + b'0' * 32 + b'\n' + b'0' * 64 + b'\n',
            'has another secret than this job, or one of the two has none. What to do: set SCALAX_RUN_TOKEN '
            '(or secret=...) to the same value in both jobs.',
        ),
        (b'', 'did not answer within 0 s: it hangs, or is stopped'),
    ],
    ids=['ssh', 'a long line', 'no proof', 'silence'],
)
def test_stranger_at_the_address_of_the_sender(greeting: bytes, text: str) -> None:
    helper, received = MeshShardingHelper([8], ['fsdp']), []

    def serve(connection: socket.socket) -> None:
        connection.sendall(greeting)
        received.append(rest_of(connection))

    with in_place_of_the_sender(serve) as address, pytest.raises(TransferError) as error:
        receive(helper, address, PartitionSpec(), secret=SECRET, timeout=LONG if greeting else SOON)
    assert str(error.value) == f'receive: process 0 of the sender at {address} {text}'
    assert b'join' not in received[0] and SECRET.encode() not in received[0]


def test_sender_with_too_many_connections() -> None:
    helper = MeshShardingHelper([8], ['fsdp'])
    sender = in_place_of_the_sender(lambda connection: None)
    with sender as address, pytest.raises(TransferError) as error:
        receive(helper, address, PartitionSpec(), secret=SECRET, wait=0)
    assert str(error.value) == (
        f'receive: nobody listens at {address} (the connection was closed at once: there are too many, or '
        'the Sender ends). What to do: start the job with the Sender, give its address, and a longer wait '
        'if it starts later.'
    )


def test_unsigned_response() -> None:
    helper = MeshShardingHelper([8], ['fsdp'])

    def serve(connection: socket.socket) -> None:
        lines.server_handshake(connection, SECRET.encode(), LONG).read(4096, LONG)
        connection.sendall(b'0' * 64 + b' {"number": 1}\n')

    with in_place_of_the_sender(serve) as address, pytest.raises(TransferError) as error:
        receive(helper, address, PartitionSpec(), secret=SECRET)
    assert str(error.value) == (
        f'receive: process 0 of the sender at {address} sent an answer that is too long, or not signed with '
        'the secret of both jobs'
    )


def test_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('SCALAX_RUN_TOKEN', SECRET)
    with Sender('localhost:0') as sender:
        assert_served(sender)


COMMAND = "python -c 'import secrets; print(secrets.token_hex())'"


def test_other_machines_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('SCALAX_RUN_TOKEN', raising=False)
    helper = MeshShardingHelper([8], ['fsdp'])
    text = (
        ': 192.0.2.1:7117 can be reached from other machines, and there is no secret to restrict who may '
        'connect. What to do: set the environment variable SCALAX_RUN_TOKEN to the same secret on both '
        f'sides, or give it as secret=...; {COMMAND} makes one. On one machine, localhost:7117 needs none.'
    )
    with pytest.raises(ArgumentError) as error:
        Sender('192.0.2.1:7117')
    assert str(error.value) == 'Sender' + text
    with pytest.raises(ArgumentError) as error:
        receive(helper, '192.0.2.1:7117', PartitionSpec(), wait=LONG)
    assert str(error.value) == 'receive' + text


@pytest.mark.parametrize(
    ('secret', 'length'), [('short', '5 characters'), ('', '0 characters'), (7, 'int')], ids=repr
)
def test_short_secrets(secret: Any, length: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Sender('localhost:0', secret=secret)
    assert str(error.value) == (
        'Sender: secret has to be text of at least 16 characters, which nobody can guess, got '
        f'{length}. What to do: {COMMAND} makes one.'
    )
