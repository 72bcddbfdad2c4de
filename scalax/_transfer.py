"""How do whole trees move between the host and a mesh? Sharding and gathering, one dispatch a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from scalax.errors import StructureError


def put(pytree: Any, shardings: Any) -> Any:
    """Places a tree of arrays as a tree of NamedShardings says, in one ``jax.device_put``."""
    return jax.device_put(pytree, shardings)


def to_host(pytree: Any) -> Any:
    """Every leaf as a numpy array of its global value, on every process; other leaves stay.

    Leaves that other processes hold a part of are gathered one at a time, so that at most one of them
    is in device memory whole. Typed PRNG keys, which numpy does not know, stay jax.Arrays.
    """
    leaves, treedef = jax.tree.flatten(pytree)
    ours = [i for i, leaf in enumerate(leaves) if _is_array(leaf) and leaf.is_fully_addressable]
    here = [leaves[i] for i in ours]
    for i, value in zip(ours, jax.device_get(here), strict=True):
        leaves[i] = value
    for i, leaf in enumerate(leaves):
        if _is_array(leaf) and not leaf.is_fully_addressable:
            leaves[i] = (
                np.asarray(leaf.addressable_data(0))
                if leaf.is_fully_replicated
                else multihost_utils.process_allgather(leaf, tiled=True)
            )
    return jax.tree.unflatten(treedef, leaves)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shard_functions(shardings: Any) -> Any:
    """For each sharding of a tree a function that places an array so."""

    def shard_function(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
        return lambda leaf: jax.device_put(leaf, sharding)

    return jax.tree.map(shard_function, shardings)


def gather_functions(shardings: Any) -> Any:
    """For each sharding of a tree a function that fetches an array to the host."""
    return jax.tree.map(lambda _: to_host, shardings)


def apply_functions(functions: Any, pytree: Any) -> Any:
    """Applies a tree of functions to a tree of the same structure."""
    mine: Any = jax.tree.structure(functions)
    theirs: Any = jax.tree.structure(pytree)
    if mine != theirs:
        raise StructureError(
            f'the functions have the structure {mine}, the tree has {theirs}: make the functions from '
            'a tree of the same structure'
        )
    return jax.tree.map(lambda function, leaf: function(leaf), functions, pytree)
