"""Rewrites of a step before partitioning: they replace algorithms that do not run on local shards.

A rewrite takes the jaxpr of a step, on global arrays, and returns an equivalent jaxpr, also on global arrays,
that `scalax._spmd.partition` partitions better. Each file has one algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalax._jax.equations import inner_jaxprs, open_jaxpr
from scalax._jax.primitives import primitive_name
from scalax._spmd.rewrites.composite_operations import COMPOSITE_OPS, expand_composite_operations
from scalax._spmd.rewrites.distributed_matrices import MATRIX_PRIMITIVES, distribute_matrices
from scalax._spmd.rewrites.facts import StepFacts as StepFacts
from scalax._spmd.rewrites.flattened_reductions import FLATTENING, unflatten_reductions
from scalax._spmd.rewrites.indexed_loops import stack_examples
from scalax._spmd.rewrites.indices_by_example import LOOKUPS, batch_example_indices
from scalax._spmd.rewrites.inlined_sorts import inline_sorts
from scalax._spmd.rewrites.interleaved_batches import interleave_batches

Rewrite = Callable[[Any, StepFacts], Any]
REWRITES: tuple[tuple[frozenset[str], Rewrite], ...] = (
    (COMPOSITE_OPS, expand_composite_operations),
    (frozenset(('scan',)), stack_examples),
    (LOOKUPS, batch_example_indices),
    (FLATTENING, unflatten_reductions),
    (FLATTENING, interleave_batches),
    (MATRIX_PRIMITIVES, distribute_matrices),
    (frozenset(('ragged_dot_general',)), inline_sorts),
)
"""The rewrites in the order in which they run, each with the primitives that it applies to."""


def apply_rewrites(jaxpr: Any, facts: StepFacts) -> Any:
    """Applies all rewrites whose primitives occur in the jaxpr of a step.

    Args:
        jaxpr: the closed jaxpr.
        facts: the properties of the step.
    """
    if not REWRITES:
        return jaxpr
    primitives = _primitives(jaxpr)
    for names, rewrite in REWRITES:
        if not names.isdisjoint(primitives):
            jaxpr = rewrite(jaxpr, facts)
            if rewrite is expand_composite_operations:
                primitives = _primitives(jaxpr)
    return jaxpr


def _primitives(jaxpr: Any) -> set[str]:
    """Returns the names of the primitives of a jaxpr and of its inner jaxprs."""
    examples, pending = dict[Any, Any](), [open_jaxpr(jaxpr)]  # primitive -> one of its equations
    seen = {id(pending[0])}
    while pending:
        inner = pending.pop()
        examples.update({equation.primitive: equation for equation in inner.eqns})
        for equation in inner.eqns:
            for inside in inner_jaxprs(equation):
                if id(inside) not in seen:
                    seen.add(id(inside))
                    pending.append(inside)
    return {*map(primitive_name, examples.values())}
