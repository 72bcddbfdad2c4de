"""Rows in another order: sorted, looked up by an index, or scattered. They are dealt to the devices anew.

No device has the rows that it gets of such an operation; the compiler gathers them all. So nothing is lost or
won where the results are. But what is computed of the results is computed once if each device has a part of
them, and by all devices if each has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scalax._follow.edit import Edit
from scalax._follow.trail import Trail, Trails, axes_of, put
from scalax._jax.equations import dim_of, gather_dims, makers_of, opened, scatter_dims, shape_of, slice_sizes
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dims import SCATTERS
from scalax._jaxprs.integers import Integers

# These give rows another order.
DEALT = SCATTERS | {'gather', 'sort'}
# These take rows by number.
TAKEN = frozenset(('dynamic_slice', 'gather'))


def dealt(equation: Any, operands: Sequence[Trail], results: Sequence[Trail], trails: Trails) -> list[Trail]:
    """The trails of the results, with rows in a dimension that has them in another order.

    Args:
        equation: a `sort`, a `gather` or a scatter.
        operands: the trails of its operands.
        results: those of its results.
        trails: answers about trails.
    """
    name = primitive_name(equation)
    if name == 'sort':
        places = [dim_of(equation)]
        given = [operands[0][i] for i in places if operands[0]]
    elif name == 'gather':
        numbers, rows = gather_dims(equation), operands[0]
        given = [rows[i] for i in numbers.start_index_map if rows and slice_sizes(equation)[i] == 1]
        places = [i for i in range(len(shape_of(equation.outvars[0]))) if i not in numbers.offset_dims]
    else:
        numbers = scatter_dims(equation)
        given = [axes for i, axes in enumerate(operands[2]) if i not in numbers.update_window_dims]
        # A constant that is scattered, as the gradient of a mean is, has no rows, but its numbers have.
        given += operands[1][:-1]
        places = [*numbers.scatter_dims_to_operand_dims]
    axes = next((axes for axes in given if trails.batch_axes.intersection(axes)), ())
    shards = trails.shards(axes)

    def with_rows(trail: Trail, shape: Sequence[int]) -> Trail:
        found = trail or ((),) * len(shape)
        free = [i for i in places if not found[i] and shape[i] % shards == 0]
        if not free or trails.has_rows(trail) or not axes_of(trail).isdisjoint(axes):
            return trail
        return put(found, free[0], axes)

    pairs = zip(results, map(shape_of, equation.outvars), strict=True)
    return [with_rows(*pair) for pair in pairs] if axes else [*results]


def may_move(equation: Any, operands: Sequence[Trail], edit: Edit) -> bool:
    """Whether rows that are dealt, or that one of `TAKEN` gives, may have been those of other devices.

    They were not if they are taken, or put, by the numbers 0, 1, 2 and so on, as in
    `x[jnp.arange(len(x)), columns]`.

    Args:
        equation: the equation.
        operands: the trails of its operands.
        edit: the jaxpr that it is in.
    """
    name, shape = primitive_name(equation), shape_of(equation.invars[0])
    rows = [i for i, axes in enumerate(operands[0]) if not edit.shared.trails.batch_axes.isdisjoint(axes)]
    if name == 'sort':
        return True
    if name == 'dynamic_slice':
        return any(shape_of(equation.outvars[0])[i] < shape[i] for i in rows)
    if name == 'gather':
        dims = gather_dims(equation).start_index_map
        taken = [i for i in rows if i in dims and slice_sizes(equation)[i] < shape[i]]
        return bool(taken) and not _in_order(equation, dims, edit).issuperset(taken)
    return not _in_order(equation, scatter_dims(equation).scatter_dims_to_operand_dims, edit)


def _in_order(equation: Any, dims: Sequence[int], edit: Edit) -> set[int]:
    """The dimensions of these in which a `gather` or a scatter takes the numbers 0, 1, 2 and so on."""
    array, numbers = equation.invars[:2]
    made, parts = makers_of(opened(edit.jaxpr)).get(id(numbers)), [numbers]
    if made is not None and primitive_name(made) == 'concatenate':
        parts = made.invars
    if len(parts) != len(dims):
        return set()
    known = Integers(opened(edit.jaxpr), iotas=True)
    pairs = zip(dims, map(known.of, parts), strict=True)
    return {i for i, x in pairs if x is not None and np.array_equal(x, np.arange(shape_of(array)[i]))}
