"""Rounds of the loops of a jaxpr whose state decides when they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scalax._jax.equations import CALLS, Literal, called, loop_of, opened
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dims import ELEMENTWISE, FORWARDS
from scalax._plan.formulas import Counted
from scalax._plan.loop_rounds import OPERATIONS, State, Values, computed, solved_rounds

_FORWARDING = FORWARDS | {'optimization_barrier', 'sharding_constraint'}
_DEEP = 30  # operations from the test of a loop to its state


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
    loop, around = loop_of(equation), _Integers(outside)
    asked, body = opened(loop.test), opened(loop.body)
    given = [around.values(operand) for operand in equation.invars]
    constants, start, _ = loop.parts(given)
    in_test, in_body = _Integers(asked), _Integers(body)

    def test(state: State) -> Values | None:
        in_test.give([*given[: loop.tested], *state.values()])
        return in_test.values(asked.outvars[0])

    def following(state: State) -> State:
        in_body.give([*constants, *state.values()])
        return {i: in_body.values(body.outvars[i]) for i in state}

    return solved_rounds(dict(enumerate(start)), test, following)


class _Integers:
    """The integers of a jaxpr; without one, only literals are known."""

    def __init__(self, jaxpr: Any) -> None:
        self._arguments = () if jaxpr is None else jaxpr.invars
        equations = () if jaxpr is None else jaxpr.eqns
        self._equations = {id(var): equation for equation in equations for var in equation.outvars}
        self._known: dict[int, Values | None] = {}

    def give(self, arguments: Sequence[Values | None]) -> None:
        """Sets the values of the arguments of the jaxpr, and forgets what was computed from others."""
        self._known = {id(var): value for var, value in zip(self._arguments, arguments, strict=True)}

    def values(self, var: Any, depth: int = 0) -> Values | None:
        """The value of a variable or literal, in one row; None if it is no integer, or is not known."""
        # Dtypes of PRNG keys are of no kind.
        aval: Any = var.aval
        if getattr(aval, 'shape', None) != () or getattr(aval.dtype, 'kind', 'V') not in 'biu':
            return None
        if isinstance(var, Literal):
            return np.array([var.val], aval.dtype)
        if id(var) not in self._known and id(var) in self._equations and depth < _DEEP:
            self._known[id(var)] = self._read(var, self._equations[id(var)], depth + 1)
        return self._known.get(id(var))

    def _read(self, var: Any, equation: Any, depth: int) -> Values | None:
        name, operands = primitive_name(equation), equation.invars
        place = next(i for i, out in enumerate(equation.outvars) if out is var)
        if name in _FORWARDING:
            value = self.values(operands[place], depth)
            return None if value is None else value.astype(var.aval.dtype)
        if name in CALLS:
            jaxpr = opened(called(equation))
            inner = _Integers(jaxpr)
            inner.give([self.values(operand, depth) for operand in operands])
            return inner.values(jaxpr.outvars[place], depth)
        if name not in ELEMENTWISE or name not in OPERATIONS:
            return None
        return computed(name, [self.values(operand, depth) for operand in operands])
