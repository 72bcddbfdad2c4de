"""What becomes of typed PRNG keys where only plain arrays can go? Their data go, and are made keys again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from scalax._hostdata.collectives import without_context


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, which numpy does not know."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def keys_of(data: jax.Array, like: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The keys that have these data, sharded so, of the kind of *like*."""
    return without_context(_wrapping(jax.random.key_impl(like), sharding), data)


@functools.lru_cache(maxsize=64)
def _wrapping(impl: Any, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=sharding)
