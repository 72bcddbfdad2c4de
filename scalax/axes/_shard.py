"""`shard` and its variants, which shard the arrays of a tree by the names of their dimensions."""

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

    Places the arrays outside ``jax.jit``, and constrains them inside.

    Args:
        x: a tree. Arrays may name their dimensions (flax's boxes and variables, haliax's NamedArrays). Other
            leaves are returned unchanged.
        axes_or_mapping: the names of the dimensions of arrays that do not name them, in einops notation
            (``'batch (heads head_dim) embed'``) or as haliax axes. Or, as in haliax, the mapping, which the
            mesh may follow: ``shard(x, mapping, mesh)``.
        mapping: logical axis name -> mesh axis, a tuple of them, or None; by default the active mapping.
            See `axis_mapping`.
        mesh: a mesh or helper; by default the mesh of the active helper, or that of ``jax.set_mesh``.

    Returns:
        The tree with the same values. Arrays whose dimensions have no names are unchanged. Without a mapping
        or a mesh, all arrays are, and a warning is issued.

    Raises:
        RuleError: the names are not a pattern, or the mapping is invalid.
        ShardingError: arrays do not fit their names or the mesh; the message names all of them.

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
    axes, mapping = _axes_and_mapping(axes_or_mapping, mapping)
    names = axes if axes is None or isinstance(axes, str) else dimensions_of(axes)[0]
    rule = active_mapping(mapping)
    mesh = active_mesh(mesh)
    if rule is None:
        _warn_unsharded('no axis mapping is active', '`with axis_mapping({...}):`', '`mapping={...}`')
        return x
    if mesh is None:
        _warn_unsharded('no mesh is active', '`with helper.get_context():`', '`mesh=helper.mesh`')
        return x
    if names is None and not rule.axis_names and not any(names_by_leaf(x)):
        _warn_unsharded(
            'no array names its dimensions', "`shard(x, 'batch embed')`", 'a rule with axis_names'
        )
        return x
    return _shard(x, rule if names is None else _with_names(rule, names), mesh)


def auto_sharded(x: Tree, mesh: Any = None) -> Tree:
    """`shard` for libraries, without warnings if no mapping or mesh is active, or no array has names.

    An active rule with ``strict=True`` is strict here, too.

    Args:
        x: as for `shard`.
        mesh: as for `shard`.

    Example:
        >>> auto_sharded({'w': 1.0})
        {'w': 1.0}
    """
    rule, mesh = active_mapping(None), active_mesh(mesh)
    return x if rule is None or mesh is None else _shard(x, rule, mesh)


def shard_with_axis_mapping(x: Tree, mapping: AxisMapping, mesh: Any = None) -> Tree:
    """Shards the arrays of a tree by a mapping: haliax's older name of ``shard(x, mapping, mesh)``.

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
    """Returns the axes and the mapping; the first argument may be either."""
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


def _warn_unsharded(reason: str, *remedies: str) -> None:
    warn(
        f'shard did nothing, because {reason}: write {" or ".join(remedies)} (auto_sharded does not warn)',
        UnshardedWarning,
    )


@functools.lru_cache(maxsize=1024)
def _with_names(rule: LogicalAxisShardingRule, names: str | Pattern) -> LogicalAxisShardingRule:
    """Adds names for every array that does not name its dimensions itself to a rule."""
    return dataclasses.replace(rule, axis_names=(('', names), *rule.axis_names))


def _shard(tree: Any, rule: LogicalAxisShardingRule, mesh: Mesh | AbstractMesh) -> Any:
    data, static = partition(tree)
    # A rule that is not strict would replicate arrays without names; `| None` leaves them unchanged.
    rules = rule if rule.strict else rule | None
    if constraints.is_traced():
        return combine(constraints.constrain(data, rules, mesh, where='shard'), static)
    meshes.require_devices(mesh, 'shard')
    leaves = jax.tree.leaves(data)
    shardings = resolve(
        rules, data, mesh, mode=ResolveMode.BOUNDARY, where='the tree given to shard'
    ).shardings
    is_sharded = [sharding is not None for sharding in shardings]
    named_shardings = [sharding for sharding in shardings if sharding is not None]
    # Passed as a tree, because errors name leaves by their paths.
    placed = transfer.put_on_mesh(cast(Mesh, mesh), keep_only(data, is_sharded), lambda: named_shardings)
    placed_leaves = iter(jax.tree.leaves(placed))
    new_leaves = [
        next(placed_leaves) if sharded else leaf for leaf, sharded in zip(leaves, is_sharded, strict=True)
    ]
    return combine(new_leaves, static)
