"""Runs a jaxpr on facts about its values in place of the values: calls, loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from scalax._jax import equations
from scalax._jax.equations import CALLS, WITH_JAXPRS, loop_of, open_jaxpr
from scalax._jax.primitives import primitive_name

Fact = TypeVar('Fact')


class LoopValues(NamedTuple, Generic[Fact]):
    """What is known of the values of each round of a loop.

    Attributes:
        constants: of its constants.
        carried: of what is carried.
        elements: of the elements of stacks that it takes.
        results: of the elements of stacks that it gives.
    """

    consts: Sequence[Fact]
    carry: Sequence[Fact]
    xs: Sequence[Fact]
    ys: Sequence[Fact]


class AbstractInterpreter(Generic[Fact]):
    """Facts about the values of a jaxpr, from those about its arguments.

    Subclasses say what equations without jaxprs do (`primitive`), and what several facts have in common
    (`joined`). Facts are compared and hashed, and finite in number: loops are run until nothing changes.

    Args:
        bottom: the fact about a value of which nothing is known, as of literals and constants.
    """

    def __init__(self, bottom: Fact) -> None:
        self._bottom = bottom
        self._known: dict[Any, list[Fact]] = {}
        self._facts: dict[int, Fact] = {}  # by the ids of variables: literals are not hashable

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of an equation without a jaxpr that is run here."""
        raise NotImplementedError

    def join(self, facts: Sequence[Fact]) -> Fact:
        """The fact about a value that may be each of several: branches, or rounds of a loop."""
        raise NotImplementedError

    def element_of(self, stack: Fact) -> Fact:
        """The fact about an element of a stack that a loop runs over."""
        return stack

    def stack_of(self, element: Fact) -> Fact:
        """The fact about a stack of results of the rounds of a loop."""
        return element

    def of(self, atom: Any) -> Fact:
        """The fact about a value, wherever its jaxpr is used."""
        return self._facts.get(id(atom), self._bottom)

    def record(self, facts: dict[int, Fact]) -> None:
        """Takes note of the values of a jaxpr, by their ids, for one of the places where it is used."""
        if self._facts.keys().isdisjoint(facts):  # most jaxprs are used in one place
            self._facts.update(facts)
            return
        for var, fact in facts.items():
            before = self._facts.setdefault(var, fact)
            if before is not fact:
                self._facts[var] = self.join([before, fact])

    def eval_jaxpr(self, jaxpr: Any, arguments: Sequence[Fact]) -> list[Fact]:
        """The facts about the results of a jaxpr, open or closed."""
        key = open_jaxpr(jaxpr), tuple(arguments)
        if key not in self._known:
            self._known[key] = self._run(*key)
        return self._known[key]

    def _run(self, jaxpr: Any, arguments: Sequence[Fact]) -> list[Fact]:
        bottom = self._bottom
        found = {id(var): fact for var, fact in zip(jaxpr.invars, arguments, strict=True) if fact != bottom}
        known = found.keys()
        for equation in jaxpr.eqns:
            ids = [*map(id, equation.invars)]
            if known.isdisjoint(ids):
                continue
            results = self.eval_equation(equation, [found.get(each, bottom) for each in ids])
            for var, fact in zip(equation.outvars, results, strict=False):
                if fact != bottom:
                    found[id(var)] = fact
        self.record(found)
        return [found.get(id(atom), bottom) for atom in jaxpr.outvars]

    def eval_equation(self, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of an equation."""
        name = primitive_name(equation)
        if name not in WITH_JAXPRS:
            return self.eval_primitive(name, equation, operands)
        if name in CALLS:
            return self.eval_jaxpr(equations.call_jaxpr(equation), operands)
        return (
            self.eval_branches(equation, operands) if name == 'cond' else self.eval_loop(equation, operands)
        )

    def eval_branches(self, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of a `cond`."""
        found = [self.eval_jaxpr(branch, operands[1:]) for branch in equations.branches(equation)]
        results = [*map(self.join, zip(*found, strict=True))]
        return self.control_dependence(equation, lambda: operands[0], results)

    def eval_loop(self, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of a loop."""
        rounds, loop = self.loop_fixpoint(equation, operands), loop_of(equation)
        if loop.cond is None:
            return [*rounds.carry, *map(self.stack_of, rounds.ys)]
        tested = [*operands[: loop.num_cond_consts], *rounds.carry]
        return self.control_dependence(equation, lambda: self.eval_jaxpr(loop.cond, tested)[0], rounds.carry)

    def control_dependence(
        self, equation: Any, by: Callable[[], Fact], results: Sequence[Fact]
    ) -> Sequence[Fact]:
        """The facts about the results of a `cond` or a `while`; *by* gives the fact about what decides.

        For subclasses; here it does not matter.
        """
        return results

    def loop_fixpoint(self, equation: Any, operands: Sequence[Fact]) -> LoopValues[Fact]:
        """The facts about every round of a loop, which begins as the loop does, or as a round ends."""
        loop = loop_of(equation)
        constants, first, stacks = loop.split(operands)
        carried, elements = list(first), [*map(self.element_of, stacks)]
        while True:
            results = self.eval_jaxpr(loop.body, [*constants, *carried, *elements])
            joined = [*map(self.join, zip(carried, results, strict=False))]
            if joined == carried:
                return LoopValues(constants, carried, elements, results[len(carried) :])
            carried = joined
