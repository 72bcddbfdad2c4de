"""How do arrays move of which devices hold parts of a sum? ``jax.device_put`` moves blocks and copies only.

The value of an unreduced array is the sum over its unreduced axes. Only compiled programs add parts up, and
make them: parts that JAX makes of a value are the value itself in one place, and zeros in the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from scalax._trace.constraints import reshard
from scalax._tree import specs


def device_put(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """``jax.device_put`` of all leaves at once, where arrays and shardings may have unreduced axes."""
    whole = [_with_sums_of(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    directly = [
        sharding if axes_of(leaf) else _reduced(sharding)
        for leaf, sharding in zip(whole, shardings, strict=True)
    ]
    placed = jax.device_put(whole, directly)
    return [
        leaf if to is sharding else _resharding(sharding)(leaf)
        for leaf, to, sharding in zip(placed, directly, shardings, strict=True)
    ]


def reduced(leaf: Any) -> Any:
    """An array whose parts are added up; any other leaf as it is."""
    return _resharding(_reduced(leaf.sharding))(leaf) if axes_of(leaf) else leaf


def axes_of(leaf: Any) -> frozenset[Any]:
    """The unreduced axes of an array; none of anything else."""
    if not isinstance(leaf, jax.Array):
        return frozenset()
    return leaf.sharding.spec.unreduced if isinstance(leaf.sharding, NamedSharding) else frozenset()


def _with_sums_of(leaf: Any, sharding: NamedSharding) -> Any:
    """The leaf with its parts added up, unless it is to have parts of the same sums in other places."""
    if not axes_of(leaf):
        return leaf
    stays = leaf.sharding.mesh == sharding.mesh
    if stays and _same_sums(leaf.sharding.spec, sharding.spec):
        return leaf
    # In one step, with a reduce-scatter where it is to be cut along these axes.
    return _resharding(_reduced(sharding))(leaf) if stays else reduced(leaf)


def _same_sums(one: PartitionSpec, other: PartitionSpec) -> bool:
    return one.unreduced == other.unreduced and specs.sums_kind(one) == specs.sums_kind(other)


def _reduced(sharding: NamedSharding) -> NamedSharding:
    """The sharding without unreduced axes; the same object where it has none."""
    spec = sharding.spec
    if not spec.unreduced:
        return sharding
    return sharding.update(spec=PartitionSpec(*specs.entries(spec), reduced=spec.reduced))


@functools.lru_cache(maxsize=1024)
def _resharding(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda value: reshard(value, sharding))
