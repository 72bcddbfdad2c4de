"""JAX's thread-local state, and calls in another thread under the state of this one."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from scalax._core.context import active_helper
from scalax._jax.tracing import THREAD_SETTINGS


class ThreadState:
    """A copy of the state of the thread that creates the object, for another thread to enter.

    It consists of JAX's settings, Python's context variables and, with *in_contexts*, the mesh of
    ``jax.set_mesh``, the active helper with its annotations, and the active mapping of named axes. JAX has no
    public way to read the rest, such as ``jax.named_scope`` and contexts that other libraries create with
    ``jax.make_user_context``.
    """

    def __init__(self, *, in_contexts: bool = False) -> None:
        self._settings = [(name, getattr(jax.config, f'jax_{name}')) for name in THREAD_SETTINGS]
        self._variables = contextvars.copy_context()
        self._managers: list[Callable[[], Any]] = []
        if not in_contexts:
            return
        if not jax.sharding.get_abstract_mesh().empty:
            mesh = jax.sharding.get_mesh()
            self._managers.append(lambda: jax.set_mesh(mesh))
        helper, mapping = active_helper.current(), active_helper.current_mapping()
        if helper is not None:
            self._managers.append(lambda: active_helper.activate(helper, helper.used_names))
        if mapping is not None:
            self._managers.append(lambda: active_helper.activate_mapping(mapping))

    def run(self, call: Callable[[], Any]) -> Any:
        """Runs *call* under this state, which only one thread at a time may enter."""

        def run_in_state() -> Any:
            with self._entered():
                return call()

        return self._variables.run(run_in_state)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in self._settings:
                # Only different settings are entered: others keep following jax.config.update.
                if getattr(jax.config, f'jax_{name}') != value:
                    stack.enter_context(getattr(jax, name)(value))
            for manager in self._managers:
                stack.enter_context(manager())
            yield


def run_in_thread(name: str, call: Callable[[], Any]) -> Any:
    """Runs *call* in a new thread, waits for it, and returns its result or raises its error.

    It runs under JAX's settings of this thread, but outside of its contexts, such as ``jax.set_mesh``. Ctrl-C
    ends the wait but not the thread, for which Python waits when it exits.
    """
    executor = ThreadPoolExecutor(1, name)
    try:
        return executor.submit(ThreadState().run, call).result()
    finally:
        executor.shutdown(wait=False)
