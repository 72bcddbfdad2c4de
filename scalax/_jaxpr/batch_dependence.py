"""Which values of a jaxpr depend on the batch, with its rows or without. Others are weights and constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scalax._jax.equations import is_jaxpr, param_values, shard_map_jaxpr
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter


class BatchDependence(AbstractInterpreter[bool]):
    """The variables of a jaxpr, and of those inside it, that depend on the batch.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: whether each of its arguments does.
        certain: whether results count only if they do for sure. What holds a jaxpr that is not read here,
            such as a kernel, may give results that do not depend on all of its operands.

    Attributes:
        of_results: whether each result of the jaxpr does.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[bool], *, certain: bool = False) -> None:
        super().__init__(nothing=False)
        self._certain = certain
        self.of_results = self.results(jaxpr, arguments)

    def __contains__(self, variable: Any) -> bool:
        """Whether a variable depends on the batch, anywhere that its jaxpr is used."""
        return self.of(variable)

    def primitive(self, name: str, equation: Any, operands: Sequence[bool]) -> Sequence[bool]:
        if name == 'shard_map':
            return self.results(shard_map_jaxpr(equation)[0], operands)
        unread = self._certain and any(map(is_jaxpr, param_values(equation)))
        return [not unread] * len(equation.outvars)

    def joined(self, facts: Sequence[bool]) -> bool:
        return any(facts)

    def chosen(self, equation: Any, by: Callable[[], bool], results: Sequence[bool]) -> Sequence[bool]:
        return [True] * len(results) if by() else results
