"""Products of rows in groups, ``jax.lax.ragged_dot``: each device multiplies its own rows.

The rows are in the order of their groups, and the sizes of the groups are those of all rows. The compiler
does not divide such a product: every device would multiply all rows. Here each one multiplies its own rows,
in a `shard_map`: of each group it has as many rows as lie in its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._follow.trail import Trail, Trails, axes_of, closed_spec_of, put, without
from scalax._jax.equations import ragged_dim, ragged_dot_dims, shape_of
from scalax._jax.rewriting import bound, equation_of


def on_own_rows(
    equation: Any,
    operands: Sequence[Trail],
    trails: Trails,
    mesh: Mesh | AbstractMesh,
    own_sizes: Any = None,
) -> Any:
    """A product of rows in groups that each device makes of its own rows; the same one if no axis has these.

    Other mesh axes shard what they shard of the weights; in a gradient, a sum over rows, what they shard of
    the rows.

    Args:
        equation: a `ragged_dot_general`.
        operands: the trails of its operands.
        trails: answers about trails.
        mesh: a mesh of Auto axes.
        own_sizes: the sizes of the groups of each device, where its rows are in an order of their own.
    """
    dims, rows, ranks = trails.dims(equation), ragged_dim(equation), [*map(_rank, equation.invars)]
    axes = operands[0][rows] if operands[0] else ()
    pairs = [(left, right) for (_, left), (_, right) in dims.summed]
    _, (batch, _), groups = ragged_dot_dims(equation)
    if own_sizes is None and (not trails.batch_axes.intersection(axes) or ranks[2] != 1 or rows in batch):
        return equation
    x, y = (
        list(without(trail, trails.batch_axes) or ((),) * rank)
        for trail, rank in zip(operands[:2], ranks, strict=False)
    )
    x[rows], is_sum = axes, rows in dict(pairs)
    for i in groups:  # the rows of a device may be in any group
        y[i] = ()
    for i, j in pairs:
        x[i], y[j] = (axes, axes) if i == rows else (y[j], y[j])
    if is_sum:
        y = [each if each == axes else tuple(set(each) - axes_of(x)) for each in y]
    added = () if is_sum else tuple(axis for _, j in pairs for axis in y[j])
    [result] = dims.through((x, y, ()), ())
    # In an order of their own the rows are put back before they are whole again: in parts of their columns.
    devices = math.prod(mesh.shape[axis] for axis in added)
    width = shape_of(equation.outvars[0])[-1]
    is_split = own_sizes is not None and added and not result[-1] and width % devices == 0
    if is_split:
        result = put(result, len(result) - 1, added)

    def part_of_groups(sizes: Any, count: int) -> Any:
        sizes = sizes.astype(jnp.int32)  # bytes hold no more than 255 rows
        ends, before = jnp.cumsum(sizes), jax.lax.axis_index(axes) * count
        first, last = (jnp.clip(each - before, 0, count) for each in (ends - sizes, ends))
        return last - first

    def of_own_rows(left: Any, right: Any, sizes: Any) -> Any:
        own = part_of_groups(sizes, left.shape[rows]) if own_sizes is None else sizes[0]
        found = bound(equation, left, right, own)
        if is_split:
            return jax.lax.psum_scatter(found, added, scatter_dimension=found.ndim - 1, tiled=True)
        return found[None] if is_sum else jax.lax.psum(found, added) if added else found

    of_sizes = PartitionSpec() if own_sizes is None else PartitionSpec(axes)
    given = [*equation.invars[:2], equation.invars[2] if own_sizes is None else own_sizes]
    out = closed_spec_of(result, _rank(equation.outvars[0]))
    mapped = jax.shard_map(
        of_own_rows,
        mesh=mesh,
        in_specs=(closed_spec_of(tuple(x), ranks[0]), closed_spec_of(tuple(y), ranks[1]), of_sizes),
        out_specs=PartitionSpec(axes, *out) if is_sum else out,
        check_vma=False,
    )
    if not is_sum:
        return equation_of(mapped, equation, given)
    return equation_of(jax.jit(lambda *operands: mapped(*operands).sum(0)), equation, given)


def _rank(atom: Any) -> int:
    return len(shape_of(atom))
