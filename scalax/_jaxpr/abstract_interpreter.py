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

    constants: Sequence[Fact]
    carried: Sequence[Fact]
    elements: Sequence[Fact]
    results: Sequence[Fact]


class AbstractInterpreter(Generic[Fact]):
    """Facts about the values of a jaxpr, from those about its arguments.

    Subclasses say what equations without jaxprs do (`primitive`), and what several facts have in common
    (`joined`). Facts are compared and hashed, and finite in number: loops are run until nothing changes.

    Args:
        nothing: the fact about a value of which nothing is known, as of literals and constants.
    """

    def __init__(self, nothing: Fact) -> None:
        self._nothing = nothing
        self._known: dict[Any, list[Fact]] = {}
        self._facts: dict[int, Fact] = {}  # by the ids of variables: literals are not hashable

    def primitive(self, name: str, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of an equation without a jaxpr that is run here."""
        raise NotImplementedError

    def joined(self, facts: Sequence[Fact]) -> Fact:
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
        return self._facts.get(id(atom), self._nothing)

    def note(self, facts: dict[int, Fact]) -> None:
        """Takes note of the values of a jaxpr, by their ids, for one of the places where it is used."""
        if self._facts.keys().isdisjoint(facts):  # most jaxprs are used in one place
            self._facts.update(facts)
            return
        for var, fact in facts.items():
            before = self._facts.setdefault(var, fact)
            if before is not fact:
                self._facts[var] = self.joined([before, fact])

    def results(self, jaxpr: Any, arguments: Sequence[Fact]) -> list[Fact]:
        """The facts about the results of a jaxpr, open or closed."""
        key = open_jaxpr(jaxpr), tuple(arguments)
        if key not in self._known:
            self._known[key] = self._run(*key)
        return self._known[key]

    def _run(self, jaxpr: Any, arguments: Sequence[Fact]) -> list[Fact]:
        nothing = self._nothing
        found = {id(var): fact for var, fact in zip(jaxpr.invars, arguments, strict=True) if fact != nothing}
        known = found.keys()
        for equation in jaxpr.eqns:
            ids = [*map(id, equation.invars)]
            if known.isdisjoint(ids):
                continue
            results = self.equation(equation, [found.get(each, nothing) for each in ids])
            for var, fact in zip(equation.outvars, results, strict=False):
                if fact != nothing:
                    found[id(var)] = fact
        self.note(found)
        return [found.get(id(atom), nothing) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of an equation."""
        name = primitive_name(equation)
        if name not in WITH_JAXPRS:
            return self.primitive(name, equation, operands)
        if name in CALLS:
            return self.results(equations.call_jaxpr(equation), operands)
        return self.branches(equation, operands) if name == 'cond' else self.loop(equation, operands)

    def branches(self, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of a `cond`."""
        found = [self.results(branch, operands[1:]) for branch in equations.branches(equation)]
        results = [*map(self.joined, zip(*found, strict=True))]
        return self.chosen(equation, lambda: operands[0], results)

    def loop(self, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of a loop."""
        rounds, loop = self.rounds(equation, operands), loop_of(equation)
        if loop.test is None:
            return [*rounds.carried, *map(self.stack_of, rounds.results)]
        tested = [*operands[: loop.tested], *rounds.carried]
        return self.chosen(equation, lambda: self.results(loop.test, tested)[0], rounds.carried)

    def chosen(self, equation: Any, by: Callable[[], Fact], results: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of a `cond` or a `while`; *by* gives the fact about what decides.

        For subclasses; here it does not matter.
        """
        return results

    def rounds(self, equation: Any, operands: Sequence[Fact]) -> LoopValues[Fact]:
        """The facts about every round of a loop, which begins as the loop does, or as a round ends."""
        loop = loop_of(equation)
        constants, first, stacks = loop.parts(operands)
        carried, elements = list(first), [*map(self.element_of, stacks)]
        while True:
            results = self.results(loop.body, [*constants, *carried, *elements])
            joined = [*map(self.joined, zip(carried, results, strict=False))]
            if joined == carried:
                return LoopValues(constants, carried, elements, results[len(carried) :])
            carried = joined
