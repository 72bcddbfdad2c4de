"""Batches that a step makes itself, of a key or of environments: where constraints shard them, they begin.

A constraint may also shard weights, gradients and activations. Those depend on state that is sharded already;
a batch that a step makes does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from scalax._core.pytree.partition_specs import entries, entry_axes
from scalax._jax.equations import all_equations, sharding_params
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.batch_dependence import BatchDependence


class BatchSource(NamedTuple):
    """A value that is constrained, and does not depend on sharded state.

    Attributes:
        var: the variable.
        dim: its first dimension that is sharded, that of the examples.
        axes: the mesh axes that shard it.
    """

    var: Any
    dim: int
    axes: tuple[str, ...]


def batch_sources(jaxpr: Any, sharded: Sequence[bool]) -> list[BatchSource]:
    """Returns the batches that a step makes.

    Args:
        jaxpr: the jaxpr of the step.
        sharded: which of its arguments are sharded.
    """
    constraints = [x for x in all_equations(jaxpr) if primitive_name(x) == 'sharding_constraint']
    if not constraints:
        return []
    depending, found = BatchDependence(jaxpr, sharded), list[BatchSource]()
    for equation in constraints:
        [var], said = equation.outvars, sharding_params(equation)[1]
        if var in depending or not isinstance(sharding := said.get(0), NamedSharding):
            continue
        sharded_dims = [
            (dim, axes) for dim, x in enumerate(entries(sharding.spec)) if (axes := entry_axes(x))
        ]
        if sharded_dims:
            found.append(BatchSource(var, *sharded_dims[0]))
    return found
