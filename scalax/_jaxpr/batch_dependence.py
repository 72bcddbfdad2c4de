"""Which values of a jaxpr depend on the batch. The others are weights and constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scalax._jax.equations import is_jaxpr, param_values, shard_map_jaxpr
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter


class BatchDependence(AbstractInterpreter[bool]):
    """The variables of a jaxpr, and of its inner jaxprs, that depend on the batch.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: whether each argument of the jaxpr depends on the batch.
        definite_only: whether only definite dependence counts. An equation with an unread inner jaxpr, such
            as a kernel, may have results that ignore some operands.

    Attributes:
        result_depends: whether each result of the jaxpr depends on the batch.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[bool], *, definite_only: bool = False) -> None:
        super().__init__(bottom=False)
        self._definite_only = definite_only
        self.result_depends = self.eval_jaxpr(jaxpr, arguments)

    def __contains__(self, variable: Any) -> bool:
        """Returns whether a variable depends on the batch in any call of its jaxpr."""
        return self.of(variable)

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[bool]) -> Sequence[bool]:
        if name == 'shard_map':
            return self.eval_jaxpr(shard_map_jaxpr(equation)[0], operands)
        is_unread = self._definite_only and any(map(is_jaxpr, param_values(equation)))
        return [not is_unread] * len(equation.outvars)

    def join(self, values: Sequence[bool]) -> bool:
        return any(values)

    def control_dependence(
        self, equation: Any, predicate: Callable[[], bool], results: Sequence[bool]
    ) -> Sequence[bool]:
        return [True] * len(results) if predicate() else results
