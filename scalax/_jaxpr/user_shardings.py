"""Where users say that values are: constraints, `jax.device_put`, shardings of a `jit` or a `shard_map`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from scalax._core.pytree.partition_specs import entries
from scalax._jax import equations
from scalax._jax.equations import SHARDING_PARAMS
from scalax._jax.primitives import primitive_name

# The user says where their results are, whatever is known of their operands.
SHARDING_OPS = frozenset({'sharding_constraint', 'device_put', 'shard_map'})


def user_shardings_of(equation: Any) -> Sequence[Mapping[int, Any]]:
    """The operands and the results that the user places, by number, with their shardings or specs."""
    if primitive_name(equation) == 'shard_map':
        return {}, dict(enumerate(equations.shard_map_out_specs(equation)))
    return equations.sharding_params(equation) if primitive_name(equation) in SHARDING_PARAMS else ({}, {})


def names_mesh(jaxpr: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Whether an equation, also in a jaxpr inside, says something of such a mesh without its devices.

    Bare specs do. Constants that a transformation makes have the mesh in force too, without a word on it.
    A function of a mesh of another shape has seen to its devices itself.
    """
    values = (
        part for equation in equations.all_equations(jaxpr) for part in equations.param_values(equation)
    )
    with contextlib.closing(values):  # here, and not wherever it is found to be unused
        return any(_says(part, mesh) for part in values)


def _says(part: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Whether a parameter says something of such a mesh without its devices."""
    if isinstance(part, NamedSharding):
        is_said = any(entries(part.spec)) or AxisType.Explicit in part.mesh.axis_types
        part = part.mesh if is_said else None
    return isinstance(part, AbstractMesh) and part.shape == mesh.shape
