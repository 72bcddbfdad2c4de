"""How the iterations of a loop accumulate its carry: sums, maxima and minima."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from scalax._jax.equations import CALLS, Loop, call_jaxpr, loop_of, open_jaxpr, producers_of
from scalax._jax.primitives import primitive_name

Reduction = Literal['sum', 'max', 'min']
# The reduction that each primitive computes, and the indices of the operands that may be the accumulator.
_REDUCTIONS: dict[str, tuple[Reduction, Sequence[int]]] = {
    **dict.fromkeys(('add', 'add_any'), ('sum', (0, 1))),
    **dict.fromkeys(('sub', 'scatter-add', 'scatter-sub'), ('sum', (0,))),
    'max': ('max', (0, 1)),
    'min': ('min', (0, 1)),
}
_BOOL_REDUCTIONS: dict[str, tuple[Reduction, Sequence[int]]] = {'or': ('max', (0, 1)), 'and': ('min', (0, 1))}


def carry_increment(body: Any, var: Any, result: Any) -> list[Any] | None:
    """Returns the values that an iteration adds to a carry that it uses for nothing else.

    Returns None if the iteration uses the carry in another way.

    Args:
        body: the open jaxpr of the loop body.
        var: the argument that holds the carry.
        result: the result that holds the next carry.
    """
    readers, uses = _readers_and_uses(body)
    increments: list[Any] = []
    while uses[id(var)] == 1 and var is not result:
        reader = readers.get(id(var))
        if reader is None or not reader.outvars:
            return None
        name, sum_var = primitive_name(reader), reader.outvars[0]
        is_same_dtype = name == 'convert_element_type' and sum_var.aval.dtype == var.aval.dtype
        if name not in ('add', 'add_any') and not is_same_dtype:
            return None
        increments += [x for x in reader.invars if x is not var]
        var = sum_var
    return increments if uses[id(var)] == 1 else None


class CarryReductions:
    """How the iterations of a loop reduce the carry.

    Iterations that only reduce the carry are independent: they may run in any order, or on different devices.

    Args:
        body: the jaxpr of the loop body, open or closed.
        carry: the indices of the body's arguments that are the carry. The first results are the next carry.
    """

    def __init__(self, body: Any, carry: range) -> None:
        self._body, self._carry = open_jaxpr(body), carry
        self._readers_and_uses: dict[Any, tuple[dict[int, Any], Counter[int]]] = {}

    def of(self, index: int) -> Reduction | None:
        """Returns the reduction of a value of the carry.

        Returns None if iterations use the value in another way.

        Args:
            index: the index of the value in the carry.
        """
        reduced = self._follow(self._body, self._body.invars[self._carry[index]])
        if reduced is None:
            return None
        reductions, result = reduced
        return next(iter(reductions)) if result == index and len(reductions) == 1 else None

    def is_passed_through(self, index: int) -> bool:
        """Returns whether iterations leave a value of the carry unchanged."""
        var = self._body.invars[self._carry[index]]
        return _source(self._body, self._body.outvars[index]) is var

    def _follow(self, jaxpr: Any, var: Any) -> tuple[set[Reduction], int] | None:
        """Returns the reductions of an argument of a jaxpr, and the index of the result that holds the total.

        Returns None if the jaxpr uses the argument in another way.
        """
        if jaxpr not in self._readers_and_uses:
            self._readers_and_uses[jaxpr] = _readers_and_uses(jaxpr)
        (readers, uses), reductions = self._readers_and_uses[jaxpr], set[Reduction]()
        while uses[id(var)] == 1:
            reader = readers.get(id(var))
            if reader is None:
                return reductions, next(i for i, x in enumerate(jaxpr.outvars) if x is var)
            operand = next(i for i, x in enumerate(reader.invars) if x is var)
            step = self._follow_equation(reader, operand)
            if step is None:
                return None
            reductions |= step[0]
            var = reader.outvars[step[1]]
        return None

    def _follow_equation(self, equation: Any, operand: int) -> tuple[set[Reduction], int] | None:
        """Returns the reductions of an operand, and the index of the result with the total, as `_follow`."""
        name = primitive_name(equation)
        if name in CALLS:
            inner = open_jaxpr(call_jaxpr(equation))
            return self._follow(inner, inner.invars[operand])
        if name == 'scan':
            loop = loop_of(equation)
            index = operand - loop.num_consts
            if not 0 <= index < loop.num_carry:
                return None
            inner = open_jaxpr(loop.body)
            reduced = self._follow(inner, inner.invars[operand])
            return reduced if reduced is not None and reduced[1] == index else None
        if not equation.outvars:  # a callback
            return None
        accumulator, total = equation.invars[operand].aval, equation.outvars[0].aval
        if name == 'convert_element_type' and total.dtype == accumulator.dtype:
            return set(), 0
        table = _BOOL_REDUCTIONS if accumulator.dtype == jnp.bool_ else _REDUCTIONS
        reduction, operands = table.get(name, (None, ()))
        if reduction is None or operand not in operands or total.shape != accumulator.shape:
            return None
        return {reduction}, 0


def carry_reductions(loop: Loop) -> CarryReductions:
    """Returns how the iterations of a loop reduce its carry."""
    return CarryReductions(loop.body, range(loop.num_consts, loop.num_consts + loop.num_carry))


def _readers_and_uses(jaxpr: Any) -> tuple[dict[int, Any], Counter[int]]:
    """Returns an equation that reads each variable of an open jaxpr, and the number of uses of each."""
    readers = {id(x): equation for equation in jaxpr.eqns for x in equation.invars}
    uses = [*[x for equation in jaxpr.eqns for x in equation.invars], *jaxpr.outvars]
    return readers, Counter(map(id, uses))


def _source(jaxpr: Any, atom: Any) -> Any:
    """Returns the variable that a value equals, seen through calls and casts to the same dtype."""
    producers = producers_of(jaxpr)
    while (producer := producers.get(id(atom))) is not None:
        name = primitive_name(producer)
        if name == 'convert_element_type' and atom.aval.dtype == producer.invars[0].aval.dtype:
            atom = producer.invars[0]
        elif name in CALLS:
            inner = open_jaxpr(call_jaxpr(producer))
            result = next(i for i, x in enumerate(producer.outvars) if x is atom)
            source = _source(inner, inner.outvars[result])
            operand = next((i for i, x in enumerate(inner.invars) if x is source), None)
            if operand is None:
                return atom
            atom = producer.invars[operand]
        else:
            return atom
    return atom
