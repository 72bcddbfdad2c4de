"""Sorts of rows that come back, as of tokens by expert: each device sorts its own rows.

Sorted, the rows of all devices would be mixed. But what is done with them does not depend on their order as
long as rows of a group are together, and in the end they are put back
(`scalax._jaxpr.sort_orders` proves it). So
each device sorts its own rows, takes the sizes of its own groups, and finds the rows that are taken or put by
their numbers among its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import open_jaxpr, ragged_dim, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.sort_orders import find_sorted_block
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.placement import REPLICATE, Placements, Shard
from scalax._spmd.values import Value


def record_local_sort(editor: JaxprEditor, equation: Any, keys: Value) -> None:
    """Takes note of what devices run on their own rows, if they may sort these alone.

    Args:
        editor: the jaxpr that is partitioned.
        equation: a `sort`.
        keys: what it sorts by.
    """
    axes = [
        i for i, x in enumerate(keys.placements) if isinstance(x, Shard) and x.dim == 0 and not x.is_state
    ]
    if not axes or len(keys.shape) != 1 or keys.has_sum or id(equation) in editor.local_rows:
        return
    context, count = editor.context, 1
    for i in axes:
        count *= context.sizes[i]
    block = find_sorted_block(editor.jaxpr, equation, count)
    if block is None:
        return
    inside = [eqn for eqn in open_jaxpr(editor.jaxpr).eqns if eqn in block.local_equations]
    changed = {*map(id, inside), *map(id, block.ragged_dots)}
    if not changed.isdisjoint(editor.local_rows):
        return
    placements = tuple([Shard(0) if i in axes else REPLICATE for i in range(len(context.axes))])
    atom = editor.convert(keys, placements, equation)
    sizes = editor.emit(
        functools.partial(_group_sizes, block.num_groups), ('group_sizes', block.num_groups), equation, [atom]
    )
    editor.local_rows.update(dict.fromkeys(changed, placements))
    editor.local_group_sizes.update((id(product), sizes) for product in block.ragged_dots)


def write_local_rows(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], placements: Placements
) -> None:
    """Writes a sort, or what takes or puts rows by number, which each device runs on its own rows.

    Rows are numbered over all devices; less the number of its first row, these are the device's own.
    """
    atoms = [editor.convert(value, placements, equation) for value in values]
    if primitive_name(equation) != 'sort':
        axes = tuple(
            [axis for axis, x in zip(editor.context.axes, placements, strict=True) if isinstance(x, Shard)]
        )
        count = shape_of(atoms[0])[0]
        function, key = functools.partial(_own_numbers, axes, count), ('own_numbers', axes, count)
        atoms[1] = editor.emit(function, key, equation, [atoms[1]])
    outputs = [editor.define(var, placements) for var in equation.outvars]
    editor.eqns.append(editor.code.localize(equation, atoms, [output.atom for output in outputs]))


def local_group_operands(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], placements: Placements
) -> list[Value]:
    """Returns the operands of a product whose rows, and their groups, are those of each device."""
    left, right, sizes = values
    rows = tuple([Shard(ragged_dim(equation)) if isinstance(x, Shard) else x for x in placements])
    if left.placements != rows:
        left = Value(left.var, rows, editor.convert(left, rows, equation))
    return [left, right, Value(sizes.var, editor.context.replicated, editor.local_group_sizes[id(equation)])]


@functools.partial(jax.jit, static_argnums=0)
def _group_sizes(groups: int, keys: Any) -> Any:
    """How many of a device's rows are in each group."""
    return jnp.sum(keys[:, None] == jnp.arange(groups, dtype=keys.dtype), 0, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _own_numbers(axes: tuple[str, ...], count: int, numbers: Any) -> Any:
    return numbers - (jax.lax.axis_index(axes) * count).astype(numbers.dtype)
