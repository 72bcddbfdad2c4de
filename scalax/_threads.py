"""How does a call run in another thread, with the JAX settings of this one?"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax

# Settings that a thread can have to itself, and by which JAX traces and compiles, also where a compiler calls
# back into Python, as it does for custom_partitioning. Their names are those of their context managers.
_OWN = (
    'enable_x64',
    'default_matmul_precision',
    'numpy_dtype_promotion',
    'numpy_rank_promotion',
    'default_prng_impl',
    'threefry_partitionable',
    'log_compiles',
)


def in_a_thread(name: str, call: Callable[[], Any]) -> Any:
    """What *call* returns or raises in a thread of that name, which is waited for.

    Contexts such as that of ``jax.set_mesh`` stay behind. So does the thread, where Ctrl-C ends the waiting;
    Python then waits for it when it ends.
    """
    results: list[Any] = []
    errors: list[BaseException] = []
    own = [(getattr(jax, setting), getattr(jax.config, f'jax_{setting}')) for setting in _OWN]

    def run() -> None:
        try:
            with contextlib.ExitStack() as stack:
                for setting, value in own:
                    stack.enter_context(setting(value))
                results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
