"""Def-use chains of a jaxpr: the equations that use each variable."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import has_effects


class Uses:
    """The equations that use each variable of a jaxpr.

    Args:
        jaxpr: the jaxpr, open.
    """

    def __init__(self, jaxpr: Any) -> None:
        self._jaxpr = jaxpr
        self._counts = Counter([id(x) for equation in jaxpr.eqns for x in equation.invars])
        self._results = Counter([*map(id, jaxpr.outvars)])
        self._replaced: dict[int, list[Any]] = {}

    def count(self, var: Any) -> int:
        """Returns how often a variable is used, including as a result of the jaxpr."""
        count = self._counts.get(id(var), 0) + self._results.get(id(var), 0)
        return count + sum([self.count(other) for other in self._replaced.get(id(var), ())])

    def equations(self, var: Any) -> list[Any]:
        """Returns the equations that use a variable. An equation that uses it twice is listed twice."""
        ends, equations = self._equations
        end = ends.get(id(var), 0)
        users = equations[end - self._counts.get(id(var), 0) : end]
        for other in self._replaced.get(id(var), ()):
            users += self.equations(other)
        return users

    def is_result(self, var: Any) -> bool:
        """Returns whether a variable is a result of the jaxpr."""
        return id(var) in self._results or any(map(self.is_result, self._replaced.get(id(var), ())))

    def add(self, var: Any, other: Any) -> None:
        """Adds the uses of *other* to those of *var*, which replaces it."""
        self._replaced.setdefault(id(var), []).append(other)

    @functools.cached_property
    def _equations(self) -> tuple[dict[int, int], list[Any]]:
        """The equations that use the variables, one variable after the other, and the end of each one's part.

        One list, because thousands of lists would trigger Python's garbage collection.
        """
        ends = dict(zip(self._counts, itertools.accumulate(self._counts.values(), initial=0), strict=False))
        equations = [None] * self._counts.total()
        for equation in self._jaxpr.eqns:
            for atom in equation.invars:
                end = ends[id(atom)]
                equations[end] = equation
                ends[id(atom)] = end + 1
        return ends, equations


def without_unused(eqns: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Returns the equations that have effects, or whose results are used.

    Args:
        eqns: the equations of a jaxpr.
        results: the results of the jaxpr.
    """
    needed, live = {*map(id, results)}, list[Any]()
    for equation in reversed(eqns):
        if not needed.isdisjoint(map(id, equation.outvars)) or has_effects(equation):
            live.append(equation)
            needed.update(map(id, equation.invars))
    return live[::-1]
