"""How do the arguments of a call come to lie where the program wants them?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from scalax import _unreduced
from scalax._constrain import apply_sharding, is_compiled
from scalax._sjit._convention import Layout
from scalax._sjit._signature import explicit_spec, traced_dtype

Shardings = Sequence[NamedSharding | None]
Move = Callable[[list[Any], list[NamedSharding]], list[Any]]


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array with buffers, rather than a tracer, numpy data or a struct."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


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
    put = _unreduced.device_put([leaves[i] for i in arrays], [shardings[i] for i in arrays])
    for i, leaf in zip(arrays, put, strict=True):
        arrived[i] = leaf
    return arrived


def _resharded(leaf: jax.core.Tracer, sharding: NamedSharding) -> Any:
    if is_compiled() or explicit_spec(sharding) is not None:
        return apply_sharding(leaf, sharding)
    # Of an array under jax.vmap, a constraint of JAX 0.10 leaves the dimensions as they are.
    return _moving(sharding)(leaf)


@functools.lru_cache(maxsize=256)
def _moving(sharding: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda value: value, out_shardings=sharding)


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
    return not leaf.committed or _is_retyped(leaf, sharding) or (mismatched and is_mismatched(leaf, sharding))


def _is_retyped(leaf: jax.Array, sharding: NamedSharding) -> bool:
    """Whether an array lies where it should, and its type is of another mesh: then nothing moves."""
    return (
        AxisType.Explicit in sharding.mesh.axis_types
        and not (isinstance(leaf.sharding, NamedSharding) and same_types(leaf.sharding.mesh, sharding.mesh))
        and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    )


def same_types(first: Any, second: Any) -> bool:
    """Whether two meshes, with devices or without, give arrays the same types."""
    return (dict(first.shape), first.axis_types) == (dict(second.shape), second.axis_types)


def is_mismatched(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether an array is committed to another sharding than asked."""
    if sharding is None or not is_concrete(leaf) or not leaf.committed:
        return False
    if isinstance(sharding.mesh, AbstractMesh):
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
