"""Signatures of two sides that share a secret, bound to both nonces, to the side and to a sequence number.

The secret is never sent. A signature is valid for one session, one direction and one message: an attacker can
neither replay a recorded message nor send it back to its sender.
"""

from __future__ import annotations

import hmac
import secrets

NONCE, SIGNATURE = 16, 32  # bytes
CLIENT, SERVER = b'asks', b'answers'
"""The two sides: the client connects and sends requests, the server listens and responds."""


def new_nonce() -> bytes:
    """Returns a random nonce, which cannot be guessed and does not repeat."""
    return secrets.token_bytes(NONCE)


class Session:
    """A session of a client and a server.

    Args:
        secret: the shared secret; empty between processes of one machine that have no secret.
        client: the nonce of the client.
        server: the nonce of the server.
    """

    def __init__(self, secret: bytes, client: bytes, server: bytes) -> None:
        # Nonces have a fixed length, so different sessions have different texts.
        self._key = hmac.digest(secret, b'scalax session 1' + client + server, 'sha256')

    def signature(self, side: bytes, sequence: int, data: bytes = b'') -> bytes:
        """Returns the signature of a side for the message with this sequence number."""
        text = len(side).to_bytes(1, 'big') + side + sequence.to_bytes(8, 'big') + data
        return hmac.digest(self._key, text, 'sha256')

    def is_signed(self, signature: bytes, side: bytes, sequence: int, data: bytes = b'') -> bool:
        """Returns whether a signature is valid, in constant time."""
        return hmac.compare_digest(signature, self.signature(side, sequence, data))
