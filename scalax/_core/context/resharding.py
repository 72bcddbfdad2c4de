"""Resharding of values and arrays, also where devices hold parts of a sum (unreduced axes).

The value of an unreduced array is the sum over its unreduced axes. ``jax.device_put`` only moves blocks and
copies; compiled programs add parts up and make them. JAX makes parts of a value by keeping the value in one
place, with zeros in the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import describe_leaf
from scalax._jax.shardings import unreduced_kind
from scalax.errors import Problem, ShardingError


def reshard(leaf: Any, sharding: NamedSharding) -> Any:
    """``jax.sharding.reshard``, also from sums over some axes to sums over others.

    There XLA (of JAX 0.10 to 0.12) would end the process.

    Raises:
        ShardingError: the value cannot be made parts of sums.
    """
    had, wanted = jax.typeof(leaf).sharding.spec, sharding.spec
    if wanted.unreduced - had.unreduced:
        reject_partial_sums(leaf, wanted)
        if had.unreduced - wanted.unreduced:
            summed = partition_specs.with_entries(
                partition_specs.only_reduction_axes(wanted, wanted.reduced), partition_specs.entries(wanted)
            )
            leaf = jax.sharding.reshard(leaf, sharding.update(spec=summed))
    return jax.sharding.reshard(leaf, sharding)


def reject_partial_sums(leaf: Any, spec: PartitionSpec) -> None:
    """Raises ShardingError if a value cannot be made parts of sums: XLA would end the process."""
    kind = unreduced_kind(spec)
    if kind != 'sum':
        what = 'arrays'
    elif jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        what = 'complex numbers'
    elif jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        what = 'PRNG keys'
    else:
        return
    problem = Problem(
        'unreduced',
        describe_leaf('', leaf),
        f'{what} cannot be placed as terms of a {kind}',
        spec=partition_specs.text(spec),
        hint='place it without unreduced axes.',
    )
    raise ShardingError([problem])


def device_put(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """``jax.device_put`` of all leaves at once, where arrays and shardings may have unreduced axes."""
    whole = [_with_sums_of(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    directly = [
        sharding if unreduced_axes(leaf) else _reduced(sharding)
        for leaf, sharding in zip(whole, shardings, strict=True)
    ]
    placed = jax.device_put(whole, directly)
    return [
        leaf if to is sharding else _reshard_to(sharding)(leaf)
        for leaf, to, sharding in zip(placed, directly, shardings, strict=True)
    ]


def reduce_partial_sums(leaf: Any) -> Any:
    """An array whose parts are added up; any other leaf as it is."""
    return _reshard_to(_reduced(leaf.sharding))(leaf) if unreduced_axes(leaf) else leaf


def unreduced_axes(leaf: Any) -> frozenset[Any]:
    """The unreduced axes of an array; none of anything else."""
    if not isinstance(leaf, jax.Array):
        return frozenset()
    return leaf.sharding.spec.unreduced if isinstance(leaf.sharding, NamedSharding) else frozenset()


def _with_sums_of(leaf: Any, sharding: NamedSharding) -> Any:
    """The leaf with its parts added up, unless it is to have parts of the same sums on other devices."""
    if not unreduced_axes(leaf):
        return leaf
    stays = leaf.sharding.mesh == sharding.mesh
    if stays and _same_sums(leaf.sharding.spec, sharding.spec):
        return leaf
    # In one step: a reduce-scatter where it is to be sharded along these axes.
    return _reshard_to(_reduced(sharding))(leaf) if stays else reduce_partial_sums(leaf)


def _same_sums(one: PartitionSpec, other: PartitionSpec) -> bool:
    return one.unreduced == other.unreduced and unreduced_kind(one) == unreduced_kind(other)


def _reduced(sharding: NamedSharding) -> NamedSharding:
    """The sharding without unreduced axes; the same object where it has none."""
    spec = sharding.spec
    if not spec.unreduced:
        return sharding
    return sharding.update(spec=PartitionSpec(*partition_specs.entries(spec), reduced=spec.reduced))


@functools.lru_cache(maxsize=1024)
def _reshard_to(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda value: reshard(value, sharding))


@functools.lru_cache(maxsize=256)
def identity(sharding: NamedSharding) -> Callable[[Any], Any]:
    """A compiled function that gives its argument a sharding."""
    return jax.jit(lambda value: value, out_shardings=sharding)
