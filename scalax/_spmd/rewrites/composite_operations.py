"""Expansion of composite operations, for which the partitioner has no rule, into calls of their jaxprs.

- A linear solve has four functions, three of which are for its derivatives. After differentiation, it becomes
  a call of the solver.
- A remaining function with a custom batching rule (``jax.custom_batching.custom_vmap``) becomes a call of the
  function.
- A ``jax.experimental.hijax`` primitive, such as `jax.numpy.searchsorted`, becomes a call of its expansion.
- A `random_gamma` of one key, on which beta and Dirichlet distributions are built, becomes a loop that draws
  for each element with a key of its own. Devices run different numbers of iterations, as long as the compiler
  exchanges nothing along other mesh axes. Microbatches of pipelines would draw other values.

Without a rule, the partitioner would gather all examples. After the expansion, a solve for each example runs
on the device of the example.
"""

from __future__ import annotations

from typing import Any

import jax

from scalax._jax.equations import custom_vmap_call, expansion, linear_solve_call, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.random_bits import gamma_expansion
from scalax._jax.rewriting import Rewriter, replace_by_jit, with_source_of
from scalax._spmd.rewrites.facts import StepFacts

COMPOSITE_OPS = frozenset(('custom_linear_solve', 'custom_vmap_call', 'call_hi_primitive', 'random_gamma'))


def expand_composite_operations(jaxpr: Any, facts: StepFacts) -> Any:
    """Expands composite operations in a jaxpr.

    Args:
        jaxpr: the closed jaxpr.
        facts: the properties of the step.
    """
    expands_gamma = not (facts.is_pipelined or facts.has_other_axes)
    rewriter: Rewriter

    def change(equation: Any) -> Any:
        name = primitive_name(equation)
        if name not in COMPOSITE_OPS or (name == 'random_gamma' and not expands_gamma):
            return equation
        if name == 'custom_linear_solve':
            inner, operands = linear_solve_call(equation)
        elif name == 'custom_vmap_call':
            inner, operands = custom_vmap_call(equation)
        else:
            inner, operands = _expansion_jaxpr(equation), equation.invars
        return equation if inner is None else replace_by_jit(equation, rewriter.jaxpr(inner), operands)

    rewriter = Rewriter(change)
    return rewriter.jaxpr(jaxpr)


def _expansion_jaxpr(equation: Any) -> Any:
    """Returns the closed jaxpr of what an equation compiles to, with its line; None if that is unknown."""
    function = (gamma_expansion if primitive_name(equation) == 'random_gamma' else expansion)(equation)
    if function is None or equation.effects:
        return None
    types = [
        jax.ShapeDtypeStruct(shape_of(atom), atom.aval.dtype, weak_type=atom.aval.weak_type)
        for atom in equation.invars
    ]
    return with_source_of(jax.make_jaxpr(function)(*types), equation)
