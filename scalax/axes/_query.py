"""Queries of the active mapping: the mesh axes, the spec and the sharding of named dimensions."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import canonical, entry_axes
from scalax._core.pytree.spec_validation import Fault
from scalax.axes._mapping import (
    AxisMapping,
    Size,
    active_mapping,
    active_mesh,
    as_rule,
    dimensions_of,
    is_axis,
    required_mesh,
)
from scalax.axes._static import is_array
from scalax.errors import RuleError
from scalax.rules._answer import REPLICATED
from scalax.rules._logical_axis import AxisAssignment, NamedDimensions
from scalax.rules._resolve import named_sharding


def physical_axis_name(axis: Any, mapping: AxisMapping | None = None, *, mesh: Any = None) -> Any:
    """Returns the mesh axis that shards the dimensions of a name.

    Args:
        axis: the name, or a haliax Axis.
        mapping: by default the active mapping; see `axis_mapping`.
        mesh: by default the active mesh, if any; axes that it lacks are skipped.

    Returns:
        A mesh axis, a tuple of mesh axes, or None for a name that is not mapped.

    Raises:
        RuleError: several dimensions are named.

    Example:
        >>> physical_axis_name('mlp', {'mlp': 'tp'})
        'tp'
    """
    pattern, text = dimensions_of(axis)
    if len(pattern.dimensions) != 1 or pattern.ellipsis is not None:
        raise RuleError(f'expected the name of one dimension, got {text!r}: pspec_for takes several')
    (entry,) = pspec_for(axis, mapping, mesh=mesh)
    return entry


def physical_axis_size(axis: Any, mapping: AxisMapping | None = None, *, mesh: Any = None) -> int | None:
    """Returns the number of devices that the dimensions of a name are sharded over.

    Returns None for a name that is not mapped.

    Args:
        axis: the name, or a haliax Axis.
        mapping: by default the active mapping; see `axis_mapping`.
        mesh: by default the active mesh.

    Raises:
        MeshError: there is no mesh.

    Example:
        >>> from scalax.sharding import MeshShardingHelper
        >>> helper = MeshShardingHelper([4, 2], ['data', 'tp'])
        >>> physical_axis_size('mlp', {'mlp': ('data', 'tp')}, mesh=helper)
        8
    """
    mesh = required_mesh(mesh, 'physical_axis_size')
    entry = physical_axis_name(axis, mapping, mesh=mesh)
    return None if entry is None else math.prod(mesh.shape[name] for name in entry_axes(entry))


def pspec_for(axes: Any, mapping: AxisMapping | None = None, *, mesh: Any = None) -> Any:
    """Returns the spec of an array with these dimensions: one entry for each, None if it is unsharded.

    Args:
        axes: the names of the dimensions: ``'batch (heads head_dim) embed'``, haliax axes, or a dict of names
            and sizes, which are ignored. Or, as in haliax, a tree whose arrays name their dimensions; the
            result is then a tree of specs.
        mapping: by default the active mapping; see `axis_mapping`. Without one nothing is sharded.
        mesh: by default the active mesh, if any; axes that it lacks are skipped. The specs of a tree have
            the axes of the mapping for every mesh.

    Raises:
        RuleError: the names are not a pattern, or do not determine the rank (``...``).

    Example:
        >>> pspec_for('batch seq embed', {'batch': ('data', 'fsdp'), 'embed': 'fsdp'})
        P(('data', 'fsdp'), None, None)
    """
    if _has_arrays(axes):
        specs = (active_mapping(mapping) or as_rule({})).apply(axes)
        return jax.tree.map(_spec_of, specs, is_leaf=_holds_spec)
    pattern, text = dimensions_of(axes)
    if pattern.ellipsis is not None:
        raise RuleError(f"{text!r} names any number of dimensions ('...'): name each of them")
    rule, mesh = active_mapping(mapping), active_mesh(mesh)
    if rule is None:
        return PartitionSpec(*[None] * len(pattern.dimensions))
    rule = dataclasses.replace(rule, on_indivisible='error')
    shape = (None,) * len(pattern.dimensions)  # unknown sizes, so that divisibility is not checked
    axis_sizes = None if mesh is None else dict(mesh.shape)
    decision = AxisAssignment(rule, NamedDimensions(pattern), shape, 0, REPLICATED, axis_sizes).decide()
    if isinstance(decision, Fault):
        raise RuleError(f'{text!r}: {decision.detail}')
    assert decision.spec is not None
    return decision.spec


def sharding_for_axis(axis: Any, mapping: AxisMapping | None = None, mesh: Any = None) -> NamedSharding:
    """Returns the sharding of an array with this dimension, or with these dimensions.

    Args:
        axis: as for `pspec_for`.
        mapping: as for `pspec_for`.
        mesh: by default the active mesh.

    Raises:
        MeshError: there is no mesh.
        RuleError: as for `pspec_for`.

    Example:
        >>> from scalax.sharding import MeshShardingHelper
        >>> helper = MeshShardingHelper([4, 2], ['data', 'tp'])
        >>> from scalax.axes import axis_mapping
        >>> with helper.get_context(), axis_mapping({'batch': 'data'}):
        ...     sharding_for_axis('batch embed').spec
        P('data',)
    """
    mesh = required_mesh(mesh, 'sharding_for_axis')
    if _has_arrays(axis):
        raise RuleError(
            f'sharding_for_axis is for the dimensions of one array, got a {type(axis).__name__} with arrays: '
            'pspec_for returns the spec of each array'
        )
    return named_sharding(mesh, canonical(pspec_for(axis, mapping, mesh=mesh)))


def round_axis_for_partitioning(
    axis: Any,
    name_or_mapping: Any = None,
    mapping: AxisMapping | None = None,
    *,
    size: Any = None,
    mesh: Any = None,
) -> Any:
    """Rounds the size of an axis up to a multiple of the number of devices along its mesh axes.

    Args:
        axis: a haliax Axis; or the name of a dimension, with *size*; or a size.
        name_or_mapping: the name of the dimension, if *axis* is a size. Or, as in haliax, the mapping; a
            size then needs no name if the mapping has only one.
        mapping: by default the active mapping; see `axis_mapping`.
        size: the size, if *axis* is a name.
        mesh: by default the active mesh.

    Returns:
        An Axis if *axis* is one, and a size otherwise. A name that is not mapped keeps its size.

    Raises:
        MeshError: there is no mesh.
        RuleError: a name without a size, or a size without a name.

    Example:
        >>> from scalax.sharding import MeshShardingHelper
        >>> helper = MeshShardingHelper([8], ['tp'])
        >>> round_axis_for_partitioning('vocab', {'vocab': 'tp'}, size=50257, mesh=helper)
        50264
        >>> round_axis_for_partitioning(50257, 'vocab', {'vocab': 'tp'}, mesh=helper)
        50264
    """
    name = name_or_mapping if isinstance(name_or_mapping, str) else None
    if name is None and name_or_mapping is not None:
        if mapping is not None:
            raise RuleError(
                f'round_axis_for_partitioning got two mappings, {name_or_mapping!r} and {mapping!r}: pass one'
            )
        mapping = name_or_mapping
    if is_axis(axis) and size is None and name is None:
        return axis.resize(_round_up(axis.size, axis, mapping, mesh))
    if isinstance(axis, str) and _is_size(size) and name is None:
        return _round_up(int(size), axis, mapping, mesh)
    if _is_size(axis) and size is None:
        return _round_up(int(axis), _only_name(axis, mapping) if name is None else name, mapping, mesh)
    raise RuleError(
        "round_axis_for_partitioning takes a haliax Axis, a name and its size ('vocab', size=50257), or a "
        f"size and its name (50257, 'vocab'), got {axis!r}, {name_or_mapping!r} and size={size!r}"
    )


def _round_up(size: int, axis: Any, mapping: AxisMapping | None, mesh: Any) -> int:
    mesh = required_mesh(mesh, 'round_axis_for_partitioning')
    devices = physical_axis_size(axis, mapping, mesh=mesh) or 1
    return -(-size // devices) * devices


def _is_size(value: Any) -> bool:
    return isinstance(value, Size) and not isinstance(value, bool) and bool(value >= 0)


def _only_name(size: Any, mapping: AxisMapping | None) -> Any:
    """Returns the name of a dimension that is rounded without a name, from a mapping of one name."""
    rule = active_mapping(mapping)
    names = [] if rule is None else list(dict.fromkeys(name for name, _ in rule.axis_mapping))
    if len(names) != 1:
        names_text = ', '.join(map(repr, names)) or 'none'
        raise RuleError(
            f'round_axis_for_partitioning got the size {size} without the name of its dimension, which is '
            f'clear only if the mapping has one name (its names: {names_text}): pass the name, '
            f"round_axis_for_partitioning({size}, 'vocab', ...)"
        )
    return SimpleNamespace(name=names[0], size=size)  # not a string, which would be parsed as a pattern


def _has_arrays(value: Any) -> bool:
    """Whether a value contains arrays, rather than names or sizes of dimensions."""
    return any(is_array(leaf) and not isinstance(leaf, np.generic) for leaf in jax.tree.leaves(value))


def _holds_spec(node: Any) -> bool:
    """Whether a node is a haliax NamedArray that contains a spec instead of its array (duck-typed)."""
    return isinstance(getattr(node, 'array', None), PartitionSpec)


def _spec_of(node: Any) -> Any:
    return node.array if _holds_spec(node) else node
