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

from scalax._core.channel.session import ANSWERS, ASKS, Session, new_nonce

_GREETING = re.compile(rb'scalax 1 ([0-9a-f]{32})')
_PROOF = re.compile(rb'([0-9a-f]{32}) ([0-9a-f]{64})')
_SHORT = 128  # bytes of a line of the handshake
_SIGNED = 65  # bytes before the text of a signed line
_CHUNK = 1 << 20  # bytes that are read at once, at most


class Closed(Exception):
    """The other side has closed the connection."""


class Invalid(Exception):
    """What came is no line of this protocol, or not signed with the secret."""


class Unproven(Invalid):
    """The other side has not proved that it has the secret, or has not accepted the proof."""


class Lines:
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

    def comes(self, seconds: float) -> bool:
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
            Closed: the connection ends before it.
            Invalid: the line is longer than so many bytes.
            OSError: the other side is gone, or the line is not complete in time (TimeoutError).
        """
        deadline, searched = time.monotonic() + seconds, 0
        while (end := self._buffer.find(b'\n', searched)) < 0:
            searched, left = len(self._buffer), deadline - time.monotonic()
            if searched > longest:
                raise Invalid
            if left <= 0:
                raise TimeoutError('timed out')
            self._socket.settimeout(left)
            data = self._socket.recv(min(longest + 1 - searched, _CHUNK))
            if not data:
                raise Closed
            self._buffer += data
        if end > longest:
            raise Invalid
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

    def __init__(self, lines: Lines, session: Session, side: bytes) -> None:
        self._lines, self._session = lines, session
        self._mine, self._theirs = (ASKS, ANSWERS) if side == ASKS else (ANSWERS, ASKS)
        self._sent, self._read = 0, 0  # messages; the proofs are those with the number 0

    def send(self, message: Any, seconds: float) -> None:
        """Sends a message, as JSON.

        Raises:
            OSError: as for `Lines.send`.
        """
        self._sent += 1
        data = json.dumps(message).encode()
        signature = self._session.signature(self._mine, self._sent, data)
        self._lines.send(signature.hex().encode() + b' ' + data, seconds)

    def comes(self, seconds: float) -> bool:
        """Whether a message begins within so many seconds, as `Lines.comes`."""
        return self._lines.comes(seconds)

    def is_closed(self) -> bool:
        """Whether the other side has left, as `Lines.is_closed`."""
        return self._lines.is_closed()

    def read(self, longest: int, seconds: float) -> Any:
        """The next message.

        Raises:
            Closed, Invalid, OSError: as for `Lines.read`; Invalid also if the other side has not signed it.
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
        raise Invalid


def answered(connection: socket.socket, secret: bytes, seconds: float) -> Channel:
    """The channel of the side that listens.

    Raises:
        Closed, Invalid, OSError: as for `Lines.read`; Unproven if the other side has another secret.
    """
    lines, nonce = Lines(connection), new_nonce()
    lines.send(b'scalax 1 ' + nonce.hex().encode(), seconds)
    match = _PROOF.fullmatch(lines.read(_SHORT, seconds))
    if match is None:
        raise Unproven
    asker, proof = (bytes.fromhex(part.decode()) for part in match.groups())
    session = Session(secret, asker, nonce)
    if not session.is_signed(proof, ASKS, 0):
        raise Unproven
    lines.send(session.signature(ANSWERS, 0).hex().encode(), seconds)
    return Channel(lines, session, ANSWERS)


def asked(connection: socket.socket, secret: bytes, seconds: float) -> Channel:
    """The channel of the side that connects.

    Raises:
        Closed: the other side has closed the connection at once: it has too many, or is ending.
        Invalid: the other side is another program.
        Unproven: it has another secret.
        OSError: it is gone, or silent for so long (TimeoutError).
    """
    lines = Lines(connection)
    try:
        match = _GREETING.fullmatch(lines.read(_SHORT, seconds))
    except ConnectionError as error:
        raise Closed from error
    if match is None:
        raise Invalid
    nonce = new_nonce()
    session = Session(secret, nonce, bytes.fromhex(match[1].decode()))
    try:
        lines.send(f'{nonce.hex()} {session.signature(ASKS, 0).hex()}'.encode(), seconds)
        proof = lines.read(_SHORT, seconds)
    except (Closed, ConnectionError) as error:
        raise Unproven from error
    if not hmac.compare_digest(proof, session.signature(ANSWERS, 0).hex().encode()):
        raise Unproven
    return Channel(lines, session, ASKS)
