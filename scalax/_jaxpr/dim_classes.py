"""Which dimensions of the values of a jaxpr are one: those that meet in products, sums, loops and calls.

The columns of one matrix that are multiplied with the rows of the next one are a dimension of the model, such
as its width or its heads. To split one of them over a mesh axis pays if all are split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from scalax._jax.equations import open_jaxpr, shape_of
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter
from scalax._jaxpr.dim_rules import ELEMENTWISE, UNKNOWN, dim_rule, reshape_groups

DimIds = tuple[int, ...]
"""A number for each dimension of a value."""


class UnionFind:
    """Classes of numbers (union-find): the least number of a class stands for it."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def root(self, number: int) -> int:
        """The number that stands for the class of this one."""
        parents = self._parents
        while (parent := parents.get(number, number)) != number:
            parents[number] = number = parents.get(parent, parent)  # the next way is half as long
        return number

    def unite(self, one: int, other: int) -> None:
        """Makes one class of two."""
        a, b = self.root(one), self.root(other)
        if a != b:
            self._parents[max(a, b)] = min(a, b)


class DimClasses(AbstractInterpreter[DimIds]):
    """Numbers the dimensions of values. Those that meet are in one class, with the least number of them.

    Args:
        jaxpr: the jaxpr, open or closed.
        shards: in how many parts a dimension would be split. Of the dimensions that a reshape merges or
            splits, the first one is one with the result, if it divides by that.

    Attributes:
        arguments: the numbers of the arguments of the jaxpr.
        classes: which of the numbers are one, since their dimensions meet.
    """

    def __init__(self, jaxpr: Any, shards: int = 1) -> None:
        super().__init__(bottom=())
        self._shards, self._count = shards, itertools.count()
        self.union_find = UnionFind()
        self.arguments = [*map(self.new_ids, open_jaxpr(jaxpr).invars)]
        self.eval_jaxpr(jaxpr, self.arguments)

    def new_ids(self, atom: Any) -> DimIds:
        """The numbers of a value of which nothing is known."""
        return tuple(itertools.islice(self._count, len(shape_of(atom))))

    def require_unsharded(self, numbers: Iterable[int]) -> None:
        """Takes note of dimensions of which all places are needed at once, or some alone are read.

        For subclasses; here it does nothing.
        """

    def eval_equation(self, equation: Any, operands: Sequence[DimIds]) -> Sequence[DimIds]:
        known = [found or self.new_ids(atom) for found, atom in zip(operands, equation.invars, strict=True)]
        found = zip(super().eval_equation(equation, known), equation.outvars, strict=False)
        # Of a stack of what nothing is known of, such as constants, nothing is known.
        return [each if len(each) == len(shape_of(out)) else self.new_ids(out) for each, out in found]

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[DimIds]) -> Sequence[DimIds]:
        if name in ELEMENTWISE and len(equation.outvars) == 1:  # most equations, and no rule has to be asked
            alike = [found for found in operands if len(found) == len(shape_of(equation.outvars[0]))]
            return [tuple(map(self._united, zip(*alike, strict=True)))] if len(alike) > 1 else alike
        dims, results = dim_rule(equation), [*map(self.new_ids, equation.outvars)]
        if dims is UNKNOWN:
            self.require_unsharded(itertools.chain(*operands, *results))
            return results
        if name == 'reshape':
            return [self._reshaped(equation, operands[0], results[0])]
        sizes = [*map(shape_of, equation.invars)]
        for pair in dims.reduced:
            self._united([operands[place][dim] for place, dim in pair])
        # Products and reductions sum over dimensions, and a lookup takes places of them: all of that splits.
        used = {place for sources in dims.reduced for place in sources}
        for result, (out, sources) in enumerate(zip(equation.outvars, dims.results, strict=True)):
            mine = [*results[result]]
            for i, (size, places) in enumerate(zip(shape_of(out), sources, strict=True)):
                same = [(place, dim) for place, dim in places if sizes[place][dim] == size]
                used.update(same)
                if same:
                    mine[i] = self._united([operands[place][dim] for place, dim in same])
                elif places:
                    self.require_unsharded([mine[i]])
            results[result] = tuple(mine)
        if name != 'gather':
            every = (
                (place, dim)
                for place, shape in enumerate(sizes)
                for dim, size in enumerate(shape)
                if size > 1
            )
            self.require_unsharded([operands[place][dim] for place, dim in every if (place, dim) not in used])
        return results

    def element_of(self, stack: DimIds) -> DimIds:
        self.require_unsharded(stack[:1])
        return stack[1:]

    def stack_of(self, element: DimIds) -> DimIds:
        rounds = next(self._count)
        self.require_unsharded([rounds])
        return (rounds, *element)

    def join(self, facts: Sequence[DimIds]) -> DimIds:
        """Values that are one: so are their dimensions."""
        return tuple(map(self._united, zip(*filter(None, facts), strict=True)))

    def _united(self, numbers: Sequence[int]) -> int:
        """The least of numbers whose dimensions are one."""
        least = first = numbers[0]
        for number in numbers:
            if number != first:
                self.union_find.unite(first, number)
                least = min(least, number)
        return least

    def _reshaped(self, equation: Any, known: DimIds, new: DimIds) -> DimIds:
        """The dimensions of a reshape: of those that it merges or splits the first ones are one."""
        operand, out = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
        found, left = [*new], {*range(len(known))}
        for (merged, *_), (split, *_) in reshape_groups(equation):
            if operand[merged] % self._shards == out[split] % self._shards == 0:
                found[split] = known[merged]
                left.discard(merged)
        self.require_unsharded([known[dim] for dim in left])
        return tuple(found)
