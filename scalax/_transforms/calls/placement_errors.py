"""What is said of arguments that lie where the program cannot take them?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from scalax._trace.constraints import is_compiled
from scalax._transforms.calls.call_key import slot_path, type_of
from scalax._transforms.calls.call_signature import CallLayout, CallSignature
from scalax._transforms.calls.placement import (
    Shardings,
    is_concrete,
    is_elsewhere,
    is_mismatched,
    is_reference,
    same_types,
)
from scalax._tree.paths import describe_leaf, optional_path
from scalax._tree.specs import axis_sizes_text
from scalax.errors import ArgumentError, MeshError, PlacementError, UnshardedWarning, shown, warn


def any_deleted(flat_args: Sequence[Any]) -> bool:
    """Whether the buffers of an argument are gone."""
    return any(is_concrete(leaf) and leaf.is_deleted() for leaf in jax.tree.leaves(flat_args))


def reject_deleted(signature: CallSignature, layout: CallLayout, flat_args: Sequence[Any]) -> None:
    """Raises ArgumentError if an argument's buffers are gone, naming all such leaves."""
    gone = []
    for slot in layout.dynamic:
        for path, leaf in jax.tree_util.tree_flatten_with_path(flat_args[slot])[0]:
            if is_concrete(leaf) and leaf.is_deleted():
                gone.append(describe_leaf(slot_path(layout, slot, path) or '', leaf))
    if gone:
        raise ArgumentError(
            f'{signature.name} got arrays that are deleted:\n{shown(gone)}\n'
            'What to do: they were donated to an earlier call (donate_argnums), which reused their '
            'buffers. Use the outputs of that call instead, or do not donate.'
        ) from None


def reject_donated_twice(
    signature: CallSignature, layout: CallLayout, flat_args: Sequence[Any], error: Exception | None
) -> None:
    """Raises ArgumentError, because of *error*, if an array that is still there was donated twice."""
    places: dict[int, list[tuple[str, Any, bool]]] = {}
    for slot in layout.dynamic:
        for path, leaf in jax.tree_util.tree_flatten_with_path(flat_args[slot])[0]:
            if is_concrete(leaf) and not leaf.is_deleted():
                name = slot_path(layout, slot, path) or ''
                places.setdefault(id(leaf), []).append((name, leaf, layout.slots[slot].donated))
    bad = [
        f'{describe_leaf(" and ".join(name for name, _, _ in given), given[0][1])}'
        for given in places.values()
        if len(given) > 1 and any(donated for _, _, donated in given)
    ]
    if bad:
        raise ArgumentError(
            f'{signature.name} got one array in several places, and donates it (donate_argnums):\n'
            f'{shown(bad)}\n'
            'What to do: give a copy in each place (jnp.copy), or do not donate.'
        ) from error


def reject_foreign_types(
    signature: CallSignature,
    layout: CallLayout,
    flat_args: Sequence[Any],
    mesh: Any,
    *,
    movable: bool = False,
) -> None:
    """Raises MeshError about values of an outer trace whose types are of another mesh than *mesh*.

    Those that are *movable* may be of other axes on as many devices.
    """
    bad = []
    for slot in layout.dynamic:
        for path, leaf in jax.tree_util.tree_flatten_with_path(flat_args[slot])[0]:
            if not isinstance(leaf, jax.core.Tracer):
                continue
            sharding = getattr(type_of(leaf), 'sharding', None)
            if sharding is None:
                continue
            theirs = sharding.mesh
            if movable and theirs.size == mesh.size:
                continue
            if _is_foreign(theirs, mesh):
                described = describe_leaf(slot_path(layout, slot, path) or '', leaf)
                bad.append(f'{described} is of {_axes_of(theirs)}')
    if bad:
        raise MeshError(
            f'{signature.name} is compiled for {_axes_of(mesh)}, and got values of another mesh with '
            f'Explicit axes:\n{shown(bad)}\n'
            'What to do: use one helper for functions that call one another.'
        )


def any_foreign(flat_args: Sequence[Any], mesh: Any) -> bool:
    """Whether values of a trace have types of another mesh with Explicit axes than *mesh*."""
    traced = (leaf for leaf in jax.tree.leaves(flat_args) if isinstance(leaf, jax.core.Tracer))
    shardings = (getattr(type_of(leaf), 'sharding', None) for leaf in traced)
    return any(sharding is not None and _is_foreign(sharding.mesh, mesh) for sharding in shardings)


def _is_foreign(theirs: Any, mesh: Any) -> bool:
    return AxisType.Explicit in theirs.axis_types and not same_types(theirs, mesh)


def _axes_of(mesh: Any) -> str:
    types = ', '.join(kind.name for kind in mesh.axis_types)
    return f'the mesh ({axis_sizes_text(mesh.shape)}) of types ({types})'


def any_mismatched(
    flat_args: Sequence[Any],
    shardings: Mapping[int, Shardings],
    wrong: Callable[[Any, NamedSharding | None], bool] = is_mismatched,
) -> bool:
    """Whether an argument is committed to another sharding than the rules say."""
    return any(
        wrong(leaf, sharding)
        for slot, wanted in shardings.items()
        for leaf, sharding in zip(jax.tree.leaves(flat_args[slot]), wanted, strict=True)
    )


def reject_mismatched(
    signature: CallSignature,
    layout: CallLayout,
    flat_args: Sequence[Any],
    shardings: Mapping[int, Shardings],
    by_rules: bool,
    *,
    returned: bool = False,
) -> None:
    """Raises PlacementError if an argument is committed to another sharding than asked.

    Args:
        signature: whose call it is.
        layout: the slots.
        flat_args: the call.
        shardings: for each dynamic slot the shardings of its leaves.
        by_rules: whether rules say so; otherwise only that JAX has to know where to run does.
        returned: whether they may be outputs of a call before, which have the shardings that JAX chose.
    """
    wrong = is_mismatched if by_rules else is_elsewhere
    if not any_mismatched(flat_args, shardings, wrong):
        return
    bad = []
    for described, leaf, sharding in _described(layout, flat_args, shardings, wrong):
        lies, asked = told_apart(leaf.sharding, sharding)
        bad.append(f'{described} lies as {lies}, asked: {asked}')
    if not by_rules:
        raise _off_the_mesh(signature, bad) from None
    if bad:
        raise PlacementError(
            f'{signature.name} got arrays that are committed to another sharding than in_shardings '
            f'says:\n{shown(bad)}\n'
            "What to do: move them first (helper.shard), pass on_mismatch='reshard' to sjit to have "
            'them moved at every such call, or use None in in_shardings to take arguments as they lie.'
            + (_OF_OUTPUTS.format(name=signature.name) if returned else '')
        ) from None


_OF_OUTPUTS = (
    ' Of outputs of an earlier call of {name} the compiler has chosen the shardings: give out_shardings, or '
    'donate the argument that they are to replace (donate_argnums), and they have those of the arguments.'
)


def _off_the_mesh(signature: CallSignature, bad: Sequence[str]) -> PlacementError:
    return PlacementError(
        f'{signature.name} got arrays that do not lie on its mesh, and in_shardings does not say where '
        f'they belong:\n{shown(bad)}\n'
        'What to do: move them first (helper.shard), or name their shardings in in_shardings and pass '
        "on_mismatch='reshard' to sjit to have them moved at every such call."
    )


def reject_elsewhere(
    signature: CallSignature,
    layout: CallLayout,
    flat_args: Sequence[Any],
    shardings: Mapping[int, Shardings],
    mesh: Any,
) -> None:
    """Raises PlacementError about arrays of other devices that no rule speaks about."""

    def elsewhere(leaf: Any, sharding: NamedSharding | None) -> bool:
        return sharding is None and lies_elsewhere(leaf, mesh)

    bad = []
    for described, leaf, _ in _described(layout, flat_args, shardings, elsewhere):
        bad.append(f'{described} lies as {_short(leaf.sharding)}{_of_devices(leaf.sharding)}')
    if bad:
        raise _off_the_mesh(signature, bad) from None


def reject_other_devices(name: str, mesh: Any) -> None:
    """Raises MeshError under a ``jax.set_mesh`` of other devices or another order."""
    try:
        ambient = jax.sharding.get_mesh()
    except ValueError:  # inside of jax.jit
        return
    if ambient.empty or [*ambient.devices.flat] == [*mesh.devices.flat]:
        return
    own, theirs = ([device.id for device in each.devices.flat] for each in (mesh, ambient))
    raise MeshError(
        f'{name} is compiled for the devices {own}, and is called under jax.set_mesh of the devices '
        f'{theirs}: leave that mesh for the call'
    ) from None


def lies_elsewhere(leaf: Any, mesh: Any) -> bool:
    """Whether an array is committed to other devices than those of *mesh*, or in another order."""
    if not (is_concrete(leaf) and leaf.committed) and not is_reference(leaf):
        return False
    own = list(mesh.devices.flat)
    if isinstance(leaf.sharding, NamedSharding):
        return list(leaf.sharding.mesh.devices.flat) != own
    return leaf.sharding.device_set != set(own)


def warn_left_alone(
    signature: CallSignature, flat_args: Sequence[Any], shardings: Mapping[int, Shardings], outputs: Any
) -> None:
    """Warns about outputs that JAX put on one device, though arguments are on several.

    JAX takes the devices from those arguments that the outputs depend on: for ``opt.init(params)`` from none.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(outputs)
    alone = [
        describe_leaf(optional_path(path) or '', leaf)
        for path, leaf in flat
        if is_concrete(leaf) and leaf.size > 1 and len(leaf.sharding.device_set) == 1
    ]
    if not alone or not any(
        (sharding is not None and sharding.num_devices > 1)
        or (is_concrete(leaf) and len(leaf.sharding.device_set) > 1)
        for slot, wanted in shardings.items()
        for leaf, sharding in zip(jax.tree.leaves(flat_args[slot]), wanted, strict=True)
    ):
        return
    warn(
        f'outputs of {signature.name} are on one device, although arguments are on several: they depend on '
        f'no value of those, and nothing says how they are sharded:\n{shown(alone)}\n'
        'What to do: give out_shardings, such as OptimizerStateShardingRule(rules, params) for the state of '
        'an optimizer, or PartitionSpec() for copies on all devices.',
        UnshardedWarning,
    )


def any_refused(flat_args: Sequence[Any], shardings: Mapping[int, Shardings]) -> bool:
    """Whether JAX refuses an argument under a transformation that runs at once; compiles, to find out."""
    return any(
        _refused(leaf, sharding)
        for slot, wanted in shardings.items()
        for leaf, sharding in zip(jax.tree.leaves(flat_args[slot]), wanted, strict=True)
    )


def reject_refused(
    signature: CallSignature,
    layout: CallLayout,
    flat_args: Sequence[Any],
    shardings: Mapping[int, Shardings],
) -> None:
    """Raises PlacementError about what JAX refused under ``jax.grad`` or ``jax.vmap``."""
    bad = []
    for described, leaf, sharding in _described(layout, flat_args, shardings, _refused):
        lies, asked = told_apart(_inner_sharding(leaf), sharding)
        bad.append(f'{described} lies as {lies}, asked: {asked}')
    if bad:
        raise PlacementError(
            f'{signature.name} got, inside a transformation such as jax.grad or jax.vmap, values of arrays '
            f'that are committed to another sharding than in_shardings says:\n{shown(bad)}\n'
            'What to do: move the arrays before the transformation (helper.shard), compile the '
            "transformation too (sjit around it), or pass on_mismatch='reshard' to sjit to have them "
            'moved at every such call.'
        ) from None


def _refused(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether a value of a transformation is of an array that JAX does not take there: it alone can tell."""
    if sharding is None or not isinstance(leaf, jax.core.Tracer) or is_compiled():
        return False
    try:
        jax.jit(lambda value: value, in_shardings=sharding)(leaf)
    except ValueError:
        return True
    return False


def _inner_sharding(leaf: Any) -> Any:
    """The sharding of the array behind a value of a transformation."""
    seen: list[Any] = ['(not known)']
    with contextlib.suppress(NotImplementedError):  # of transformations that cannot look
        jax.debug.inspect_array_sharding(leaf, callback=seen.append)
    return seen[-1]


def _described(
    layout: CallLayout,
    flat_args: Sequence[Any],
    shardings: Mapping[int, Shardings],
    wrong: Callable[[Any, NamedSharding | None], bool],
) -> Iterator[tuple[str, Any, Any]]:
    """The leaves that are *wrong*: how messages name them, they themselves, and their shardings."""
    for slot, wanted in shardings.items():
        flat, _ = jax.tree_util.tree_flatten_with_path(flat_args[slot])
        for (path, leaf), sharding in zip(flat, wanted, strict=True):
            if wrong(leaf, sharding):
                yield describe_leaf(slot_path(layout, slot, path) or '', leaf), leaf, sharding


def told_apart(first: Any, second: Any) -> tuple[str, str]:
    """Two shardings that differ, in as few words as show it."""
    texts = _short(first), _short(second)
    if texts[0] == texts[1] and all(isinstance(each, NamedSharding) for each in (first, second)):
        # What is left to differ is the order of the devices, or which they are.
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
    return f'{sharding.spec}{memory} on ({axis_sizes_text(sharding.mesh.shape)})'
