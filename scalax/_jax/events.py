"""Monitoring events of JAX."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'


@contextlib.contextmanager
def compilations_of(name: str) -> Iterator[list[float]]:
    """Collects the seconds of each compilation of a function of that name in this thread.

    Relies on the event `_COMPILED`, with the *fun_name* of the function: ``name`` or ``jit(name)``.
    """
    thread, durations = threading.get_ident(), list[float]()

    def listen(event: str, duration_secs: float, **metadata: str | int) -> None:
        is_named = metadata.get('fun_name') in (name, f'jit({name})')
        if event == _COMPILED and is_named and threading.get_ident() == thread:
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
