"""What two sides sign that have the same secret: bound to a nonce of each, to the side, and to a count.

The secret is never sent. A signature of one conversation, one direction or one message fits no other: a
stranger can neither replay what it has recorded nor send it back to where it came from.
"""

from __future__ import annotations

import hmac
import secrets

NONCE, SIGNATURE = 16, 32  # bytes
CLIENT, SERVER = b'asks', b'answers'
"""The two sides: that which asks, and connects, and that which answers, and listens."""


def new_nonce() -> bytes:
    """A number that nobody can guess, and that never comes again."""
    return secrets.token_bytes(NONCE)


class Session:
    """One conversation.

    Args:
        secret: of both sides; empty between processes of one machine that have none.
        asker: the nonce of the side that asks.
        answerer: the nonce of the side that answers.
    """

    def __init__(self, secret: bytes, asker: bytes, answerer: bytes) -> None:
        # Nonces have one length, so no two conversations have the same text.
        self._key = hmac.digest(secret, b'scalax session 1' + asker + answerer, 'sha256')

    def signature(self, side: bytes, count: int, data: bytes = b'') -> bytes:
        """The signature of a side under a message, the so-manyth that it sends."""
        text = len(side).to_bytes(1, 'big') + side + count.to_bytes(8, 'big') + data
        return hmac.digest(self._key, text, 'sha256')

    def is_signed(self, signature: bytes, side: bytes, count: int, data: bytes = b'') -> bool:
        """Whether a signature is that of a side; takes as long for a wrong one, wherever it is wrong."""
        return hmac.compare_digest(signature, self.signature(side, count, data))
