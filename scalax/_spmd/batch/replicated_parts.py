"""Blocks of replicated values, where each device only needs its own block.

A broadcast, an iota, random bits, or a cheap elementwise result is computed for the block alone. Of any other
value, the block is sliced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import dim_of, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.random_bits import bits_at, depends_on_indices
from scalax._jaxpr.dim_rules import CHEAP_ELEMENTWISE, dim_rule
from scalax._spmd.placements.collectives import BlockAxes, block_index

DimBlock = tuple[int, BlockAxes, int]
"""A dimension, the axes that shard it, and its number of blocks."""


def is_computed_by_block(equation: Any) -> bool:
    """Returns whether an equation can compute a block of its result alone."""
    name = primitive_name(equation)
    return name in CHEAP_ELEMENTWISE or name in ('broadcast_in_dim', 'iota') or depends_on_indices(equation)


def block_operand_dims(equation: Any, dim: int) -> dict[int, int]:
    """Returns the dimension of each operand that corresponds to a dimension of the result, by operand index.

    Only the matching block of these operands is needed.
    """
    name = primitive_name(equation)
    if name in ('iota', 'random_bits'):
        return {}
    size = shape_of(equation.outvars[0])[dim]
    return {
        i: source
        for i, source in dim_rule(equation).results[0][dim]
        if shape_of(equation.invars[i])[source] == size
    }


def block_function(equation: Any, blocks: Sequence[DimBlock]) -> tuple[Callable[..., Any], Any] | None:
    """Returns the function that computes a block of an `iota` or of random bits, and its cache key.

    Returns None if the equation itself, with local shapes, computes the block.

    Args:
        equation: the equation.
        blocks: the block along each sharded dimension.
    """
    name = primitive_name(equation)
    shape, dtype = shape_of(equation.outvars[0]), equation.outvars[0].aval.dtype
    local = list(shape)
    for dim, _, count in blocks:
        local[dim] //= count
    key = name, tuple(local), shape, str(dtype), tuple(blocks)
    if name == 'iota':
        axis = dim_of(equation)
        if all(dim != axis for dim, _, _ in blocks):
            return None
        return functools.partial(_iota, dtype, axis, tuple(local), tuple(blocks)), (*key, axis)
    if name == 'random_bits':
        return functools.partial(_bits, shape, tuple(local), tuple(blocks), dtype), key
    return None


def _starts(
    local_sizes: Sequence[int], blocks: Sequence[DimBlock], microbatch_index: Sequence[Any]
) -> list[Any]:
    """Returns the index of the first element of a device's block in each dimension."""
    starts: list[Any] = [0] * len(local_sizes)
    for dim, block, _ in blocks:
        starts[dim] = block_index(block, *microbatch_index) * local_sizes[dim]
    return starts


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _iota(
    dtype: Any, axis: int, local: tuple[int, ...], blocks: tuple[DimBlock, ...], *microbatch_index: Any
) -> Any:
    """Computes a block of an iota, sharded along its own dimension."""
    start = jnp.asarray(_starts(local, blocks, microbatch_index)[axis], dtype)
    return jax.lax.broadcasted_iota(dtype, local, axis) + start


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _bits(
    shape: tuple[int, ...],
    local: tuple[int, ...],
    blocks: tuple[DimBlock, ...],
    dtype: Any,
    key: Any,
    *microbatch_index: Any,
) -> Any:
    """Computes a block of the random bits of a key."""
    return bits_at(key, shape, local, _starts(local, blocks, microbatch_index), dtype)
