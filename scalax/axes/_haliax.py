"""The active mapping as haliax's, for haliax operations inside functions that scalax compiles."""

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
    mapping of ``hax.axis_mapping`` and the active mesh.

    The context does nothing if haliax is not imported, or if haliax cannot apply the mapping: haliax
    supports Auto axes only, and does not skip a mesh axis that an array already uses.

    Args:
        mapping: the active mapping.
        mesh: the mesh that the function is compiled for.
        call: the function. It is traced to find out whether one array has two names that map to the same
            mesh axis.
    """
    partitioning = sys.modules.get('haliax.partitioning')
    if partitioning is None or mapping is None or mesh is None:
        return contextlib.nullcontext()
    if {*mesh.axis_types} != {AxisType.Auto} or jax.sharding.get_abstract_mesh().manual_axes:
        return contextlib.nullcontext()
    entries = {}
    for name, _ in mapping.axis_mapping:
        # The name of a haliax axis may be any text, but a plain string would be parsed as a pattern.
        entry = physical_axis_name(SimpleNamespace(name=name, size=1), mapping, mesh=mesh)
        if entry is not None:
            entries[name] = entry
    mesh_axes = [axis for entry in entries.values() for axis in entry_axes(entry)]
    if len({*mesh_axes}) < len(mesh_axes) and _repeats_a_mesh_axis(call, partitioning.axis_mapping(entries)):
        return contextlib.nullcontext()
    return partitioning.axis_mapping(entries)


def _repeats_a_mesh_axis(call: Callable[[], Any], context: contextlib.AbstractContextManager[Any]) -> bool:
    """Whether haliax uses one mesh axis for two dimensions of an array anywhere in a function."""

    def call_in_context() -> None:
        with context:
            call()

    try:
        jax.eval_shape(call_in_context)
    except Exception as error:
        if error_texts.repeats_a_mesh_axis(error):
            return True
        raise
    return False
