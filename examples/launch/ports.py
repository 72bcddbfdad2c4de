"""A port for the coordinator of processes on one machine."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that is free, and that no other program is given meanwhile.

    The coordinator takes it seconds later, when its process has imported JAX. It shares ports, and so does
    the socket that holds this one, which listens to nobody. Where that is not known to work nothing holds it.
    """
    with socket.socket() as holder:
        if sys.platform == 'linux':
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(('localhost', 0))
        port = int(holder.getsockname()[1])
        if sys.platform != 'linux':
            holder.close()
        yield port
