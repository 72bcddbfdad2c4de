"""Rows in another order: sorted, looked up by an index, or scattered. They are dealt to the devices anew.

No device has the rows that it gets of such an operation; the compiler gathers them all. So nothing is lost or
won where the results are. But what is computed of the results is computed once if each device has a part of
them, and by all devices if each has all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scalax._follow.trail import Trail, Trails, axes_of, put
from scalax._jax.equations import dim_of, gather_dims, scatter_dims, shape_of, slice_sizes
from scalax._jax.primitives import primitive_name

DEALT = frozenset(
    ('gather', 'scatter', 'scatter-add', 'scatter-max', 'scatter-min', 'scatter-mul', 'scatter-sub', 'sort')
)


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
        places = rows = [dim_of(equation)]
        moved = operands[0]
    elif name == 'gather':
        numbers, moved = gather_dims(equation), operands[0]
        rows = [i for i in numbers.start_index_map if slice_sizes(equation)[i] == 1]
        places = [i for i in range(len(shape_of(equation.outvars[0]))) if i not in numbers.offset_dims]
    else:
        numbers, moved = scatter_dims(equation), operands[2]
        rows = [i for i in range(len(moved)) if i not in numbers.update_window_dims]
        places = [*numbers.scatter_dims_to_operand_dims]
    axes = next((moved[i] for i in rows if moved and trails.batch_axes.intersection(moved[i])), ())
    shards = math.prod(trails.sizes[axis] for axis in axes)

    def with_rows(trail: Trail, shape: Sequence[int]) -> Trail:
        found = trail or ((),) * len(shape)
        free = [i for i in places if not found[i] and shape[i] % shards == 0]
        if not free or trails.has_rows(trail) or not axes_of(trail).isdisjoint(axes):
            return trail
        return put(found, free[0], axes)

    pairs = zip(results, map(shape_of, equation.outvars), strict=True)
    return [with_rows(*pair) for pair in pairs] if axes else [*results]
