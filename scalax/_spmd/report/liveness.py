"""Dead-code analysis: the equations of a jaxpr that its results need. The compiler drops all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import (
    CALLS,
    branches,
    call_jaxpr,
    has_effects,
    loop_of,
    open_jaxpr,
    shard_map_jaxpr,
)
from scalax._jax.primitives import primitive_name


def live_equations(jaxpr: Any) -> set[int]:
    """Returns the ids of the equations that the results of a jaxpr need, including those of inner jaxprs.

    Args:
        jaxpr: the jaxpr, open or closed.
    """
    live = set[int]()
    _mark(live, jaxpr, [True] * len(open_jaxpr(jaxpr).outvars))
    return live


def _mark(live: set[int], jaxpr: Any, results: Sequence[bool]) -> list[bool]:
    """Records the equations that some results of a jaxpr need, and returns which arguments they need."""
    inner_jaxpr = open_jaxpr(jaxpr)
    needed = {id(atom) for atom, is_used in zip(inner_jaxpr.outvars, results, strict=True) if is_used}
    for equation in reversed(inner_jaxpr.eqns):
        used = [id(var) in needed for var in equation.outvars]
        if any(used) or has_effects(equation):
            live.add(id(equation))
            operands = _operands(live, equation, used)
            needed.update(id(x) for x, is_used in zip(equation.invars, operands, strict=True) if is_used)
    return [id(var) in needed for var in inner_jaxpr.invars]


def _operands(live: set[int], equation: Any, results: Sequence[bool]) -> Sequence[bool]:
    """Returns which operands some results of an equation need."""
    name = primitive_name(equation)
    if name in CALLS:
        return _mark(live, call_jaxpr(equation), results)
    if name == 'shard_map':
        return _mark(live, shard_map_jaxpr(equation)[0], results)
    if name == 'cond':
        branch_needs = [_mark(live, branch, results) for branch in branches(equation)]
        return [True, *map(any, zip(*branch_needs, strict=True))]
    if name not in ('scan', 'while'):
        return [True] * len(equation.invars)
    loop, used = loop_of(equation), [*results]
    cond_needs = [] if loop.cond is None else _mark(live, loop.cond, [True])
    for i, is_used in enumerate(cond_needs[loop.num_cond_consts :]):
        used[i] = used[i] or is_used
    while True:  # each iteration has to compute the carry that the next one needs
        operands = _mark(live, loop.body, used)
        after = [a or b for a, b in zip(used, operands[loop.num_consts :], strict=False)][: loop.num_carry]
        if after == used[: loop.num_carry]:
            return [*cond_needs[: loop.num_cond_consts], *operands]
        used[: loop.num_carry] = after
