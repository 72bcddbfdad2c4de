"""Products of rows in groups, ``jax.lax.ragged_dot``: each device multiplies its own rows.

The rows are in the order of their groups, and the sizes of the groups are those of all rows. The compiler
does not divide such a product: every device would multiply all rows. Here each one multiplies its own rows,
in a `shard_map`: of each group it has as many rows as lie in its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._follow.trail import Trail, Trails, axes_of, closed_spec_of, put, without
from scalax._jax.equations import ragged_dim, ragged_dot_dims, shape_of
from scalax._jax.rewriting import bound, equation_of


def on_own_rows(
    equation: Any, operands: Sequence[Trail], trails: Trails, mesh: Mesh | AbstractMesh, own_sizes: Any = None
) -> Any:
    """A product of rows in groups that each device makes of its own rows; the same one if no axis has these.

    Args:
        equation: a `ragged_dot_general`.
        operands: the trails of its operands.
        trails: answers about trails.
        mesh: a mesh of Auto axes.
        own_sizes: the sizes of the groups of each device, where its rows are in an order of their own.
    """
    rows, (_, (batch, _), _) = ragged_dim(equation), ragged_dot_dims(equation)
    axes = operands[0][rows] if operands[0] else ()
    one_size = _rank(equation.invars[2]) == 1
    if own_sizes is None and (not trails.batch_axes.intersection(axes) or not one_size or rows in batch):
        return equation
    product, is_sum = _product(equation, operands, trails, mesh, has_own=own_sizes is not None)
    given = [*equation.invars[:2], equation.invars[2] if own_sizes is None else own_sizes]
    if not is_sum:
        return equation_of(product, equation, given)

    def summed(*operands: Any) -> Any:
        parts = product(*operands)
        return parts.sum(0, dtype=parts.dtype)  # else devices exchange those of bfloat16 as float32

    return equation_of(jax.jit(summed), equation, given)


def if_mapped(
    equation: Any, operands: Sequence[Trail], axes: tuple[str, ...], trails: Trails, mesh: Mesh | AbstractMesh
) -> Any:
    """A product that `jax.vmap` maps over the devices of these axes, each of which has rows in groups.

    By itself `jax.vmap` maps few of these products, and none that compiles for TPUs.
    """
    rows = put(operands[0] or ((),) * _rank(equation.invars[0]), ragged_dim(equation), axes)
    of_devices, is_sum = _product(equation, [rows, *operands[1:]], trails, mesh, has_own=True)

    @jax.custom_batching.custom_vmap
    def product(*operands: Any) -> Any:
        return bound(equation, *operands)

    @product.def_vmap
    def mapped(devices: int, is_mapped: Sequence[bool], *operands: Any) -> tuple[Any, bool]:
        if ragged_dim(equation) != 0 or operands[2].ndim != 1 + is_mapped[2] or is_mapped[1] > is_sum:
            raise NotImplementedError('a device has other groups, or weights of its own')
        left, right, sizes = (
            x if own or (i == 1 and not is_sum) else jnp.broadcast_to(x, (devices, *x.shape))
            for i, (x, own) in enumerate(zip(operands, is_mapped, strict=True))
        )
        right = right.reshape(-1, *right.shape[2:]) if is_sum else right
        found = of_devices(left.reshape(-1, *left.shape[2:]), right, sizes)
        return found if is_sum else found.reshape(devices, -1, *found.shape[1:]), True

    return equation_of(product, equation)


def _product(
    equation: Any, operands: Sequence[Trail], trails: Trails, mesh: Mesh | AbstractMesh, has_own: bool
) -> tuple[Callable[..., Any], bool]:
    """A product in groups that each device makes of its own rows, and whether it is one sum for each device.

    Other mesh axes shard what they shard of the weights; in a gradient, a sum over rows, what they shard of
    the rows. It takes the sizes of the groups, or those of each device if it *has_own*.
    """
    dims, rows, ranks = trails.dims(equation), ragged_dim(equation), [*map(_rank, equation.invars)]
    axes, pairs = operands[0][rows], [(left, right) for (_, left), (_, right) in dims.summed]
    x, y = (
        list(without(trail, trails.batch_axes) or ((),) * rank)
        for trail, rank in zip(operands[:2], ranks, strict=False)
    )
    x[rows], is_sum = axes, rows in dict(pairs)
    for i in ragged_dot_dims(equation)[2]:  # the rows of a device may be in any group
        y[i] = ()
    for i, j in pairs:
        x[i], y[j] = (axes, axes) if i == rows else (y[j], y[j])
    if is_sum:
        y = [each if each == axes else tuple(set(each) - axes_of(x)) for each in y]
    added = () if is_sum else tuple(axis for _, j in pairs for axis in y[j])
    [result] = dims.through((x, y, ()))
    # In an order of their own the rows are put back before they are whole again: in parts of their columns.
    width = shape_of(equation.outvars[0])[-1]
    is_split = has_own and added and not result[-1] and width % trails.shards(added) == 0
    if is_split:
        result = put(result, len(result) - 1, added)

    def part_of_groups(sizes: Any, count: int) -> Any:
        sizes = sizes.astype(jnp.int32)  # bytes hold no more than 255 rows
        ends, before = jnp.cumsum(sizes), jax.lax.axis_index(axes) * count
        first, last = (jnp.clip(each - before, 0, count) for each in (ends - sizes, ends))
        return last - first

    def of_own_rows(left: Any, right: Any, sizes: Any) -> Any:
        own = sizes[0] if has_own else part_of_groups(sizes, left.shape[rows])
        found = bound(equation, left, right, own)
        if is_split:
            return jax.lax.psum_scatter(found, added, scatter_dimension=found.ndim - 1, tiled=True)
        return found[None] if is_sum else jax.lax.psum(found, added) if added else found

    of_sizes = PartitionSpec(axes) if has_own else PartitionSpec()
    out = closed_spec_of(result, _rank(equation.outvars[0]))
    product = jax.shard_map(
        of_own_rows,
        mesh=mesh,
        in_specs=(closed_spec_of(tuple(x), ranks[0]), closed_spec_of(tuple(y), ranks[1]), of_sizes),
        out_specs=PartitionSpec(axes, *out) if is_sum else out,
        check_vma=False,
    )
    return product, is_sum


def _rank(atom: Any) -> int:
    return len(shape_of(atom))
