"""The user's sharding constraints: along the batch axes, they are conversions between placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from scalax._jax.equations import Literal, is_on_device, shape_of, sharding_params
from scalax._jax.manual_axes import is_noop_reshard
from scalax._jax.primitives import primitive_name
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.auto_shardings import auto_spec
from scalax._spmd.placements.axis_orders import with_outer_axes
from scalax._spmd.placements.layouts import state_placement
from scalax._spmd.placements.placement import REPLICATE, Placement, Placements, Shard, shard_counts
from scalax._spmd.values import CannotPartition, Value, is_replicated


def partition_constraint(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a sharding constraint, ``jax.device_put`` or ``reshard``: converts the operands."""
    if primitive_name(equation) == 'reshard':
        if not is_noop_reshard(equation):
            raise CannotPartition(
                equation, 'it reshards along Explicit axes, which are part of the type of a value'
            )
        shardings = {}
    else:
        shardings = sharding_params(equation)[1]
    for i, (var, value) in enumerate(zip(equation.outvars, values, strict=True)):
        placements = value.placements
        if not is_on_device(equation.invars[i]) and is_on_device(var):  # conversions need device memory
            value = Value(var, placements, editor.move_memory(value.atom, var, equation), value.origin)
        if i in shardings:
            placements = placements_of_sharding(
                editor, equation, value, shardings[i], moves=not is_on_device(var)
            )
        atom = editor.convert(value, placements, equation)
        if i in shardings:
            atom = _constrained(editor, equation, atom, shardings[i])
        if is_on_device(value.var) and not is_on_device(var):
            atom = editor.move_memory(atom, var, equation)
        editor.define(var, placements, atom).origin = value.origin


def apply_sharding(editor: JaxprEditor, equation: Any, value: Value, sharding: Any) -> None:
    """Converts a value to a sharding, for all following equations."""
    editor.convert_in_place(value, placements_of_sharding(editor, equation, value, sharding), equation)
    value.atom = _constrained(editor, equation, value.atom, sharding)


def _constrained(editor: JaxprEditor, equation: Any, atom: Any, sharding: Any) -> Any:
    """Constrains a block to the part of a sharding along the Auto axes."""
    sizes = editor.context.auto.sizes
    if not sizes or not hasattr(atom.aval, 'sharding') or isinstance(atom, Literal):
        return atom
    return editor.constrain_auto(auto_spec(sharding.spec, len(shape_of(atom)), sizes), atom, equation)


def placements_of_sharding(
    editor: JaxprEditor, equation: Any, value: Value, sharding: Any, *, moves: bool = False
) -> Placements:
    """Returns the placements of a value with a sharding. Unconstrained dimensions keep their placements.

    Args:
        editor: the editor of the jaxpr.
        equation: the equation that specifies the sharding.
        value: the value.
        sharding: the sharding.
        moves: whether the equation moves the value to the memory that the sharding names.
    """
    if not isinstance(sharding, NamedSharding):
        raise CannotPartition(equation, f'its sharding is a {type(sharding).__name__}, not a NamedSharding')
    if sharding.memory_kind not in (None, 'device') and not moves:
        raise CannotPartition(equation, 'it moves values between memory spaces')
    placements = placements_of_spec(
        sharding.spec, editor.context.mesh_axes, value.placements, value.shape, equation
    )
    batch_placements = editor.context.batch_dims.placements(value.var, editor.context.replicated)
    if value.origin is not None and is_replicated(batch_placements):  # state, possibly replicated before
        placements = tuple(map(state_placement, placements))
    if (value.is_state or value.has_sum) and not editor.context.pipelines:
        placements = with_outer_axes(
            placements, sharding.spec, editor.context.mesh_axes, editor.context.auto.sizes
        )
    i = editor.context.microbatch_axis  # a pipelined layer runs on one microbatch
    return placements if i is None else (*placements[:i], value.placements[i], *placements[i + 1 :])


def placements_of_spec(
    spec: PartitionSpec,
    mesh_axes: Mapping[str, int],
    unspecified: Placements,
    shape: Sequence[int],
    equation: Any = None,
) -> Placements:
    """Returns the placements of a value with a spec.

    Args:
        spec: the spec.
        mesh_axes: the batch axes, from major to minor, and their sizes.
        unspecified: the placements that unconstrained dimensions keep.
        shape: the shape of the value.
        equation: the equation, for errors.
    """
    axes, entries = [*mesh_axes], [*spec, *[None] * (len(shape) - len(spec))]
    open_dims = [dim for dim, entry in enumerate(entries) if entry is PartitionSpec.UNCONSTRAINED]
    result: list[Placement] = [
        x if open_dims and (not isinstance(x, Shard) or x.dim in open_dims) else REPLICATE
        for x in unspecified
    ]
    for dim, entry in enumerate(entries):
        names = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        # Several axes shard a dimension in the order of the mesh, whatever the order in the spec.
        for axis in [axes.index(name) for name in names if name in axes]:
            is_state = isinstance(unspecified[axis], Shard) and unspecified[axis].is_state  # type: ignore[union-attr]
            result[axis] = Shard(dim, is_state)
    counts = shard_counts(tuple(result), [*mesh_axes.values()], len(shape))
    if any(size % count for size, count in zip(shape, counts, strict=True)):
        raise CannotPartition(equation, f'{spec} splits {tuple(shape)} into blocks of different sizes')
    return tuple(result)
