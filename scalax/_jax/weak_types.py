"""Weakly typed arrays, which no documented function makes from an array that is already on devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def weakly_typed(array: jax.Array) -> jax.Array:
    """Returns an array with a weak type, and the same values, dtype and sharding.

    An array without elements stays strongly typed, because programs of JAX 0.10 return it unsharded.

    Relies on a program that was compiled for weakly typed arguments accepting strongly typed ones, and
    returning values of the types that it was compiled for.
    """
    if array.weak_type or not array.size:
        return array
    if array.sharding.memory_kind == 'pinned_host':  # JAX 0.10 compiles no program for host memory
        on_device = array.sharding.with_memory_kind('device')
        return jax.device_put(weakly_typed(jax.device_put(array, on_device)), array.sharding)
    return _identity(array.shape, array.dtype, array.sharding)(array)


@functools.lru_cache(maxsize=256)
def _identity(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    with jax.enable_x64(True):  # without x64, a struct would narrow 64-bit dtypes
        struct = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=True)
        compiled = jax.jit(lambda value: value, out_shardings=sharding).lower(struct).compile()
    return compiled
