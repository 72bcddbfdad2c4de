"""The equations of a jaxpr of which something is used, as the compiler finds them: it drops all others."""

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
    """Returns the ids of the equations of a jaxpr, and of those inside it, that its results need.

    Args:
        jaxpr: the jaxpr, open or closed.
    """
    found = set[int]()
    _mark(found, jaxpr, [True] * len(open_jaxpr(jaxpr).outvars))
    return found


def _mark(live: set[int], jaxpr: Any, results: Sequence[bool]) -> list[bool]:
    """Takes note of what these results need, and returns which arguments they need."""
    inner = open_jaxpr(jaxpr)
    needed = {id(atom) for atom, is_used in zip(inner.outvars, results, strict=True) if is_used}
    for equation in reversed(inner.eqns):
        used = [id(var) in needed for var in equation.outvars]
        if any(used) or has_effects(equation):
            live.add(id(equation))
            operands = _operands(live, equation, used)
            needed.update(id(x) for x, is_used in zip(equation.invars, operands, strict=True) if is_used)
    return [id(var) in needed for var in inner.invars]


def _operands(live: set[int], equation: Any, results: Sequence[bool]) -> Sequence[bool]:
    """Returns which operands these results of an equation need."""
    name = primitive_name(equation)
    if name in CALLS:
        return _mark(live, call_jaxpr(equation), results)
    if name == 'shard_map':
        return _mark(live, shard_map_jaxpr(equation)[0], results)
    if name == 'cond':
        found = [_mark(live, branch, results) for branch in branches(equation)]
        return [True, *map(any, zip(*found, strict=True))]
    if name not in ('scan', 'while'):
        return [True] * len(equation.invars)
    loop, used = loop_of(equation), [*results]
    tested = [] if loop.cond is None else _mark(live, loop.cond, [True])
    for i, is_used in enumerate(tested[loop.num_cond_consts :]):
        used[i] = used[i] or is_used
    while True:  # what a round needs, the round before it has to give
        operands = _mark(live, loop.body, used)
        after = [a or b for a, b in zip(used, operands[loop.num_consts :], strict=False)][: loop.num_carry]
        if after == used[: loop.num_carry]:
            return [*tested[: loop.num_cond_consts], *operands]
        used[: loop.num_carry] = after
