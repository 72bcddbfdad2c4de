"""Lines of bounded length; and what each side signs, which nobody else can."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from scalax._core.channel import lines
from scalax._core.channel.secret import is_loopback, names_loopback, resolve_secret
from scalax._core.channel.session import CLIENT, SERVER, Session, new_nonce
from scalax.errors import ArgumentError

LONG, SOON = 60.0, 0.05
SECRET = b'a secret of sixteen bytes or more'


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


Pair = tuple[socket.socket, socket.socket]


def test_lines_come_as_they_were_sent(pair: Pair) -> None:
    texts = [b'', b'a', b'x' * 1000, b'b']
    for text in texts:
        lines.LineSocket(pair[0]).send(text, LONG)
    reader = lines.LineSocket(pair[1])
    assert [reader.read(1000, LONG) for _ in texts] == texts
    assert not reader.wait_readable(SOON)


@pytest.mark.parametrize('end', [b'', b'\n'])
def test_a_line_is_not_longer_than_it_may_be(end: bytes, pair: Pair) -> None:
    pair[0].sendall(b'x' * 10 + end)
    with pytest.raises(lines.InvalidMessage):
        lines.LineSocket(pair[1]).read(9, LONG)


def test_a_line_has_a_deadline_however_it_drips(pair: Pair) -> None:
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


def channels(pair: Pair, ours: bytes = SECRET, theirs: bytes = SECRET) -> tuple[lines.Channel, lines.Channel]:
    """Both sides, of which the second one listens."""
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(lines.server_handshake, pair[1], theirs, LONG)
        asker = lines.client_handshake(pair[0], ours, LONG)
        return asker, answering.result(LONG)


@pytest.mark.parametrize('secret', [SECRET, b''])
def test_messages_go_both_ways(secret: bytes, pair: Pair) -> None:
    asker, answerer = channels(pair, secret, secret)
    for number in range(3):
        asker.send({'asks': number}, LONG)
        assert answerer.read(100, LONG) == {'asks': number}
        answerer.send([number], LONG)
        assert asker.read(100, LONG) == [number]


def test_a_line_is_not_sent_back_to_its_side(pair: Pair) -> None:
    asker, _ = channels(pair)
    asker.send('mine', LONG)
    pair[1].sendall(pair[1].recv(4096))
    with pytest.raises(lines.InvalidMessage):
        asker.read(100, LONG)


@pytest.mark.parametrize('text', [b'[' * 100_000, b'{', b'\xff'], ids=['nested', 'half', 'no text'])
def test_what_is_signed_and_no_json(text: bytes, pair: Pair) -> None:
    asker, answerer = channels(pair)
    signature = asker._session.signature(CLIENT, 1, text)
    pair[0].sendall(signature.hex().encode() + b' ' + text + b'\n')
    with pytest.raises(lines.InvalidMessage):
        answerer.read(1 << 20, LONG)


def test_a_signature_fits_nothing_else() -> None:
    one, other = new_nonce(), new_nonce()
    session = Session(SECRET, one, other)
    signature = session.signature(CLIENT, 1, b'data')
    assert session.is_signed(signature, CLIENT, 1, b'data')
    others = [
        (Session(b'another secret', one, other), CLIENT, 1, b'data'),
        (Session(SECRET, other, one), CLIENT, 1, b'data'),
        (Session(SECRET, new_nonce(), other), CLIENT, 1, b'data'),
        (Session(SECRET, one, new_nonce()), CLIENT, 1, b'data'),
        (session, SERVER, 1, b'data'),
        (session, CLIENT, 2, b'data'),
        (session, CLIENT, 1, b'date'),
        (session, CLIENT + b'\0', 1, b'data'),
    ]
    for wrong, side, count, data in others:
        assert not wrong.is_signed(signature, side, count, data)


@pytest.mark.parametrize(
    ('host', 'names', 'is_one'),
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
def test_loopback(host: str, names: bool, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name on every machine, or as this one resolves it."""

    names_of = {'trainer': ['127.0.1.1', '::1'], 'both': ['127.0.1.1', '10.0.0.1'], '': ['0.0.0.0']}

    def resolved(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if len(name) > 63:
            raise UnicodeError('label too long')
        if name not in names_of and not set(name) <= set('0123456789.:'):
            raise OSError('nobody knows the host')
        return [(0, 0, 0, '', (address, 0)) for address in names_of.get(name, [name])]

    monkeypatch.setattr(socket, 'getaddrinfo', resolved)
    assert names_loopback(host) == names
    assert is_loopback(host) == is_one


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
def test_texts_that_are_secrets(text: str, secret: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an argument and as a variable, which often differ by a newline at the end."""
    assert resolve_secret('test', text) == secret
    monkeypatch.setenv('SCALAX_RUN_TOKEN', text)
    assert resolve_secret('test') == secret


@pytest.mark.parametrize('text', [' ' * 20, '\n', 'short' + ' ' * 20], ids=repr)
def test_white_space_is_no_secret(text: str) -> None:
    length = len(text.strip())
    with pytest.raises(ArgumentError, match=f'^test: secret has to be .*, got {length} characters\\. What'):
        resolve_secret('test', text)
