"""The mapping of haliax, which haliax's own operations read, inside functions that scalax compiles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._core.pytree.partition_specs import entry_axes
from scalax._jax import error_texts
from scalax.axes._query import physical_axis_name
from scalax.rules import LogicalAxisShardingRule


def haliax_mapping(
    mapping: LogicalAxisShardingRule | None, mesh: Mesh | AbstractMesh | None, call: Callable[[], Any]
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which haliax's operations shard their results by a mapping of scalax.

    The layers of haliax (``haliax.nn``), its random numbers, ``hax.shard`` and ``hax.auto_sharded`` read the
    mapping of ``hax.axis_mapping`` and the mesh in force.

    The context does nothing where haliax is not imported, and where haliax cannot apply the mapping: haliax
    supports Auto axes only, and does not skip a mesh axis that an array already uses.

    Args:
        mapping: the mapping that is active.
        mesh: the mesh that the function is compiled for.
        call: the function, to be traced in the context. A mapping of two names to one mesh axis is fine
            unless one array has both, which only a trace can tell.
    """
    partitioning = sys.modules.get('haliax.partitioning')
    if partitioning is None or mapping is None or mesh is None:
        return contextlib.nullcontext()
    if {*mesh.axis_types} != {AxisType.Auto} or jax.sharding.get_abstract_mesh().manual_axes:
        return contextlib.nullcontext()
    entries = {}
    for name, _ in mapping.axis_mapping:
        # A haliax axis may have any text as its name; a plain string would be parsed as a pattern.
        entry = physical_axis_name(SimpleNamespace(name=name, size=1), mapping, mesh=mesh)
        if entry is not None:
            entries[name] = entry
    mesh_axes = [axis for entry in entries.values() for axis in entry_axes(entry)]
    if len({*mesh_axes}) < len(mesh_axes) and _repeats_a_mesh_axis(call, partitioning.axis_mapping(entries)):
        return contextlib.nullcontext()
    return partitioning.axis_mapping(entries)


def _repeats_a_mesh_axis(call: Callable[[], Any], context: contextlib.AbstractContextManager[Any]) -> bool:
    """Whether haliax names one mesh axis for two dimensions of an array, somewhere in a function."""

    def traced() -> None:
        with context:
            call()

    try:
        jax.eval_shape(traced)
    except Exception as error:
        if error_texts.repeats_a_mesh_axis(error):
            return True
        raise
    return False
