"""The mapping and the mesh of scalax as haliax's own operations see them, where haliax is in use."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._tree.specs import entry_axes
from scalax.axes._query import physical_axis_name
from scalax.rules import LogicalAxisShardingRule


def entered(mapping: LogicalAxisShardingRule | None, mesh: Mesh | AbstractMesh | None) -> Any:
    """A context in which haliax's operations shard what they make by this mapping, on this mesh.

    They ask haliax's own mapping, and the mesh in force. Nothing is entered where haliax was not imported,
    and where haliax could not shard what scalax can: it applies a mapping as it is, to Auto axes alone.
    """
    partitioning = sys.modules.get('haliax.partitioning')
    if partitioning is None or mapping is None or mesh is None:
        return contextlib.nullcontext()
    entries = {name: _entry(name, mapping, mesh) for name, _ in mapping.axis_mapping}
    used = [axis for entry in entries.values() if entry is not None for axis in entry_axes(entry)]
    if len(set(used)) < len(used) or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(
        jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)
    )
    stack.enter_context(
        partitioning.axis_mapping({name: entry for name, entry in entries.items() if entry is not None})
    )
    return stack


def _entry(name: str, mapping: LogicalAxisShardingRule, mesh: Mesh | AbstractMesh) -> Any:
    # As of a haliax axis, whose name may be any text.
    return physical_axis_name(SimpleNamespace(name=name, size=1), mapping, mesh=mesh)
