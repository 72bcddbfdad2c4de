"""A port at which only who has the secret is served, and strangers are few, short and silent."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from scalax._core.channel import lines
from scalax._core.channel.secret import SECRET_VARIABLE, require_secret

HANDSHAKE_SECONDS = 30.0  # seconds that a connection has to prove itself
MAX_UNAUTHENTICATED = 64  # connections that have not proved themselves yet
_MOST = 4096  # connections in all
_PATIENCE = 2.0  # seconds that no stranger is sent away for another one
_log = logging.getLogger('scalax.channel')


class Listener(socketserver.ThreadingTCPServer):
    """Serves connections, each in a thread of its own, once they have proved that they have the secret.

    Args:
        what: the name of the caller, for messages.
        address: host and port to listen at; port 0 is any that is free.
        secret: of both sides; empty is allowed at a loopback address only.
        serve: called with each channel; the connection is closed when it returns.

    Raises:
        ArgumentError: there is no secret, and other machines can reach the address.
        OSError: the port is taken, or the host has no address.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, what: str, address: tuple[str, int], secret: bytes, serve: Callable[[lines.Channel], None]
    ) -> None:
        require_secret(what, secret, f'{address[0]}:{address[1]}')
        self._what, self._secret, self._serve = what, secret, serve
        self._lock, self._logged = threading.Lock(), False
        self._connections: set[socket.socket] = set()
        self._strangers: dict[socket.socket, float] = {}  # since when, the first one first
        super().__init__(address, socketserver.BaseRequestHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more; the longest of too many strangers makes room."""
        with self._lock:
            if len(self._strangers) >= MAX_UNAUTHENTICATED:
                first = next(iter(self._strangers))
                if time.monotonic() - self._strangers[first] < _PATIENCE:
                    return False
                del self._strangers[first]
                _hang_up(first)
            if len(self._connections) >= _MOST:
                return False
            self._connections.add(request)
            self._strangers[request] = time.monotonic()
            return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serves one connection, in its thread."""
        try:
            channel = lines.server_handshake(request, self._secret, HANDSHAKE_SECONDS)
            with self._lock:
                self._strangers.pop(request, None)
            self._serve(channel)
        except (lines.ConnectionClosed, ConnectionError):
            pass  # the other side has gone
        except (lines.InvalidMessage, OSError):
            self._log(client_address[0])

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection, however it has come to its end."""
        with self._lock:
            self._connections.discard(request)
            self._strangers.pop(request, None)
        super().shutdown_request(request)

    def _log(self, host: str) -> None:
        """Says once that somebody was sent away; a stranger could fill the disk otherwise."""
        with self._lock:
            logged, self._logged = self._logged, True
        if not logged:
            _log.warning(
                '%s: a connection from %s was closed: it did not prove that it has the secret, was silent or '
                'asked what nobody asks. If it is yours, set %s to the same value on both sides. Others are '
                'closed without a message.',
                *(self._what, host, SECRET_VARIABLE),
            )

    def close(self) -> None:
        """Stops listening, and sends strangers away; `serve_forever` has to run in another thread."""
        self.shutdown()
        self.server_close()
        with self._lock:
            for request in self._strangers:
                _hang_up(request)


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        request.shutdown(socket.SHUT_RDWR)  # its thread sees the end of it
