"""What a round of a loop adds to a sum that it carries, or reduces with it in another way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from scalax._jax.equations import loop_of, opened
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import with_inlined

Reduction = Literal['sum', 'max', 'min']
# The reduction that each primitive is, and in which of its operands.
_REDUCTIONS: dict[str, tuple[Reduction, Sequence[int]]] = {
    **dict.fromkeys(('add', 'add_any'), ('sum', (0, 1))),
    **dict.fromkeys(('sub', 'scatter-add', 'scatter-sub'), ('sum', (0,))),
    'max': ('max', (0, 1)),
    'min': ('min', (0, 1)),
}
_OF_TRUTH_VALUES: dict[str, tuple[Reduction, Sequence[int]]] = {'or': ('max', (0, 1)), 'and': ('min', (0, 1))}


def added_by_round(body: Any, var: Any, out: Any) -> list[Any] | None:
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


def reduction_by_round(body: Any, var: Any, out: Any) -> Reduction | None:
    """Returns how a round reduces a carried value that it uses for nothing else; None if it does otherwise.

    Rounds that only reduce do not depend on each other: they may run in any order, and apart.

    Args:
        body: the open jaxpr of the round, with the equations of calls in their place.
        var: the carried value, which is one of the arguments of the jaxpr.
        out: what becomes of it.
    """
    readers = {id(x): each for each in body.eqns for x in each.invars}
    uses = Counter(map(id, [*[x for each in body.eqns for x in each.invars], *body.outvars]))
    found: set[Reduction] = set()
    while var is not out:
        reader = readers.get(id(var))
        if uses[id(var)] != 1 or reader is None:
            return None
        [operand] = [i for i, x in enumerate(reader.invars) if x is var]
        name = primitive_name(reader)
        if name == 'scan':
            loop = loop_of(reader)
            first, result = loop.tested + loop.constants, operand - loop.tested - loop.constants
            if not 0 <= result < loop.carried:
                return None
            inner = opened(with_inlined(loop.body, lambda _: True))
            reduction = reduction_by_round(inner, inner.invars[first + result], inner.outvars[result])
            var = reader.outvars[result]
        else:
            table = _OF_TRUTH_VALUES if var.aval.dtype == jnp.bool_ else _REDUCTIONS
            reduction, operands = table.get(name, (None, ()))
            if name == 'convert_element_type' and reader.outvars[0].aval.dtype == var.aval.dtype:
                var = reader.outvars[0]
                continue
            if operand not in operands or reader.outvars[0].aval.shape != var.aval.shape:
                return None
            var = reader.outvars[0]
        if reduction is None:
            return None
        found.add(reduction)
    return found.pop() if len(found) == 1 and uses[id(var)] == 1 else None
