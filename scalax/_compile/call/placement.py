"""Moves the arguments of a call to the shardings that the rules give them."""

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
    has_explicit_type,
    is_mismatched,
    sharding_in_type,
    traced_dtype,
    type_fits_mesh,
    type_matches,
)
from scalax._core.context import resharding
from scalax._core.context.constraints import apply_sharding, has_explicit_axes
from scalax._core.pytree.paths import type_text
from scalax._jax.tracing import ABSTRACT, is_abstract, is_compiled, is_reference, memory_space, type_of
from scalax.errors import ArgumentError
from scalax.rules._resolve import named_sharding

MoveFunction = Callable[[Any, Mapping[int, NamedSharding]], Any]
"""Gives leaves of a tree, by index, other shardings: `move_leaves`, or `retype_leaves` for types only."""


class ReshardPolicy(NamedTuple):
    """Which arguments of a call are moved, or get another type.

    Attributes:
        moves_unplaced: move leaves that ``jax.jit`` would place: numpy data, uncommitted arrays, arrays that
            it accepts from other devices, and values of an outer trace with another type. Needed where types
            hold shardings.
        moves_mismatched: move arrays that the user has committed to another sharding.
        retypes_foreign: give arrays with a type of a mesh with Explicit axes a type of Auto axes. They stay
            on their devices. Needed if the helper's mesh has no Explicit axis.
    """

    moves_unplaced: bool = False
    moves_mismatched: bool = False
    retypes_foreign: bool = False

    def target_sharding(self, leaf: Any, sharding: NamedSharding | None) -> NamedSharding | None:
        """Returns the sharding that *leaf* is moved to, or None if it stays as it is.

        Args:
            leaf: the leaf.
            sharding: the sharding that the rules give it.
        """
        if self.retypes_foreign and has_explicit_type(leaf):
            return sharding or _with_auto_axes(leaf)
        return sharding if sharding is not None and self._must_move(leaf, sharding) else None

    def _must_move(self, leaf: Any, sharding: NamedSharding) -> bool:
        if not (self.moves_unplaced or self.moves_mismatched) or is_reference(leaf):
            return False  # nothing moves, or the owner of a reference may write to it
        if is_abstract(leaf):
            current = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else sharding_in_type(leaf)
            return self.moves_unplaced and current is None
        if isinstance(leaf, jax.core.Tracer) and self.moves_unplaced and not type_matches(leaf, sharding):
            return True
        if isinstance(sharding.mesh, AbstractMesh):
            return self.moves_unplaced and not isinstance(leaf, jax.core.Tracer)
        if not sharding.is_fully_addressable:
            return False  # other processes hold some of the shards: JAX decides what may be moved, and how
        if isinstance(leaf, jax.core.Tracer):
            return self.moves_mismatched and not is_compiled()  # an array under jax.grad or jax.vmap
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            return self.moves_unplaced
        if is_mismatched(leaf, sharding):
            return self.moves_mismatched
        is_placed = leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        return self.moves_unplaced and not (is_placed and type_fits_mesh(leaf, sharding.mesh))


def with_devices(
    call: Call, mesh: Mesh | AbstractMesh, shardings_of_rules: Callable[[Call], Shardings]
) -> Call:
    """Adds devices to types that name a mesh of the same axes without devices, for a call that is not run.

    The types of ``jax.typeof`` name such meshes, and ``jax.jit`` cannot lower a program for them alone. Over
    Auto axes a type does not contain the array's sharding. It is taken from the rules, if they give one.
    """
    if isinstance(mesh, AbstractMesh):
        return call
    leaves = [_with_devices(leaf, mesh) if is_abstract(leaf) else leaf for leaf in call.leaves]
    if all(map(operator.is_, leaves, call.leaves)):
        return call
    placed = Call(call.signature, call.with_leaves(leaves))
    shardings = shardings_of_rules(placed)
    for i, (leaf, original, sharding) in enumerate(zip(leaves, call.leaves, shardings, strict=True)):
        is_type = leaf is not original and isinstance(original, jax.core.ShapedArray)
        if is_type and sharding is not None and explicit_spec(leaf.sharding) == explicit_spec(sharding):
            leaves[i] = _retype_leaf(leaf, sharding)
    return Call(call.signature, call.with_leaves(leaves))


def _with_devices(leaf: Any, mesh: Mesh) -> Any:
    leaf_mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else mesh
    if isinstance(leaf_mesh, Mesh) or [*leaf_mesh.shape.items()] != [*mesh.shape.items()]:
        return leaf
    if AxisType.Explicit in mesh.axis_types and not has_explicit_axes(leaf.sharding):
        return leaf  # over Auto axes a type does not contain the array's sharding
    memory_kind = 'pinned_host' if memory_space(leaf) == jax.memory.Space.Host else leaf.sharding.memory_kind
    same_types_mesh = mesh.update(axis_types=leaf_mesh.axis_types)
    return _retype_leaf(leaf, named_sharding(same_types_mesh, leaf.sharding.spec, memory_kind))


def target_shardings(
    leaves: Sequence[Any], shardings: Shardings, policy: ReshardPolicy
) -> dict[int, NamedSharding]:
    """Returns the new shardings of the leaves that are moved, by index."""
    targets = enumerate(map(policy.target_sharding, leaves, shardings))
    return {i: target for i, target in targets if target is not None}


def place_arguments(
    call: Call, shardings: Shardings, policy: ReshardPolicy, move: MoveFunction
) -> Sequence[Any]:
    """Returns the flat arguments with the shardings of the rules.

    If nothing moves, they are the flat arguments of *call* themselves.

    Args:
        call: the call.
        shardings: the shardings that the rules give its leaves.
        policy: which leaves are moved.
        move: how a tree's leaves are moved.
    """
    placed: dict[int, Any] = {}
    leaves = call.by_slot(call.leaves)
    for slot, slot_shardings in call.by_slot(shardings).items():
        if targets := target_shardings(leaves[slot], slot_shardings, policy):
            placed[slot] = move(call.flat_args[slot], targets)
    return [placed.get(slot, tree) for slot, tree in enumerate(call.flat_args)] if placed else call.flat_args


def move_leaves(tree: Any, targets: Mapping[int, NamedSharding]) -> Any:
    """Moves leaves of a tree, by index, to other shardings. Values of an outer trace are resharded in it."""
    leaves, treedef = jax.tree.flatten(tree)
    not_arrays = (jax.core.Tracer, *ABSTRACT)
    arrays = [
        i
        for i, target in targets.items()
        if isinstance(target.mesh, Mesh) and not isinstance(leaves[i], not_arrays)
    ]
    # One transfer for all leaves, because each transfer costs a dispatch.
    moved = resharding.device_put([leaves[i] for i in arrays], [targets[i] for i in arrays])
    moved_by_index = dict(zip(arrays, moved, strict=True))
    for i, target in targets.items():
        leaves[i] = moved_by_index[i] if i in moved_by_index else _reshard(leaves[i], target)
    return jax.tree.unflatten(treedef, leaves)


def _reshard(leaf: Any, sharding: NamedSharding) -> Any:
    if is_abstract(leaf):
        return _retype_leaf(leaf, sharding)
    if is_compiled() or has_explicit_axes(sharding):
        return apply_sharding(leaf, sharding)
    # Under jax.vmap, a constraint of JAX 0.10 does not reshard the dimensions of an array.
    return resharding.identity(sharding)(leaf)


def retype_leaves(tree: Any, targets: Mapping[int, NamedSharding]) -> Any:
    """Replaces leaves of a tree, by index, by the types that they would have after the move, for tracing."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, target in targets.items():
        leaves[i] = _retype_leaf(leaves[i], target)
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception:  # noqa: BLE001 - a node that accepts only arrays is traced with arrays
        return move_leaves(tree, targets)


def _retype_leaf(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    aval = type_of(leaf)
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
    if traced_dtype(struct) == aval.dtype:
        return struct
    # The array was made under x64, which is off now, so that no struct has its dtype.
    if is_abstract(leaf):
        raise ArgumentError(
            f'{type_text(aval.dtype, aval.shape)} is a type of jax_enable_x64, which is off, and has to be '
            'placed on the mesh\n'
            'What to do: call this under jax.enable_x64(True), or pass the array.'
        )
    return move_leaves(leaf, {0: sharding})


def _with_auto_axes(leaf: Any) -> NamedSharding:
    """Returns the sharding of an array on the same mesh with Auto axes."""
    mesh = leaf.sharding.mesh
    auto_mesh = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return named_sharding(auto_mesh, leaf.sharding.spec, leaf.sharding.memory_kind)
