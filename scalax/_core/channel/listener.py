"""TCP server that serves only clients with the secret, and limits connections without it."""

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

HANDSHAKE_SECONDS = 30.0  # the time for the handshake of a connection
MAX_UNAUTHENTICATED = 64  # connections whose handshake is not complete
_MAX_CONNECTIONS = 4096
_MIN_SECONDS = 2.0  # before an unauthenticated connection may be closed to make room
_log = logging.getLogger('scalax.channel')


class Listener(socketserver.ThreadingTCPServer):
    """Serves authenticated connections, each in its own thread.

    Args:
        caller: the name of the caller, for messages.
        address: the host and port to listen at; port 0 is any free port.
        secret: the shared secret; it may be empty only at a loopback address.
        serve: a function that is called with each channel. When it returns, the connection is closed.

    Raises:
        ArgumentError: there is no secret, and other machines can reach the address.
        OSError: the port is in use, or the host has no address.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, caller: str, address: tuple[str, int], secret: bytes, serve: Callable[[lines.Channel], None]
    ) -> None:
        require_secret(caller, secret, f'{address[0]}:{address[1]}')
        self._caller, self._secret, self._serve = caller, secret, serve
        self._lock, self._has_logged = threading.Lock(), False
        self._connections: set[socket.socket] = set()
        self._unauthenticated: dict[socket.socket, float] = {}  # -> time of arrival, oldest first
        super().__init__(address, socketserver.BaseRequestHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns whether there is room for a connection; may close the oldest unauthenticated one."""
        with self._lock:
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                if time.monotonic() - self._unauthenticated[oldest] < _MIN_SECONDS:
                    return False
                del self._unauthenticated[oldest]
                _disconnect(oldest)
            if len(self._connections) >= _MAX_CONNECTIONS:
                return False
            self._connections.add(request)
            self._unauthenticated[request] = time.monotonic()
            return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection, in its thread."""
        try:
            channel = lines.server_handshake(request, self._secret, HANDSHAKE_SECONDS)
            with self._lock:
                self._unauthenticated.pop(request, None)
            self._serve(channel)
        except (lines.ConnectionClosed, ConnectionError):
            pass  # the client has disconnected
        except (lines.InvalidMessage, OSError):
            self._log(client_address[0])

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._connections.discard(request)
            self._unauthenticated.pop(request, None)
        super().shutdown_request(request)

    def _log(self, host: str) -> None:
        """Logs the first rejected connection only; otherwise an attacker could fill the disk."""
        with self._lock:
            has_logged, self._has_logged = self._has_logged, True
        if not has_logged:
            _log.warning(
                '%s: a connection from %s was closed: it did not prove that it has the secret, was silent or '
                'sent an invalid request. If it is yours, set %s to the same value on both sides. Others are '
                'closed without a message.',
                *(self._caller, host, SECRET_VARIABLE),
            )

    def close(self) -> None:
        """Stops `serve_forever` in another thread, and closes unauthenticated connections."""
        self.shutdown()
        self.server_close()
        with self._lock:
            for request in self._unauthenticated:
                _disconnect(request)


def _disconnect(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client may have disconnected
        request.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
