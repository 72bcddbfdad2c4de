"""Resharding of values and arrays, including partial sums (unreduced axes).

The value of an unreduced array is the sum over its unreduced axes. ``jax.device_put`` only moves blocks and
copies, so compiled programs reduce partial sums and create them. JAX creates partial sums by keeping the
value at one index of the axis, with zeros at the others.
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
    """Reshards a value, also from partial sums over some axes to partial sums over others.

    In that case XLA (of JAX 0.10 to 0.12) would end the process, so the sums are reduced first.

    Raises:
        ShardingError: the value cannot be converted to partial sums.
    """
    source, target = jax.typeof(leaf).sharding.spec, sharding.spec
    if target.unreduced - source.unreduced:
        reject_partial_sums(leaf, target)
        if source.unreduced - target.unreduced:
            reduced_spec = partition_specs.with_entries(
                partition_specs.only_reduction_axes(target, target.reduced), partition_specs.entries(target)
            )
            leaf = jax.sharding.reshard(leaf, sharding.update(spec=reduced_spec))
    return jax.sharding.reshard(leaf, sharding)


def reject_partial_sums(leaf: Any, spec: PartitionSpec) -> None:
    """Raises ShardingError if a value cannot be converted to partial sums: XLA would end the process."""
    kind = unreduced_kind(spec)
    if kind != 'sum':
        noun = 'arrays'
    elif jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        noun = 'complex numbers'
    elif jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        noun = 'PRNG keys'
    else:
        return
    problem = Problem(
        'unreduced',
        describe_leaf('', leaf),
        f'{noun} cannot be placed as terms of a {kind}',
        spec=partition_specs.text(spec),
        hint='place it without unreduced axes.',
    )
    raise ShardingError([problem])


def device_put(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Calls ``jax.device_put`` for all leaves at once, whose shardings may have unreduced axes."""
    leaves = [_reduce_unless_kept(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    reduced_shardings = [
        sharding if unreduced_axes(leaf) else _without_unreduced(sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    placed = jax.device_put(leaves, reduced_shardings)
    return [
        leaf if reduced is sharding else _reshard_to(sharding)(leaf)
        for leaf, reduced, sharding in zip(placed, reduced_shardings, shardings, strict=True)
    ]


def reduce_partial_sums(leaf: Any) -> Any:
    """Reduces the partial sums of an array. Returns any other leaf as it is."""
    return _reshard_to(_without_unreduced(leaf.sharding))(leaf) if unreduced_axes(leaf) else leaf


def unreduced_axes(leaf: Any) -> frozenset[Any]:
    """Returns the unreduced axes of an array; no axes for any other leaf."""
    if not isinstance(leaf, jax.Array):
        return frozenset()
    return leaf.sharding.spec.unreduced if isinstance(leaf.sharding, NamedSharding) else frozenset()


def _reduce_unless_kept(leaf: Any, sharding: NamedSharding) -> Any:
    """Reduces the partial sums of a leaf, unless *sharding* keeps the same sums on the same mesh."""
    if not unreduced_axes(leaf):
        return leaf
    same_mesh = leaf.sharding.mesh == sharding.mesh
    if same_mesh and _are_same_sums(leaf.sharding.spec, sharding.spec):
        return leaf
    # Reducing and sharding in one program allows a reduce-scatter.
    return _reshard_to(_without_unreduced(sharding))(leaf) if same_mesh else reduce_partial_sums(leaf)


def _are_same_sums(first: PartitionSpec, second: PartitionSpec) -> bool:
    return first.unreduced == second.unreduced and unreduced_kind(first) == unreduced_kind(second)


def _without_unreduced(sharding: NamedSharding) -> NamedSharding:
    """Removes the unreduced axes of a sharding. Returns the same object if it has none."""
    spec = sharding.spec
    if not spec.unreduced:
        return sharding
    return sharding.update(spec=PartitionSpec(*partition_specs.entries(spec), reduced=spec.reduced))


@functools.lru_cache(maxsize=1024)
def _reshard_to(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    """Returns a compiled function that reshards its argument."""
    return jax.jit(lambda value: reshard(value, sharding))


@functools.lru_cache(maxsize=256)
def identity(sharding: NamedSharding) -> Callable[[Any], Any]:
    """Returns a compiled identity function whose result has the sharding."""
    return jax.jit(lambda value: value, out_shardings=sharding)
