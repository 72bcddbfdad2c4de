"""`shard`: places or constrains the arrays of a tree by the names of their dimensions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from scalax._core.context import constraints
from scalax._core.mesh import meshes
from scalax._data.host import transfer
from scalax.axes._mapping import AxisMapping, active_mapping, active_mesh, dimensions_of, is_axis
from scalax.axes._static import combine, keep_only, partition
from scalax.errors import RuleError, UnshardedWarning, warn
from scalax.interop._boxes import names_by_leaf
from scalax.rules import LogicalAxisShardingRule
from scalax.rules._einops_pattern import Pattern
from scalax.rules._resolve import ResolveMode, resolve

Tree = TypeVar('Tree')


def shard(x: Tree, axes_or_mapping: Any = None, mapping: AxisMapping | None = None, mesh: Any = None) -> Tree:
    """Shards the arrays of a tree by the names of their dimensions.

    Outside of ``jax.jit`` arrays are placed, inside they are constrained.

    Args:
        x: a tree of arrays that name their dimensions (flax's boxes and variables, haliax's NamedArrays), and
            others. Other leaves are returned as they are.
        axes_or_mapping: the names of the dimensions of arrays that do not name them, as einops writes them
            (``'batch (heads head_dim) embed'``) or as haliax axes; or, as in haliax, the mapping, which the
            mesh may follow: ``shard(x, mapping, mesh)``.
        mapping: logical axis name -> mesh axis, a tuple of them, or None; by default the mapping that is
            active. See `axis_mapping`.
        mesh: a mesh or helper; by default that of the active helper, or that of ``jax.set_mesh``.

    Returns:
        The tree with the same values. Arrays whose dimensions have no names are left as they are. Without a
        mapping or a mesh nothing happens, with a warning.

    Raises:
        RuleError: names that are not a pattern, or a mapping of another form.
        ShardingError: arrays that do not fit their names or the mesh; all of them are named.

    Example:
        >>> import numpy as np
        >>> from scalax.axes import axis_mapping
        >>> from scalax.sharding import MeshShardingHelper
        >>> helper = MeshShardingHelper([4, 2], ['data', 'tp'])
        >>> with helper.get_context(), axis_mapping({'batch': 'data', 'mlp': 'tp'}):
        ...     shard(np.zeros((8, 6)), 'batch mlp').sharding.spec
        P('data', 'tp')
    """
    if mesh is None and isinstance(getattr(mapping, 'mesh', mapping), Mesh | AbstractMesh):
        mapping, mesh = None, mapping  # haliax's order: the mesh follows the mapping
    axes, given = _axes_and_mapping(axes_or_mapping, mapping)
    names = axes if axes is None or isinstance(axes, str) else dimensions_of(axes)[0]
    rule = active_mapping(given)
    where = active_mesh(mesh)
    if rule is None:
        _unsharded('no axis mapping is active', '`with axis_mapping({...}):`', '`mapping={...}`')
        return x
    if where is None:
        _unsharded('no mesh is active', '`with helper.get_context():`', '`mesh=helper.mesh`')
        return x
    if names is None and not rule.axis_names and not any(names_by_leaf(x)):
        _unsharded('no array names its dimensions', "`shard(x, 'batch embed')`", 'a rule with axis_names')
        return x
    return _sharded(x, rule if names is None else _naming(rule, names), where)


def auto_sharded(x: Tree, mesh: Any = None) -> Tree:
    """`shard` for libraries: silent where no mapping or no mesh is active, or no array names its dimensions.

    A rule with ``strict=True`` that is active is strict here, too.

    Args:
        x: as for `shard`.
        mesh: as for `shard`.

    Example:
        >>> auto_sharded({'w': 1.0})
        {'w': 1.0}
    """
    rule, where = active_mapping(None), active_mesh(mesh)
    return x if rule is None or where is None else _sharded(x, rule, where)


def shard_with_axis_mapping(x: Tree, mapping: AxisMapping, mesh: Any = None) -> Tree:
    """Shards the arrays of a tree by a mapping: ``shard(x, mapping, mesh)`` under its older name in haliax.

    Args:
        x: as for `shard`.
        mapping: as for `shard`.
        mesh: as for `shard`.

    Example:
        >>> import numpy as np
        >>> from scalax.sharding import LogicalAxisShardingRule, MeshShardingHelper
        >>> helper = MeshShardingHelper([4, 2], ['data', 'tp'])
        >>> mapping = LogicalAxisShardingRule({'embed': 'tp'}, [('w', '_ embed')])
        >>> shard_with_axis_mapping({'w': np.zeros((8, 6))}, mapping, helper)['w'].sharding.spec
        P(None, 'tp')
    """
    return shard(x, mapping=mapping, mesh=mesh)


def _axes_and_mapping(axes_or_mapping: Any, mapping: AxisMapping | None) -> tuple[Any, AxisMapping | None]:
    """The axes and the mapping: the first argument may be either."""
    value = axes_or_mapping
    if value is None or isinstance(value, str) or is_axis(value):
        return value, mapping
    is_mapping = isinstance(value, Mapping | LogicalAxisShardingRule) or (
        isinstance(value, tuple | list) and any(isinstance(item, tuple | list) for item in value)
    )
    if is_mapping and mapping is not None:
        raise RuleError(
            f'shard got two mappings, {value!r} and {mapping!r}: give one, or names of dimensions first'
        )
    return (None, value) if is_mapping else (value, mapping)


def _unsharded(why: str, *remedies: str) -> None:
    warn(
        f'shard did nothing, because {why}: write {" or ".join(remedies)} (auto_sharded does not warn)',
        UnshardedWarning,
    )


@functools.lru_cache(maxsize=1024)
def _naming(rule: LogicalAxisShardingRule, names: str | Pattern) -> LogicalAxisShardingRule:
    """The rule with these names for every array that does not name its dimensions itself."""
    return dataclasses.replace(rule, axis_names=(('', names), *rule.axis_names))


def _sharded(tree: Any, rule: LogicalAxisShardingRule, mesh: Mesh | AbstractMesh) -> Any:
    data, static = partition(tree)
    # A rule that is not strict would replicate arrays without names; here they stay as they are.
    rules = rule if rule.strict else rule | None
    if constraints.is_traced():
        return combine(constraints.constrain(data, rules, mesh, where='shard'), static)
    meshes.require_devices(mesh, 'shard')
    leaves = jax.tree.leaves(data)
    shardings = resolve(
        rules, data, mesh, mode=ResolveMode.BOUNDARY, where='the tree given to shard'
    ).shardings
    moved = [sharding is not None for sharding in shardings]
    # A tree, not a list: errors name leaves by their paths.
    wanted = [sharding for sharding in shardings if sharding is not None]
    placed = transfer.put_on(cast(Mesh, mesh), keep_only(data, moved), lambda: wanted)
    new = iter(jax.tree.leaves(placed))
    return combine([next(new) if moves else leaf for leaf, moves in zip(leaves, moved, strict=True)], static)
