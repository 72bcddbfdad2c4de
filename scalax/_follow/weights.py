"""Weights of a jaxpr, the arguments that rows are multiplied with; and sums over rows, which gradients are.

Where each round of a loop multiplies few rows with weights that it does not change, these are gathered once
before the loop, and the sums of its rounds are added up over devices once behind it. A recurrent cell would
else gather them, and reduce their gradients, in every time step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from scalax._follow.jaxprs import shape_of
from scalax._follow.trail import Trail

# To gather two bytes of a weight takes 2 / 1e11 s over links of 100 GB/s, to multiply them with rows
# 2 x rows / 4e14 s: as long with 4,000 rows. A quarter of that, since what is gathered stays in memory for
# the whole loop.
FEW_ROWS = 1024
# Primitives whose first operand is a weight, and whose result is the same one.
_FORWARDS = ('convert_element_type', 'copy', 'reshape', 'squeeze', 'transpose')
_ADDS = ('add', 'add_any')


class Weights:
    """The weights of a jaxpr, and its sums over rows.

    Args:
        arguments: the arguments of the jaxpr that hold no rows, each with its number.
        sizes: the sizes of the mesh axes.
        has_rows: tells whether a trail has rows of the batch.

    Attributes:
        multiplied: argument -> with how many rows it is multiplied on each device, at most.
    """

    def __init__(
        self, arguments: Mapping[Any, int], sizes: Mapping[str, int], has_rows: Callable[[Trail], bool]
    ) -> None:
        self._numbers, self._sizes, self._has_rows = dict(arguments), sizes, has_rows
        self.multiplied: dict[int, int] = {}
        self._sums: set[Any] = set()

    def is_sum(self, atom: Any) -> bool:
        """Whether a value is a sum over few rows."""
        return not isinstance(atom, Literal) and atom in self._sums

    def note(self, equation: Any, operands: Sequence[Trail]) -> None:
        """Takes note of an equation without jaxprs, and of the trails of its operands."""
        name = equation.primitive.name
        if name == 'dot_general':
            self._note_product(equation, operands)
        elif name in _FORWARDS and (number := self._number(equation.invars[0])) is not None:
            self._numbers[equation.outvars[0]] = number
        if name in (*_FORWARDS, *_ADDS) and any(map(self.is_sum, equation.invars)):
            self._sums.add(equation.outvars[0])

    def note_call(self, equation: Any, multiplied: Mapping[int, int], summed: Container[int]) -> None:
        """Takes note of an equation that runs a jaxpr once, of whose weights and sums this is known."""
        for i, rows in multiplied.items():
            self._note_rows(equation.invars[i], rows)
        self._sums.update(var for i, var in enumerate(equation.outvars) if i in summed)

    def _note_product(self, equation: Any, operands: Sequence[Trail]) -> None:
        contracted, _ = equation.params['dimension_numbers']
        for weight, other in ((0, 1), (1, 0)):
            if self._has_rows(operands[other]):
                rows = self._count(equation.invars[other], operands[other], contracted[other], inside=False)
                self._note_rows(equation.invars[weight], rows)
        summed = [
            tuple(axes if i in dims else () for i, axes in enumerate(trail))
            for trail, dims in zip(operands, contracted, strict=True)
        ]
        if all(map(self._has_rows, summed)):
            rows = self._count(equation.invars[0], operands[0], contracted[0], inside=True)
            if rows < FEW_ROWS:
                self._sums.add(equation.outvars[0])

    def _count(self, atom: Any, trail: Trail, contracted: Container[int], *, inside: bool) -> int:
        """The rows of a matrix that each device has: the dimensions that are contracted, or the others."""
        dims = [i for i in range(len(shape_of(atom))) if (i in contracted) is inside]
        shards = math.prod(self._sizes[axis] for i in dims for axis in trail[i])
        return math.prod(shape_of(atom)[i] for i in dims) // shards

    def _number(self, atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else self._numbers.get(atom)

    def _note_rows(self, atom: Any, rows: int) -> None:
        number = self._number(atom)
        if number is not None:
            self.multiplied[number] = max(rows, self.multiplied.get(number, 0))
