"""Look-ups in tables with sharded rows, such as embedding tables, and their gradients.

Every device looks up all indices in its local rows, with zeros for the rows of other devices, so that the sum
over devices is the result. The gradient adds to the local rows only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from scalax._jax.equations import bounds_mode, fill_value, gather_dims, scatter_dims, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import resized_params


def is_indexed(equation: Any, dim: int) -> bool:
    """Returns whether an equation reads or writes single rows of a dimension of its first operand, by index.

    Args:
        equation: a `gather` or a `scatter-add`.
        dim: the dimension.
    """
    if primitive_name(equation) == 'gather':
        numbers = gather_dims(equation)
        return (*numbers.start_index_map,) == (dim,) and dim in numbers.collapsed_slice_dims
    numbers = scatter_dims(equation)
    return (*numbers.scatter_dims_to_operand_dims,) == (dim,) and dim in numbers.inserted_window_dims


class _ShardedRows(NamedTuple):
    """The parameters of a look-up in the local rows of a table, or of its gradient.

    Attributes:
        numbers: the dimension numbers of the `gather` or `scatter-add`.
        dim: the dimension of the rows.
        size: the number of rows of all devices.
        axes: the mesh axes that shard the rows.
        outer_blocks: the number of blocks along the axes whose blocks contain these.
        mode: the mode for indices that are out of bounds.
        slice_sizes: the slice sizes of a `gather`.
        fill_value: the value of a `gather` for indices that are out of bounds.
    """

    numbers: Any
    dim: int
    size: int
    axes: tuple[str, ...]
    outer_blocks: int
    mode: Any
    slice_sizes: tuple[int, ...] = ()
    fill_value: Any = None


def local_lookup(
    equation: Any, dim: int, axes: Sequence[str], outer_blocks: int, shapes: Sequence[Sequence[int]]
) -> tuple[Callable[..., Any], Any]:
    """Returns the function that runs an equation on local rows, and the function's cache key.

    Args:
        equation: a `gather` or a `scatter-add`.
        dim: the dimension of the rows.
        axes: the mesh axes that shard the rows.
        outer_blocks: the number of blocks along the Auto axes whose blocks contain these.
        shapes: the local shapes of its operands.
    """
    size, mode = shape_of(equation.invars[0])[dim], bounds_mode(equation)
    if primitive_name(equation) == 'gather':
        sizes = resized_params(equation, shapes, [])['slice_sizes']
        numbers, fill = gather_dims(equation), fill_value(equation)
        table_rows = _ShardedRows(numbers, dim, size, tuple(axes), outer_blocks, mode, sizes, fill)
        return functools.partial(_look_up, table_rows), ('look_up', table_rows)
    table_rows = _ShardedRows(scatter_dims(equation), dim, size, tuple(axes), outer_blocks, mode)
    return functools.partial(_add, table_rows), ('add', table_rows)


def _local_indices(table_rows: _ShardedRows, indices: Any, row_count: int) -> tuple[Any, Any, Any]:
    """Returns local row indices, whether these rows are local, and whether the indices are out of bounds."""
    if table_rows.mode != GatherScatterMode.FILL_OR_DROP:
        indices = jnp.clip(indices, 0, min(table_rows.size - 1, jnp.iinfo(indices.dtype).max))
    dtype = indices.dtype if indices.dtype.itemsize == 8 else jnp.dtype('int32')
    wide_indices = indices.astype(dtype)
    is_outside = (wide_indices < 0) | (wide_indices >= table_rows.size)
    block_rows = row_count // table_rows.outer_blocks
    start = (jax.lax.axis_index(table_rows.axes) * block_rows).astype(dtype)
    if table_rows.outer_blocks == 1:
        local = wide_indices - start
        return local, (local >= 0) & (local < row_count), is_outside
    outer_rows = table_rows.size // table_rows.outer_blocks
    local = wide_indices % outer_rows - start
    is_local = (local >= 0) & (local < block_rows) & ~is_outside
    return wide_indices // outer_rows * block_rows + local, is_local, is_outside


@functools.partial(jax.jit, static_argnums=0)
def _look_up(table_rows: _ShardedRows, table: Any, indices: Any) -> Any:
    """Looks up local rows. The first device fills in rows for indices that are out of bounds."""
    row_count = table.shape[table_rows.dim]
    local, is_local, is_outside = _local_indices(table_rows, indices, row_count)
    local = jnp.where(is_local, local, jnp.where(is_outside, row_count, 0).astype(local.dtype))
    looked_up = jax.lax.gather(
        *(table, local, table_rows.numbers, table_rows.slice_sizes),
        mode=table_rows.mode,
        fill_value=table_rows.fill_value,
    )
    is_filled = (is_local | (is_outside & (jax.lax.axis_index(table_rows.axes) == 0)))[..., 0]
    dims = [dim for dim in range(looked_up.ndim) if dim not in table_rows.numbers.offset_dims]
    return jnp.where(
        jax.lax.broadcast_in_dim(is_filled, looked_up.shape, dims), looked_up, jnp.zeros_like(looked_up)
    )


@functools.partial(jax.jit, static_argnums=0)
def _add(table_rows: _ShardedRows, table: Any, indices: Any, updates: Any) -> Any:
    """Adds updates to local rows."""
    row_count = table.shape[table_rows.dim]
    local, is_local, _ = _local_indices(table_rows, indices, row_count)
    local = jnp.where(is_local, local, jnp.full_like(local, row_count))
    return jax.lax.scatter_add(table, local, updates, table_rows.numbers, mode=GatherScatterMode.FILL_OR_DROP)
