"""Which values of a jaxpr depend on the batch, also without its rows. Others are weights and constants."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import (
    CALLS,
    WITH_JAXPRS,
    branches,
    called,
    is_jaxpr,
    loop_of,
    opened,
    values_in,
)
from scalax._jax.primitives import primitive_name


class Dependence:
    """The variables of a jaxpr, and of those inside it, that depend on the batch.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: whether each of its arguments does.
        certain: whether results count only if they do for sure. What holds a jaxpr that is not read here,
            such as ``shard_map``, may give results that do not depend on all of its operands.

    Attributes:
        primitives: the names of those that take one of them.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[bool], *, certain: bool = False) -> None:
        self._certain = certain
        self.primitives: set[str] = set()
        self._variables: set[int] = set()  # their ids: literals are not hashable
        self._known: dict[Any, list[bool]] = {}
        self._results(jaxpr, arguments)

    def __contains__(self, variable: Any) -> bool:
        """Whether a variable depends on the batch, anywhere that its jaxpr is used."""
        return id(variable) in self._variables

    def _results(self, jaxpr: Any, arguments: Sequence[bool]) -> list[bool]:
        jaxpr = opened(jaxpr)
        key = id(jaxpr), tuple(arguments)
        if key not in self._known:
            found = {id(var) for var, depends in zip(jaxpr.invars, arguments, strict=True) if depends}
            for equation in jaxpr.eqns:
                if found.isdisjoint(map(id, equation.invars)):
                    continue
                name = primitive_name(equation)
                self.primitives.add(name)
                if name in WITH_JAXPRS:
                    results = self._equation(equation, [id(atom) in found for atom in equation.invars])
                    found.update(itertools.compress(map(id, equation.outvars), results))
                elif not (self._certain and any(map(is_jaxpr, values_in(equation)))):
                    found.update(map(id, equation.outvars))
            self._variables |= found
            self._known[key] = [id(atom) in found for atom in jaxpr.outvars]
        return self._known[key]

    def _equation(self, equation: Any, operands: Sequence[bool]) -> Sequence[bool]:
        name = primitive_name(equation)
        if name in CALLS:
            return self._results(called(equation), operands)
        if name in ('scan', 'while'):
            loop = loop_of(equation)
            results = self._loop(loop.body, *loop.parts(operands))
            # A test that does decides about the number of rounds.
            if loop.test is None or not any(self._results(loop.test, [*operands[: loop.tested], *results])):
                return results
        if name == 'cond' and not operands[0]:
            found = [self._results(branch, operands[1:]) for branch in branches(equation)]
            return [any(each) for each in zip(*found, strict=True)]
        return [True] * len(equation.outvars)

    def _loop(
        self, body: Any, constants: Sequence[bool], first: Sequence[bool], behind: Sequence[bool]
    ) -> list[bool]:
        """Those of the results: what a round returns is what the next one begins with."""
        carried = list(first)
        while True:
            results = self._results(body, [*constants, *carried, *behind])
            grown = [a or b for a, b in zip(carried, results, strict=False)]
            if grown == carried:
                return [*carried, *results[len(carried) :]]
            carried = grown
