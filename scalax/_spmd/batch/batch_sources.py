"""Batches that a step creates itself, from a random key or an environment, and then constrains.

A sharding constraint may also apply to weights, gradients and activations. But these depend on sharded state,
whereas a batch that a step creates does not.
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
    """A constrained value that does not depend on sharded state.

    Attributes:
        var: the variable.
        dim: its first sharded dimension, which is the batch dimension.
        axes: the mesh axes that shard this dimension.
    """

    var: Any
    dim: int
    axes: tuple[str, ...]


def batch_sources(jaxpr: Any, sharded: Sequence[bool]) -> list[BatchSource]:
    """Returns the batches that a step creates.

    Args:
        jaxpr: the jaxpr of the step.
        sharded: which of its arguments are sharded.
    """
    constraints = [x for x in all_equations(jaxpr) if primitive_name(x) == 'sharding_constraint']
    if not constraints:
        return []
    depending, sources = BatchDependence(jaxpr, sharded), list[BatchSource]()
    for equation in constraints:
        [var], out_shardings = equation.outvars, sharding_params(equation)[1]
        if var in depending or not isinstance(sharding := out_shardings.get(0), NamedSharding):
            continue
        sharded_dims = [
            (dim, axes) for dim, x in enumerate(entries(sharding.spec)) if (axes := entry_axes(x))
        ]
        if sharded_dims:
            sources.append(BatchSource(var, *sharded_dims[0]))
    return sources
