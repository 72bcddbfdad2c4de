"""Loop fission: splits a scan over layers whose layers need sums over the entire batch.

The balance loss of experts is a product of two means, but a microbatch only has partial sums. So a first scan
computes the sums of all layers, and a second scan takes the complete sums and computes the rest. In a forward
pass the second scan needs no examples. In a backward pass under `jax.checkpoint` the first scan computes as
much of each layer as the sums need, and the second scan computes it again. A value that mixes examples, but
depends on constants of the loop only, is computed before the loop.
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


def fission_scan(equation: Any, analysis: BatchDimAnalysis, batch_values: Sequence[BatchValue]) -> list[Any]:
    """Returns the equations that replace a `scan` whose body needs the entire batch.

    Returns an empty list if fission does not help.

    Args:
        equation: the `scan`.
        analysis: the batch dimension analysis.
        batch_values: the batch dimensions of its operands.
    """
    loop = loop_of(equation)
    body = inline_calls(loop.body, lambda call: True)
    inner = open_jaxpr(body)
    needs = _BatchNeeds(inner, loop, analysis, batch_values)
    operands = dict(zip(map(id, inner.invars), equation.invars, strict=True))
    consts, _, xs = loop.split(inner.invars)
    all_results, hoisted, sums = (
        range(len(inner.outvars)),
        [*needs.hoisted.values()],
        [*needs.sums.values()],
    )
    if hoisted:
        hoisted_jaxpr = extract_subjaxpr(body, consts, hoisted)
        before = trace_added_equation(
            jax.jit(lambda *values: eval_jaxpr(hoisted_jaxpr, values)),
            equation,
            [operands[id(x)] for x in consts],
        )
        body, hoisted_consts = substitute_vars(body, hoisted)
        operands |= zip(map(id, hoisted_consts), before.outvars, strict=True)
        scan = _PartialScan(equation, body, [*consts, *hoisted_consts], xs, all_results)
        return [before, scan.equation(operands)]
    second_results = [i for i in all_results if id(inner.outvars[i]) in needs.second]
    first_results = [i for i in all_results if i not in second_results]
    second_body, complete_sums = substitute_vars(body, sums)
    second = _PartialScan(equation, second_body, consts, [*xs, *complete_sums], second_results)
    needed_sums = {id(new): x for x, new in zip(sums, complete_sums, strict=True) if id(new) in second.read}
    # If the second scan reads a carry of examples that the first one returns, it would run all layers again.
    if not needed_sums or any(
        isinstance(needs.carry[i], BatchDim) for i in second.carry_indices if i in first_results
    ):
        return []
    first = _PartialScan(equation, body, consts, xs, first_results, [*needed_sums.values()])
    first_equation = first.equation(operands)
    operands |= zip(needed_sums, first_equation.outvars[-len(needed_sums) :], strict=True)
    return [first_equation, second.equation(operands)]


class _BatchNeeds:
    """The values of a loop body that need the entire batch, by the ids of their variables.

    Attributes:
        sums: the sums over examples.
        hoisted: values that mix examples, but depend on constants only. They are computed before the loop.
        second: values for the second scan: values that use sums other than by adding to them, values that
            mix examples, and sums in the carry that the body reads.
        carry: the batch dimensions of the carry; None for values for the second scan.
    """

    def __init__(
        self, body: Any, loop: Loop, analysis: BatchDimAnalysis, batch_values: Sequence[BatchValue]
    ) -> None:
        const_vars, carry_vars, _ = loop.split(body.invars)
        consts, init, stacks = loop.split(batch_values)
        self.carry, second_carry = [*init], set[int]()
        while True:
            arguments = [*consts, *self.carry, *map(analysis.element_of, stacks)]
            self._batch_values = dict(zip(map(id, body.invars), arguments, strict=True))
            self._constants = {*map(id, const_vars)}
            self.sums, self.hoisted = dict[int, Any](), dict[int, Any]()
            self.second = {id(carry_vars[i]) for i in second_carry}
            for equation in body.eqns:
                self._classify_results(equation, analysis)
            previous, next_carry = (second_carry, self.carry), body.outvars[: loop.num_carry]
            for var, result in zip(carry_vars, next_carry, strict=True):
                is_sum = self._batch_values.get(id(result)) == PARTIAL_SUM
                if is_sum and carry_increment(body, var, result) is None:
                    self.second.add(id(result))
            second_carry = second_carry | {i for i, var in enumerate(next_carry) if id(var) in self.second}
            self.carry = [
                None
                if i in second_carry
                else analysis.join([self.carry[i], self._batch_values.get(id(result))])
                for i, result in enumerate(next_carry)
            ]
            if (second_carry, self.carry) == previous:
                return

    def _classify_results(self, equation: Any, analysis: BatchDimAnalysis) -> None:
        """Adds the results of an equation to the values that need the entire batch, or to the others."""
        operand_ids = [id(x) for x in equation.invars if not isinstance(x, Literal)]
        batch_values = [self._batch_values.get(id(x)) for x in equation.invars]
        needs_batch = not self.second.isdisjoint(operand_ids)
        is_constant = self._constants.issuperset(operand_ids)
        result_values: Sequence[BatchValue] = [None] * len(equation.outvars)
        try:
            if not needs_batch and any(batch_values):
                result_values = analysis.eval_equation(equation, batch_values)
        except MixesExamples:
            needs_batch = True
        results = {id(var): var for var in equation.outvars}
        sums: dict[int, Any] = {}
        if any(isinstance(value, BatchDim) for value in batch_values):
            pairs = zip(results.items(), result_values, strict=True)
            sums = {i: var for (i, var), value in pairs if value == PARTIAL_SUM}
        self._constants.update(results if is_constant else ())
        if is_constant and (needs_batch or sums):
            self.hoisted |= {i: var for i, var in results.items() if not isinstance(var, DropVar)}
            return
        self.sums |= sums
        self.second.update(results if needs_batch else ())
        self._batch_values.update(zip(results, result_values, strict=True))


class _PartialScan:
    """A `scan` that computes some results of another one.

    Args:
        equation: the other one.
        body: the jaxpr of its body.
        consts: the variables of the constants that it may read.
        xs: the variables of the elements that it may read.
        results: the indices of the results that it computes.
        extra_ys: variables of the body that it returns as further ys.

    Attributes:
        read: the ids of the variables that it reads.
        carry_indices: the indices of its carry in the carry of the other one.
    """

    def __init__(
        self,
        equation: Any,
        body: Any,
        consts: Sequence[Any],
        xs: Sequence[Any],
        results: Sequence[int],
        extra_ys: Sequence[Any] = (),
    ) -> None:
        inner, loop = open_jaxpr(body), loop_of(equation)
        _, carry, _ = loop.split(inner.invars)
        self.carry_indices = [i for i in results if i < loop.num_carry]
        ys = [i for i in results if i >= loop.num_carry]
        previous = None
        while self.carry_indices != previous:
            previous, self._result_indices = self.carry_indices, [*self.carry_indices, *ys]
            outvars = [*[inner.outvars[i] for i in self._result_indices], *extra_ys]
            needed_eqns = open_jaxpr(extract_subjaxpr(body, [], outvars)).eqns
            atoms = [x for eqn in needed_eqns for x in eqn.invars]
            self.read = {id(x) for x in [*atoms, *outvars] if not isinstance(x, Literal)}
            self.carry_indices = [i for i, var in enumerate(carry) if i in previous or id(var) in self.read]
        consts = [x for x in consts if id(x) in self.read]
        xs = [x for x in xs if id(x) in self.read]
        self._inputs = consts, [carry[i] for i in self.carry_indices], xs
        self._body = extract_subjaxpr(body, [x for group in self._inputs for x in group], outvars)
        self._original, self._results = equation, results

    def equation(self, operands: dict[int, Any]) -> Any:
        """Returns the equation of the scan.

        Args:
            operands: the id of a variable of the body -> the operand.
        """
        consts, init, stacks = [[operands[id(x)] for x in group] for group in self._inputs]

        def body(consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
            return eval_jaxpr(self._body, [*consts, *carry, *xs])

        scan = scan_like(self._original, body, consts, init, stacks)
        outvars = [*scan.outvars]
        for i, result in enumerate(self._result_indices):
            if result in self._results:
                outvars[i] = self._original.outvars[result]
        return with_results(scan, outvars)
