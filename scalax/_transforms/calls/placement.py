"""Moving the arguments of a call to the shardings that the rules give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from scalax._trace import resharding
from scalax._trace.constraints import apply_sharding, is_compiled, is_in_types
from scalax._transforms.calls.call_key import explicit_spec, traced_dtype
from scalax.rules._resolve import named_sharding

Shardings = Sequence[NamedSharding | None]
Move = Callable[[list[Any], list[NamedSharding]], list[Any]]


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array with buffers, rather than a tracer, numpy data or a struct."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a reference to an array (jax.new_ref), rather than one of an outer trace."""
    return isinstance(leaf, jax.Ref) and not isinstance(leaf, jax.core.Tracer)


@dataclasses.dataclass(frozen=True)
class Moves:
    """Which arguments of a call are moved, or are given another type.

    Attributes:
        unplaced: what ``jax.jit`` would place: numpy data, uncommitted arrays, and those of other devices
            that it takes; and values of an outer trace of another type. Needed where types hold shardings.
        mismatched: arrays that the user has committed to another sharding.
        foreign: arrays whose types are of a mesh with Explicit axes, for a mesh that has none: they get
            another type and stay on their devices.
    """

    unplaced: bool = False
    mismatched: bool = False
    foreign: bool = False

    def target(self, leaf: Any, sharding: NamedSharding | None) -> NamedSharding | None:
        """The sharding that *leaf* is moved to, given that of the rules; None if it stays as it is."""
        if self.foreign and _is_explicit(leaf):
            return sharding or _as_auto(leaf)
        return sharding if sharding is not None and self._moves(leaf, sharding) else None

    def _moves(self, leaf: Any, sharding: NamedSharding) -> bool:
        if not (self.unplaced or self.mismatched) or isinstance(leaf, jax.Ref):
            return False  # nothing moves, or others write to it
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return self.unplaced and leaf.sharding is None
        if isinstance(leaf, jax.core.Tracer) and self.unplaced and not _has_type(leaf, sharding):
            return True
        if isinstance(sharding.mesh, AbstractMesh):
            return self.unplaced and not isinstance(leaf, jax.core.Tracer)
        if not sharding.is_fully_addressable:
            return False  # other processes hold a part: JAX decides what may be moved, and how
        if isinstance(leaf, jax.core.Tracer):
            return self.mismatched and not is_compiled()  # an array under jax.grad or jax.vmap
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            return self.unplaced
        if is_mismatched(leaf, sharding):
            return self.mismatched
        return self.unplaced and not (
            leaf.sharding.is_equivalent_to(sharding, leaf.ndim) and _is_of(leaf, sharding.mesh)
        )


def place(
    flat_args: Sequence[Any], shardings: Mapping[int, Shardings], moves: Moves, move: Move
) -> Sequence[Any]:
    """Moves arguments to their shardings; returns *flat_args* itself if nothing moves.

    Args:
        flat_args: the call.
        shardings: for each dynamic slot the shardings of its leaves.
        moves: which are moved.
        move: moves leaves to shardings: `moved`, or `as_moved`, which gives their types only.
    """
    placed: dict[int, Any] = {}
    for slot, wanted in shardings.items():
        leaves = jax.tree.leaves(flat_args[slot])
        targets = {i: to for i, to in enumerate(map(moves.target, leaves, wanted)) if to is not None}
        if not targets:
            continue
        try:
            placed[slot] = with_moved(flat_args[slot], targets, move)
        except Exception:
            if move is not as_moved:
                raise
            # A node that refuses to hold types is traced with arrays: its own, unless types hold shardings.
            if moves.unplaced:
                return place(flat_args, shardings, moves, moved)
    return [placed.get(slot, tree) for slot, tree in enumerate(flat_args)] if placed else flat_args


def with_moved(tree: Any, targets: Mapping[int, NamedSharding], move: Move) -> Any:
    """A tree with some leaves moved: *targets* holds their shardings by the numbers of the leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    # One move for all leaves: one for each costs a dispatch a leaf.
    for i, leaf in zip(targets, move([leaves[i] for i in targets], [*targets.values()]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def moved(leaves: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """The leaves with these shardings: arrays are moved, values of an outer trace resharded in it."""
    types = jax.core.Tracer | jax.ShapeDtypeStruct
    here = [isinstance(sharding.mesh, Mesh) for sharding in shardings]
    arrays = [i for i, leaf in enumerate(leaves) if here[i] and not isinstance(leaf, types)]
    put = resharding.device_put([leaves[i] for i in arrays], [shardings[i] for i in arrays])
    arrived = dict(zip(arrays, put, strict=True))
    return [
        arrived[i] if i in arrived else _resharded(leaf, sharding)
        for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
    ]


def _resharded(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    if is_compiled() or is_in_types(sharding):
        return apply_sharding(leaf, sharding)
    # Of an array under jax.vmap, a constraint of JAX 0.10 leaves the dimensions as they are.
    return resharding.identity(sharding)(leaf)


def as_moved(leaves: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """The types of the leaves with these shardings: enough to trace with."""
    return [_as_moved(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _as_moved(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    aval = jax.typeof(leaf)
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
    if traced_dtype(struct) == aval.dtype:
        return struct
    return moved([leaf], [sharding])[0]  # an array of an x64 that is off now: no struct stands for it


def as_typed(tree: Any, shardings: Shardings) -> Any:
    """A tree of values inside a trace, resharded where their types differ from *shardings*."""
    leaves, treedef = jax.tree.flatten(tree)
    typed = [
        leaf if sharding is None or _has_type(leaf, sharding) else apply_sharding(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, typed)


def all_typed(flat_args: Sequence[Any], shardings: Mapping[int, Shardings]) -> bool:
    """Whether the types of all arguments agree with the rules over Explicit axes."""
    return all(
        sharding is None or _has_type(leaf, sharding)
        for slot, wanted in shardings.items()
        for leaf, sharding in zip(jax.tree.leaves(flat_args[slot]), wanted, strict=True)
    )


def slots_to_place(
    flat_args: Sequence[Any], shardings: Mapping[int, Shardings], moves: Moves
) -> frozenset[int]:
    """The slots with leaves that are moved."""
    return frozenset(
        slot
        for slot, wanted in shardings.items()
        if any(map(moves.target, jax.tree.leaves(flat_args[slot]), wanted))
    )


def _has_type(leaf: Any, sharding: NamedSharding) -> bool:
    return explicit_spec(jax.typeof(leaf).sharding) == explicit_spec(sharding)


def _is_of(leaf: jax.Array, mesh: Any) -> bool:
    """Whether the type of an array is one of this mesh; on Auto axes any type is."""
    if AxisType.Explicit not in mesh.axis_types:
        return True
    return isinstance(leaf.sharding, NamedSharding) and same_types(leaf.sharding.mesh, mesh)


def is_typed_by(leaf: Any, mesh: Any) -> bool:
    """Whether a function that is traced on *mesh* takes the type of an array."""
    return not is_concrete(leaf) or (
        _is_of(leaf, mesh) and (not _is_explicit(leaf) or same_types(leaf.sharding.mesh, mesh))
    )


def _is_explicit(leaf: Any) -> bool:
    """Whether an array, or a struct of one, has a type of a mesh with Explicit axes."""
    if not is_concrete(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
        return False
    return is_in_types(leaf.sharding)


def _as_auto(leaf: Any) -> NamedSharding:
    """The sharding that an array has, on the same mesh with Auto axes."""
    mesh = leaf.sharding.mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    same: Any = (
        mesh.update(axis_types=types)
        if isinstance(mesh, AbstractMesh)
        else Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    )
    return named_sharding(same, leaf.sharding.spec, leaf.sharding.memory_kind)


def same_types(first: Any, second: Any) -> bool:
    """Whether two meshes, with devices or without, give arrays the same types."""
    return (dict(first.shape), first.axis_types) == (dict(second.shape), second.axis_types)


def is_mismatched(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether an array is committed to another sharding than asked, so that ``jax.jit`` refuses it.

    Where whole copies are asked for, JAX takes a whole copy on any device.
    """
    if sharding is None or not committed_elsewhere(leaf, sharding):
        return False
    if isinstance(leaf, jax.Ref):
        return True
    whole = leaf.sharding.is_fully_replicated and sharding.is_fully_replicated
    return not (whole and leaf.sharding.memory_kind == sharding.memory_kind)


def committed_elsewhere(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether an array is committed to anything but *sharding*."""
    if sharding is None or not (is_reference(leaf) or (is_concrete(leaf) and leaf.committed)):
        return False
    if isinstance(sharding.mesh, AbstractMesh):
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
