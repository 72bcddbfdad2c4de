"""Rewrites of a step before partitioning: they replace algorithms that do not run on local shards.

A rewrite takes the jaxpr of a step, on global arrays, and returns an equivalent jaxpr, also on global arrays,
that `scalax._spmd.partition` partitions better. Each file has one algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from scalax._jax.equations import inner_jaxprs, open_jaxpr
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import ELEMENTWISE
from scalax._spmd.rewrites.composite_operations import COMPOSITE_OPS, expand_composite_operations
from scalax._spmd.rewrites.distributed_matrices import MATRIX_PRIMITIVES, distribute_matrices
from scalax._spmd.rewrites.facts import StepFacts as StepFacts
from scalax._spmd.rewrites.flattened_reductions import flattens, unflatten_reductions
from scalax._spmd.rewrites.indexed_loops import indexes_rows, stack_examples
from scalax._spmd.rewrites.indices_by_example import LOOKUPS, batch_example_indices, has_several_indices
from scalax._spmd.rewrites.inlined_sorts import inline_sorts
from scalax._spmd.rewrites.interleaved_batches import interleave_batches, merges_dims


class Rewrite(NamedTuple):
    """A rewrite, and the equations to which it may apply.

    Attributes:
        primitives: their primitives.
        rewrite: returns the rewritten jaxpr, or the same jaxpr.
        may_apply: whether it may apply to an equation of these primitives.
    """

    primitives: frozenset[str]
    rewrite: Callable[[Any, StepFacts], Any]
    may_apply: Callable[[Any], bool] = lambda equation: True


REWRITES = (
    Rewrite(COMPOSITE_OPS, expand_composite_operations),
    Rewrite(frozenset(('scan',)), stack_examples, indexes_rows),
    Rewrite(LOOKUPS, batch_example_indices, has_several_indices),
    Rewrite(frozenset(('reshape',)), unflatten_reductions, flattens),
    Rewrite(frozenset(('reshape',)), interleave_batches, merges_dims),
    Rewrite(MATRIX_PRIMITIVES, distribute_matrices),
    Rewrite(frozenset(('ragged_dot_general',)), inline_sorts),
)
"""The rewrites in the order in which they run."""
# Most equations are elementwise, and few rewrites apply to them.
_NOT_REWRITTEN = ELEMENTWISE.difference(*[rewrite.primitives for rewrite in REWRITES])


def apply_rewrites(jaxpr: Any, facts: StepFacts) -> Any:
    """Applies all rewrites that may apply to an equation of the jaxpr of a step.

    Args:
        jaxpr: the closed jaxpr.
        facts: the properties of the step.
    """
    equations = _equations_by_primitive(jaxpr)
    for primitives, rewrite, may_apply in REWRITES:
        if any(may_apply(equation) for name in primitives for equation in equations.get(name, ())):
            before, jaxpr = jaxpr, rewrite(jaxpr, facts)
            if jaxpr is not before:
                equations = _equations_by_primitive(jaxpr)
    return jaxpr


def _equations_by_primitive(jaxpr: Any) -> Mapping[str, Sequence[Any]]:
    """Returns the equations of a jaxpr and of its inner jaxprs to which rewrites may apply, by primitive."""
    equations, pending = dict[str, list[Any]](), [open_jaxpr(jaxpr)]
    seen = {id(pending[0])}
    while pending:
        for equation in pending.pop().eqns:
            name = primitive_name(equation)
            if name in _NOT_REWRITTEN:
                continue
            equations.setdefault(name, []).append(equation)
            for inside in inner_jaxprs(equation):
                if id(inside) not in seen:
                    seen.add(id(inside))
                    pending.append(inside)
    return equations
