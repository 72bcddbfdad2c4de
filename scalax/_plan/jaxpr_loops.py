"""Rounds of the loops of a jaxpr whose state decides when they end."""

from __future__ import annotations

from typing import Any

from scalax._jax.equations import loop_of, opened
from scalax._jaxprs.integers import Integers, Values
from scalax._plan.formulas import Counted
from scalax._plan.loop_rounds import State, solved_rounds


def rounds_of_while(equation: Any, outside: Any = None) -> tuple[int, Counted]:
    """How often the body of a ``while`` equation runs, and how well that is known.

    (``jax.lax.fori_loop`` over Python integers is a scan, whose length is known.)

    Args:
        equation: the equation.
        outside: the jaxpr that it is in, where the loop's state may begin as a constant.

    Example:
        >>> import jax
        >>> loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1]), (1, x))
        >>> [rounds_of_while(equation) for equation in jax.jit(loop).trace(0.0).jaxpr.eqns]
        [(4, <Counted.EXACTLY: 'exactly'>)]
    """
    loop, around = loop_of(equation), Integers(outside)
    asked, body = opened(loop.test), opened(loop.body)
    given = [*map(around.of, equation.invars)]
    constants, start, _ = loop.parts(given)
    in_test, in_body = Integers(asked), Integers(body)

    def test(state: State) -> Values | None:
        in_test.give(asked.invars, [*given[: loop.tested], *state.values()])
        return in_test.of(asked.outvars[0])

    def following(state: State) -> State:
        in_body.give(body.invars, [*constants, *state.values()])
        return {i: in_body.of(body.outvars[i]) for i in state}

    return solved_rounds(dict(enumerate(start)), test, following)
