"""Operands that are placed otherwise before an equation, because that takes less than what would follow."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from scalax._follow.edit import Edit
from scalax._follow.experts import move_to_experts, stay, way
from scalax._follow.trail import (
    Trail,
    Trails,
    axes_of,
    closed_spec_of,
    common,
    merged,
    of_dims,
    spec_of,
    without,
)
from scalax._jax.equations import conv_dims, dot_dims, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dims import multiplications, updated_dims
from scalax._jaxprs.machine_balance import PER_BYTE, PER_OPERATION

_SIDE_BY_SIDE = frozenset({'stack', 'concatenate'})
_WITH_TABLES = ('gather', 'scatter-add')


def place_operands(edit: Edit, equation: Any, operands: list[Trail]) -> Sequence[int]:
    """Places operands of an equation. *operands* gets their new trails.

    Returns:
        the operands that are experts' weights to which rows move, by number.
    """
    name, shared = primitive_name(equation), edit.shared
    if name == 'dot_general':
        experts = _experts(edit, equation, operands)
        if all(map(shared.has_rows, operands)):
            _gather_factors(edit, equation, operands)
        _gather_beside_columns(edit, equation)
        return experts
    if name in _SIDE_BY_SIDE and len({*operands}) > 1:
        _keep_beside(edit, equation, operands)
    elif name in _WITH_TABLES:
        _move_to_table(edit, equation, operands)
    elif name == 'conv_general_dilated' and shared.has_columns:
        _place_images(edit, equation, operands)
    return ()


def _experts(edit: Edit, equation: Any, operands: list[Trail]) -> Sequence[int]:
    """The weights of a product to which rows move, by number. *operands* gets the new trail of these."""
    _, (batch, _) = dot_dims(equation)
    if not batch or not any(operands):
        return ()
    stored = [edit.shared.stored.of(atom) for atom in equation.invars]
    move = move_to_experts(equation, operands, stored, edit.shared.trails)
    if move is not None:
        place, var = move[0], equation.invars[move[0]]
        trail = edit.shared.possible(move[1], var)
        if trail and edit.has_open_rows(var):
            stops, dim = way(equation, place, operands, trail, edit.shared.trails.sizes)
            trail = stops[-1]
            # At both ends: else the compiler might compute it where it moves to.
            edit.move_before(var, trail, [spec_of(stop, dim) for stop in stops], equation)
            operands[place] = trail
    staying = stay(equation, operands, stored)
    for place in staying:  # the result is where the rows are
        operands[place] = without(operands[place], axes_of(operands[1 - place]))
    return staying


def _gather_beside_columns(edit: Edit, equation: Any) -> None:
    """Gathers the rows of a product with columns that stay split, once for all such products."""
    splits = edit.shared.splits
    dims = [splits.dim(atom) for atom in equation.invars]
    if dims == [None, None]:
        return
    for var, dim in zip(equation.invars, dims, strict=True):
        here = edit.trail(var)
        if dim is not None and var not in edit.shared.from_batch:
            edit.note_move(equation, var)
        elif not edit.has_open_rows(var):
            continue
        elif dim is None:
            edit.gather_before(var, here, without(here, splits.axes), equation)
        elif id(var) not in edit.constrained:
            # If nothing is said about the rows, the compiler might gather the weight.
            edit.place_before(var, spec_of(here), equation)


def _gather_factors(edit: Edit, equation: Any, operands: list[Trail]) -> None:
    """Gathers the operands of a product of rows with rows, if that takes less than to add up its sums."""
    shared = edit.shared
    # Of products that are added up, as in the rounds of a loop, their sum alone is sent; and rows beside
    # columns that stay split are gathered anyway.
    left = edit.costs.is_part(equation) or shared.splits.dim(equation.outvars[0]) is not None
    whole = _whole_factors(equation, operands, shared.trails, None if left else shared.stored_axes)
    if all(map(edit.has_open_rows, equation.invars)):
        if not shared.trails.batch_axes.isdisjoint(axes_of(operands[0]) - axes_of(whole[0])):
            edit.note_move(equation, equation.outvars[0])
        for place, trail in enumerate(whole):
            if trail != operands[place]:
                edit.gather_before(equation.invars[place], operands[place], trail, equation)
                operands[place] = trail


def _whole_factors(
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


def _keep_beside(edit: Edit, equation: Any, operands: Sequence[Trail]) -> None:
    """Keeps what is stacked with split values whole: else the compiler splits what computed it too."""
    for place, dims in enumerate(_whole_beside(equation, operands, edit.shared.trails)):
        var = equation.invars[place]
        if dims and edit.shared.placed and edit.has_open_rows(var):
            edit.place_before(var, spec_of(operands[place], dims), equation)


def _whole_beside(equation: Any, operands: Sequence[Trail], trails: Trails) -> list[set[int]]:
    """Of each operand of a stack or a concatenation the dimensions that mesh axes split in others only."""
    found = merged(operands, len(shape_of(equation.invars[0])))
    return [
        {i for i, (mine, all_) in enumerate(zip(each, found, strict=False)) if all_ and not mine}
        - {i for i, all_ in enumerate(found) if not trails.batch_axes.isdisjoint(all_)}
        for each in operands
    ]


def _place_images(edit: Edit, equation: Any, operands: list[Trail]) -> None:
    """Constrains the channels of the images that a convolution takes.

    They are whole along the axes of the kernel's columns, and split where it sums. Else the compiler may
    split what is computed before over these axes, and gather it for each convolution.
    """
    shared, (image, kernel) = edit.shared, operands
    numbers = conv_dims(equation)
    if image and not shared.has_rows(kernel):
        channels, summed = numbers.lhs_spec[1], kernel[numbers.rhs_spec[1]] if kernel else ()
        left = without(image, axes_of(kernel) - shared.trails.batch_axes)
        split = tuple((each or summed) if i == channels else each for i, each in enumerate(left))
        operands[0] = shared.possible(split, equation.invars[0])
    for trail, var, dims in zip(operands, equation.invars, (numbers.lhs_spec, numbers.rhs_spec), strict=True):
        if edit.has_open_rows(var) and id(var) not in edit.constrained:
            edit.on_trail[id(var)] = trail
            edit.constrain(var, spec_of(trail, dims[:2]), equation)


def _move_to_table(edit: Edit, equation: Any, operands: list[Trail]) -> None:
    """Rows move to the gradient of a table, a sum of scattered ones, if the table has more elements.

    Else each device would have a sum of the size of its part of the table, and all would add these up.
    Where axes of the rows shard the columns of the table, rows become columns over these.
    """
    name, shared, shape = primitive_name(equation), edit.shared, shape_of(equation.invars[0])
    if name == 'gather' and equation.invars[0] not in shared.from_batch:
        stored = shared.stored.of(equation.invars[0])
        shared.tables[shape] = common(stored, shared.tables.get(shape, stored))
    if name == 'gather' or shape not in shared.tables:
        return
    table, _, updates = equation.invars
    if not edit.has_open_rows(updates) or table.aval.size <= updates.aval.size:
        return
    stored = shared.tables[shape]
    dims = {place: stored[i] for place, i in updated_dims(equation)} if stored else {}
    columns = of_dims(dims, len(shape_of(updates)))
    if not shared.has_rows(shared.trails.through(equation, operands)[0]):
        for place in (1, 2):
            if edit.has_open_rows(equation.invars[place]):
                if axes_of(columns):  # as for experts: at both ends
                    edit.place_before(equation.invars[place], spec_of(operands[place]), equation)
                operands[place] = without(operands[place], shared.trails.batch_axes)
                ndim = len(shape_of(equation.invars[place]))
                there = merged((columns, operands[place]), ndim) if place == 2 else operands[place]
                edit.place_before(equation.invars[place], closed_spec_of(there, ndim), equation)
