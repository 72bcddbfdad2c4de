"""Do the arguments of a call lie where the program wants them?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from scalax._constrain import apply_sharding, is_compiled
from scalax._paths import describe_leaf
from scalax._sjit._convention import Convention, Layout
from scalax._sjit._signature import explicit_spec, slot_path, traced_dtype
from scalax._spec import axis_sizes_text
from scalax.errors import ArgumentError, MeshError, PlacementError, shown

Shardings = Sequence[NamedSharding | None]
Move = Callable[[list[Any], list[NamedSharding]], list[Any]]


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array with buffers, rather than a tracer, numpy data or a struct."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def reject_deleted(convention: Convention, layout: Layout, row: Sequence[Any]) -> None:
    """Raises ArgumentError if an argument's buffers are gone, naming all such leaves."""
    gone = []
    for slot in layout.dynamic:
        for path, leaf in jax.tree_util.tree_flatten_with_path(row[slot])[0]:
            if is_concrete(leaf) and leaf.is_deleted():
                gone.append(describe_leaf(slot_path(layout, slot, path) or '', leaf))
    if gone:
        raise ArgumentError(
            f'{convention.name} got arrays that are deleted:\n{shown(gone)}\n'
            'What to do: they were donated to an earlier call (donate_argnums), which reused their '
            'buffers. Use the outputs of that call instead, or do not donate.'
        )


def place(
    layout: Layout,
    row: Sequence[Any],
    shardings: Mapping[int, Shardings],
    *,
    explicit: bool,
    mismatched: bool,
    move: Move,
) -> list[Any]:
    """Moves arguments to where the program wants them.

    Args:
        layout: the slots.
        row: the call.
        shardings: for each dynamic slot the shardings of its leaves.
        explicit: types say where arrays lie, so numpy data and values of an outer trace move too.
        mismatched: also arrays that the user has committed to another sharding.
        move: moves leaves to shardings: `moved`, or `as_moved`, which only says what they would be.
    """
    placed = list(row)
    for slot, wanted in shardings.items():
        leaves, treedef = jax.tree.flatten(row[slot])
        host_data = explicit or layout.slots[slot].donated
        chosen = [
            (i, sharding)
            for i, (leaf, sharding) in enumerate(zip(leaves, wanted, strict=True))
            if sharding is not None
            and (_moves(leaf, sharding, host_data, mismatched) or (explicit and _is_mistyped(leaf, sharding)))
        ]
        if explicit:
            leaves = [_typed(leaf, sharding) for leaf, sharding in zip(leaves, wanted, strict=True)]
        elif not chosen:
            continue
        # One move for all leaves: one for each costs a dispatch a leaf.
        arrived = move([leaves[i] for i, _ in chosen], [sharding for _, sharding in chosen])
        for (i, _), leaf in zip(chosen, arrived, strict=True):
            leaves[i] = leaf
        try:
            placed[slot] = jax.tree.unflatten(treedef, leaves)
        except Exception:
            if move is not as_moved:
                raise
            # A node that refuses to hold types is traced with arrays: those that it has, unless where
            # they lie is part of their types.
            if explicit:
                return place(layout, row, shardings, explicit=True, mismatched=mismatched, move=moved)
    return placed


def moved(leaves: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """The leaves where they shall be: arrays are moved, values of an outer trace resharded in it."""
    traced = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]
    arrived = [
        _resharded(leaf, sharding) if inside else leaf
        for leaf, sharding, inside in zip(leaves, shardings, traced, strict=True)
    ]
    arrays = [i for i, inside in enumerate(traced) if not inside]
    put = jax.device_put([leaves[i] for i in arrays], [shardings[i] for i in arrays])
    for i, leaf in zip(arrays, put, strict=True):
        arrived[i] = leaf
    return arrived


def _resharded(leaf: jax.core.Tracer, sharding: NamedSharding) -> Any:
    if is_compiled() or explicit_spec(sharding) is not None:
        return apply_sharding(leaf, sharding)
    # Of an array under jax.vmap, a constraint of JAX 0.10 leaves the dimensions as they are.
    return jax.jit(lambda value: value, out_shardings=sharding)(leaf)


def as_moved(leaves: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """What the leaves would be if they were moved: enough to trace with."""
    return [_as_moved(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _as_moved(leaf: Any, sharding: NamedSharding) -> Any:
    aval = jax.typeof(leaf)
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
    if traced_dtype(struct) == aval.dtype:
        return struct
    return moved([leaf], [sharding])[0]  # an array of an x64 that is off now: no struct stands for it


def as_typed(tree: Any, shardings: Shardings) -> Any:
    """A tree of values inside a trace, resharded where their types say something else than *shardings*."""
    leaves, treedef = jax.tree.flatten(tree)
    typed = [
        leaf if sharding is None or _has_type(leaf, sharding) else apply_sharding(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, typed)


def all_typed(row: Sequence[Any], shardings: Mapping[int, Shardings]) -> bool:
    """Whether the types of all arguments say, over Explicit axes, what the rules say."""
    return all(
        sharding is None or _has_type(leaf, sharding)
        for slot, wanted in shardings.items()
        for leaf, sharding in zip(jax.tree.leaves(row[slot]), wanted, strict=True)
    )


def slots_off_the_mesh(row: Sequence[Any], shardings: Mapping[int, Shardings]) -> frozenset[int]:
    """The slots that hold data which is moved at each call: numpy data, and arrays nobody has placed."""
    return frozenset(
        slot
        for slot, wanted in shardings.items()
        if any(
            sharding is not None and _moves(leaf, sharding, host_data=True, mismatched=False)
            for leaf, sharding in zip(jax.tree.leaves(row[slot]), wanted, strict=True)
        )
    )


def _has_type(leaf: Any, sharding: NamedSharding) -> bool:
    return explicit_spec(jax.typeof(leaf).sharding) == explicit_spec(sharding)


def _is_mistyped(leaf: Any, sharding: NamedSharding) -> bool:
    return isinstance(leaf, jax.core.Tracer) and not _has_type(leaf, sharding)


def _typed(leaf: Any, sharding: NamedSharding | None) -> Any:
    """A ShapeDtypeStruct that says where it lies, as an array placed there would."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None and sharding is not None:
        return leaf.update(sharding=sharding)
    return leaf


def _moves(leaf: Any, sharding: NamedSharding, host_data: bool, mismatched: bool) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return False
    if isinstance(sharding.mesh, AbstractMesh) or not sharding.is_fully_addressable:
        return False  # other processes hold a part: JAX decides what may be moved, and how
    if isinstance(leaf, jax.core.Tracer):
        return mismatched and not is_compiled()  # an array under jax.grad or jax.vmap
    if not isinstance(leaf, jax.Array):
        return host_data
    return not leaf.committed or _is_retyped(leaf, sharding) or (mismatched and _mismatched(leaf, sharding))


def _is_retyped(leaf: jax.Array, sharding: NamedSharding) -> bool:
    """Whether an array lies where it should, and its type is of another mesh: then nothing moves."""
    return (
        AxisType.Explicit in sharding.mesh.axis_types
        and not (isinstance(leaf.sharding, NamedSharding) and _same_types(leaf.sharding.mesh, sharding.mesh))
        and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    )


def _same_types(first: Any, second: Any) -> bool:
    return (dict(first.shape), first.axis_types) == (dict(second.shape), second.axis_types)


def reject_foreign_types(convention: Convention, layout: Layout, row: Sequence[Any], mesh: Any) -> None:
    """Raises MeshError about values of an outer trace whose types are of another mesh than *mesh*."""
    bad = []
    for slot in layout.dynamic:
        for path, leaf in jax.tree_util.tree_flatten_with_path(row[slot])[0]:
            theirs = jax.typeof(leaf).sharding.mesh
            if AxisType.Explicit in theirs.axis_types and not _same_types(theirs, mesh):
                described = describe_leaf(slot_path(layout, slot, path) or '', leaf)
                bad.append(f'{described} is of {_axes_of(theirs)}')
    if bad:
        raise MeshError(
            f'{convention.name} is compiled for {_axes_of(mesh)}, and got values of another mesh with '
            f'Explicit axes:\n{shown(bad)}\n'
            'What to do: use one helper for functions that call one another.'
        )


def _axes_of(mesh: Any) -> str:
    types = ', '.join(kind.name for kind in mesh.axis_types)
    return f'the mesh ({axis_sizes_text(mesh.shape)}) of types ({types})'


def any_mismatched(row: Sequence[Any], shardings: Mapping[int, Shardings]) -> bool:
    """Whether an argument is committed to another sharding than the rules say."""
    return any(
        _mismatched(leaf, sharding)
        for slot, wanted in shardings.items()
        for leaf, sharding in zip(jax.tree.leaves(row[slot]), wanted, strict=True)
    )


def _mismatched(leaf: Any, sharding: NamedSharding | None) -> bool:
    if sharding is None or not is_concrete(leaf) or not leaf.committed:
        return False
    if isinstance(sharding.mesh, AbstractMesh):
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def reject_mismatched(
    convention: Convention,
    layout: Layout,
    row: Sequence[Any],
    shardings: Mapping[int, Shardings],
    by_rules: bool,
) -> None:
    """Raises PlacementError if an argument is committed to another sharding than asked.

    Args:
        convention: whose call it is.
        layout: the slots.
        row: the call.
        shardings: for each dynamic slot the shardings of its leaves.
        by_rules: whether rules say so; otherwise only that JAX has to know where to run does.
    """
    if not any_mismatched(row, shardings):
        return
    bad = []
    for described, leaf, sharding in _described(layout, row, shardings, _mismatched):
        lies, asked = told_apart(leaf.sharding, sharding)
        bad.append(f'{described} lies as {lies}, asked: {asked}')
    if not by_rules:
        raise _off_the_mesh(convention, bad)
    if bad:
        raise PlacementError(
            f'{convention.name} got arrays that are committed to another sharding than in_shardings '
            f'says:\n{shown(bad)}\n'
            "What to do: move them first (helper.shard), pass on_mismatch='reshard' to sjit to have "
            'them moved at every such call, or use None in in_shardings to take arguments as they lie.'
        )


def reject_elsewhere(
    convention: Convention,
    layout: Layout,
    row: Sequence[Any],
    shardings: Mapping[int, Shardings],
    mesh: Any,
    error: Exception,
) -> None:
    """Raises PlacementError, because of *error*, about arrays of other devices that no rule speaks about."""

    def elsewhere(leaf: Any, sharding: NamedSharding | None) -> bool:
        return sharding is None and lies_elsewhere(leaf, mesh)

    bad = []
    for described, leaf, _ in _described(layout, row, shardings, elsewhere):
        bad.append(f'{described} lies as {_short(leaf.sharding)}{_of_devices(leaf.sharding)}')
    if bad:
        raise _off_the_mesh(convention, bad) from error


def _off_the_mesh(convention: Convention, bad: Sequence[str]) -> PlacementError:
    return PlacementError(
        f'{convention.name} got arrays that do not lie on its mesh, and in_shardings does not say where '
        f'they belong:\n{shown(bad)}\n'
        'What to do: move them first (helper.shard), or name their shardings in in_shardings and pass '
        "on_mismatch='reshard' to sjit to have them moved at every such call."
    )


def lies_elsewhere(leaf: Any, mesh: Any) -> bool:
    """Whether an array is committed to other devices than those of *mesh*, or in another order."""
    if not is_concrete(leaf) or not leaf.committed:
        return False
    own = list(mesh.devices.flat)
    if isinstance(leaf.sharding, NamedSharding):
        return list(leaf.sharding.mesh.devices.flat) != own
    return leaf.sharding.device_set != set(own)


def _described(
    layout: Layout,
    row: Sequence[Any],
    shardings: Mapping[int, Shardings],
    wrong: Callable[[Any, NamedSharding | None], bool],
) -> Iterator[tuple[str, Any, Any]]:
    """The leaves that are *wrong*: how messages name them, they themselves, and their shardings."""
    for slot, wanted in shardings.items():
        flat, _ = jax.tree_util.tree_flatten_with_path(row[slot])
        for (path, leaf), sharding in zip(flat, wanted, strict=True):
            if wrong(leaf, sharding):
                yield describe_leaf(slot_path(layout, slot, path) or '', leaf), leaf, sharding


def any_refused(row: Sequence[Any], shardings: Mapping[int, Shardings]) -> bool:
    """Whether JAX refuses an argument under a transformation that runs at once; compiles, to find out."""
    return any(
        _refused(leaf, sharding)
        for slot, wanted in shardings.items()
        for leaf, sharding in zip(jax.tree.leaves(row[slot]), wanted, strict=True)
    )


def reject_refused(
    convention: Convention,
    layout: Layout,
    row: Sequence[Any],
    shardings: Mapping[int, Shardings],
    error: Exception,
) -> None:
    """Raises PlacementError about what JAX refused, with *error*, under ``jax.grad`` or ``jax.vmap``."""
    bad = []
    for described, leaf, sharding in _described(layout, row, shardings, _refused):
        lies, asked = told_apart(_lies(leaf), sharding)
        bad.append(f'{described} lies as {lies}, asked: {asked}')
    if bad:
        raise PlacementError(
            f'{convention.name} got, inside a transformation such as jax.grad or jax.vmap, values of arrays '
            f'that are committed to another sharding than in_shardings says:\n{shown(bad)}\n'
            'What to do: move the arrays before the transformation (helper.shard), compile the '
            "transformation too (sjit around it), or pass on_mismatch='reshard' to sjit to have them "
            'moved at every such call.'
        ) from error


def _refused(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether a value of a transformation is of an array that JAX does not take there: it alone can tell."""
    if sharding is None or not isinstance(leaf, jax.core.Tracer) or is_compiled():
        return False
    try:
        jax.jit(lambda value: value, in_shardings=sharding)(leaf)
    except ValueError:
        return True
    return False


def _lies(leaf: Any) -> Any:
    """How the array behind a value of a transformation lies."""
    seen: list[Any] = ['(not known)']
    with contextlib.suppress(NotImplementedError):  # of transformations that cannot look
        jax.debug.inspect_array_sharding(leaf, callback=seen.append)
    return seen[-1]


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
