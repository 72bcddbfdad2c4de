"""Look-ups in a table of which each device has a block of rows, and the gradients of such look-ups.

Every device looks up the rows of all indices in its own block. A row that another device has counts as zero,
so the sum over devices is what was looked up. The gradient adds to the block the rows that are in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from scalax._jax.equations import bounds_mode, fill_value, gather_dims, scatter_dims, shape_of
from scalax._jax.manual_axes import local_params
from scalax._jax.primitives import primitive_name


def is_indexed(equation: Any, dim: int) -> bool:
    """Returns whether indices alone say which rows of a dimension of its first operand an equation takes.

    Args:
        equation: a `gather` or a `scatter-add`.
        dim: the dimension.
    """
    if primitive_name(equation) == 'gather':
        numbers = gather_dims(equation)
        return (*numbers.start_index_map,) == (dim,) and dim in numbers.collapsed_slice_dims
    numbers = scatter_dims(equation)
    return (*numbers.scatter_dims_to_operand_dims,) == (dim,) and dim in numbers.inserted_window_dims


class _Block(NamedTuple):
    """What an equation does with a block of a table.

    Attributes:
        numbers: its dimension numbers.
        dim: the dimension of rows.
        size: how many rows all blocks have.
        axes: the mesh axes along which devices have the blocks.
        mode: what it does with indices that are out of bounds.
        slice_sizes: the sizes of a slice of a `gather`.
        fill_value: what a `gather` fills in for such indices.
    """

    numbers: Any
    dim: int
    size: int
    axes: tuple[str, ...]
    mode: Any
    slice_sizes: tuple[int, ...] = ()
    fill_value: Any = None


def local_lookup(
    equation: Any, dim: int, axes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[Callable[..., Any], Any]:
    """Returns the function of one operation that an equation does with a block of rows, and its key.

    Args:
        equation: a `gather` or a `scatter-add`.
        dim: the dimension of rows.
        axes: the mesh axes along which devices have blocks.
        shapes: the local shapes of its operands.
    """
    size, mode = shape_of(equation.invars[0])[dim], bounds_mode(equation)
    if primitive_name(equation) == 'gather':
        sizes = local_params(equation, shapes, [])['slice_sizes']
        numbers, fill = gather_dims(equation), fill_value(equation)
        block = _Block(numbers, dim, size, tuple(axes), mode, sizes, fill)
        return functools.partial(_look_up, block), ('look_up', block)
    block = _Block(scatter_dims(equation), dim, size, tuple(axes), mode)
    return functools.partial(_add, block), ('add', block)


def _in_block(block: _Block, indices: Any, rows: int) -> tuple[Any, Any, Any]:
    """The numbers of rows in a device's block, whether they are in it, and whether they are in none."""
    if block.mode != GatherScatterMode.FILL_OR_DROP:
        indices = jnp.clip(indices, 0, min(block.size - 1, jnp.iinfo(indices.dtype).max))
    dtype = indices.dtype if indices.dtype.itemsize == 8 else jnp.dtype('int32')
    numbers = indices.astype(dtype)
    own = numbers - (jax.lax.axis_index(block.axes) * rows).astype(dtype)
    is_here = (own >= 0) & (own < rows)
    return own, is_here, (numbers < 0) | (numbers >= block.size)


@functools.partial(jax.jit, static_argnums=0)
def _look_up(block: _Block, table: Any, indices: Any) -> Any:
    """The rows that a device has; what is out of bounds is filled in by the first device."""
    rows = table.shape[block.dim]
    own, is_here, is_outside = _in_block(block, indices, rows)
    own = jnp.where(is_here, own, jnp.where(is_outside, rows, 0).astype(own.dtype))
    found = jax.lax.gather(
        *(table, own, block.numbers, block.slice_sizes), mode=block.mode, fill_value=block.fill_value
    )
    kept = (is_here | (is_outside & (jax.lax.axis_index(block.axes) == 0)))[..., 0]
    dims = [dim for dim in range(found.ndim) if dim not in block.numbers.offset_dims]
    return jnp.where(jax.lax.broadcast_in_dim(kept, found.shape, dims), found, jnp.zeros_like(found))


@functools.partial(jax.jit, static_argnums=0)
def _add(block: _Block, table: Any, indices: Any, updates: Any) -> Any:
    """A block to which the updates of its rows are added."""
    rows = table.shape[block.dim]
    own, is_here, _ = _in_block(block, indices, rows)
    own = jnp.where(is_here, own, jnp.full_like(own, rows))
    return jax.lax.scatter_add(table, own, updates, block.numbers, mode=GatherScatterMode.FILL_OR_DROP)
