"""Where the batch is in the values of a step, and layers that are sharded over an axis of stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import loop_of, shape_of
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter
from scalax._jaxpr.dim_rules import dim_rule
from scalax._jaxpr.dim_sharding import UNSHARDED, DimSharding, merged, of_dims

ROWS, LAYERS, _MINOR = 'rows', 'layers', 'minor'


class LayerScanFinder(AbstractInterpreter[DimSharding]):
    """Which dimensions have rows, and which have layers; in place of mesh axes, a sharding has these marks.

    They are hints: what a pipeline computes does not depend on them.

    Args:
        jaxpr: the jaxpr.
        arguments: the marks of its arguments. Others than `ROWS` and `LAYERS` tell where a stack is from.

    Attributes:
        loops: the loops over layers, by the ids of their equations.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[DimSharding]) -> None:
        super().__init__(bottom=UNSHARDED)
        self.loops: dict[int, Any] = {}
        self.eval_jaxpr(jaxpr, arguments)

    def eval_primitive(
        self, name: str, equation: Any, operands: Sequence[DimSharding]
    ) -> Sequence[DimSharding]:
        results = dim_rule(equation).propagate(operands) or [UNSHARDED] * len(equation.outvars)
        return [*map(_first_of_each, results)]

    def join(self, facts: Sequence[DimSharding]) -> DimSharding:
        return merged(facts, max(map(len, facts)))

    def element_of(self, stack: DimSharding) -> DimSharding:
        return _first_of_each(stack[1:])

    def stack_of(self, element: DimSharding) -> DimSharding:
        return ((), *element) if element else UNSHARDED

    def eval_loop(self, equation: Any, operands: Sequence[DimSharding]) -> Sequence[DimSharding]:
        results, loop = super().eval_loop(equation, operands), loop_of(equation)
        if not any(LAYERS in stack[0] for stack in loop.split(operands)[2] if stack):
            return results
        self.loops[id(equation)] = equation
        stacks = zip(results[loop.num_carry :], equation.outvars[loop.num_carry :], strict=True)
        of_layers = [
            merged([of_dims({0: (LAYERS,)}, len(shape_of(var))), each], len(shape_of(var)))
            for each, var in stacks
        ]
        return [*results[: loop.num_carry], *of_layers]


def _first_of_each(sharding: DimSharding) -> DimSharding:
    """Returns a sharding whose marks are in one dimension each, the first one.

    Where a reshape splits the batch dimension, a loop may take the first of the new ones apart, as
    microbatches: the minor one is noted, and has the rows of what the loop takes.
    """
    used: set[str] = set()
    found = []
    for marks in sharding:
        known = [mark for mark in marks if mark not in used]
        found.append((_MINOR,) if ROWS in marks and ROWS in used and _MINOR not in used else tuple(known))
        used.update(marks, found[-1])
    if ROWS not in used:
        found = [tuple([ROWS if mark == _MINOR else mark for mark in marks]) for marks in found]
    return tuple(found) if any(found) else UNSHARDED
