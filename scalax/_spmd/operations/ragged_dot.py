"""Grouped matmuls, ``jax.lax.ragged_dot``: each device multiplies its local rows.

Rows are sorted by group, and the group sizes count the rows of all devices. The local rows of a device are a
block of them, with its own group sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import has_all_groups, ragged_dim, ragged_dot_dims, shape_of
from scalax._jaxpr.dim_rules import dim_rule
from scalax._spmd.placements.placement import REPLICATE, SUM, Placement, Shard, shards_examples


def row_placements(
    equation: Any, placements: Sequence[Placement]
) -> tuple[Sequence[Placement], Placement] | None:
    """Returns the placements of the operands and of the result of a grouped matmul with sharded rows.

    Returns None if the rows are unsharded, or if each example has its own groups.

    Args:
        equation: a `ragged_dot_general`.
        placements: the placements of its operands along one axis.
    """
    row_dim, (contracted, (batch, _), _) = ragged_dim(equation), ragged_dot_dims(equation)
    right_dims = dict(zip(*contracted, strict=True))
    left, right, _ = placements
    is_left = shards_examples(left) and left.dim == row_dim
    is_right = isinstance(right, Shard) and right.dim == right_dims.get(row_dim) and not right.is_state
    if not (is_left or is_right) or row_dim in batch:
        return None
    if len(shape_of(equation.invars[2])) != 1 or not has_all_groups(equation):
        return None
    if row_dim in right_dims:
        return (Shard(row_dim), Shard(right_dims[row_dim]), REPLICATE), SUM
    dim = dim_rule(equation).dim_from_exactly([(0, row_dim)])
    return None if dim is None else ((Shard(row_dim), REPLICATE, REPLICATE), Shard(dim))


def group_sizes_placement(equation: Any, left: Placement) -> Placement | None:
    """Returns the placement of the group sizes, given the placement of the left operand.

    Returns None if the rows are sharded.
    """
    row_dim, (contracted, (batch, _), _) = ragged_dim(equation), ragged_dot_dims(equation)
    if not isinstance(left, Shard):
        return REPLICATE
    if left.dim == row_dim:
        return None
    rank = len(shape_of(equation.invars[0]))
    kinds = [[*batch], [*contracted[0]]]
    kinds.append([dim for dim in range(rank) if dim not in kinds[0] and dim not in kinds[1]])
    prefix = [*batch]
    if row_dim not in batch:
        same_kind = next(dims for dims in kinds[1:] if row_dim in dims)
        prefix += same_kind[: same_kind.index(row_dim)]
    else:
        prefix = prefix[: prefix.index(row_dim)]
    if len(shape_of(equation.invars[2])) == 1 or left.dim not in prefix:
        return REPLICATE
    return Shard(prefix.index(left.dim))


def local_group_sizes(axes: tuple[str, ...], num_rows: int) -> tuple[Callable[..., Any], Any]:
    """Returns the function from global to local group sizes, and the function's cache key.

    Args:
        axes: the mesh axes that shard the rows.
        num_rows: the number of rows of a device.
    """
    return functools.partial(_sizes_in_block, axes, num_rows), ('local_group_sizes', axes, num_rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sizes_in_block(axes: tuple[str, ...], num_rows: int, sizes: Any) -> Any:
    sizes = sizes.astype(jnp.int32)  # a uint8 counts up to 255 rows only
    ends, block_start = jnp.cumsum(sizes), jax.lax.axis_index(axes) * num_rows
    first, last = (jnp.clip(index - block_start, 0, num_rows) for index in (ends - sizes, ends))
    return last - first
