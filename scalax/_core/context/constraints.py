"""Sharding constraints and annotations of values inside compiled functions.

The JAX operation depends on the type of each mesh axis: an Auto axis needs a sharding *constraint*, an
Explicit axis a *reshard*, because it is part of the value's type, and a Manual axis, inside ``shard_map``,
is ignored, because it belongs to the caller.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._core.context import active_helper
from scalax._core.context.resharding import reshard
from scalax._core.pytree import partition_specs, spec_validation
from scalax._core.util.renamed_keywords import renamed
from scalax._jax.shardings import compile_for_devices, unconstrained_sharding
from scalax._jax.tracing import is_compiled, is_traced
from scalax.errors import ArgumentError, MeshError
from scalax.rules._indivisible import OnIndivisible
from scalax.rules._resolve import ResolveMode, fill_unconstrained, resolve
from scalax.rules._rule_tree import RuleLike, match_subtrees

Tree = TypeVar('Tree')


@renamed(pytree='tree', sharding_rule='rules')
def with_sharding_constraint(tree: Tree, rules: RuleLike) -> Tree:
    """Constrains the sharding of a tree of arrays, inside a function that `sjit` compiles.

    With an active helper (inside `sjit`, or in ``helper.get_context()``) the helper's mesh is used.
    Without one, NamedShardings apply as they are, rules and PartitionSpecs use the mesh of
    ``jax.set_mesh`` if there is one, and otherwise nothing happens.

    Args:
        tree: arrays, or anything JAX takes as one.
        rules: a rule, a PartitionSpec, a NamedSharding, None (leave it to the compiler), or a
            pytree prefix of these.

    Returns:
        The tree with the same values, sharded as asked. Inside ``shard_map`` the axes that are manual
        there are left alone.

    Raises:
        ShardingError: some leaves cannot be sharded as asked; all of them are named.

    Example:
        >>> import jax.numpy as jnp
        >>> from scalax.sharding import MeshShardingHelper
        >>> helper = MeshShardingHelper([-1], ['data'])
        >>> @helper.sjit
        ... def double(x):
        ...     return with_sharding_constraint(2 * x, PartitionSpec('data'))
        >>> double(jnp.ones(16)).sharding.spec
        P('data',)
    """
    context = active_helper.current()
    if context is not None:
        helper = context.helper
        return constrain(tree, rules, helper.mesh, helper.on_indivisible)
    ambient = ambient_mesh()
    if ambient.empty:
        return _constrain_named_shardings(tree, rules)
    return constrain(tree, rules, ambient, 'error')


@renamed(pytree='tree')
def with_sharding_annotation(tree: Tree, sharding_name: str) -> Tree:
    """Names a value in a model, whose sharding is chosen where the model is compiled.

    The sharding is the one that ``helper.sjit(..., annotation_shardings={sharding_name: rule})`` (or
    ``helper.get_context(...)``) binds to the name. A name that nobody bound does nothing.

    Args:
        tree: arrays, or anything JAX takes as one.
        sharding_name: the name.

    Returns:
        The tree with the same values.

    Raises:
        ShardingError: the rule bound to the name does not fit the tree; all bad leaves are named.

    Example:
        >>> import jax.numpy as jnp
        >>> from scalax.sharding import MeshShardingHelper
        >>> def model(x):
        ...     return with_sharding_annotation(2 * x, 'hidden')
        >>> helper = MeshShardingHelper([-1], ['data'])
        >>> compiled = helper.sjit(model, annotation_shardings={'hidden': PartitionSpec('data')})
        >>> compiled(jnp.ones(16)).sharding.spec
        P('data',)
    """
    if not isinstance(sharding_name, str):
        raise ArgumentError(
            f'with_sharding_annotation(tree, name): the name is a string, got {type(sharding_name).__name__}'
        )
    binding = active_helper.look_up_annotation(sharding_name)
    if binding is None:
        return tree
    helper, rules = binding
    where = f'annotation {sharding_name!r}'
    # The scope names the operation in profiles and plans.
    with jax.named_scope(f'annotation({sharding_name})'):
        return constrain(tree, rules, helper.mesh, helper.on_indivisible, where)


def constrain(
    pytree: Any,
    rules: RuleLike,
    mesh: Mesh | AbstractMesh,
    on_indivisible: OnIndivisible = 'error',
    where: str = 'a sharding constraint',
) -> Any:
    """Resolves rules on a mesh and applies the shardings to a pytree."""
    mesh = retyped_mesh(mesh)
    resolution = resolve(
        rules,
        pytree,
        mesh,
        mode=ResolveMode.INTERMEDIATE if is_compiled() else ResolveMode.EAGER,
        where=where,
        on_indivisible=on_indivisible,
    )
    with use_mesh(mesh, where):
        return apply_shardings(resolution.treedef.unflatten(resolution.tree.leaves), resolution.shardings)


def apply_shardings(pytree: Any, shardings: Sequence[NamedSharding | None]) -> Any:
    """Applies resolved shardings, one for each leaf. None leaves a leaf unchanged."""
    leaves, treedef = jax.tree.flatten(pytree)
    applied = [
        leaf if sharding is None else apply_sharding(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, applied)


def has_explicit_axes(sharding: Any) -> TypeGuard[NamedSharding]:
    """Returns whether a sharding is part of the types of its arrays, because its mesh has Explicit axes."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def explicit_sharding(kind: Any) -> NamedSharding | None:
    """Returns the sharding of a type over Explicit axes, or None if it has no Explicit axes."""
    sharding = kind.sharding
    if not has_explicit_axes(sharding):
        return None
    if AxisType.Auto not in sharding.mesh.axis_types:
        return sharding
    # The compiler decides about Auto axes.
    open_entries = [
        entry or partition_specs.UNCONSTRAINED for entry in partition_specs.entries(sharding.spec)
    ]
    return sharding.update(spec=PartitionSpec(*open_entries))


def retyped_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns the mesh with the axis types of the enclosing shard_map, auto_axes or explicit_axes.

    Outside of these it is *mesh* itself, or the active mesh in its place. Types in a trace refer to the
    Explicit axes of the ambient mesh, even if it is for another platform. They do not hold Auto axes, and
    shardings on a mesh without devices would be lost.
    """
    ambient, mesh = jax.sharding.get_abstract_mesh(), active_helper.active_mesh(mesh)
    is_explicit = AxisType.Explicit in mesh.axis_types and _has_same_axes(ambient, mesh)
    differs = has_other_types(ambient, mesh) or (is_explicit and ambient != as_abstract(mesh))
    if ambient.empty or (not ambient.manual_axes and not (differs and is_traced())):
        return mesh
    if dict(ambient.shape) != dict(mesh.shape):
        raise MeshError(
            f'inside shard_map over the mesh ({partition_specs.axis_sizes_text(ambient.shape)}), '
            'but the active helper '
            f'has the mesh ({partition_specs.axis_sizes_text(mesh.shape)}): use the helper of the same mesh'
        )
    return ambient


def use_mesh(mesh: Mesh | AbstractMesh, label: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager in which *mesh* is the ambient mesh, in place of that of ``jax.set_mesh``.

    Raises:
        MeshError: the ambient mesh has other devices, or values of a compiled function have types of it.
    """
    ambient, abstract = jax.sharding.get_abstract_mesh(), as_abstract(mesh)
    if ambient.empty:
        return contextlib.nullcontext()
    if not is_traced() and isinstance(mesh, Mesh) and not jax.sharding.get_mesh().empty:
        ids, ambient_ids = ([device.id for device in m.devices.flat] for m in (mesh, jax.sharding.get_mesh()))
        if ids != ambient_ids:
            raise MeshError(
                f'{label} uses the devices {ids}, but jax.set_mesh is active with the devices {ambient_ids}: '
                'exit that mesh before the call'
            )
    if ambient == abstract:
        return contextlib.nullcontext()
    if ambient.size != abstract.size:
        raise MeshError(
            f'{label} uses a mesh of {abstract.size} devices, but jax.set_mesh is active with a mesh of '
            f'{ambient.size}: exit that mesh before the call'
        )
    if AxisType.Explicit in (*ambient.axis_types, *abstract.axis_types) and is_compiled():
        raise MeshError(
            f'{label} uses the mesh ({partition_specs.axis_sizes_text(abstract.shape)}), in a function that '
            f'is compiled for the mesh ({partition_specs.axis_sizes_text(ambient.shape)}): JAX cannot '
            'combine values of two meshes with Explicit axes; use one helper for both'
        )
    return jax.sharding.use_abstract_mesh(abstract)


def as_abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """Returns the mesh without devices."""
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def has_other_types(ambient: AbstractMesh, mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether *ambient* has the axes of *mesh*, with other types."""
    return _has_same_axes(ambient, mesh) and ambient.axis_types != mesh.axis_types


def _has_same_axes(ambient: AbstractMesh, mesh: Mesh | AbstractMesh) -> bool:
    return list(ambient.shape.items()) == list(mesh.shape.items())


def ambient_mesh() -> Mesh | AbstractMesh:
    """Returns the mesh of ``jax.set_mesh``: inside ``jax.jit`` without devices, outside with devices."""
    return jax.sharding.get_abstract_mesh() if is_traced() else jax.sharding.get_mesh()


def apply_sharding(leaf: Any, sharding: NamedSharding) -> Any:
    """Applies a resolved sharding to one array or traced value."""
    mesh, spec = sharding.mesh, sharding.spec
    axes = partition_specs.MeshAxes.of(mesh)
    explicit, auto = set(axes.of_type(AxisType.Explicit)), set(axes.of_type(AxisType.Auto))
    if {*axes.types.values()} == {AxisType.Auto}:
        if isinstance(mesh, AbstractMesh) and not is_compiled():
            # Under jax.grad or jax.vmap alone, JAX cannot place an array on a mesh without devices.
            return _compiled_constraint(sharding)(leaf)
        return _constrained(leaf, sharding)
    if explicit:
        explicit_spec = partition_specs.with_entries(
            spec, fill_unconstrained(partition_specs.only_axes(spec, explicit), leaf)
        )
        if not has_type(leaf, mesh, explicit_spec):
            leaf = reshard(leaf, sharding.update(spec=explicit_spec))
    if auto:
        # A dimension that an Explicit axis shards gets None: its type keeps that axis.
        auto_spec = partition_specs.only_axes(PartitionSpec(*partition_specs.entries(spec)), auto)
        leaf = _compiled_constraint(sharding.update(spec=auto_spec))(leaf)
    return leaf


def constrain_to_devices(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Constrains the outputs of a function to the devices of a mesh of Auto axes, without fixing a sharding.

    In a trace, JAX knows the ambient mesh without its devices. If nothing else determines the devices of a
    program, it is compiled for one device, and specs of JAX's own functions are lost. Outputs are never
    dropped as unused, and the gradients of inexact outputs are constrained too.
    """
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = {
        i: jax.typeof(leaf).dtype for i, leaf in enumerate(leaves) if hasattr(jax.typeof(leaf), 'dtype')
    }
    for i in [i for i in dtypes if jnp.issubdtype(dtypes[i], jnp.inexact)] or [*dtypes][:1]:
        leaves[i] = compile_for_devices(leaves[i], mesh)
    if not dtypes:  # JAX does not remove this unused constraint
        compile_for_devices(jnp.zeros(()), mesh)
    return jax.tree.unflatten(treedef, leaves)


def has_type(leaf: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> bool:
    """Returns whether a traced value has this sharding in its type, so that it needs no reshard.

    A reshard would also fix its dimensions over Auto axes.
    """
    current = jax.typeof(leaf).sharding
    return (
        isinstance(leaf, jax.core.Tracer)
        and dict(current.mesh.shape) == dict(mesh.shape)
        and partition_specs.canonical(current.spec) == partition_specs.canonical(spec)
    )


@functools.lru_cache(maxsize=4096)
def _compiled_constraint(sharding: NamedSharding) -> Callable[[Any], Any]:
    """Returns a compiled function that constrains the Auto axes of a mixed mesh.

    Outside of ``jax.jit``, a constraint places the entire array, which would undo the reshard. The function
    is not inlined, because JAX 0.10 would then give cotangents a type without the Explicit axes.
    """
    return jax.jit(lambda leaf: _constrained(leaf, sharding))


def _constrained(leaf: Any, sharding: NamedSharding) -> Any:
    constrained = jax.lax.with_sharding_constraint(leaf, sharding)
    if not spec_validation.indivisible_dims(
        sharding.spec, np.shape(leaf), partition_specs.MeshAxes.of(sharding.mesh)
    ):
        return constrained
    # JAX (0.12.0.1) fails to read the sharding of a padded output if 1 < gcd(size, shards) < shards, unless
    # the output is also constrained to UNCONSTRAINED.
    return jax.lax.with_sharding_constraint(constrained, unconstrained_sharding(leaf, sharding.mesh))


def _constrain_named_shardings(pytree: Any, rules: RuleLike) -> Any:
    """Applies NamedShardings, which have a mesh, where there is no ambient mesh. Other rules do nothing."""
    parts = match_subtrees(rules, pytree)
    if not any(isinstance(part.rule, NamedSharding) for part in parts):
        return pytree
    subtrees = [
        constrain(part.tree, part.rule, part.rule.mesh) if isinstance(part.rule, NamedSharding) else part.tree
        for part in parts
    ]
    return jax.tree.unflatten(jax.tree.structure(pytree), jax.tree.leaves(subtrees))
