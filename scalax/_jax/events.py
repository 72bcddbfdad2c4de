"""What JAX reports while it works."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'


@contextlib.contextmanager
def compilations_of(name: str) -> Iterator[list[float]]:
    """The compilations of functions of that name in this thread: the seconds of each, as they happen.

    Relies on the event `_COMPILED`, with the *fun_name* of the function: ``name`` or ``jit(name)``.
    """
    thread, found = threading.get_ident(), list[float]()

    def listen(event: str, duration_secs: float, **metadata: str | int) -> None:
        named = metadata.get('fun_name') in (name, f'jit({name})')
        if event == _COMPILED and named and threading.get_ident() == thread:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
