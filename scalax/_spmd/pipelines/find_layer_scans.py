"""Finder of the scans over layers that are sharded over the axis of stages, and of batch dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import loop_of, shape_of
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter
from scalax._jaxpr.dim_rules import dim_rule
from scalax._jaxpr.dim_sharding import UNSHARDED, DimSharding, merged, of_dims

BATCH, LAYERS, _MINOR_BATCH = 'batch', 'layers', 'minor batch'
"""Marks of the batch dimension, and of a dimension of layers that are sharded over the axis of stages."""


class LayerScanFinder(AbstractInterpreter[DimSharding]):
    """Marks the dimensions of the batch and of layers, in `DimSharding`s with marks in place of mesh axes.

    Marks are hints: the result of a pipeline does not depend on them.

    Args:
        jaxpr: the jaxpr.
        arguments: the marks of its arguments. A mark other than `BATCH` and `LAYERS` identifies the argument
            that a stack comes from.

    Attributes:
        loops: the scans over layers, by equation id.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[DimSharding]) -> None:
        super().__init__(bottom=UNSHARDED)
        self.loops: dict[int, Any] = {}
        self.eval_jaxpr(jaxpr, arguments)

    def batch_dim(self, atom: Any) -> int | None:
        """Returns the batch dimension of a value; None if it has none."""
        return next((dim for dim, marks in enumerate(self.of(atom)) if BATCH in marks), None)

    def eval_primitive(
        self, name: str, equation: Any, operands: Sequence[DimSharding]
    ) -> Sequence[DimSharding]:
        results = dim_rule(equation).propagate(operands) or [UNSHARDED] * len(equation.outvars)
        return [*map(_with_unique_marks, results)]

    def join(self, values: Sequence[DimSharding]) -> DimSharding:
        return merged(values, max(map(len, values)))

    def element_of(self, stack: DimSharding) -> DimSharding:
        return _with_unique_marks(stack[1:])

    def stack_of(self, element: DimSharding) -> DimSharding:
        return ((), *element) if element else UNSHARDED

    def eval_loop(self, equation: Any, operands: Sequence[DimSharding]) -> Sequence[DimSharding]:
        results, loop = super().eval_loop(equation, operands), loop_of(equation)
        if not any(LAYERS in stack[0] for stack in loop.split(operands)[2] if stack):
            return results
        self.loops[id(equation)] = equation
        ys = zip(results[loop.num_carry :], equation.outvars[loop.num_carry :], strict=True)
        ys_of_layers = [
            merged([of_dims({0: (LAYERS,)}, len(shape_of(var))), marks], len(shape_of(var)))
            for marks, var in ys
        ]
        return [*results[: loop.num_carry], *ys_of_layers]


def _with_unique_marks(sharding: DimSharding) -> DimSharding:
    """Keeps each mark in the first dimension that has it only.

    If a reshape splits the batch dimension into microbatches, a loop may run over the first of the new
    dimensions. The second one is marked as minor, and becomes the batch dimension of an element.
    """
    used: set[str] = set()
    dims = []
    for marks in sharding:
        is_minor_batch = BATCH in marks and BATCH in used and _MINOR_BATCH not in used
        dims.append(
            (_MINOR_BATCH,) if is_minor_batch else tuple([mark for mark in marks if mark not in used])
        )
        used.update(marks, dims[-1])
    if BATCH not in used:
        dims = [tuple([BATCH if mark == _MINOR_BATCH else mark for mark in marks]) for marks in dims]
    return tuple(dims) if any(dims) else UNSHARDED
