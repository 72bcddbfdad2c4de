"""Loops over layers in two, where layers need sums over all of the batch: a microbatch has a part of them.

The balance loss of experts is a product of two means, and a microbatch can only add up. So a first loop gives
the sums of all layers, and a second one takes them whole and does the rest. In a forward pass it needs no
rows. In a backward pass under `jax.checkpoint` the first one computes as much of each layer as its sums need,
which the second one does again. What depends on several rows of a loop's constants alone is computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scalax._jax.equations import DropVar, Literal, Loop, loop_of, open_jaxpr
from scalax._jax.rewriting import (
    eval_jaxpr,
    extract_subjaxpr,
    inline_calls,
    substitute_vars,
    trace_added_equation,
    with_results,
)
from scalax._jaxpr.batch_dims import PARTIAL_SUM, BatchDim, BatchDimAnalysis, BatchValue, MixesExamples
from scalax._jaxpr.carry_accumulation import carry_increment
from scalax._spmd.pipelines.sink_constants import scan_like


def fission_scan(equation: Any, rows: BatchDimAnalysis, operands: Sequence[BatchValue]) -> list[Any]:
    """Equations in place of a `scan` whose rounds need all of the batch; none where that is no help.

    Args:
        equation: the `scan`.
        rows: where rows are.
        operands: what is known of its operands.
    """
    loop = loop_of(equation)
    body = inline_calls(loop.body, lambda call: True)
    inner = open_jaxpr(body)
    needs = _Needs(inner, loop, rows, operands)
    outer = dict(zip(map(id, inner.invars), equation.invars, strict=True))
    constants, _, elements = loop.split(inner.invars)
    everything, ahead, sums = range(len(inner.outvars)), [*needs.ahead.values()], [*needs.sums.values()]
    if ahead:
        given = extract_subjaxpr(body, constants, ahead)
        made = trace_added_equation(
            jax.jit(lambda *x: eval_jaxpr(given, x)), equation, [outer[id(x)] for x in constants]
        )
        body, whole = substitute_vars(body, ahead)
        outer |= zip(map(id, whole), made.outvars, strict=True)
        return [made, _Part(equation, body, [*constants, *whole], elements, everything).scan(outer)]
    late = [i for i in everything if id(inner.outvars[i]) in needs.late]
    early = [i for i in everything if i not in late]
    rest, whole = substitute_vars(body, sums)
    second = _Part(equation, rest, constants, [*elements, *whole], late)
    cut = {id(new): x for x, new in zip(sums, whole, strict=True) if id(new) in second.read}
    # The second one would run all layers again, for rows that one layer gives to the next.
    if not cut or any(isinstance(needs.carried[i], BatchDim) for i in second.kept if i in early):
        return []
    made = _Part(equation, body, constants, elements, early, [*cut.values()]).scan(outer)
    outer |= zip(cut, made.outvars[-len(cut) :], strict=True)
    return [made, second.scan(outer)]


class _Needs:
    """What a round of a loop computes that needs all of the batch, by the ids of variables.

    Attributes:
        sums: the sums over rows, where rows are added up.
        ahead: what depends on several rows of constants, and on nothing else.
        late: what is computed of sums otherwise than by adding them up, or is refused for another reason; a
            carried sum that is read.
        carried: what is known of what is carried; of what is late, nothing.
    """

    def __init__(self, body: Any, loop: Loop, rows: BatchDimAnalysis, operands: Sequence[BatchValue]) -> None:
        constants, state, _ = loop.split(body.invars)
        fixed, first, stacks = loop.split(operands)
        self.carried, late = [*first], set[int]()  # numbers of what is carried
        while True:
            facts = [*fixed, *self.carried, *map(rows.element_of, stacks)]
            self._known = dict(zip(map(id, body.invars), facts, strict=True))
            self._constant = {*map(id, constants)}
            self.sums, self.ahead = dict[int, Any](), dict[int, Any]()
            self.late = {id(state[i]) for i in late}
            for each in body.eqns:
                self._follow(each, rows)
            before, outs = (late, self.carried), body.outvars[: loop.num_carry]
            for var, out in zip(state, outs, strict=True):
                if self._known.get(id(out)) == PARTIAL_SUM and carry_increment(body, var, out) is None:
                    self.late.add(id(out))
            late = late | {i for i, out in enumerate(outs) if id(out) in self.late}
            self.carried = [
                None if i in late else rows.join([self.carried[i], self._known.get(id(out))])
                for i, out in enumerate(outs)
            ]
            if (late, self.carried) == before:
                return

    def _follow(self, equation: Any, rows: BatchDimAnalysis) -> None:
        ids = [id(x) for x in equation.invars if not isinstance(x, Literal)]
        facts = [self._known.get(id(x)) for x in equation.invars]
        is_late, is_constant = not self.late.isdisjoint(ids), self._constant.issuperset(ids)
        results: Sequence[BatchValue] = [None] * len(equation.outvars)
        try:
            if not is_late and any(facts):
                results = rows.eval_equation(equation, facts)
        except MixesExamples:
            is_late = True
        own = {id(var): var for var in equation.outvars}
        sums = {i: var for (i, var), fact in zip(own.items(), results, strict=True) if fact == PARTIAL_SUM}
        sums = sums if any(isinstance(fact, BatchDim) for fact in facts) else {}
        self._constant.update(own if is_constant else ())
        if is_constant and (is_late or sums):
            self.ahead |= {i: var for i, var in own.items() if not isinstance(var, DropVar)}
            return
        self.sums |= sums
        self.late.update(own if is_late else ())
        self._known.update(zip(own, results, strict=True))


class _Part:
    """A `scan` that gives some results of another one.

    Args:
        equation: the other one.
        body: the jaxpr of its rounds.
        constants: the variables of constants that it may take.
        elements: those of elements of stacks.
        own: the numbers of the results that it gives.
        more: variables that it gives in stacks besides.

    Attributes:
        read: the ids of the variables that it reads.
        kept: the numbers of what it carries.
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
        inner, loop = open_jaxpr(body), loop_of(equation)
        _, state, _ = loop.split(inner.invars)
        self.kept, stacked = [[i for i in own if (i < loop.num_carry) == is_it] for is_it in (True, False)]
        before = None
        while self.kept != before:
            before, self._numbers = self.kept, [*self.kept, *stacked]
            results = [*[inner.outvars[i] for i in self._numbers], *more]
            atoms = [x for each in open_jaxpr(extract_subjaxpr(body, [], results)).eqns for x in each.invars]
            self.read = {id(x) for x in [*atoms, *results] if not isinstance(x, Literal)}
            self.kept = [i for i, var in enumerate(state) if i in before or id(var) in self.read]
        constants, elements = [[x for x in each if id(x) in self.read] for each in (constants, elements)]
        self._taken = constants, [state[i] for i in self.kept], elements
        self._jaxpr = extract_subjaxpr(body, [x for each in self._taken for x in each], results)
        self._equation, self._own = equation, own

    def scan(self, outer: dict[int, Any]) -> Any:
        """Its equation; *outer* are operands by the ids of the variables of a round."""
        operands = [[outer[id(x)] for x in each] for each in self._taken]
        made = scan_like(self._equation, lambda *x: eval_jaxpr(self._jaxpr, [*x[0], *x[1], *x[2]]), *operands)
        results = [*made.outvars]
        for place, i in enumerate(self._numbers):
            if i in self._own:
                results[place] = self._equation.outvars[i]
        return with_results(made, results)
