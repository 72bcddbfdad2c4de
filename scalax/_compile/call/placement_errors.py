"""Errors and warnings about arguments that a program cannot take as they are placed.

Before a program runs, `reject_deleted`, `reject_abstract`, `reject_mismatched` and `reject_foreign_types`
check its arguments. `reject_explained` says why JAX refused a call all the same. Each raises the error that
it makes, and returns none: an error in a variable of a frame that it passes keeps itself, the frame and the
arguments alive.
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
    left_alone,
)
from scalax._compile.call.resolve_arguments import ReadCall
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
    """Raises ArgumentError if an argument's buffers are gone, naming all such leaves."""
    if any(gone := [*map(is_deleted, call.leaves)]):
        raise ArgumentError(
            f'{call.signature.name} got arrays that are deleted:\n{call.shown(gone)}\n'
            'What to do: they were donated to an earlier call (donate_argnums), which reused their '
            'buffers. Use the outputs of that call instead, or do not donate.'
        ) from None


def reject_abstract(call: Call) -> None:
    """Raises ArgumentError about arguments that stand for arrays and have no values, if there are any."""
    if any(abstract := [*map(is_abstract, call.leaves)]):
        kinds = dict.fromkeys(type(leaf).__name__ for leaf in call.leaves if is_abstract(leaf))
        raise ArgumentError(
            f'{call.signature.name} got types ({", ".join(kinds)}), which have no values:\n'
            f'{call.shown(abstract)}\n'
            'What to do: pass arrays. lower, trace, eval_shape and shardings_for of the function, and '
            'helper.plan, take types.'
        ) from None


def reject_donated_twice(call: Call) -> None:
    """Raises ArgumentError about arrays that are given in several places and donated, if there are any."""
    places: dict[int, list[int]] = {}
    for i, leaf in enumerate(call.leaves):
        if is_concrete(leaf):  # the run that JAX refused may have deleted it
            places.setdefault(id(leaf), []).append(i)
    bad = []
    for given in places.values():
        if len(given) > 1 and any(call.places[i][0] in call.layout.donated for i in given):
            bad.append(describe_leaf(' and '.join(map(call.path, given)), call.leaves[given[0]]))
    if bad:
        raise ArgumentError(
            f'{call.signature.name} got one array in several places, and donates it (donate_argnums):\n'
            f'{shown_leaves(bad)}\n'
            'What to do: give a copy in each place (jnp.copy), or do not donate.'
        ) from None


def reject_foreign_types(call: Call, mesh: Any, *, movable: bool = False) -> None:
    """Raises MeshError about values of an outer trace whose types are of another mesh than *mesh*.

    Those that are *movable* may be of other axes on as many devices.
    """
    bad = [
        f'{call.describe(i)} is of {_axes_of(type_of(leaf).sharding.mesh)}'
        for i, leaf in enumerate(call.leaves)
        if is_foreign(leaf, mesh) and not (movable and type_of(leaf).sharding.mesh.size == mesh.size)
    ]
    if bad:
        raise MeshError(
            f'{call.signature.name} is compiled for {_axes_of(mesh)}, and got values of another mesh with '
            f'Explicit axes:\n{shown_leaves(bad)}\n'
            'What to do: use one helper for functions that call one another.'
        )


def _axes_of(mesh: Any) -> str:
    types = ', '.join(kind.name for kind in mesh.axis_types)
    return f'the mesh ({axis_sizes_text(mesh.shape)}) of types ({types})'


def note_flags(error: jax.errors.TracerBoolConversionError, call: Call) -> None:
    """Adds a note to an error about the value of a traced bool: the flags in trees that a call traces."""
    pairs = zip(call.places, call.leaves, strict=True)
    flags = call.shown([bool(path) and _is_flag(leaf) for (_, path), leaf in pairs])
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


# What JAX refuses ------------------------------------------------------------------------------------


def reject_explained(error: Exception, read: ReadCall) -> None:
    """Raises the error that says why JAX refused a call, if something is known to be wrong with the call."""
    # A run that failed has deleted what was donated to it, and raises errors of other types.
    if type(error) is RuntimeError:
        reject_deleted(read.call)
    reject_abstract(read.call)
    reject_mismatched(read)
    reject_donated_twice(read.call)


def reject_mismatched(read: ReadCall) -> None:
    """Raises PlacementError about arrays that are committed to another sharding than asked."""
    if read.moves.mismatched:
        return
    listed = shown_leaves(
        '{} is sharded as {}, asked for: {}'.format(
            read.call.describe(i), *describe_difference(leaf.sharding, sharding)
        )
        for i, (leaf, sharding) in enumerate(zip(read.call.leaves, read.shardings, strict=True))
        if read.rules.is_wrong(leaf, sharding)
    )
    if not listed:
        return
    if not read.rules.any_rule:
        raise PlacementError(
            f'{read.call.signature.name} got arrays that are not on its mesh, and in_shardings gives them no '
            f'sharding:\n{listed}\n'
            'What to do: move them first (helper.shard), or name their shardings in in_shardings and pass '
            "on_mismatch='reshard' to sjit to have them moved at every such call."
        ) from None
    raise PlacementError(
        f'{read.call.signature.name} got arrays that are committed to another sharding than in_shardings '
        f'gives them:\n{listed}\n'
        "What to do: move them first (helper.shard), pass on_mismatch='reshard' to sjit to have them "
        'moved at every such call, or use None in in_shardings to leave arguments where they are.'
        f'{_batch_advice(read)}{_output_advice(read)}'
    ) from None


def _batch_advice(read: ReadCall) -> str:
    """What to do about batches that are sharded as `prefetch` shards them: over all axes of the mesh."""
    all_axes = tuple(read.rules.mesh.axis_names)
    for leaf, sharding in zip(read.call.leaves, read.shardings, strict=True):
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
                ' If helper.prefetch or helper.local_data_to_global_array made the array: they shard rows '
                f'over all axes of the mesh, unless you pass mesh_axis_subset={subset!r}.'
            )
    return ''


def _output_advice(read: ReadCall) -> str:
    """What to do about outputs of earlier calls, whose shardings the compiler chose."""
    if not read.called_before or read.rules.options.out_shardings is not None:
        return ''
    return (
        f' If the array is an output of an earlier call of {read.call.signature.name}: the compiler chose '
        'its sharding. Give out_shardings, or donate the argument that it replaces (donate_argnums), whose '
        'sharding it then gets.'
    )


def warn_left_alone(call: Call, shardings: Shardings, outputs: Any) -> None:
    """Warns about outputs that JAX `left_alone`, though arguments are on several devices.

    JAX takes the devices from the arguments that the outputs depend on: for ``opt.init(params)`` from none.
    """
    if any(map(_on_several, call.leaves, shardings)):
        flat, _ = jax.tree_util.tree_flatten_with_path(outputs)
        listed = shown_leaves(
            describe_leaf(optional_path(path) or '', x) for path, x in flat if left_alone(x)
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
    """Two shardings that differ, in as few words as show it."""
    texts = _short(first), _short(second)
    if texts[0] == texts[1] and all(isinstance(each, NamedSharding) for each in (first, second)):
        # They differ in their devices, or in the order of these.
        texts = f'{texts[0]}{_of_devices(first)}', f'{texts[1]}{_of_devices(second)}'
    return texts


def _of_devices(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return ''  # others show theirs
    return f' of devices {", ".join(str(device.id) for device in sharding.mesh.devices.flat)}'


def _short(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    memory = '' if sharding.memory_kind in (None, 'device') else f' in {sharding.memory_kind}'
    return f'{partition_specs.text(sharding.spec)}{memory} on ({axis_sizes_text(sharding.mesh.shape)})'
