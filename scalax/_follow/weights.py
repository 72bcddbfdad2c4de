"""Weights of a jaxpr, the arguments that rows are multiplied with; and sums over rows, which gradients are.

Where each round of a loop multiplies few rows with weights that it does not change, these are gathered once
before the loop, and the sums of its rounds are added up over devices once behind it. A recurrent cell would
else gather them, and reduce their gradients, in every time step.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from scalax._follow.trail import Trail, Trails
from scalax._jax.equations import shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dims import ELEMENTWISE, FORWARDS, PARTS, PRODUCTS, VIEWS

# To gather two bytes of a weight takes as long as to multiply them with 4,000 rows (`seconds`). A quarter of
# that, since what is gathered stays in memory for the whole loop.
FEW_ROWS = 1024
_OF_SUMS = FORWARDS | {'add', 'add_any'}


class Weights:
    """The weights of a jaxpr, and its sums over rows.

    Args:
        arguments: the arguments of the jaxpr that hold no rows, each with its number.
        rounds: for how many rounds of loops each argument of it is the same; empty if it is no round.
        trails: answers about trails.

    Attributes:
        multiplied: argument -> with how many rows each device multiplies it at once, as in `Followed`.
    """

    def __init__(self, arguments: Mapping[Any, int], rounds: Sequence[int], trails: Trails) -> None:
        self._trails, self._rounds = trails, rounds
        self.multiplied: dict[int, int] = {}
        # By the ids of variables: literals are not hashable.
        self._numbers = {id(var): i for var, i in arguments.items()}
        self._parts: set[int] = set()
        self._sums: set[int] = set()

    def is_sum(self, atom: Any) -> bool:
        """Whether a value is a sum over few rows."""
        return id(atom) in self._sums

    def is_weight(self, atom: Any) -> bool:
        """Whether a value is an argument without rows, a part of one, or computed of one."""
        return id(atom) in self._numbers

    def note(
        self,
        equation: Any,
        operands: Sequence[Trail],
        results: Sequence[Trail] = (),
        staying: Container[int] = (),
    ) -> None:
        """Takes note of an equation without jaxprs.

        Args:
            equation: the equation.
            operands: the trails of its operands.
            results: those of its results.
            staying: which operands are weights that are not gathered for it.
        """
        name = primitive_name(equation)
        if name in PRODUCTS:
            for weight, other in ((0, 1), (1, 0)):
                if weight not in staying:
                    self._note_product(equation, operands, weight, other)
            if all(map(self._trails.has_rows, operands[:2])):
                self._note_sum(equation, operands)
        elif name in VIEWS:
            operand, result = equation.invars[0], equation.outvars[0]
            if self.is_weight(operand) and (name in PARTS or size_of(operand) == size_of(result)):
                self._note_same(operand, equation.outvars, part=name in PARTS)
        elif name in ELEMENTWISE and not any(map(self._trails.has_rows, operands)):
            self._note_computed(equation)
        if name in _OF_SUMS and not self._sums.isdisjoint(map(id, equation.invars)):
            self._sums.add(id(equation.outvars[0]))

    def passed(self, results: Sequence[Any]) -> dict[int, int]:
        """The results of the jaxpr that are arguments, or parts of them: number -> number of the argument."""
        return {i: self._numbers[id(atom)] for i, atom in enumerate(results) if id(atom) in self._numbers}

    def note_call(self, operands: Sequence[Any], multiplied: Mapping[int, int]) -> None:
        """Takes note of the products in a jaxpr that runs once."""
        for i, rows in multiplied.items():
            self._note_rows(operands[i], rows)

    def note_results(
        self,
        operands: Sequence[Any],
        results: Sequence[Any],
        passed: Mapping[int, int],
        summed: Container[int],
    ) -> None:
        """Takes note of the results of a jaxpr that runs once."""
        for i, number in passed.items():
            self._note_same(operands[number], results[i : i + 1], part=True)
        self._sums.update(id(var) for i, var in enumerate(results) if i in summed)

    def note_loop(
        self, operands: Sequence[Any], multiplied: Mapping[int, int], constants: int, rounds: int
    ) -> None:
        """Takes note of a loop, of the weights of whose rounds this is known.

        Args:
            operands: those of a round, in order: constants, what is carried, then stacks.
            multiplied: the products of these in one round.
            constants: how many constants there are.
            rounds: how many rounds there are; 1 if that is not known.
        """
        for i, rows in multiplied.items():
            before = i < constants and rows < FEW_ROWS  # gathered once, before the loop
            self._note_rows(operands[i], rows * (rounds if before else 1))

    def rounds(self, atom: Any) -> int:
        """For how many rounds of loops a value is the same weight."""
        number = self._numbers.get(id(atom), len(self._rounds))
        return self._rounds[number] if number < len(self._rounds) and id(atom) not in self._parts else 1

    def rounds_of(self, equation: Any, operands: Sequence[Trail], weight: int, other: int) -> int:
        """For how many rounds of loops the weight of a product is gathered once."""
        few = self._rows(equation, operands, other) < FEW_ROWS
        return self.rounds(equation.invars[weight]) if few else 1

    def _note_product(self, equation: Any, operands: Sequence[Trail], weight: int, other: int) -> None:
        """A product of a weight and rows, if these operands are such."""
        if self.is_weight(equation.invars[weight]) and self._trails.has_rows(operands[other]):
            self._note_rows(equation.invars[weight], self._rows(equation, operands, other))

    def _note_sum(self, equation: Any, operands: Sequence[Trail]) -> None:
        """A sum over few rows, if a product of rows is one."""
        contracted = [self._trails.dims(equation).summed_of(place) for place in (0, 1)]
        summed = [
            tuple([axes if i in dims else () for i, axes in enumerate(trail)])
            for trail, dims in zip(operands, contracted, strict=False)
        ]
        if all(map(self._trails.has_rows, summed)):
            rows = self._count(equation.invars[0], operands[0], contracted[0], inside=True)
            if rows < FEW_ROWS:
                self._sums.add(id(equation.outvars[0]))

    def _rows(self, equation: Any, operands: Sequence[Trail], place: int) -> int:
        """How many rows of an operand of a product each device has."""
        summed = self._trails.dims(equation).summed_of(place)
        return self._count(equation.invars[place], operands[place], summed, inside=False)

    def _count(self, atom: Any, trail: Trail, contracted: Container[int], *, inside: bool) -> int:
        """The rows of a matrix that each device has: the dimensions that are contracted, or the others."""
        shape, sizes = shape_of(atom), self._trails.sizes
        dims = [i for i in range(len(shape)) if (i in contracted) is inside]
        shards = math.prod([sizes[axis] for i in dims for axis in trail[i]])
        return math.prod([shape[i] for i in dims]) // shards

    def _note_same(self, atom: Any, results: Sequence[Any], *, part: bool) -> None:
        """Results that are a weight, or parts of one."""
        number = self._numbers.get(id(atom))
        if number is not None:
            self._numbers.update(dict.fromkeys(map(id, results), number))
            if part or id(atom) in self._parts:
                self._parts.update(map(id, results))

    def _note_computed(self, equation: Any) -> None:
        """A weight that is computed of another one of its size: scaled, masked, with an adapter added."""
        [result] = equation.outvars
        for atom in equation.invars:
            if id(atom) not in self._numbers or atom.aval.dtype != result.aval.dtype:  # such as a mask
                continue
            if atom.aval.shape == result.aval.shape or size_of(atom) == size_of(result):
                self._note_same(atom, equation.outvars, part=False)
                return

    def _note_rows(self, atom: Any, rows: int) -> None:
        number = self._numbers.get(id(atom))
        if number is not None:
            rows = max(rows, FEW_ROWS) if id(atom) in self._parts else rows
            self.multiplied[number] = max(self.multiplied.get(number, 0), rows)
