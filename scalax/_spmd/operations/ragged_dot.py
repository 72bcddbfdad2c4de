"""Products of rows in groups, ``jax.lax.ragged_dot``: each device multiplies its own rows.

The rows are in the order of their groups, and the sizes of the groups are those of all rows. A device has
some of the rows: of each group as many as lie in its block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import has_all_groups, ragged_dim, ragged_dot_dims, shape_of
from scalax._jaxpr.dim_rules import dim_rule
from scalax._spmd.placements.placement import REPLICATE, SUM, Placement, Shard


def row_placements(
    equation: Any, placements: Sequence[Placement]
) -> tuple[Sequence[Placement], Placement] | None:
    """Returns the placements of the operands and of the result of a product whose rows are sharded.

    None if no rows are sharded, or if each example has groups of its own.

    Args:
        equation: a `ragged_dot_general`.
        placements: those of its operands along one axis.
    """
    rows, (contracted, (batch, _), _) = ragged_dim(equation), ragged_dot_dims(equation)
    others = dict(zip(*contracted, strict=True))
    left, right, _ = placements
    is_left = isinstance(left, Shard) and left.dim == rows and not left.is_state
    is_right = isinstance(right, Shard) and right.dim == others.get(rows) and not right.is_state
    if not (is_left or is_right) or rows in batch:
        return None
    if len(shape_of(equation.invars[2])) != 1 or not has_all_groups(equation):
        return None
    if rows in others:
        return (Shard(rows), Shard(others[rows]), REPLICATE), SUM
    dim = dim_rule(equation).dim_from_exactly([(0, rows)])
    return None if dim is None else ((Shard(rows), REPLICATE, REPLICATE), Shard(dim))


def group_sizes_placement(equation: Any, left: Placement) -> Placement | None:
    """Returns the placement of the sizes of groups where a dimension of the left operand is sharded.

    None if that is the dimension of the rows.
    """
    rows, (contracted, (batch, _), _) = ragged_dim(equation), ragged_dot_dims(equation)
    if not isinstance(left, Shard):
        return REPLICATE
    if left.dim == rows:
        return None
    rank = len(shape_of(equation.invars[0]))
    kinds = [[*batch], [*contracted[0]]]
    kinds.append([dim for dim in range(rank) if dim not in kinds[0] and dim not in kinds[1]])
    prefix = [*batch]
    if rows not in batch:
        same_kind = next(dims for dims in kinds[1:] if rows in dims)
        prefix += same_kind[: same_kind.index(rows)]
    else:
        prefix = prefix[: prefix.index(rows)]
    if len(shape_of(equation.invars[2])) == 1 or left.dim not in prefix:
        return REPLICATE
    return Shard(prefix.index(left.dim))


def local_group_sizes(axes: Sequence[str], count: int) -> tuple[Callable[..., Any], Any]:
    """Returns the function that computes how many rows of each group are in a device's block, and its key.

    Args:
        axes: the mesh axes along which devices have rows.
        count: how many rows a device has.
    """
    return functools.partial(_sizes_in_block, tuple(axes), count), ('local_group_sizes', tuple(axes), count)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sizes_in_block(axes: tuple[str, ...], count: int, sizes: Any) -> Any:
    sizes = sizes.astype(jnp.int32)  # bytes hold no more than 255 rows
    ends, before = jnp.cumsum(sizes), jax.lax.axis_index(axes) * count
    first, last = (jnp.clip(each - before, 0, count) for each in (ends - sizes, ends))
    return last - first
