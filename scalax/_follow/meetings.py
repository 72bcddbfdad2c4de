"""Where values that lie differently over mesh axes without rows meet: in products, and side by side."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from scalax._follow.seconds import PER_BYTE, PER_OPERATION
from scalax._follow.trail import Trail, Trails, axes_of, merged, without
from scalax._jax.equations import dot_dims, shape_of
from scalax._jaxprs.dims import multiplications

SIDE_BY_SIDE = frozenset({'stack', 'concatenate'})


def whole_factors(
    equation: Any, operands: Sequence[Trail], trails: Trails, stored: Set[str] | None
) -> Sequence[Trail]:
    """The trails of the operands of a product of rows with rows.

    A product that sums over a mesh axis leaves each device a part of the sums, which all add up: that sends
    them twice. If it takes less to gather the operands, such as the few rows that a gradient is a sum of, and
    to compute more, nothing is added up. Over axes that shard weights, sums are scattered, and sent once.

    Args:
        equation: the product.
        operands: the trails of its operands.
        trails: answers about trails.
        stored: the axes that shard weights, and so the gradient that a sum over rows is; None if that is left
            as it is.
    """
    contracted, _ = dot_dims(equation)
    pairs = [*zip(operands, contracted, strict=True)]
    others = {axis for trail, dims in pairs for i, each in enumerate(trail) if i not in dims for axis in each}
    summed = {axis for trail in operands for axis in axes_of(trail)} - others
    for gone in filter(None, [summed - trails.batch_axes] if stored is None else [summed, summed - stored]):
        whole = [without(trail, gone) for trail in operands]
        moved = sum(
            trails.bytes_of(atom, axes_of(after))
            for atom, before, after in zip(equation.invars, operands, whole, strict=True)
            if before != after
        )
        [result] = trails.through(equation, whole)
        there, [out] = axes_of(result), equation.outvars
        split = there if trails.has_rows(result) else there.union(stored or ())
        sums = trails.bytes_of(out, there) if gone & split else 2 * trails.bytes_of(out, split)
        computed = 2 * multiplications(equation) / trails.shards(split)
        if moved * PER_BYTE + computed * PER_OPERATION < sums * PER_BYTE:
            return whole
    return operands


def whole_beside(equation: Any, operands: Sequence[Trail], trails: Trails) -> list[set[int]]:
    """Of each operand of a stack or a concatenation the dimensions that mesh axes split in others only."""
    found = merged(operands, len(shape_of(equation.invars[0])))
    return [
        {i for i, (mine, all_) in enumerate(zip(each, found, strict=False)) if all_ and not mine}
        - {i for i, all_ in enumerate(found) if not trails.batch_axes.isdisjoint(all_)}
        for each in operands
    ]
