"""Queries of the active mapping: the mesh axes, the spec and the sharding of named dimensions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from scalax._tree.specs import Fault, canonical, entry_axes
from scalax.axes._mapping import (
    AxisMapping,
    dimensions_of,
    mapping_in_force,
    mesh_in_force,
    required_mesh,
)
from scalax.errors import RuleError
from scalax.rules._answer import REPLICATED
from scalax.rules._logical_axis import Named, NamedLeaf
from scalax.rules._resolve import named_sharding


def physical_axis_name(axis: Any, mapping: AxisMapping | None = None, *, mesh: Any = None) -> Any:
    """The mesh axis that shards dimensions of a name.

    Args:
        axis: the name, or a haliax Axis.
        mapping: by default the mapping that is active; see `axis_mapping`.
        mesh: by default the mesh that is active, if any; its lack of an axis counts.

    Returns:
        A mesh axis, a tuple of several, or None for a name that is not mapped.

    Example:
        >>> physical_axis_name('mlp', {'mlp': 'tp'})
        'tp'
    """
    (entry,) = pspec_for(axis, mapping, mesh=mesh)
    return entry


def physical_axis_size(axis: Any, mapping: AxisMapping | None = None, *, mesh: Any = None) -> int | None:
    """Over how many devices dimensions of a name are sharded; None for a name that is not mapped.

    Args:
        axis: the name, or a haliax Axis.
        mapping: by default the mapping that is active; see `axis_mapping`.
        mesh: by default the mesh that is active.

    Raises:
        MeshError: there is no mesh.

    Example:
        >>> from scalax.sharding import MeshShardingHelper
        >>> helper = MeshShardingHelper([4, 2], ['data', 'tp'])
        >>> physical_axis_size('mlp', {'mlp': ('data', 'tp')}, mesh=helper)
        8
    """
    found = required_mesh(mesh, 'physical_axis_size')
    entry = physical_axis_name(axis, mapping, mesh=found)
    return None if entry is None else math.prod(found.shape[name] for name in entry_axes(entry))


def pspec_for(axes: Any, mapping: AxisMapping | None = None, *, mesh: Any = None) -> PartitionSpec:
    """The spec of an array with these dimensions: one entry for each, None where it is not sharded.

    Args:
        axes: the names of the dimensions: ``'batch (heads head_dim) embed'``, or haliax axes.
        mapping: by default the mapping that is active; see `axis_mapping`. Without one nothing is mapped.
        mesh: by default the mesh that is active, if any; axes that it lacks are skipped.

    Raises:
        RuleError: names that are not a pattern, or whose number depends on the array (``...``).

    Example:
        >>> pspec_for('batch seq embed', {'batch': ('data', 'fsdp'), 'embed': 'fsdp'})
        P(('data', 'fsdp'), None, None)
    """
    pattern, text = dimensions_of(axes)
    if pattern.ellipsis is not None:
        raise RuleError(f"{text!r} names any number of dimensions ('...'): name each of them")
    rule, found = mapping_in_force(mapping), mesh_in_force(mesh)
    if rule is None:
        return PartitionSpec(*[None] * len(pattern.dimensions))
    rule = dataclasses.replace(rule, on_indivisible='error')
    shape = (None,) * len(pattern.dimensions)  # divisibility is checked when there is an array
    sizes = None if found is None else dict(found.shape)
    decision = NamedLeaf(rule, Named(pattern), shape, 0, REPLICATED, sizes).decide()
    if isinstance(decision, Fault):
        raise RuleError(f'{text!r}: {decision.detail}')
    assert decision.spec is not None
    return decision.spec


def sharding_for_axis(axis: Any, mapping: AxisMapping | None = None, mesh: Any = None) -> NamedSharding:
    """The sharding of an array with this dimension, or with these dimensions.

    Args:
        axis: as for `pspec_for`.
        mapping: as for `pspec_for`.
        mesh: by default the mesh that is active.

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
    found = required_mesh(mesh, 'sharding_for_axis')
    return named_sharding(found, canonical(pspec_for(axis, mapping, mesh=found)))


def round_axis_for_partitioning(
    axis: Any, mapping: AxisMapping | None = None, *, size: Any = None, mesh: Any = None
) -> Any:
    """The axis, with its size rounded up to a multiple of the number of devices along its mesh axes.

    Args:
        axis: a haliax Axis; or the name of the dimension.
        mapping: by default the mapping that is active; see `axis_mapping`.
        size: the size, if *axis* is a name.
        mesh: by default the mesh that is active.

    Returns:
        An Axis for an Axis, a size for a name. Without a mapping for the name the size stays as it is.

    Raises:
        MeshError: there is no mesh.

    Example:
        >>> from scalax.sharding import MeshShardingHelper
        >>> helper = MeshShardingHelper([8], ['tp'])
        >>> round_axis_for_partitioning('vocab', {'vocab': 'tp'}, size=50257, mesh=helper)
        50264
    """
    found = required_mesh(mesh, 'round_axis_for_partitioning')
    over = physical_axis_size(axis, mapping, mesh=found) or 1
    rounded = -(-(axis.size if size is None else size) // over) * over
    return axis.resize(rounded) if size is None else rounded
