"""Parts of replicated values: what each device computes of a value that is the same on all of them.

What is broadcast, an iota, drawn of a key, or cheap to compute from other values is computed for a block
alone. Of everything else a block is cut out.
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
"""A dimension, the axes along which devices have its blocks, and how many blocks there are."""


def is_computed_by_block(equation: Any) -> bool:
    """Whether a block of the result of an equation is computed without the rest of it."""
    name = primitive_name(equation)
    return name in CHEAP_ELEMENTWISE or name in ('broadcast_in_dim', 'iota') or depends_on_indices(equation)


def block_operand_dims(equation: Any, dim: int) -> dict[int, int]:
    """Returns the dimensions of operands of which only the block is needed, operand by operand."""
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
    """Returns a function of the operands that computes blocks of an `iota` or of random bits, and its key.

    None if the equation itself computes them, with other parameters.

    Args:
        equation: the equation.
        blocks: the blocks, at most one of each dimension.
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


def _starts(local: Sequence[int], blocks: Sequence[DimBlock], number: Sequence[Any]) -> list[Any]:
    """The index of the first element of a device's block in each dimension."""
    starts: list[Any] = [0] * len(local)
    for dim, block, _ in blocks:
        starts[dim] = block_index(block, *number) * local[dim]
    return starts


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _iota(dtype: Any, axis: int, local: tuple[int, ...], blocks: tuple[DimBlock, ...], *number: Any) -> Any:
    """A block of an iota along the dimension that it counts."""
    start = jnp.asarray(_starts(local, blocks, number)[axis], dtype)
    return jax.lax.broadcasted_iota(dtype, local, axis) + start


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _bits(
    shape: tuple[int, ...],
    local: tuple[int, ...],
    blocks: tuple[DimBlock, ...],
    dtype: Any,
    key: Any,
    *number: Any,
) -> Any:
    """A block of the bits of a key."""
    return bits_at(key, shape, local, _starts(local, blocks, number), dtype)
