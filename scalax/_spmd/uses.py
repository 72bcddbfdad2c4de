"""Def-use chains of a jaxpr: the equations that use each variable."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
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
        self._counts.update(map(id, jaxpr.outvars))

    def count(self, var: Any) -> int:
        """Returns how often a variable is used, including as a result of the jaxpr."""
        return self._counts[id(var)]

    def equations(self, var: Any) -> list[Any]:
        """Returns the equations that use a variable. An equation that uses it twice is listed twice."""
        return self._equations.get(id(var), [])

    def is_result(self, var: Any) -> bool:
        """Returns whether a variable is a result of the jaxpr."""
        return self.count(var) != len(self.equations(var))

    def add(self, var: Any, other: Any) -> None:
        """Adds the uses of *other* to those of *var*, which replaces it."""
        self._counts[id(var)] += self._counts[id(other)]
        self._equations[id(var)] += self.equations(other)

    @functools.cached_property
    def _equations(self) -> dict[int, list[Any]]:
        equations = defaultdict[int, list[Any]](list)
        for equation in self._jaxpr.eqns:
            for atom in equation.invars:
                equations[id(atom)].append(equation)
        return equations


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
