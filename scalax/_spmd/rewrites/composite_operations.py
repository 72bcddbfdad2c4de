"""Operations that are made of others, in whose place these others come.

- A linear solve has four functions, of which three are for its derivatives. After differentiation it is a
  call of the one that solves.
- A function with a ``jax.vmap`` of its own (``jax.custom_batching.custom_vmap``) that is still there after
  the trace is a call of the function.
- A primitive of ``jax.experimental.hijax``, such as `jax.numpy.searchsorted`, calls what it expands to.

The partitioner knows none of them, and would gather all examples, but it knows what is in them: then a solve
for each example runs on the device of the example.
"""

from __future__ import annotations

from typing import Any

import jax

from scalax._jax.equations import custom_vmap_call, expansion, linear_solve_call, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, replace_by_jit, with_source_of
from scalax._spmd.rewrites.facts import StepFacts

OPENED = frozenset(('custom_linear_solve', 'custom_vmap_call', 'call_hi_primitive'))


def open_operations(jaxpr: Any, facts: StepFacts) -> Any:
    """Returns a jaxpr that calls what such operations are made of.

    Args:
        jaxpr: the closed jaxpr.
        facts: what is known of the step.
    """
    del facts
    rewriter: Rewriter

    def change(equation: Any) -> Any:
        name = primitive_name(equation)
        if name not in OPENED:
            return equation
        if name == 'custom_linear_solve':
            inner, operands = linear_solve_call(equation)
        elif name == 'custom_vmap_call':
            inner, operands = custom_vmap_call(equation)
        else:
            inner, operands = _expanded(equation), equation.invars
        return equation if inner is None else replace_by_jit(equation, rewriter.jaxpr(inner), operands)

    rewriter = Rewriter(change)
    return rewriter.jaxpr(jaxpr)


def _expanded(equation: Any) -> Any:
    """The closed jaxpr of what a primitive of hijax is made of, in its line; None if it is not known."""
    function = expansion(equation)
    if function is None or equation.effects:
        return None
    types = [
        jax.ShapeDtypeStruct(shape_of(atom), atom.aval.dtype, weak_type=atom.aval.weak_type)
        for atom in equation.invars
    ]
    return with_source_of(jax.make_jaxpr(function)(*types), equation)
