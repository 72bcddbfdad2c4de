"""Local sorts, as of tokens by expert, and their groups: each device sorts its local rows.

A global sort would mix the rows of all devices. But if the operations after it do not depend on the order of
rows within a group, and finally restore the original order (which `_jaxpr.local_sort_analysis` proves), each
device sorts its local rows, counts its local group sizes, and converts global row indices to local ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import open_jaxpr, ragged_dim, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.local_sort_analysis import find_sorted_block
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.operations.ragged_dot import local_group_sizes
from scalax._spmd.placements.placement import REPLICATE, Placements, Shard, shards_examples
from scalax._spmd.values import Value


def record_local_sort(editor: JaxprEditor, equation: Any, keys: Value) -> None:
    """Records the equations that devices run on local rows, if a sort may be local.

    Args:
        editor: the editor of the jaxpr.
        equation: a `sort`.
        keys: its keys.
    """
    axes = [i for i, x in enumerate(keys.placements) if shards_examples(x) and x.dim == 0]
    if not axes or len(keys.shape) != 1 or keys.has_sum or id(equation) in editor.local_rows:
        return
    context, num_devices = editor.context, 1
    for i in axes:
        num_devices *= context.sizes[i]
    block = find_sorted_block(editor.jaxpr, equation, num_devices)
    if block is None:
        return
    equations_on_rows = [eqn for eqn in open_jaxpr(editor.jaxpr).eqns if eqn in block.local_equations]
    local_ids = {*map(id, equations_on_rows), *map(id, block.ragged_dots)}
    if not local_ids.isdisjoint(editor.local_rows):
        return
    placements = tuple([Shard(0) if i in axes else REPLICATE for i in range(len(context.axes))])
    atom = editor.convert(keys, placements, equation)
    sizes = editor.emit(
        functools.partial(_group_sizes, block.num_groups), ('group_sizes', block.num_groups), equation, [atom]
    )
    editor.local_rows.update(dict.fromkeys(local_ids, placements))
    editor.local_group_sizes.update((id(product), sizes) for product in block.ragged_dots)


def write_local_rows(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], placements: Placements
) -> None:
    """Writes an equation on local rows: a sort, or a gather or scatter of rows.

    Local row indices are the global ones minus the index of the device's first row.
    """
    atoms = [editor.convert(value, placements, equation) for value in values]
    if primitive_name(equation) != 'sort':
        axes = tuple(
            [axis for axis, x in zip(editor.context.axes, placements, strict=True) if isinstance(x, Shard)]
        )
        num_rows = shape_of(atoms[0])[0]
        function, key = functools.partial(_local_indices, axes, num_rows), ('local_indices', axes, num_rows)
        atoms[1] = editor.emit(function, key, equation, [atoms[1]])
    outputs = [editor.define(var, placements) for var in equation.outvars]
    editor.eqns.append(editor.code.localize(equation, atoms, [output.atom for output in outputs]))


def local_group_operands(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], placements: Placements
) -> list[Value]:
    """Returns the operands of a grouped matmul on local rows, with local group sizes."""
    left, right, sizes = values
    row_placements = tuple([Shard(ragged_dim(equation)) if isinstance(x, Shard) else x for x in placements])
    if left.placements != row_placements:
        left = Value(left.var, row_placements, editor.convert(left, row_placements, equation))
    return [left, right, Value(sizes.var, editor.context.replicated, editor.local_group_sizes[id(equation)])]


def write_local_group_sizes(
    editor: JaxprEditor, equation: Any, atoms: Sequence[Any], placements: Placements
) -> Any:
    """Writes the computation of a device's local group sizes if the rows of a grouped matmul are sharded.

    Args:
        editor: the editor of the jaxpr.
        equation: a `ragged_dot_general`.
        atoms: its operands, with the global group sizes.
        placements: the placements of its left operand.

    Returns:
        The local group sizes, or the global ones if the rows are unsharded.
    """
    row_dim = ragged_dim(equation)
    axes = tuple(
        [
            axis
            for axis, x in zip(editor.context.axes, placements, strict=True)
            if isinstance(x, Shard) and x.dim == row_dim
        ]
    )
    if not axes:
        return atoms[2]
    function, key = local_group_sizes(axes, shape_of(atoms[0])[row_dim])
    return editor.emit(function, key, equation, atoms[2:])


@functools.partial(jax.jit, static_argnums=0)
def _group_sizes(groups: int, keys: Any) -> Any:
    """Counts the local rows of each group."""
    return jnp.sum(keys[:, None] == jnp.arange(groups, dtype=keys.dtype), 0, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _local_indices(axes: tuple[str, ...], num_rows: int, indices: Any) -> Any:
    return indices - (jax.lax.axis_index(axes) * num_rows).astype(indices.dtype)
