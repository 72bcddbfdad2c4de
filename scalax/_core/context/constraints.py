"""Constraints and annotations: shardings of values inside compiled functions.

What JAX is asked for depends on the type of each mesh axis: an Auto axis takes a sharding *constraint*,
an Explicit axis a *reshard* (it is part of the value's type), and a Manual axis, inside ``shard_map``,
belongs to the caller and is left alone.
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
    """Names a place in a model, to be given its sharding where the model is compiled.

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
    found = active_helper.look_up_annotation(sharding_name)
    if found is None:
        return tree
    helper, rules = found
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
    """Resolves *rules* on *mesh* and applies the shardings to *pytree*."""
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
    """Applies shardings that are resolved already, one for each leaf; None leaves a leaf as it is."""
    leaves, treedef = jax.tree.flatten(pytree)
    applied = [
        leaf if sharding is None else apply_sharding(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, applied)


def has_explicit_axes(sharding: Any) -> TypeGuard[NamedSharding]:
    """Whether arrays of this sharding have it in their types: its mesh has Explicit axes."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def explicit_sharding(kind: Any) -> NamedSharding | None:
    """The sharding that a type has over Explicit axes; None without any."""
    sharding = kind.sharding
    if not has_explicit_axes(sharding):
        return None
    if AxisType.Auto not in sharding.mesh.axis_types:
        return sharding
    # Along Auto axes the compiler decides.
    open_ = [entry or partition_specs.UNCONSTRAINED for entry in partition_specs.entries(sharding.spec)]
    return sharding.update(spec=PartitionSpec(*open_))


def retyped_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with the axis types that JAX's shard_map, auto_axes or explicit_axes gives it here.

    Outside of these it is *mesh* itself, or the mesh that stands in for it. The types of a trace hold
    Explicit axes of the mesh in force, even if that is for another platform. They hold no Auto axes, and
    shardings on a mesh without devices are lost.
    """
    ambient, mesh = jax.sharding.get_abstract_mesh(), active_helper.active_mesh(mesh)
    in_types = AxisType.Explicit in mesh.axis_types and _has_same_axes(ambient, mesh)
    retyped = (has_other_types(ambient, mesh) or (in_types and ambient != as_abstract(mesh))) and is_traced()
    if ambient.empty or (not ambient.manual_axes and not retyped):
        return mesh
    if dict(ambient.shape) != dict(mesh.shape):
        raise MeshError(
            f'inside shard_map over the mesh ({partition_specs.axis_sizes_text(ambient.shape)}), '
            'but the active helper '
            f'has the mesh ({partition_specs.axis_sizes_text(mesh.shape)}): use the helper of the same mesh'
        )
    return ambient


def use_mesh(mesh: Mesh | AbstractMesh, what: str) -> contextlib.AbstractContextManager[Any]:
    """A context manager in which *mesh* is in force, for operations of JAX, in place of ``jax.set_mesh``.

    Raises:
        MeshError: the other mesh has other devices; or values of a compiled function have types of it.
    """
    ambient, own = jax.sharding.get_abstract_mesh(), as_abstract(mesh)
    if ambient.empty:
        return contextlib.nullcontext()
    if not is_traced() and isinstance(mesh, Mesh) and not jax.sharding.get_mesh().empty:
        devices = [[device.id for device in each.devices.flat] for each in (mesh, jax.sharding.get_mesh())]
        if devices[0] != devices[1]:
            raise MeshError(
                f'{what} is for the devices {devices[0]}, under jax.set_mesh of the devices {devices[1]}: '
                'exit that mesh before the call'
            )
    if ambient == own:
        return contextlib.nullcontext()
    if ambient.size != own.size:
        raise MeshError(
            f'{what} is for a mesh of {own.size} devices, under jax.set_mesh of one of {ambient.size}: exit '
            'that mesh before the call'
        )
    if AxisType.Explicit in (*ambient.axis_types, *own.axis_types) and is_compiled():
        ours, theirs = (
            partition_specs.axis_sizes_text(own.shape),
            partition_specs.axis_sizes_text(ambient.shape),
        )
        raise MeshError(
            f'{what} is for the mesh ({ours}), in a function that is compiled for the mesh ({theirs}): JAX '
            'joins no values of two meshes where axes are Explicit; use the helper of one mesh'
        )
    return jax.sharding.use_abstract_mesh(own)


def as_abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """The mesh without devices."""
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def has_other_types(ambient: AbstractMesh, mesh: Mesh | AbstractMesh) -> bool:
    """Whether *ambient* has the axes of *mesh*, of other types."""
    return _has_same_axes(ambient, mesh) and ambient.axis_types != mesh.axis_types


def _has_same_axes(ambient: AbstractMesh, mesh: Mesh | AbstractMesh) -> bool:
    return list(ambient.shape.items()) == list(mesh.shape.items())


def ambient_mesh() -> Mesh | AbstractMesh:
    """The mesh of ``jax.set_mesh``: with its devices outside of ``jax.jit``, without them inside."""
    return jax.sharding.get_abstract_mesh() if is_traced() else jax.sharding.get_mesh()


def apply_sharding(leaf: Any, sharding: NamedSharding) -> Any:
    """Applies a sharding that is resolved already to one array or value of a trace."""
    mesh, spec = sharding.mesh, sharding.spec
    axes = partition_specs.MeshAxes.of(mesh)
    explicit, auto = set(axes.of_type(AxisType.Explicit)), set(axes.of_type(AxisType.Auto))
    if {*axes.types.values()} == {AxisType.Auto}:
        if isinstance(mesh, AbstractMesh) and not is_compiled():
            # Under jax.grad or jax.vmap alone JAX puts no array on a mesh without devices.
            return _compiled_constraint(sharding)(leaf)
        return _constrained(leaf, sharding)
    if explicit:
        typed = partition_specs.with_entries(
            spec, fill_unconstrained(partition_specs.only_axes(spec, explicit), leaf)
        )
        if not has_type(leaf, mesh, typed):
            leaf = reshard(leaf, sharding.update(spec=typed))
    if auto:
        # None for a dimension that an Explicit axis shards: the type keeps that axis.
        constraint = partition_specs.only_axes(PartitionSpec(*partition_specs.entries(spec)), auto)
        leaf = _compiled_constraint(sharding.update(spec=constraint))(leaf)
    return leaf


def constrain_to_devices(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The outputs of a function, constrained to the devices of a mesh of Auto axes, and to no sharding there.

    In a trace JAX knows a mesh in force without its devices: if nothing else says on which a program runs, it
    is compiled for one, and specs of JAX's own functions are lost. Outputs are never dropped as unused, and
    gradients come in through those that have any.
    """
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = {
        i: jax.typeof(leaf).dtype for i, leaf in enumerate(leaves) if hasattr(jax.typeof(leaf), 'dtype')
    }
    for i in [i for i in dtypes if jnp.issubdtype(dtypes[i], jnp.inexact)] or [*dtypes][:1]:
        leaves[i] = compile_for_devices(leaves[i], mesh)
    if not dtypes:  # the program keeps what is unused
        compile_for_devices(jnp.zeros(()), mesh)
    return jax.tree.unflatten(treedef, leaves)


def has_type(leaf: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> bool:
    """Whether a value of a trace has this type: a reshard would also close its dimensions on Auto axes."""
    now = jax.typeof(leaf).sharding
    return (
        isinstance(leaf, jax.core.Tracer)
        and dict(now.mesh.shape) == dict(mesh.shape)
        and partition_specs.canonical(now.spec) == partition_specs.canonical(spec)
    )


@functools.lru_cache(maxsize=4096)
def _compiled_constraint(sharding: NamedSharding) -> Callable[[Any], Any]:
    """A constraint on the Auto axes of a mixed mesh, compiled wherever it is called.

    Outside of ``jax.jit`` a constraint places the entire array, and would undo the reshard.
    Not inlined: JAX 0.10 then gives cotangents a type without the Explicit axes.
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
    """Without any mesh: NamedShardings have their own, and other rules do nothing."""
    parts = match_subtrees(rules, pytree)
    if not any(isinstance(part.rule, NamedSharding) for part in parts):
        return pytree
    subtrees = [
        constrain(part.tree, part.rule, part.rule.mesh) if isinstance(part.rule, NamedSharding) else part.tree
        for part in parts
    ]
    return jax.tree.unflatten(jax.tree.structure(pytree), jax.tree.leaves(subtrees))
