"""Errors and warnings about arguments that a program cannot accept, because of their values or shardings.

Before a program runs, `reject_deleted`, `reject_abstract`, `reject_mismatched` and `reject_foreign_types`
check its arguments. If JAX rejects a call nevertheless, `raise_known_cause` explains why. All of these
functions raise the error themselves rather than return it: an error in a local variable of a frame in its own
traceback is a reference cycle, which would keep the frame and the arguments alive.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from scalax._compile.call.call_key import (
    Call,
    Shardings,
    is_concrete,
    is_deleted,
    is_foreign,
    is_mismatched,
    is_single_device,
)
from scalax._compile.call.resolve_arguments import ResolvedCall
from scalax._core.pytree import partition_specs
from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.pytree.paths import describe_leaf, optional_path
from scalax._jax.tracing import is_abstract, type_of
from scalax.errors import (
    ArgumentError,
    MeshError,
    PlacementError,
    UnshardedWarning,
    shown_leaves,
    warn,
)

# Before the program runs -----------------------------------------------------------------------------


def reject_deleted(call: Call) -> None:
    """Raises ArgumentError if the buffers of some arguments have been deleted."""
    if any(deleted := [*map(is_deleted, call.leaves)]):
        raise ArgumentError(
            f'{call.signature.name} got arrays that are deleted:\n{call.list_leaves(deleted)}\n'
            'What to do: they were donated to an earlier call (donate_argnums), which reused their '
            'buffers. Use the outputs of that call instead, or do not donate.'
        ) from None


def reject_abstract(call: Call) -> None:
    """Raises ArgumentError if some arguments are types or structs, which have no values."""
    if any(abstract := [*map(is_abstract, call.leaves)]):
        kinds = dict.fromkeys(type(leaf).__name__ for leaf in call.leaves if is_abstract(leaf))
        raise ArgumentError(
            f'{call.signature.name} got types ({", ".join(kinds)}), which have no values:\n'
            f'{call.list_leaves(abstract)}\n'
            'What to do: pass arrays. lower, trace, eval_shape and shardings_for of the function, and '
            'helper.plan, take types.'
        ) from None


def reject_donated_twice(call: Call) -> None:
    """Raises ArgumentError if an array is passed in several places and donated."""
    indices_by_id: dict[int, list[int]] = {}
    for i, leaf in enumerate(call.leaves):
        if is_concrete(leaf):  # the run that JAX rejected may have deleted it
            indices_by_id.setdefault(id(leaf), []).append(i)
    donated_twice = []
    for indices in indices_by_id.values():
        if len(indices) > 1 and any(call.leaf_paths[i][0] in call.layout.donated for i in indices):
            paths = ' and '.join(map(call.path, indices))
            donated_twice.append(describe_leaf(paths, call.leaves[indices[0]]))
    if donated_twice:
        raise ArgumentError(
            f'{call.signature.name} got one array in several places, and donates it (donate_argnums):\n'
            f'{shown_leaves(donated_twice)}\n'
            'What to do: give a copy in each place (jnp.copy), or do not donate.'
        ) from None


def reject_foreign_types(call: Call, mesh: Any, *, movable: bool = False) -> None:
    """Raises MeshError about values of an outer trace whose types are of another mesh than *mesh*.

    Args:
        call: the call.
        mesh: the mesh of the function.
        movable: accept values of a mesh with other axes on the same number of devices.
    """
    foreign = [
        f'{call.describe(i)} is of {_axes_of(type_of(leaf).sharding.mesh)}'
        for i, leaf in enumerate(call.leaves)
        if is_foreign(leaf, mesh) and not (movable and type_of(leaf).sharding.mesh.size == mesh.size)
    ]
    if foreign:
        raise MeshError(
            f'{call.signature.name} is compiled for {_axes_of(mesh)}, but got values of another mesh with '
            f'Explicit axes:\n{shown_leaves(foreign)}\n'
            'What to do: use one helper for functions that call one another.'
        )


def _axes_of(mesh: Any) -> str:
    types = ', '.join(kind.name for kind in mesh.axis_types)
    return f'the mesh ({axis_sizes_text(mesh.shape)}) of types ({types})'


def add_flags_note(error: jax.errors.TracerBoolConversionError, call: Call) -> None:
    """Adds a note to an error about a traced bool that lists the flags in trees, which the call traces."""
    pairs = zip(call.leaf_paths, call.leaves, strict=True)
    flags = call.list_leaves([bool(path) and _is_flag(leaf) for (_, path), leaf in pairs])
    if flags:
        error.add_note(
            f'{call.signature.name} got flags in trees, and traces them like arrays (sjit and helper.shard '
            f'make arrays of Python bools):\n{flags}\n'
            'What to do: take flags out of the tree before helper.shard, and close over them. For a module '
            'of equinox, equinox.partition(module, equinox.is_array) gives the arrays and the rest, and '
            'equinox.combine joins them inside the function; scalax.axes.named_jit takes entire modules.'
        )


def _is_flag(leaf: Any) -> bool:
    array = getattr(leaf, 'shape', None), getattr(leaf, 'dtype', None)
    return isinstance(leaf, bool) or array == ((), bool)


# After JAX rejected a call ----------------------------------------------------------------------------


def raise_known_cause(error: Exception, resolved: ResolvedCall) -> None:
    """Raises an error that explains why JAX rejected a call, if one of the known causes applies."""
    # A run that failed raises errors of other types, and has deleted its donated arguments.
    if type(error) is RuntimeError:
        reject_deleted(resolved.call)
    reject_abstract(resolved.call)
    reject_mismatched(resolved)
    reject_donated_twice(resolved.call)


def reject_mismatched(resolved: ResolvedCall) -> None:
    """Raises PlacementError about arrays that are committed to another sharding than required."""
    if resolved.policy.moves_mismatched:
        return
    call, name = resolved.call, resolved.call.signature.name
    listed = shown_leaves(
        '{} is sharded as {}, asked for: {}'.format(
            call.describe(i), *describe_difference(leaf.sharding, sharding)
        )
        for i, (leaf, sharding) in enumerate(zip(call.leaves, resolved.shardings, strict=True))
        if resolved.rules.is_misplaced(leaf, sharding)
    )
    if not listed:
        return
    if not resolved.rules.any_rule:
        raise PlacementError(
            f'{name} got arrays that are not on its mesh, and in_shardings gives them no sharding:\n'
            f'{listed}\n'
            'What to do: move them first (helper.shard), or name their shardings in in_shardings and pass '
            "on_mismatch='reshard' to sjit to have them moved at every such call."
        ) from None
    raise PlacementError(
        f'{name} got arrays that are committed to another sharding than in_shardings gives them:\n{listed}\n'
        "What to do: move them first (helper.shard), pass on_mismatch='reshard' to sjit to have them "
        'moved at every such call, or use None in in_shardings to leave arguments where they are.'
        f'{_batch_advice(resolved)}{_output_advice(resolved)}'
    ) from None


def _batch_advice(resolved: ResolvedCall) -> str:
    """Returns advice about a batch that is sharded over all mesh axes, which is the default of `prefetch`."""
    all_axes = tuple(resolved.rules.mesh.axis_names)
    for leaf, sharding in zip(resolved.call.leaves, resolved.shardings, strict=True):
        if sharding is None or not is_mismatched(leaf, sharding):
            continue
        if not isinstance(leaf.sharding, NamedSharding):
            continue
        if [*map(partition_specs.entry_axes, partition_specs.entries(leaf.sharding.spec))] != [all_axes]:
            continue
        axes = partition_specs.spec_axes(sharding.spec)
        if axes and axes == partition_specs.entry_axes(partition_specs.entries(sharding.spec)[0]):
            subset = axes[0] if len(axes) == 1 else axes
            return (
                ' If helper.prefetch or helper.local_data_to_global_array made the array: they shard '
                f'examples over all axes of the mesh, unless you pass mesh_axis_subset={subset!r}.'
            )
    return ''


def _output_advice(resolved: ResolvedCall) -> str:
    """Returns advice about outputs of earlier calls, whose shardings the compiler chose."""
    if not resolved.called_before or resolved.rules.options.out_shardings is not None:
        return ''
    return (
        f' If the array is an output of an earlier call of {resolved.call.signature.name}: the compiler '
        'chose its sharding. Give out_shardings, or donate the argument that it replaces (donate_argnums), '
        'whose sharding it then gets.'
    )


def warn_single_device_outputs(call: Call, shardings: Shardings, outputs: Any) -> None:
    """Warns about outputs on a single device, if arguments are on several devices.

    JAX runs a program on the devices of the arguments that its outputs depend on. The zeros of
    ``opt.init(params)`` depend on none.
    """
    if any(map(_on_several, call.leaves, shardings)):
        flat, _ = jax.tree_util.tree_flatten_with_path(outputs)
        listed = shown_leaves(
            describe_leaf(optional_path(path) or '', x) for path, x in flat if is_single_device(x)
        )
        warn(
            f'outputs of {call.signature.name} are on one device, although arguments are on several: '
            f'they depend on no argument, and out_shardings gives them no sharding:\n{listed}\n'
            'What to do: give out_shardings, such as OptimizerStateShardingRule(rules, params) for the state '
            'of an optimizer, or PartitionSpec() for copies on all devices.',
            UnshardedWarning,
        )


def _on_several(leaf: Any, sharding: NamedSharding | None) -> bool:
    return (sharding is not None and sharding.num_devices > 1) or (
        is_concrete(leaf) and len(leaf.sharding.device_set) > 1
    )


def describe_difference(first: Any, second: Any) -> tuple[str, str]:
    """Returns short texts of two different shardings that show the difference."""
    texts = _text(first), _text(second)
    if texts[0] == texts[1] and isinstance(first, NamedSharding) and isinstance(second, NamedSharding):
        # The shardings have other devices, or the same devices in another order.
        texts = f'{texts[0]}{_devices_text(first)}', f'{texts[1]}{_devices_text(second)}'
    return texts


def _devices_text(sharding: NamedSharding) -> str:
    return f' of devices {", ".join(str(device.id) for device in sharding.mesh.devices.flat)}'


def _text(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    memory = '' if sharding.memory_kind in (None, 'device') else f' in {sharding.memory_kind}'
    return f'{partition_specs.text(sharding.spec)}{memory} on ({axis_sizes_text(sharding.mesh.shape)})'
