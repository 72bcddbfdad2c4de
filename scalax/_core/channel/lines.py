"""Signed lines of JSON over TCP, between two sides that have proved to each other that they have one secret.

The side that listens greets with its nonce. The side that connects answers with a nonce and its proof, and is
told nothing before that is checked; then the listening side proves itself. A line has a maximal length and a
deadline, whoever sends it.
"""

from __future__ import annotations

import hmac
import json
import re
import socket
import time
from typing import Any

from scalax._core.channel.session import CLIENT, SERVER, Session, new_nonce

_GREETING = re.compile(rb'scalax 1 ([0-9a-f]{32})')
_PROOF = re.compile(rb'([0-9a-f]{32}) ([0-9a-f]{64})')
_SHORT = 128  # bytes of a line of the handshake
_SIGNED = 65  # bytes before the text of a signed line
_CHUNK = 1 << 20  # bytes that are read at once, at most


class ConnectionClosed(Exception):
    """The other side has closed the connection."""


class InvalidMessage(Exception):
    """What came is no line of this protocol, or not signed with the secret."""


class Unauthenticated(InvalidMessage):
    """The other side has not proved that it has the secret, or has not accepted the proof."""


class LineSocket:
    """Lines that come over a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, bytearray()

    def send(self, data: bytes, seconds: float) -> None:
        """Sends a line.

        Raises:
            OSError: the other side is gone, or takes nothing for so long (TimeoutError).
        """
        self._socket.settimeout(seconds)
        self._socket.sendall(data + b'\n')

    def wait_readable(self, seconds: float) -> bool:
        """Whether a line begins within so many seconds. The end of the connection counts as one."""
        if self._buffer:
            return True
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        return True

    def is_closed(self) -> bool:
        """Whether the other side has closed the connection, and all it sent was read; does not wait."""
        self._socket.settimeout(0)
        try:
            return not self._buffer and not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def read(self, longest: int, seconds: float) -> bytes:
        """The next line, without its end.

        Raises:
            ConnectionClosed: the connection ends before it.
            InvalidMessage: the line is longer than so many bytes.
            OSError: the other side is gone, or the line is not complete in time (TimeoutError).
        """
        deadline, searched = time.monotonic() + seconds, 0
        while (end := self._buffer.find(b'\n', searched)) < 0:
            searched, left = len(self._buffer), deadline - time.monotonic()
            if searched > longest:
                raise InvalidMessage
            if left <= 0:
                raise TimeoutError('timed out')
            self._socket.settimeout(left)
            data = self._socket.recv(min(longest + 1 - searched, _CHUNK))
            if not data:
                raise ConnectionClosed
            self._buffer += data
        if end > longest:
            raise InvalidMessage
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


class Channel:
    """A connection after the handshake.

    Args:
        lines: of the connection.
        session: of both sides.
        side: this one.
    """

    def __init__(self, lines: LineSocket, session: Session, side: bytes) -> None:
        self._lines, self._session = lines, session
        self._mine, self._theirs = (CLIENT, SERVER) if side == CLIENT else (SERVER, CLIENT)
        self._sent, self._read = 0, 0  # messages; the proofs are those with the number 0

    def send(self, message: Any, seconds: float) -> None:
        """Sends a message, as JSON.

        Raises:
            OSError: as for `LineSocket.send`.
        """
        self._sent += 1
        data = json.dumps(message).encode()
        signature = self._session.signature(self._mine, self._sent, data)
        self._lines.send(signature.hex().encode() + b' ' + data, seconds)

    def wait_readable(self, seconds: float) -> bool:
        """Whether a message begins within so many seconds, as `LineSocket.wait_readable`."""
        return self._lines.wait_readable(seconds)

    def is_closed(self) -> bool:
        """Whether the other side has left, as `LineSocket.is_closed`."""
        return self._lines.is_closed()

    def read(self, longest: int, seconds: float) -> Any:
        """The next message.

        Raises:
            ConnectionClosed, OSError: as for `LineSocket.read`.
            InvalidMessage: the line is too long, or the other side has not signed it.
        """
        line = self._lines.read(longest + _SIGNED, seconds)
        self._read += 1
        signature, data = line[: _SIGNED - 1], line[_SIGNED:]
        try:
            signed = self._session.is_signed(
                bytes.fromhex(signature.decode()), self._theirs, self._read, data
            )
            if signed:  # before anything is parsed
                return json.loads(data)
        except (ValueError, RecursionError):
            pass
        raise InvalidMessage


def server_handshake(connection: socket.socket, secret: bytes, seconds: float) -> Channel:
    """The channel of the side that listens.

    Raises:
        ConnectionClosed, InvalidMessage, OSError: as for `LineSocket.read`.
        Unauthenticated: the other side has another secret.
    """
    lines, nonce = LineSocket(connection), new_nonce()
    lines.send(b'scalax 1 ' + nonce.hex().encode(), seconds)
    match = _PROOF.fullmatch(lines.read(_SHORT, seconds))
    if match is None:
        raise Unauthenticated
    asker, proof = (bytes.fromhex(part.decode()) for part in match.groups())
    session = Session(secret, asker, nonce)
    if not session.is_signed(proof, CLIENT, 0):
        raise Unauthenticated
    lines.send(session.signature(SERVER, 0).hex().encode(), seconds)
    return Channel(lines, session, SERVER)


def client_handshake(connection: socket.socket, secret: bytes, seconds: float) -> Channel:
    """The channel of the side that connects.

    Raises:
        ConnectionClosed: the other side has closed the connection at once: it has too many, or is ending.
        InvalidMessage: the other side is another program.
        Unauthenticated: it has another secret.
        OSError: it is gone, or silent for so long (TimeoutError).
    """
    lines = LineSocket(connection)
    try:
        match = _GREETING.fullmatch(lines.read(_SHORT, seconds))
    except ConnectionError as error:
        raise ConnectionClosed from error
    if match is None:
        raise InvalidMessage
    nonce = new_nonce()
    session = Session(secret, nonce, bytes.fromhex(match[1].decode()))
    try:
        lines.send(f'{nonce.hex()} {session.signature(CLIENT, 0).hex()}'.encode(), seconds)
        proof = lines.read(_SHORT, seconds)
    except (ConnectionClosed, ConnectionError) as error:
        raise Unauthenticated from error
    if not hmac.compare_digest(proof, session.signature(SERVER, 0).hex().encode()):
        raise Unauthenticated
    return Channel(lines, session, CLIENT)
