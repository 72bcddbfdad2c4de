"""Loops over layers in two, where layers need all of the batch: sums over it, of which a microbatch has a part.

The balance loss of experts is a product of two means, and a microbatch can only add up. So a first loop gives
the sums of all layers, and a second one takes them whole and does the rest. Behind a forward pass it needs no
rows. In a backward pass under `jax.checkpoint` the first one computes as much of each layer as its sums need,
which the second one does again. What depends on several rows of a loop's constants alone is computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scalax._jax.equations import Literal, Loop, loop_of, makers_of, opened
from scalax._jax.rewriting import added_equation, part_of, run, with_inlined, with_results
from scalax._jaxprs.rows import SUM, Fact, Refused, Rows, RowsOf
from scalax._stages.constants import scan_like


class _Round:
    """What a round of a loop computes that needs all of the batch.

    Attributes:
        cut: the sums over rows that something else is computed of than sums, where rows are added up.
        ahead: what depends on several rows of constants, and on nothing else.
        late: the ids of what depends on *cut*, or what is refused for another reason.
        carried: what is known of what is carried; of what is late, nothing.
    """

    def __init__(self, body: Any, loop: Loop, rows: RowsOf, operands: Sequence[Fact]) -> None:
        constants, state, elements = loop.parts(body.invars)
        fixed, first, stacks = loop.parts(operands)
        self.carried, late_before = [*first], set[int]()
        while True:
            facts = [*fixed, *self.carried, *map(rows.element_of, stacks)]
            self._known = dict(zip(map(id, body.invars), facts, strict=True))
            self._constant = {*map(id, constants)}
            self._parts: dict[int, dict[int, Any]] = {}  # a sum -> the sums over rows of which it is one
            self.cut: dict[int, Any] = {}
            self.ahead: dict[int, Any] = {}
            self.late = {id(var) for i, var in enumerate(state) if i in late_before}
            for each in body.eqns:
                self._run(each, rows)
            outs = body.outvars[: loop.carried]
            late = {i for i, out in enumerate(outs) if id(out) in self.late}
            found = [
                None if i in late else rows.joined([before, self._known.get(id(out))])
                for i, (before, out) in enumerate(zip(self.carried, outs, strict=True))
            ]
            if (late, found) == (late_before, self.carried):
                return
            late_before, self.carried = late_before | late, found

    def _run(self, equation: Any, rows: RowsOf) -> None:
        operands = [x for x in equation.invars if not isinstance(x, Literal)]
        facts = [self._known.get(id(x)) for x in equation.invars]
        is_late = any(id(x) in self.late for x in operands)
        is_constant = all(id(x) in self._constant for x in operands)
        results: Sequence[Fact] = [None] * len(equation.outvars)
        try:
            if not is_late and any(facts):
                results = rows.equation(equation, facts)
        except Refused:
            is_late = True
        is_sum = any(isinstance(fact, Rows) for fact in facts) and SUM in results
        pairs = [(id(var), var) for var in equation.outvars]
        if is_constant:
            self._constant.update(i for i, _ in pairs)
            if is_late or is_sum:
                self.ahead.update(pairs)
                return
        parts: dict[int, Any] = {}
        for x in operands:
            parts |= self._parts.get(id(x), {})
        if is_late:
            self.late.update(i for i, _ in pairs)
            self.cut |= parts
        for (i, var), fact in zip(pairs, results, strict=True):
            self._known[i] = fact
            if fact == SUM:
                self._parts[i] = {i: var} if is_sum else parts


def apart(equation: Any, rows: RowsOf, operands: Sequence[Fact]) -> list[Any]:
    """Equations in place of a `scan` whose rounds need all of the batch; none where that is no help.

    Args:
        equation: the `scan`.
        rows: where rows are.
        operands: what is known of its operands.
    """
    body, loop = with_inlined(loop_of(equation).body, lambda call: True), loop_of(equation)
    inner = opened(body)
    found = _Round(inner, loop, rows, operands)
    outer = dict(zip(map(id, inner.invars), equation.invars, strict=True))
    constants, _, elements = loop.parts(inner.invars)
    everything = range(len(inner.outvars))
    if found.ahead:
        given = part_of(body, constants, [*found.ahead.values()])
        values = added_equation(
            jax.jit(lambda *x: run(given, x)), equation, [outer[id(x)] for x in constants]
        )
        outer |= zip(found.ahead, values.outvars, strict=True)
        rest = _half(equation, body, outer, [*constants, *found.ahead.values()], elements, everything)
        return [values, rest] if rest is not None else []
    late = [i for i in everything if id(inner.outvars[i]) in found.late]
    early = [i for i in everything if i not in late]
    sums = [*found.cut.values()]
    if not sums or not late:
        return []
    first = _half(equation, body, outer, constants, elements, early, sums)
    if first is None:
        return []
    outer |= zip(found.cut, first.outvars[-len(sums) :], strict=True)
    with_rows = {i for i in early if i < loop.carried and isinstance(found.carried[i], Rows)}
    second = _half(equation, body, outer, constants, [*elements, *sums], late, unless=with_rows)
    return [first, second] if second is not None else []


def _half(
    equation: Any,
    body: Any,
    outer: dict[int, Any],
    constants: Sequence[Any],
    elements: Sequence[Any],
    own: Sequence[int],
    more: Sequence[Any] = (),
    unless: Sequence[int] | set[int] = (),
) -> Any:
    """A `scan` that gives some results of another one, and *more* variables of its rounds in stacks.

    None if it would carry what it is not to, or needs what it does not take.
    """
    inner, loop = opened(body), loop_of(equation)
    _, state, _ = loop.parts(inner.invars)
    kept, given = [[i for i in own if (i < loop.carried) == is_carried] for is_carried in (True, False)]
    while True:
        results = [*[inner.outvars[i] for i in [*kept, *given]], *more]
        part = part_of(body, [*constants, *state, *elements], results)
        read = {id(x) for each in opened(part).eqns for x in each.invars if not isinstance(x, Literal)}
        read |= {id(x) for x in results if not isinstance(x, Literal)}
        needed = sorted({*kept} | {i for i, var in enumerate(state) if id(var) in read})
        if needed == kept:
            break
        kept = needed
    there = [*constants, *elements, *state, *opened(part).constvars]
    if not read <= {*map(id, there), *makers_of(opened(part))} or not {*kept}.isdisjoint(unless):
        return None
    parts = [[x for x in each if id(x) in read] for each in (constants, elements)]
    operands = [parts[0], [state[i] for i in kept], parts[1]]
    part = part_of(body, [x for each in operands for x in each], results)
    made = scan_like(
        equation,
        lambda *x: run(part, [*x[0], *x[1], *x[2]]),
        *[[outer[id(x)] for x in each] for each in operands],
    )
    if made is None:
        return None
    numbers = [*kept, *given]
    bound = [equation.outvars[i] if i in own else var for i, var in zip(numbers, made.outvars, strict=False)]
    return with_results(made, [*bound, *made.outvars[len(numbers) :]])
