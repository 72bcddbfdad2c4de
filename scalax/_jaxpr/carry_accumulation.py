"""What a round of a loop adds to a sum that it carries, or reduces with it in another way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from scalax._jax.equations import CALLS, Loop, call_jaxpr, loop_of, open_jaxpr, producers_of
from scalax._jax.primitives import primitive_name

Reduction = Literal['sum', 'max', 'min']
# The reduction that each primitive is, and in which of its operands.
_REDUCTIONS: dict[str, tuple[Reduction, Sequence[int]]] = {
    **dict.fromkeys(('add', 'add_any'), ('sum', (0, 1))),
    **dict.fromkeys(('sub', 'scatter-add', 'scatter-sub'), ('sum', (0,))),
    'max': ('max', (0, 1)),
    'min': ('min', (0, 1)),
}
_OF_TRUTH_VALUES: dict[str, tuple[Reduction, Sequence[int]]] = {'or': ('max', (0, 1)), 'and': ('min', (0, 1))}


def carry_increment(body: Any, var: Any, out: Any) -> list[Any] | None:
    """What a round adds to a carried value that it uses for nothing else; None if it does otherwise."""
    readers = {id(x): each for each in body.eqns for x in each.invars}
    uses = Counter(map(id, [*[x for each in body.eqns for x in each.invars], *body.outvars]))
    found: list[Any] = []
    while uses[id(var)] == 1 and var is not out:
        reader = readers.get(id(var))
        if reader is None:
            return None
        name, after = primitive_name(reader), reader.outvars[0]
        is_same = name == 'convert_element_type' and after.aval.dtype == var.aval.dtype
        if name not in ('add', 'add_any') and not is_same:
            return None
        found += [x for x in reader.invars if x is not var]
        var = after
    return found if uses[id(var)] == 1 else None


class CarryReductions:
    """How the rounds of a loop reduce what they carry.

    Rounds that only reduce do not depend on each other: they may run in any order, and apart.

    Args:
        body: the jaxpr of a round, open or closed.
        carried: the numbers of its arguments that are carried; its first results are what becomes of them.
    """

    def __init__(self, body: Any, carried: range) -> None:
        self._body, self._carried = open_jaxpr(body), carried
        self._readers: dict[Any, tuple[dict[int, Any], Counter[int]]] = {}

    def of(self, number: int) -> Reduction | None:
        """Returns the reduction of a carried value, by its number; None if a round does otherwise with it."""
        found = self._followed(self._body, self._body.invars[self._carried[number]])
        if found is None:
            return None
        reductions, result = found
        return next(iter(reductions)) if result == number and len(reductions) == 1 else None

    def is_passed_through(self, number: int) -> bool:
        """Returns whether a carried value, by its number, is the same behind the round."""
        var = self._body.invars[self._carried[number]]
        return _source(self._body, self._body.outvars[number]) is var

    def _followed(self, jaxpr: Any, var: Any) -> tuple[set[Reduction], int] | None:
        """Returns what a jaxpr reduces an argument with, and which result it is; None if there is no such."""
        if jaxpr not in self._readers:
            readers = {id(x): each for each in jaxpr.eqns for x in each.invars}
            uses = Counter(map(id, [*[x for each in jaxpr.eqns for x in each.invars], *jaxpr.outvars]))
            self._readers[jaxpr] = readers, uses
        (readers, uses), found = self._readers[jaxpr], set[Reduction]()
        while uses[id(var)] == 1:
            reader = readers.get(id(var))
            if reader is None:
                return found, next(i for i, x in enumerate(jaxpr.outvars) if x is var)
            operand = next(i for i, x in enumerate(reader.invars) if x is var)
            after = self._after(reader, operand)
            if after is None:
                return None
            found |= after[0]
            var = reader.outvars[after[1]]
        return None

    def _after(self, equation: Any, operand: int) -> tuple[set[Reduction], int] | None:
        """Returns what an equation reduces one of its operands with, and which result it is."""
        name = primitive_name(equation)
        if name in CALLS:
            inner = open_jaxpr(call_jaxpr(equation))
            return self._followed(inner, inner.invars[operand])
        if name == 'scan':
            loop = loop_of(equation)
            number = operand - loop.num_consts
            if not 0 <= number < loop.num_carry:
                return None
            inner = open_jaxpr(loop.body)
            found = self._followed(inner, inner.invars[operand])
            return found if found is not None and found[1] == number else None
        before, [after, *_] = equation.invars[operand].aval, [var.aval for var in equation.outvars]
        if name == 'convert_element_type' and after.dtype == before.dtype:
            return set(), 0
        table = _OF_TRUTH_VALUES if before.dtype == jnp.bool_ else _REDUCTIONS
        reduction, operands = table.get(name, (None, ()))
        if reduction is None or operand not in operands or after.shape != before.shape:
            return None
        return {reduction}, 0


def carry_reductions(loop: Loop) -> CarryReductions:
    """Returns how the rounds of a loop reduce what they carry."""
    return CarryReductions(loop.body, range(loop.num_consts, loop.num_consts + loop.num_carry))


def _source(jaxpr: Any, atom: Any) -> Any:
    """The variable of an open jaxpr that one of its values is, handed on."""
    makers = producers_of(jaxpr)
    while (maker := makers.get(id(atom))) is not None:
        if primitive_name(maker) == 'convert_element_type' and atom.aval.dtype == maker.invars[0].aval.dtype:
            atom = maker.invars[0]
        elif primitive_name(maker) in CALLS:
            inner = open_jaxpr(call_jaxpr(maker))
            result = next(i for i, x in enumerate(maker.outvars) if x is atom)
            source = _source(inner, inner.outvars[result])
            operand = next((i for i, x in enumerate(inner.invars) if x is source), None)
            if operand is None:
                return atom
            atom = maker.invars[operand]
        else:
            return atom
    return atom
