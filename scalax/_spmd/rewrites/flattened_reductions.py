"""Reductions of flattened arrays, as in norms of gradients and inner products, without the flattening.

Flattening mixes a sharded dimension with others, so each device would gather the array. A reduction of all
elements has no order: where elementwise operations and such reductions alone use what is flattened, they take
the array as it is, and each device reduces its block.
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

FLATTENING = frozenset(('reshape',))


def unflatten_reductions(jaxpr: Any, facts: StepFacts) -> Any:
    """Returns a jaxpr that reduces arrays without flattening them; the same jaxpr if it flattens none."""
    return _Unflattening().jaxpr(jaxpr)


class _Unflattening(Rewriter):
    """Unflattens what is reduced in a jaxpr, and in the jaxprs inside it."""

    def __init__(self) -> None:
        super().__init__()

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, open or closed, that reduces arrays without flattening them."""
        if jaxpr in self._known:
            return self._known[jaxpr]
        flattened = _flattened(open_jaxpr(jaxpr).eqns)
        if flattened:
            # Norms and inner products are functions that JAX has compiled.
            jaxpr = inline_calls(
                jaxpr, lambda call: _is_plain(call) and any(id(x) in flattened for x in call.invars)
            )
            jaxpr = _unflattened(jaxpr)
        return super().jaxpr(jaxpr)


def _is_plain(call: Any) -> bool:
    """Whether a call is a `jit` that says nothing of shardings."""
    return primitive_name(call) == 'jit' and not any(sharding_params(call))


def _flattened(equations: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """The shapes that flattened variables had, by the ids of the variables."""
    shapes: dict[int, tuple[int, ...]] = {}
    for equation in equations:
        name = primitive_name(equation)
        if name == 'reshape' and not permutes_elements(equation):
            shape, flat = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
            if len(flat) == 1 < len(shape):
                shapes[id(equation.outvars[0])] = shape
        elif shapes and name in _ELEMENTWISE:
            taken = [shapes[id(x)] for x in equation.invars if id(x) in shapes]
            shapes.update(
                {id(var): taken[0] for var in equation.outvars if taken and len(shape_of(var)) == 1}
            )
    return shapes


def _unflattened(jaxpr: Any) -> Any:
    """The jaxpr with other equations in place of those whose operands need not be flattened."""
    inner = open_jaxpr(jaxpr)
    shapes = _flattened(inner.eqns)
    for var in inner.outvars:
        shapes.pop(id(var), None)
    # A variable that something else takes has to be flattened, and so has what is computed with it.
    while needed := {
        id(x)
        for equation in inner.eqns
        if not _takes_unflattened(equation, shapes)
        for x in (*equation.invars, *equation.outvars)
        if id(x) in shapes
    }:
        shapes = {key: shape for key, shape in shapes.items() if key not in needed}
    if not shapes:
        return jaxpr
    arrays: dict[int, Any] = {}
    equations = []
    for equation in inner.eqns:
        result = equation.outvars[0] if equation.outvars else None
        if primitive_name(equation) == 'reshape' and id(result) in shapes:
            arrays[id(result)] = arrays.get(id(equation.invars[0]), equation.invars[0])
        elif any(id(x) in arrays for x in equation.invars):
            equations.append(_on_arrays(equation, arrays))
            if id(result) in shapes:
                arrays[id(result)] = equations[-1].outvars[0]
        else:
            equations.append(equation)
    return replace_jaxpr(jaxpr, eqns=equations)


def _takes_unflattened(equation: Any, shapes: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether an equation gives the same for arrays of these shapes as for what is flattened of them."""
    name, taken = primitive_name(equation), {shapes[id(x)] for x in equation.invars if id(x) in shapes}
    given = {shapes[id(x)] for x in equation.outvars if id(x) in shapes}
    if name == 'reshape' and not taken:
        return True
    if not taken and not given:
        return True
    others = [x for x in equation.invars if id(x) not in shapes]
    if len(equation.outvars) != 1 or len(taken) != 1:
        return False
    if name in _ELEMENTWISE:
        return given == taken and all(not shape_of(x) for x in others)
    if name in _REDUCTIONS:
        return (*removed_dims(equation),) == (0,)
    return name == 'dot_general' and not others and not shape_of(equation.outvars[0])


def _on_arrays(equation: Any, arrays: Mapping[int, Any]) -> Any:
    """An equation of arrays in place of one of what is flattened of them."""
    operands = [x if isinstance(x, Literal) else arrays.get(id(x), x) for x in equation.invars]
    name = primitive_name(equation)
    changed: dict[str, Any] = {}
    if name not in _ELEMENTWISE:
        dims = tuple(range(max(len(shape_of(x)) for x in operands)))
        changed = {'axes': dims} if name in _REDUCTIONS else {'dimension_numbers': ((dims, dims), ((), ()))}
    new = trace_added_equation(lambda *xs: rebind(equation, *xs, **changed), equation, operands)
    return new if name in _ELEMENTWISE else with_results(new, equation.outvars)
