"""A port for the coordinator of processes on one machine."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yields a free port, and reserves it.

    The coordinator binds it seconds later, when its process has imported JAX. It uses SO_REUSEPORT, as does
    the socket that reserves the port without listening. On other systems than Linux the port is not reserved.
    """
    with socket.socket() as holder:
        if sys.platform == 'linux':
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(('localhost', 0))
        port = int(holder.getsockname()[1])
        if sys.platform != 'linux':
            holder.close()
        yield port
