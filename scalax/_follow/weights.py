"""Weights of a jaxpr, the arguments that rows are multiplied with; and sums over rows, which gradients are.

Where each round of a loop multiplies few rows with weights that it does not change, these are gathered once
before the loop, and the sums of its rounds are added up over devices once behind it. A recurrent cell would
else gather them, and reduce their gradients, in every time step.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from scalax._follow.trail import Trail, Trails, axes_of
from scalax._jax.equations import shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dims import ELEMENTWISE, FORWARDS, PRODUCTS

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
        self._sums: set[int] = set()

    def is_sum(self, atom: Any) -> bool:
        """Whether a value is a sum over few rows."""
        return id(atom) in self._sums

    def note(self, equation: Any, operands: Sequence[Trail], staying: Container[int] = ()) -> None:
        """Takes note of an equation without jaxprs.

        Args:
            equation: the equation.
            operands: the trails of its operands.
            staying: which operands are weights that are not gathered for it.
        """
        name, has_rows = primitive_name(equation), self._trails.has_rows
        if name in PRODUCTS:
            for weight, rows in ((0, 1), (1, 0)):
                if weight not in staying and has_rows(operands[rows]):
                    self._note_rows(equation.invars[weight], self._rows(equation, operands, rows))
            if self._is_sum_over_few(equation, operands):
                self._sums.add(id(equation.outvars[0]))
        elif name in FORWARDS or (name in ELEMENTWISE and not any(map(has_rows, operands))):
            self._note_derived(equation, is_view=name in FORWARDS)
        if name in _OF_SUMS and not self._sums.isdisjoint(map(id, equation.invars)):
            self._sums.add(id(equation.outvars[0]))

    def note_sums(self, results: Sequence[Any], summed: Container[int]) -> None:
        """Takes note of the sums among the results of a jaxpr that runs once, of which these are some."""
        self._sums.update(id(var) for i, var in enumerate(results) if i in summed)

    def note_loop(
        self, operands: Sequence[Any], multiplied: Mapping[int, int], constants: int = 0, rounds: int = 1
    ) -> None:
        """Takes note of the products in the jaxpr of a loop, or of a call, which is a loop of one round.

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
        return self._rounds[number] if number < len(self._rounds) else 1

    def rounds_of(self, equation: Any, operands: Sequence[Trail], weight: int, other: int) -> int:
        """For how many rounds of loops the weight of a product is gathered once."""
        few = self._rows(equation, operands, other) < FEW_ROWS
        return self.rounds(equation.invars[weight]) if few else 1

    def _is_sum_over_few(self, equation: Any, operands: Sequence[Trail]) -> bool:
        """Whether a product of rows sums over them, and these are few."""
        dims, batch_axes = self._trails.dims(equation), self._trails.batch_axes
        summed = [
            [trail[i] for i in dims.summed_of(place)] for place, trail in enumerate(operands[:2]) if trail
        ]
        over_rows = len(summed) == 2 and not any(batch_axes.isdisjoint(axes_of(each)) for each in summed)
        return over_rows and self._rows(equation, operands, 0, are_summed=True) < FEW_ROWS

    def _rows(self, equation: Any, operands: Sequence[Trail], place: int, *, are_summed: bool = False) -> int:
        """How many rows of an operand of a product each device has: what is summed over, or all else."""
        shape, summed = shape_of(equation.invars[place]), self._trails.dims(equation).summed_of(place)
        dims = [i for i in range(len(shape)) if (i in summed) is are_summed]
        axes = [axis for i in dims for axis in operands[place][i]]
        return math.prod([shape[i] for i in dims]) // self._trails.shards(axes)

    def _note_derived(self, equation: Any, *, is_view: bool) -> None:
        """Counts as weights views of whole ones, and what is computed in their size: with an adapter added.

        Parts of weights do not count: else a loop over layers would gather all layers.
        """
        result = equation.outvars[0]
        for atom in equation.invars:
            is_same = is_view or atom.aval.dtype == result.aval.dtype  # unlike a mask
            if id(atom) in self._numbers and is_same and size_of(atom) == size_of(result):
                self._numbers.update(dict.fromkeys(map(id, equation.outvars), self._numbers[id(atom)]))
                return

    def _note_rows(self, atom: Any, rows: int) -> None:
        number = self._numbers.get(id(atom))
        if number is not None:
            self.multiplied[number] = max(self.multiplied.get(number, 0), rows)
