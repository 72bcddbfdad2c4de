"""The shardings that users specify in a jaxpr: constraints, `device_put`, `jit` and `shard_map`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from scalax._core.pytree.partition_specs import entries
from scalax._jax import equations
from scalax._jax.equations import SHARDING_PARAMS
from scalax._jax.primitives import primitive_name

# The user specifies the shardings of their results, whatever the shardings of their operands are.
SHARDING_OPS = frozenset({'sharding_constraint', 'device_put', 'shard_map'})


def user_shardings_of(equation: Any) -> Sequence[Mapping[int, Any]]:
    """Returns the shardings or specs that the user specifies: index -> sharding, of operands and results."""
    if primitive_name(equation) == 'shard_map':
        return {}, dict(enumerate(equations.shard_map_out_specs(equation)))
    return equations.sharding_params(equation) if primitive_name(equation) in SHARDING_PARAMS else ({}, {})


def names_mesh(jaxpr: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether an equation, also in an inner jaxpr, names a mesh of this shape without its devices.

    Bare specs do. Constants of a transformation also have the ambient mesh, but name none of its axes. A
    function that uses a mesh of another shape has provided its devices itself.
    """
    return any(
        _names_mesh(value, mesh)
        for equation in equations.all_equations(jaxpr)
        for value in equations.param_values(equation)
    )


def _names_mesh(value: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether the value of a parameter names a mesh of this shape without its devices."""
    if isinstance(value, NamedSharding):
        names_axes = any(entries(value.spec)) or AxisType.Explicit in value.mesh.axis_types
        value = value.mesh if names_axes else None
    return isinstance(value, AbstractMesh) and value.shape == mesh.shape
