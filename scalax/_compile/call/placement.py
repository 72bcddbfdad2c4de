"""Moving the arguments of a call to the shardings that the rules give them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from scalax._compile.call.call_key import (
    Call,
    Shardings,
    explicit_spec,
    has_type,
    is_explicit,
    is_mismatched,
    is_typed_by,
    sharding_in_type,
    traced_dtype,
)
from scalax._core.context import resharding
from scalax._core.context.constraints import apply_sharding, has_explicit_axes
from scalax._core.pytree.paths import type_text
from scalax._jax.tracing import ABSTRACT, is_abstract, is_compiled, is_reference, memory_space, type_of
from scalax.errors import ArgumentError
from scalax.rules._resolve import named_sharding

Move = Callable[[Any, Mapping[int, NamedSharding]], Any]
"""Gives leaves of a tree, by number, other shardings: `moved`, or `as_moved`, which gives types only."""


class Moves(NamedTuple):
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
        if self.foreign and is_explicit(leaf):
            return sharding or _as_auto(leaf)
        return sharding if sharding is not None and self._moves(leaf, sharding) else None

    def _moves(self, leaf: Any, sharding: NamedSharding) -> bool:
        if not (self.unplaced or self.mismatched) or is_reference(leaf):
            return False  # nothing moves, or others write to it
        if is_abstract(leaf):
            placed = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else sharding_in_type(leaf)
            return self.unplaced and placed is None
        if isinstance(leaf, jax.core.Tracer) and self.unplaced and not has_type(leaf, sharding):
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
        fits = leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        return self.unplaced and not (fits and is_typed_by(leaf, sharding.mesh))


def with_devices(
    call: Call, mesh: Mesh | AbstractMesh, shardings_of_rules: Callable[[Call], Shardings]
) -> Call:
    """Returns a call that is not run, with devices for types that name a mesh of the same axes without any.

    The types of ``jax.typeof`` name such meshes, and ``jax.jit`` lowers no program for these alone. Over Auto
    axes a type does not say where its array is: the rules do, if they have a sharding for it.
    """
    if isinstance(mesh, AbstractMesh):
        return call
    leaves = [_with_devices(leaf, mesh) if is_abstract(leaf) else leaf for leaf in call.leaves]
    if all(map(operator.is_, leaves, call.leaves)):
        return call
    placed = Call(call.signature, call.replaced(leaves))
    shardings = shardings_of_rules(placed)
    for i, (leaf, before, sharding) in enumerate(zip(leaves, call.leaves, shardings, strict=True)):
        is_type = leaf is not before and isinstance(before, jax.core.ShapedArray)
        if is_type and sharding is not None and explicit_spec(leaf.sharding) == explicit_spec(sharding):
            leaves[i] = _as_moved(leaf, sharding)
    return Call(call.signature, call.replaced(leaves))


def _with_devices(leaf: Any, mesh: Mesh) -> Any:
    own = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else mesh
    if isinstance(own, Mesh) or [*own.shape.items()] != [*mesh.shape.items()]:
        return leaf
    if AxisType.Explicit in mesh.axis_types and not has_explicit_axes(leaf.sharding):
        return leaf  # over Auto axes a type does not say where the array is
    kind = 'pinned_host' if memory_space(leaf) == jax.memory.Space.Host else leaf.sharding.memory_kind
    same = mesh.update(axis_types=own.axis_types)
    return _as_moved(leaf, named_sharding(same, leaf.sharding.spec, kind))


def targets(leaves: Sequence[Any], shardings: Shardings, moves: Moves) -> dict[int, NamedSharding]:
    """The leaves that are moved, by number, with their new shardings."""
    return {i: to for i, to in enumerate(map(moves.target, leaves, shardings)) if to is not None}


def place(call: Call, shardings: Shardings, moves: Moves, move: Move) -> Sequence[Any]:
    """The flat arguments where the rules want them; those of *call* themselves if nothing moves.

    Args:
        call: the call.
        shardings: the shardings of its leaves.
        moves: which are moved.
        move: how.
    """
    placed: dict[int, Any] = {}
    leaves = call.by_slot(call.leaves)
    for slot, wanted in call.by_slot(shardings).items():
        if found := targets(leaves[slot], wanted, moves):
            placed[slot] = move(call.flat_args[slot], found)
    return [placed.get(slot, tree) for slot, tree in enumerate(call.flat_args)] if placed else call.flat_args


def moved(tree: Any, found: Mapping[int, NamedSharding]) -> Any:
    """A tree with leaves moved to the shardings found: values of an outer trace are resharded in it."""
    leaves, treedef = jax.tree.flatten(tree)
    types = (jax.core.Tracer, *ABSTRACT)
    arrays = [i for i, to in found.items() if isinstance(to.mesh, Mesh) and not isinstance(leaves[i], types)]
    # One move for all leaves: one for each costs a dispatch a leaf.
    put = resharding.device_put([leaves[i] for i in arrays], [found[i] for i in arrays])
    arrived = dict(zip(arrays, put, strict=True))
    for i, to in found.items():
        leaves[i] = arrived[i] if i in arrived else _resharded(leaves[i], to)
    return jax.tree.unflatten(treedef, leaves)


def _resharded(leaf: Any, sharding: NamedSharding) -> Any:
    if is_abstract(leaf):
        return _as_moved(leaf, sharding)
    if is_compiled() or has_explicit_axes(sharding):
        return apply_sharding(leaf, sharding)
    # Of an array under jax.vmap, a constraint of JAX 0.10 leaves the dimensions as they are.
    return resharding.identity(sharding)(leaf)


def as_moved(tree: Any, found: Mapping[int, NamedSharding]) -> Any:
    """A tree with the types of leaves as they are once moved: enough to trace with."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, to in found.items():
        leaves[i] = _as_moved(leaves[i], to)
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception:  # noqa: BLE001 - a node that takes nothing but arrays is traced with them
        return moved(tree, found)


def _as_moved(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    aval = type_of(leaf)
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
    if traced_dtype(struct) == aval.dtype:
        return struct
    # It is of an x64 that is off now, and no struct stands for it.
    if is_abstract(leaf):
        raise ArgumentError(
            f'{type_text(aval.dtype, aval.shape)} is a type of jax_enable_x64, which is off, and has to be '
            'placed on the mesh\n'
            'What to do: call this under jax.enable_x64(True), or pass the array.'
        )
    return moved(leaf, {0: sharding})


def _as_auto(leaf: Any) -> NamedSharding:
    """The sharding that an array has, on the same mesh with Auto axes."""
    mesh = leaf.sharding.mesh
    same = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return named_sharding(same, leaf.sharding.spec, leaf.sharding.memory_kind)
