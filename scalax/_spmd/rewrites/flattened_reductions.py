"""Reductions of flattened arrays, as in gradient norms and inner products, without the flattening.

Flattening merges a sharded dimension with others, for which each device would gather the array. A full
reduction does not depend on the order of elements. If only elementwise operations and full reductions use a
flattened array, they get the original array, and each device reduces its local shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalax._jax.equations import (
    Literal,
    open_jaxpr,
    permutes_elements,
    removed_dims,
    shape_of,
    sharding_params,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import (
    Rewriter,
    inline_calls,
    rebind,
    replace_jaxpr,
    trace_added_equation,
    with_results,
)
from scalax._jaxpr.dim_rules import ALONG_DIM, ELEMENTWISE
from scalax._spmd.rewrites.facts import StepFacts

_ELEMENTWISE = ELEMENTWISE - ALONG_DIM - {'random_fold_in', 'random_gamma', 'threefry2x32'}
_REDUCTIONS = frozenset(('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_and', 'reduce_or'))


def unflatten_reductions(jaxpr: Any, facts: StepFacts) -> Any:
    """Removes the flattening of arrays that are reduced. Returns the same jaxpr if there is none."""
    return _Unflattening().jaxpr(jaxpr)


class _Unflattening(Rewriter):
    """Removes flattening before reductions in a jaxpr and its inner jaxprs."""

    def __init__(self) -> None:
        super().__init__()

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, open or closed, without flattening before reductions."""
        if jaxpr in self._rewritten:
            return self._rewritten[jaxpr]
        flattened = _original_shapes(open_jaxpr(jaxpr).eqns)
        if flattened:
            # jnp.linalg.norm and jnp.vdot are jitted functions.
            jaxpr = inline_calls(
                jaxpr, lambda call: _is_plain(call) and any(id(x) in flattened for x in call.invars)
            )
            jaxpr = _without_flattening(jaxpr)
        return super().jaxpr(jaxpr)


def _is_plain(call: Any) -> bool:
    """Whether a call is a `jit` without shardings."""
    return primitive_name(call) == 'jit' and not any(sharding_params(call))


def flattens(equation: Any) -> bool:
    """Returns whether a `reshape` flattens an array of several dimensions."""
    shape, flat = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    return len(flat) == 1 < len(shape) and not permutes_elements(equation)


def _original_shapes(equations: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Returns the original shapes of flattened variables, by variable id."""
    shapes: dict[int, tuple[int, ...]] = {}
    for equation in equations:
        name = primitive_name(equation)
        if name == 'reshape' and flattens(equation):
            shapes[id(equation.outvars[0])] = shape_of(equation.invars[0])
        elif shapes and name in _ELEMENTWISE:
            operand_shapes = [shapes[id(x)] for x in equation.invars if id(x) in shapes]
            shapes.update(
                {
                    id(var): operand_shapes[0]
                    for var in equation.outvars
                    if operand_shapes and len(shape_of(var)) == 1
                }
            )
    return shapes


def _without_flattening(jaxpr: Any) -> Any:
    """Returns a jaxpr whose equations use the original arrays instead of flattened ones, where possible."""
    inner = open_jaxpr(jaxpr)
    shapes = _original_shapes(inner.eqns)
    for var in inner.outvars:
        shapes.pop(id(var), None)
    # Variables with other uses have to be flattened, and so do the operands and results of these equations.
    while flattened_ids := {
        id(x)
        for equation in inner.eqns
        if not _accepts_original_shapes(equation, shapes)
        for x in (*equation.invars, *equation.outvars)
        if id(x) in shapes
    }:
        shapes = {key: shape for key, shape in shapes.items() if key not in flattened_ids}
    if not shapes:
        return jaxpr
    originals: dict[int, Any] = {}
    equations = []
    for equation in inner.eqns:
        result = equation.outvars[0] if equation.outvars else None
        if primitive_name(equation) == 'reshape' and id(result) in shapes:
            originals[id(result)] = originals.get(id(equation.invars[0]), equation.invars[0])
        elif any(id(x) in originals for x in equation.invars):
            equations.append(_with_original_arrays(equation, originals))
            if id(result) in shapes:
                originals[id(result)] = equations[-1].outvars[0]
        else:
            equations.append(equation)
    return replace_jaxpr(jaxpr, eqns=equations)


def _accepts_original_shapes(equation: Any, shapes: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether an equation has the same result for arrays of their original shapes."""
    name, operand_shapes = (
        primitive_name(equation),
        {shapes[id(x)] for x in equation.invars if id(x) in shapes},
    )
    result_shapes = {shapes[id(x)] for x in equation.outvars if id(x) in shapes}
    if name == 'reshape' and not operand_shapes:
        return True
    if not operand_shapes and not result_shapes:
        return True
    others = [x for x in equation.invars if id(x) not in shapes]
    if len(equation.outvars) != 1 or len(operand_shapes) != 1:
        return False
    if name in _ELEMENTWISE:
        return result_shapes == operand_shapes and all(not shape_of(x) for x in others)
    if name in _REDUCTIONS:
        return (*removed_dims(equation),) == (0,)
    return name == 'dot_general' and not others and not shape_of(equation.outvars[0])


def _with_original_arrays(equation: Any, originals: Mapping[int, Any]) -> Any:
    """Returns an equation of the original arrays in place of an equation of flattened ones."""
    operands = [x if isinstance(x, Literal) else originals.get(id(x), x) for x in equation.invars]
    name = primitive_name(equation)
    params: dict[str, Any] = {}
    if name not in _ELEMENTWISE:
        dims = tuple(range(max(len(shape_of(x)) for x in operands)))
        params = {'axes': dims} if name in _REDUCTIONS else {'dimension_numbers': ((dims, dims), ((), ()))}
    new_equation = trace_added_equation(lambda *xs: rebind(equation, *xs, **params), equation, operands)
    return new_equation if name in _ELEMENTWISE else with_results(new_equation, equation.outvars)
