"""Signed messages over UDP: questions and answers, each of which counts once.

An answerer has one nonce for all, which a question has to name; so it keeps nothing of those who have not
proved that they have the secret, and never answers these. To a question with another nonce, which may be an
old one, it answers with its nonce alone. An answer names the nonce and the number of its question.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from scalax._core.channel.session import ANSWERS, ASKS, NONCE, SIGNATURE, Session, new_nonce

_HEAD = struct.Struct(f'>{NONCE}s{NONCE}sQ{SIGNATURE}s')
HEAD = _HEAD.size
"""Bytes that a message takes besides its data."""


class Foreign(ValueError):
    """A packet that is not signed with the secret of this run."""


class Message(NamedTuple):
    """A message that is signed.

    Attributes:
        asker: the nonce of the side that asks.
        answerer: that of the side that answers, as far as it is known.
        number: of the question, from 1.
        data: what is asked or answered.
    """

    asker: bytes
    answerer: bytes
    number: int
    data: bytes


def packed(secret: bytes, side: bytes, message: Message) -> bytes:
    """A message with the signature of a side."""
    asker, answerer, number, data = message
    return _HEAD.pack(*message[:3], Session(secret, asker, answerer).signature(side, number, data)) + data


def unpacked(secret: bytes, side: bytes, packet: bytes) -> Message:
    """The message of a packet.

    Raises:
        Foreign: the side has not signed it.
    """
    if len(packet) >= HEAD:
        asker, answerer, number, signature = _HEAD.unpack_from(packet)
        data = packet[HEAD:]
        if Session(secret, asker, answerer).is_signed(signature, side, number, data):
            return Message(asker, answerer, number, data)
    raise Foreign('a message of another program, or of one that has another secret')


class Asker:
    """The side that asks one answerer."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._nonce = secret, new_nonce()
        self._answerer, self._asked, self._answered = bytes(NONCE), 0, 0

    def question(self, data: bytes) -> bytes:
        """A packet that asks."""
        self._asked += 1
        return packed(self._secret, ASKS, Message(self._nonce, self._answerer, self._asked, data))

    def answer(self, packet: bytes) -> bytes | None:
        """The data of an answer; None if it only has the answerer's nonce: the question has to come again.

        Raises:
            Foreign: the packet is no answer.
            ValueError: it answers no question that is open.
        """
        message = unpacked(self._secret, ANSWERS, packet)
        if message.asker != self._nonce or not self._answered < message.number <= self._asked:
            raise ValueError('an answer to another question')
        self._answered = message.number
        is_known = message.answerer == self._answerer
        self._answerer = message.answerer
        return message.data if is_known else None


class Answerer:
    """The side that answers.

    Args:
        secret: of both sides.
        most: of how many askers the last number is kept. After that all have to ask with a new nonce.
    """

    def __init__(self, secret: bytes, most: int) -> None:
        self._secret, self._most, self._nonce = secret, most, new_nonce()
        self._numbers: dict[bytes, int] = {}  # of the last question, by the nonce of who asked

    def question(self, packet: bytes) -> tuple[Message, bool]:
        """A question, and whether it is new for certain; if not, its data may be old.

        Raises:
            Foreign: the packet is no question.
            ValueError: the question came before.
        """
        message = unpacked(self._secret, ASKS, packet)
        if message.answerer == self._nonce:
            if message.number <= self._numbers.get(message.asker, 0):
                raise ValueError('a question that came before')
            if message.asker not in self._numbers and len(self._numbers) >= self._most:
                self._nonce, self._numbers = new_nonce(), {}
                return message, False
            self._numbers[message.asker] = message.number
            return message, True
        return message, False

    def answer(self, question: Message, data: bytes) -> bytes:
        """The packet that answers a question."""
        return packed(self._secret, ANSWERS, question._replace(answerer=self._nonce, data=data))
