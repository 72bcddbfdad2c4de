"""Signed requests and responses over UDP, each of which counts once.

The server has one nonce for all clients, which a request has to name. So it keeps nothing about clients that
have not proved that they have the secret, and never sends them data. It answers a request that names another
nonce, which may be a replay, with its own nonce alone. A response names the nonce and the sequence number of
its request.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from scalax._core.channel.session import CLIENT, NONCE, SERVER, SIGNATURE, Session, new_nonce

_HEAD = struct.Struct(f'>{NONCE}s{NONCE}sQ{SIGNATURE}s')
HEAD = _HEAD.size
"""The bytes of a packet in addition to its data."""


class ForeignPacket(ValueError):
    """A packet that is not signed with the secret of this run."""


class Message(NamedTuple):
    """A signed request or response.

    Attributes:
        client: the nonce of the client.
        server: the nonce of the server, as far as the client knows it.
        sequence: the sequence number of the request, from 1.
        data: the data that is sent.
    """

    client: bytes
    server: bytes
    sequence: int
    data: bytes


def pack(secret: bytes, side: bytes, message: Message) -> bytes:
    """Returns the packet of a message, with the signature of the side that sends it."""
    client, server, sequence, data = message
    return _HEAD.pack(*message[:3], Session(secret, client, server).signature(side, sequence, data)) + data


def unpack(secret: bytes, side: bytes, packet: bytes) -> Message:
    """Returns the message of a packet.

    Raises:
        ForeignPacket: the side has not signed it.
    """
    if len(packet) >= HEAD:
        client, server, sequence, signature = _HEAD.unpack_from(packet)
        data = packet[HEAD:]
        if Session(secret, client, server).is_signed(signature, side, sequence, data):
            return Message(client, server, sequence, data)
    raise ForeignPacket('a message of another program, or of one that has another secret')


class Client:
    """The side that sends requests to one server."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._nonce = secret, new_nonce()
        self._server, self._last_request, self._last_response = bytes(NONCE), 0, 0

    def request(self, data: bytes) -> bytes:
        """Returns the packet of a new request."""
        self._last_request += 1
        return pack(self._secret, CLIENT, Message(self._nonce, self._server, self._last_request, data))

    def read_response(self, packet: bytes) -> bytes | None:
        """Returns the data of a response.

        Returns None if the response holds nothing but the server's nonce: the request has to be sent again.

        Raises:
            ForeignPacket: the packet is not a response.
            ValueError: it does not belong to an open request.
        """
        message = unpack(self._secret, SERVER, packet)
        if message.client != self._nonce or not self._last_response < message.sequence <= self._last_request:
            raise ValueError('a response to another request')
        self._last_response = message.sequence
        is_known = message.server == self._server
        self._server = message.server
        return message.data if is_known else None


class Server:
    """The side that responds.

    Args:
        secret: the secret of both sides.
        max_clients: the number of clients whose last sequence number is kept. With one more, the nonce
            changes, and all clients have to use the new one.
    """

    def __init__(self, secret: bytes, max_clients: int) -> None:
        self._secret, self._max_clients, self._nonce = secret, max_clients, new_nonce()
        self._sequences: dict[bytes, int] = {}  # nonce of a client -> sequence number of its last request

    def read_request(self, packet: bytes) -> tuple[Message, bool]:
        """Returns a request, and whether it is certainly new; if not, its data may be a replay.

        Raises:
            ForeignPacket: the packet is not a request.
            ValueError: the request was received before.
        """
        message = unpack(self._secret, CLIENT, packet)
        if message.server == self._nonce:
            if message.sequence <= self._sequences.get(message.client, 0):
                raise ValueError('a request that was received before')
            if message.client not in self._sequences and len(self._sequences) >= self._max_clients:
                self._nonce, self._sequences = new_nonce(), {}
                return message, False
            self._sequences[message.client] = message.sequence
            return message, True
        return message, False

    def respond(self, request: Message, data: bytes) -> bytes:
        """Returns the packet of the response to a request."""
        return pack(self._secret, SERVER, request._replace(server=self._nonce, data=data))
