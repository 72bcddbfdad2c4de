"""Signed lines of JSON over TCP, after a handshake in which both sides prove that they have the secret.

The server sends a greeting with its nonce. The client sends a nonce and its proof, and receives nothing else
before the server has checked the proof. Then the server proves itself. Every line has a maximal length and a
deadline, in both directions.
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
_MAX_HANDSHAKE = 128  # bytes of a line of the handshake
_PREFIX = 65  # bytes of the signature, and a space, before the data of a line
_CHUNK = 1 << 20  # the largest number of bytes that are read at once


class ConnectionClosed(Exception):
    """The other side has closed the connection."""


class InvalidMessage(Exception):
    """A line does not follow the protocol, or is not signed with the secret."""


class Unauthenticated(InvalidMessage):
    """The other side has not proved that it has the secret, or has rejected the proof."""


class LineSocket:
    """A socket that sends and receives lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, bytearray()

    def send(self, data: bytes, seconds: float) -> None:
        """Sends a line.

        Raises:
            OSError: the other side is gone.
            TimeoutError: it has not received the line in time.
        """
        self._socket.settimeout(seconds)
        self._socket.sendall(data + b'\n')

    def wait_readable(self, seconds: float) -> bool:
        """Waits for the start of a line, or the end of the connection. Returns False after *seconds*."""
        if self._buffer:
            return True
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        return True

    def is_closed(self) -> bool:
        """Returns whether the other side has closed the connection and all lines are read; does not wait."""
        self._socket.settimeout(0)
        try:
            return not self._buffer and not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def read(self, max_bytes: int, seconds: float) -> bytes:
        """Returns the next line, without the newline.

        Raises:
            ConnectionClosed: the connection ends before it.
            InvalidMessage: the line is longer than *max_bytes*.
            OSError: the other side is gone.
            TimeoutError: the line is not complete in time.
        """
        deadline, searched = time.monotonic() + seconds, 0
        while (end := self._buffer.find(b'\n', searched)) < 0:
            searched, remaining = len(self._buffer), deadline - time.monotonic()
            if searched > max_bytes:
                raise InvalidMessage
            if remaining <= 0:
                raise TimeoutError('timed out')
            self._socket.settimeout(remaining)
            data = self._socket.recv(min(max_bytes + 1 - searched, _CHUNK))
            if not data:
                raise ConnectionClosed
            self._buffer += data
        if end > max_bytes:
            raise InvalidMessage
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


class Channel:
    """A connection after the handshake.

    Args:
        lines: the socket.
        session: the session of both sides.
        side: this side.
    """

    def __init__(self, lines: LineSocket, session: Session, side: bytes) -> None:
        self._lines, self._session = lines, session
        self._side, self._peer = (CLIENT, SERVER) if side == CLIENT else (SERVER, CLIENT)
        self._num_sent, self._num_read = 0, 0  # sequence number 0 belongs to the proofs

    def send(self, message: Any, seconds: float) -> None:
        """Sends a message, as JSON.

        Raises:
            OSError, TimeoutError: as for `LineSocket.send`.
        """
        self._num_sent += 1
        data = json.dumps(message).encode()
        signature = self._session.signature(self._side, self._num_sent, data)
        self._lines.send(signature.hex().encode() + b' ' + data, seconds)

    def wait_readable(self, seconds: float) -> bool:
        """Waits for the start of a message, as `LineSocket.wait_readable`."""
        return self._lines.wait_readable(seconds)

    def is_closed(self) -> bool:
        """Returns whether the other side has closed the connection, as `LineSocket.is_closed`."""
        return self._lines.is_closed()

    def read(self, max_bytes: int, seconds: float) -> Any:
        """Returns the next message.

        Raises:
            ConnectionClosed, OSError: as for `LineSocket.read`.
            InvalidMessage: the line is too long, or the other side has not signed it.
        """
        line = self._lines.read(max_bytes + _PREFIX, seconds)
        self._num_read += 1
        signature, data = line[: _PREFIX - 1], line[_PREFIX:]
        try:
            is_signed = self._session.is_signed(
                bytes.fromhex(signature.decode()), self._peer, self._num_read, data
            )
            if is_signed:  # checked before anything is parsed
                return json.loads(data)
        except (ValueError, RecursionError):
            pass
        raise InvalidMessage


def server_handshake(connection: socket.socket, secret: bytes, seconds: float) -> Channel:
    """Returns the channel of the server.

    Raises:
        ConnectionClosed, InvalidMessage, OSError: as for `LineSocket.read`.
        Unauthenticated: the client has another secret.
    """
    lines, nonce = LineSocket(connection), new_nonce()
    lines.send(b'scalax 1 ' + nonce.hex().encode(), seconds)
    match = _PROOF.fullmatch(lines.read(_MAX_HANDSHAKE, seconds))
    if match is None:
        raise Unauthenticated
    client_nonce, proof = (bytes.fromhex(part.decode()) for part in match.groups())
    session = Session(secret, client_nonce, nonce)
    if not session.is_signed(proof, CLIENT, 0):
        raise Unauthenticated
    lines.send(session.signature(SERVER, 0).hex().encode(), seconds)
    return Channel(lines, session, SERVER)


def client_handshake(connection: socket.socket, secret: bytes, seconds: float) -> Channel:
    """Returns the channel of the client.

    Raises:
        ConnectionClosed: the server has closed the connection at once: it has too many, or is shutting down.
        InvalidMessage: the server is another program.
        Unauthenticated: the server has another secret.
        OSError: the server is gone.
        TimeoutError: it does not respond in time.
    """
    lines = LineSocket(connection)
    try:
        match = _GREETING.fullmatch(lines.read(_MAX_HANDSHAKE, seconds))
    except ConnectionError as error:
        raise ConnectionClosed from error
    if match is None:
        raise InvalidMessage
    nonce = new_nonce()
    session = Session(secret, nonce, bytes.fromhex(match[1].decode()))
    try:
        lines.send(f'{nonce.hex()} {session.signature(CLIENT, 0).hex()}'.encode(), seconds)
        proof = lines.read(_MAX_HANDSHAKE, seconds)
    except (ConnectionClosed, ConnectionError) as error:
        raise Unauthenticated from error
    if not hmac.compare_digest(proof, session.signature(SERVER, 0).hex().encode()):
        raise Unauthenticated
    return Channel(lines, session, CLIENT)
