"""The queued work of the devices of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@functools.lru_cache(maxsize=64)
def fence_program(devices: tuple[Any, ...]) -> Callable[[], jax.Array]:
    """Returns a program that devices of this process run after all programs that were started before.

    Relies on devices running programs in the order in which they were started, by whichever thread, even if
    their results were dropped. If a process has one CPU device, this holds only within each thread; but
    there, programs that merely move arrays have ended when their call returns.
    """
    sharding = NamedSharding(Mesh(np.asarray(devices, dtype=object), ('device',)), PartitionSpec('device'))
    return jax.jit(lambda: jnp.zeros(len(devices)), out_shardings=sharding)


def pending_arrays(platform: str) -> list[jax.Array]:
    """Returns the arrays on a platform that are not computed yet, without deleted ones.

    Relies on ``is_ready`` of an array, which does not wait.
    """
    arrays: list[Any] = jax.live_arrays(platform)
    return [array for array in arrays if not array.is_deleted() and not array.is_ready()]


def drain(platform: str) -> Iterator[tuple[list[jax.Array], Exception]]:
    """Waits until this process's devices of a platform are idle, and yields the arrays that fail.

    Each comes with its error. If the array was dropped, the list of arrays is empty.

    Relies on waiting for an array that will never be ready raising an error, as soon as JAX knows that.
    """
    for array in pending_arrays(platform):
        try:
            jax.block_until_ready(array)
        except Exception as error:  # noqa: BLE001 - an error of the device, or of another process
            yield [array], error
    try:
        jax.block_until_ready(fence_program(tuple(jax.local_devices(backend=platform)))())
    except Exception as error:  # noqa: BLE001 - as above; the caller keeps it
        yield [], error
