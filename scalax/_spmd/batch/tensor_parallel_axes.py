"""Axes of Megatron's sequence parallelism, which shard the batch as well as the features of weights.

Between its matmuls, a tensor-parallel layer may shard time over the axis of its heads: the batch is sharded
by ``P('fsdp', 'tp')``, the columns of a weight over ``tp``, and a constraint moves ``tp`` from time to the
columns. If ``tp`` were a batch axis, each device would gather the weight and repeat the entire matmul.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from scalax._core.pytree.partition_specs import entries, entry_axes
from scalax._jax.equations import all_equations, sharding_params
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_classes import DimClasses
from scalax._jaxpr.dim_sharding import DimSharding
from scalax._spmd.batch.batch_arguments import BatchArguments


def tensor_parallel_axes(jaxpr: Any, batch: BatchArguments, sizes: Mapping[str, int]) -> frozenset[str]:
    """Returns the batch axes that a constraint moves from the batch to the features of a weight.

    Axes that shard the first dimension of an argument shard examples, not time, and stay batch axes.

    Args:
        jaxpr: the jaxpr of the step.
        batch: its batch.
        sizes: the mesh axes and their sizes.
    """
    of_examples = {axis for sharding in batch.shardings for axis in (sharding[0] if sharding else ())}
    candidates = batch.batch_axes - of_examples
    if not candidates or not any(batch.state_shardings):
        return frozenset()
    constraints = [x for x in all_equations(jaxpr) if primitive_name(x) == 'sharding_constraint']
    if not constraints:
        return frozenset()
    classes = DimClasses(jaxpr, math.prod(sizes[axis] for axis in batch.batch_axes))
    of_batch, of_state = (
        _axes_of_dims(classes, shardings) for shardings in (batch.shardings, batch.state_shardings)
    )
    result = set[str]()
    for equation in constraints:
        sharding = sharding_params(equation)[1].get(0)
        if not isinstance(sharding, NamedSharding):
            continue
        roots = [*map(classes.union_find.root, classes.of(equation.outvars[0]))]
        # A gradient of a weight has the dimensions of the weight, but none of the batch.
        of_value = {axis for root in roots for axis in of_batch.get(root, ())}
        for root, entry in zip(roots, entries(sharding.spec), strict=False):
            moved = of_value.intersection(entry_axes(entry)) - of_batch.get(root, set())
            result |= moved & of_state.get(root, set()) & candidates
    return frozenset(result)


def _axes_of_dims(classes: DimClasses, shardings: Sequence[DimSharding]) -> dict[int, set[str]]:
    """Returns the mesh axes that shard each class of dimensions of the arguments."""
    result: dict[int, set[str]] = {}
    for ids, sharding in zip(classes.arguments, shardings, strict=False):
        for dim_id, axes in zip(ids, sharding, strict=False):
            if axes:
                result.setdefault(classes.union_find.root(dim_id), set()).update(axes)
    return result
