"""Products whose rows move to the weight, since it is larger than what moves.

FSDP gathers a weight for each product, and leaves the rows in place. That pays if rows are many. Where they
are few, as in a step that generates one token, each device gets all rows, or of these the columns that its
part of the weight is multiplied with, and the result moves back to the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._follow.edit import Edit
from scalax._follow.trail import LOST, Trail, axes_of, spec_of, without
from scalax._follow.types import Move
from scalax._jax.primitives import primitive_name

# A weight that is gathered for a product is often kept for the gradient; rows would move for both.
_USES = 2


def move_to_weight(
    edit: Edit, equation: Any, operands: Sequence[Trail], results: Sequence[Trail]
) -> Move | None:
    """Places the rows of a product where the parts of its weight are, if that takes less than to gather it.

    Both ways take the same links, those along the mesh axes that shard the weight, so bytes tell which one is
    faster. An all-gather and a reduce-scatter send all of an array, an all-to-all the part of a device.

    Args:
        edit: the jaxpr at hand.
        equation: the product. XLA fails at some convolutions that are placed like this, so none is.
        operands: the trails of its operands.
        results: those of its result, with the rows in place.
    """
    shared, trails = edit.shared, edit.shared.trails
    for weight, rows in ((0, 1), (1, 0)):
        var, stored = equation.invars[rows], shared.stored.of(equation.invars[weight])
        if stored and shared.has_rows(operands[rows]):
            break
    else:
        return None
    if shared.splits.dim(equation.invars[weight]) is not None:
        return None
    [out], kept = equation.outvars, results[0] if results else LOST
    axes, others = axes_of(stored), axes_of(operands[weight])
    left, right = axes_of(operands[rows]) - axes, axes_of(kept) - axes
    rounds = edit.weights.rounds_of(equation, operands, weight, rows)
    gathered = trails.bytes_of(equation.invars[weight], others - axes) / rounds
    if primitive_name(equation) != 'dot_general' or not shared.has_rows(kept) or not axes.isdisjoint(others):
        return None
    dims = trails.dims(equation)
    summed = {pair[rows]: stored[pair[weight]] for pair in map(dict, dims.summed)}
    columns = {i: stored[dim] for i in dims.own(weight) for _, dim in dims.results[0][i]}
    taken, split = axes_of(summed.values()), axes_of(columns.values())
    sent = trails.bytes_of(var, left | taken) + trails.bytes_of(out, right | split)
    is_open = edit.has_open_rows(var) and id(out) not in edit.users_own
    # A stack of weights may have its axes in another dimension: each device has some of them.
    if axes != taken | split or not is_open or gathered <= _USES * sent:
        return None
    # At both ends: else the compiler might compute the rows where they move to.
    for spec in (spec_of(operands[rows]), _there(operands[rows], axes, summed)):
        edit.place_before(var, spec, equation)
    return Move(weight, _there(kept, axes, columns), sent)


def _there(trail: Trail, axes: set[str], parts: Mapping[int, tuple[str, ...]]) -> PartitionSpec:
    """The spec of rows that are whole along some mesh axes, with these in other dimensions."""
    moved = without(trail, axes) or ((),) * len(trail)
    rows = {i for i, each in enumerate(trail) if not axes.isdisjoint(each)}
    return spec_of(tuple([each or parts.get(i, ()) for i, each in enumerate(moved)]), rows)
