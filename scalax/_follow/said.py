"""Where users say that values are: constraints, `jax.device_put`, shardings of a `jit` or a `shard_map`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._follow.trail import Trail, of_dims
from scalax._jax import equations
from scalax._jax.equations import PLACES, shape_of
from scalax._jax.primitives import primitive_name
from scalax._tree.specs import entry_axes

# The user says where their results are, whatever is known of their operands.
SAID = frozenset({'sharding_constraint', 'device_put', 'shard_map'})


def said_trails(equation: Any, operands: Sequence[Trail]) -> list[Trail]:
    """The trails of the results of an equation of `SAID`."""
    if primitive_name(equation) == 'shard_map':
        return [
            of_dims(dict(enumerate(map(entry_axes, spec))), len(shape_of(out)))
            for spec, out in zip(equations.mapped_outputs(equation), equation.outvars, strict=True)
        ]
    _, results = placed_by_user(equation)
    return [placed_at(results.get(i), operands[i], var) for i, var in enumerate(equation.outvars)]


def placed_by_user(equation: Any) -> Sequence[Mapping[int, Any]]:
    """The operands and the results of an equation that the user places, by number, with their shardings."""
    return equations.shardings_said(equation) if primitive_name(equation) in PLACES else ({}, {})


def placed_at(sharding: Any, trail: Trail, var: Any) -> Trail:
    """The trail of a value that has this sharding. Dimensions that are left open stay as they were.

    Args:
        sharding: where the user places it; None if nothing is said.
        trail: its trail, without what is said.
        var: the value.
    """
    if sharding is None:
        return trail
    dims = {
        i: (trail[i] if trail else ()) if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry)
        for i, entry in enumerate(getattr(sharding, 'spec', ()))
    }
    return of_dims(dims, len(shape_of(var)))
