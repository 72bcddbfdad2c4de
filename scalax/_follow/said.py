"""Where users say that values are: constraints, `jax.device_put`, shardings of a `jit` or a `shard_map`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalax._jax import equations
from scalax._jax.equations import PLACES
from scalax._jax.primitives import primitive_name

# The user says where their results are, whatever is known of their operands.
SAID = frozenset({'sharding_constraint', 'device_put', 'shard_map'})


def placed_by_user(equation: Any) -> Sequence[Mapping[int, Any]]:
    """The operands and the results that the user places, by number, with their shardings or specs."""
    if primitive_name(equation) == 'shard_map':
        return {}, dict(enumerate(equations.mapped_outputs(equation)))
    return equations.shardings_said(equation) if primitive_name(equation) in PLACES else ({}, {})
