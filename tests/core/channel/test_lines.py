"""Signed lines of bounded length, the handshake, and the secret."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from scalax._core.channel import lines
from scalax._core.channel.secret import is_loopback, names_loopback, resolve_secret
from scalax._core.channel.session import CLIENT, SERVER, Session, new_nonce
from scalax.errors import ArgumentError

LONG, SOON = 200.0, 0.05
SECRET = b'a secret of sixteen bytes or more'


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    with client, server:
        yield client, server


Pair = tuple[socket.socket, socket.socket]


def test_lines_arrive_unchanged(pair: Pair) -> None:
    texts = [b'', b'a', b'x' * 1000, b'b']
    for text in texts:
        lines.LineSocket(pair[0]).send(text, LONG)
    reader = lines.LineSocket(pair[1])
    assert [reader.read(1000, LONG) for _ in texts] == texts
    assert not reader.wait_readable(SOON)


@pytest.mark.parametrize('end', [b'', b'\n'])
def test_too_long_lines_are_invalid(end: bytes, pair: Pair) -> None:
    pair[0].sendall(b'x' * 10 + end)
    with pytest.raises(lines.InvalidMessage):
        lines.LineSocket(pair[1]).read(9, LONG)


def test_a_slow_line_has_a_deadline(pair: Pair) -> None:
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(SOON / 5):
            pair[0].sendall(b'x')

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TimeoutError):
            lines.LineSocket(pair[1]).read(1 << 20, 4 * SOON)
    finally:
        ended.set()
        dripping.join(LONG)


def test_a_connection_that_ends_within_a_line(pair: Pair) -> None:
    pair[0].sendall(b'half a li')
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(lines.ConnectionClosed):
        lines.LineSocket(pair[1]).read(100, LONG)


def channels(
    pair: Pair, client_secret: bytes = SECRET, server_secret: bytes = SECRET
) -> tuple[lines.Channel, lines.Channel]:
    """The channels of the client and of the server."""
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(lines.server_handshake, pair[1], server_secret, LONG)
        client = lines.client_handshake(pair[0], client_secret, LONG)
        return client, server.result(LONG)


@pytest.mark.parametrize('secret', [SECRET, b''])
def test_messages_go_both_ways(secret: bytes, pair: Pair) -> None:
    client, server = channels(pair, secret, secret)
    for number in range(3):
        client.send({'asks': number}, LONG)
        assert server.read(100, LONG) == {'asks': number}
        server.send([number], LONG)
        assert client.read(100, LONG) == [number]


def test_reflected_lines_are_invalid(pair: Pair) -> None:
    client, _ = channels(pair)
    client.send('text', LONG)
    pair[1].sendall(pair[1].recv(4096))
    with pytest.raises(lines.InvalidMessage):
        client.read(100, LONG)


@pytest.mark.parametrize('text', [b'[' * 100_000, b'{', b'\xff'], ids=['nested', 'half', 'no text'])
def test_signed_lines_that_are_not_json(text: bytes, pair: Pair) -> None:
    client, server = channels(pair)
    signature = client._session.signature(CLIENT, 1, text)
    pair[0].sendall(signature.hex().encode() + b' ' + text + b'\n')
    with pytest.raises(lines.InvalidMessage):
        server.read(1 << 20, LONG)


def test_a_signature_is_valid_for_one_message_only() -> None:
    client, server = new_nonce(), new_nonce()
    session = Session(SECRET, client, server)
    signature = session.signature(CLIENT, 1, b'data')
    assert session.is_signed(signature, CLIENT, 1, b'data')
    others = [
        (Session(b'another secret', client, server), CLIENT, 1, b'data'),
        (Session(SECRET, server, client), CLIENT, 1, b'data'),
        (Session(SECRET, new_nonce(), server), CLIENT, 1, b'data'),
        (Session(SECRET, client, new_nonce()), CLIENT, 1, b'data'),
        (session, SERVER, 1, b'data'),
        (session, CLIENT, 2, b'data'),
        (session, CLIENT, 1, b'date'),
        (session, CLIENT + b'\0', 1, b'data'),
    ]
    for other, side, sequence, data in others:
        assert not other.is_signed(signature, side, sequence, data)


@pytest.mark.parametrize(
    ('host', 'by_name', 'expected'),
    [
        ('localhost', True, True),
        ('127.0.0.1', True, True),
        ('127.9.8.7', True, True),
        ('::1', True, True),
        ('[::1]', True, True),
        ('0.0.0.0', False, False),
        ('::', False, False),
        ('', False, False),
        ('10.0.0.1', False, False),
        ('trainer', False, True),
        ('both', False, False),
        ('x' * 64, False, False),
    ],
)
def test_loopback(host: str, by_name: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name on every machine, or as this machine resolves it."""
    addresses = {'trainer': ['127.0.1.1', '::1'], 'both': ['127.0.1.1', '10.0.0.1'], '': ['0.0.0.0']}

    def resolved(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if len(name) > 63:
            raise UnicodeError('label too long')
        if name not in addresses and not set(name) <= set('0123456789.:'):
            raise OSError('nobody knows the host')
        return [(0, 0, 0, '', (address, 0)) for address in addresses.get(name, [name])]

    monkeypatch.setattr(socket, 'getaddrinfo', resolved)
    assert names_loopback(host) == by_name
    assert is_loopback(host) == expected


@pytest.mark.parametrize(
    ('text', 'secret'),
    [
        (SECRET.decode() + '\n', SECRET),
        (f' {SECRET.decode()}\r\n', SECRET),
        ('a \n b' * 4, b'a \n b' * 4),
        ('ü' * 16, 'ü'.encode() * 16),
        ('\udcff' * 16, b'\xed\xb3\xbf' * 16),  # bytes of a variable that are not UTF-8
    ],
    ids=['newline', 'space', 'inside', 'unicode', 'bytes'],
)
def test_valid_secrets(text: str, secret: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an argument and as a variable, which often differ by a newline at the end."""
    assert resolve_secret('test', text) == secret
    monkeypatch.setenv('SCALAX_RUN_TOKEN', text)
    assert resolve_secret('test') == secret


@pytest.mark.parametrize('text', [' ' * 20, '\n', 'short' + ' ' * 20], ids=repr)
def test_white_space_does_not_count(text: str) -> None:
    length = len(text.strip())
    with pytest.raises(ArgumentError, match=f'^test: secret has to be .*, got {length} characters\\. What'):
        resolve_secret('test', text)
