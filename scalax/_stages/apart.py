"""Loops over layers in two, where layers need sums over all of the batch: a microbatch has a part of them.

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


def apart(equation: Any, rows: RowsOf, operands: Sequence[Fact]) -> list[Any]:
    """Equations in place of a `scan` whose rounds need all of the batch; none where that is no help.

    Args:
        equation: the `scan`.
        rows: where rows are.
        operands: what is known of its operands.
    """
    loop = loop_of(equation)
    body = with_inlined(loop.body, lambda call: True)
    inner = opened(body)
    needs = _Needs(inner, loop, rows, operands)
    outer = dict(zip(map(id, inner.invars), equation.invars, strict=True))
    constants, _, elements = loop.parts(inner.invars)
    everything, ahead = range(len(inner.outvars)), [*needs.ahead.values()]
    if ahead:
        given = part_of(body, constants, ahead)
        made = added_equation(jax.jit(lambda *x: run(given, x)), equation, [outer[id(x)] for x in constants])
        outer |= zip(needs.ahead, made.outvars, strict=True)
        rest = _Half(equation, body, [*constants, *ahead], elements, everything)
        return [made, rest.scan(outer)] if rest.is_whole else []
    late = [i for i in everything if id(inner.outvars[i]) in needs.late]
    early = [i for i in everything if i not in late]
    second = _Half(equation, body, constants, [*elements, *needs.sums.values()], late)
    cut = [x for x in second.elements if id(x) in needs.sums]
    first = _Half(equation, body, constants, elements, early, cut)
    # To compute rows of each layer again that layers take of each other is to run the loop twice.
    is_twice = any(isinstance(needs.carried[i], Rows) for i in second.kept if i in early)
    if not cut or is_twice or not (first.is_whole and second.is_whole):
        return []
    made = first.scan(outer)
    outer |= zip(map(id, cut), made.outvars[-len(cut) :], strict=True)
    return [made, second.scan(outer)]


class _Needs:
    """What a round of a loop computes that needs all of the batch, by the ids of variables.

    Attributes:
        sums: the sums over rows, where rows are added up.
        ahead: what depends on several rows of constants, and on nothing else.
        late: what is computed of sums otherwise than by adding them up, or is refused for another reason.
        carried: what is known of what is carried; of what is late, nothing.
    """

    def __init__(self, body: Any, loop: Loop, rows: RowsOf, operands: Sequence[Fact]) -> None:
        constants, state, _ = loop.parts(body.invars)
        fixed, first, stacks = loop.parts(operands)
        self.carried, late = [*first], set[int]()  # numbers of what is carried
        while True:
            facts = [*fixed, *self.carried, *map(rows.element_of, stacks)]
            self._known = dict(zip(map(id, body.invars), facts, strict=True))
            self._constant = {*map(id, constants)}
            self.sums, self.ahead = dict[int, Any](), dict[int, Any]()
            self.late = {id(state[i]) for i in late}
            for each in body.eqns:
                self._run(each, rows)
            before, outs = (late, self.carried), body.outvars[: loop.carried]
            late = late | {i for i, out in enumerate(outs) if id(out) in self.late}
            self.carried = [
                None if i in late else rows.joined([self.carried[i], self._known.get(id(out))])
                for i, out in enumerate(outs)
            ]
            if (late, self.carried) == before:
                return

    def _run(self, equation: Any, rows: RowsOf) -> None:
        ids = [id(x) for x in equation.invars if not isinstance(x, Literal)]
        facts = [self._known.get(id(x)) for x in equation.invars]
        is_late, is_constant = not self.late.isdisjoint(ids), self._constant.issuperset(ids)
        results: Sequence[Fact] = [None] * len(equation.outvars)
        try:
            if not is_late and any(facts):
                results = rows.equation(equation, facts)
        except Refused:
            is_late = True
        own = {id(var): var for var in equation.outvars}
        sums = {i: var for (i, var), fact in zip(own.items(), results, strict=True) if fact == SUM}
        sums = sums if any(isinstance(fact, Rows) for fact in facts) else {}
        self._constant.update(own if is_constant else ())
        if is_constant and (is_late or sums):
            self.ahead |= own
            return
        self.sums |= sums
        self.late.update(own if is_late else ())
        self._known.update(zip(own, results, strict=True))


class _Half:
    """A `scan` that gives some results of another one.

    Args:
        equation: the other one.
        body: the jaxpr of its rounds.
        constants: the variables of constants that it may take.
        elements: those of elements of stacks.
        own: the numbers of the results that it gives.
        more: variables that it gives in stacks besides.

    Attributes:
        elements: the elements that it takes.
        kept: the numbers of what it carries.
        is_whole: whether it computes all that it needs.
    """

    def __init__(
        self,
        equation: Any,
        body: Any,
        constants: Sequence[Any],
        elements: Sequence[Any],
        own: Sequence[int],
        more: Sequence[Any] = (),
    ) -> None:
        inner, loop = opened(body), loop_of(equation)
        _, state, _ = loop.parts(inner.invars)
        kept, stacked = [[i for i in own if (i < loop.carried) == is_it] for is_it in (True, False)]
        while True:
            results = [*[inner.outvars[i] for i in [*kept, *stacked]], *more]
            part = opened(part_of(body, [*constants, *state, *elements], results))
            atoms = [*results, *[x for each in part.eqns for x in each.invars]]
            read = {id(x) for x in atoms if not isinstance(x, Literal)}
            found = [i for i, var in enumerate(state) if i in kept or id(var) in read]
            if found == kept:
                break
            kept = found
        there = [*constants, *elements, *state, *part.constvars]
        self.is_whole = read <= {*map(id, there), *makers_of(part)}
        self.kept = kept
        self.elements = [x for x in elements if id(x) in read]
        self._taken = [x for x in constants if id(x) in read], [state[i] for i in kept], self.elements
        self._part = part_of(body, [x for each in self._taken for x in each], results)
        self._equation, self._numbers, self._own = equation, [*kept, *stacked], own

    def scan(self, outer: dict[int, Any]) -> Any:
        """Its equation; *outer* are the operands of the other one by the ids of variables of its rounds."""
        operands = [[outer[id(x)] for x in each] for each in self._taken]
        made = scan_like(self._equation, lambda *x: run(self._part, [*x[0], *x[1], *x[2]]), *operands)
        results = [*made.outvars]
        for place, i in enumerate(self._numbers):
            if i in self._own:
                results[place] = self._equation.outvars[i]
        return with_results(made, results)
