"""Which dimensions of the values of a jaxpr are one: those that meet in products, sums, loops and calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from scalax._follow.said import placed_by_user
from scalax._jax.equations import opened, shape_of
from scalax._jaxprs.classes import Classes
from scalax._jaxprs.dims import UNKNOWN, dims_of, reshaped
from scalax._jaxprs.interpreter import Interpreter

Numbers = tuple[int, ...]
"""A number for each dimension of a value; those of one class are one dimension."""
_STACK = 0
"""The number of dimensions that loops stack what rounds give in."""
# What they give in one place depends on the places before.
_IN_ORDER = frozenset(('cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp', 'rev'))
# The results of convolutions have windows, and those of ragged products groups.
_NOT_SPLIT = _IN_ORDER | {'conv_general_dilated', 'ragged_dot_general'}


class Dimensions(Interpreter[Numbers]):
    """The dimensions of all values of a jaxpr, and of those inside it, in classes.

    Some are *whole*: an equation needs all places of one at once, or reads some of them alone. Slices and
    sorts do, loops over stacks, what is not known, and the user who places a value.

    Args:
        jaxpr: the jaxpr, open or closed.
        shards: in how many parts a dimension would be; what a reshape merges or splits is one with the first
            dimension, if that divides.

    Attributes:
        whole: the classes that are whole.
    """

    def __init__(self, jaxpr: Any, shards: int) -> None:
        super().__init__(nothing=())
        self._shards = shards
        self._classes = Classes[int]()
        self._count = itertools.count(_STACK + 1)
        self._own = functools.cache(lambda key, rank: tuple(itertools.islice(self._count, rank)))
        self._whole = [_STACK]
        self.results(jaxpr, [*map(self.numbers, opened(jaxpr).invars)])
        self.whole = {*map(self._classes.root, self._whole)}

    def numbers(self, atom: Any) -> Numbers:
        """The numbers of the dimensions of a value, wherever its jaxpr is used."""
        return self.of(atom) or self._own(id(atom), len(shape_of(atom)))

    def classes(self, atom: Any) -> list[int]:
        """The class of each dimension of a value."""
        return [*map(self._classes.root, self.numbers(atom))]

    def equation(self, equation: Any, operands: Sequence[Numbers]) -> Sequence[Numbers]:
        pairs = zip(super().equation(equation, operands), equation.outvars, strict=False)
        # A stack of results of rounds of which nothing is known has no number for each dimension.
        results = [each if len(each) == len(shape_of(var)) else self.numbers(var) for each, var in pairs]
        for found, places in zip((operands, results), placed_by_user(equation), strict=True):
            self._whole += [number for i in places for number in found[i]]
        return results

    def primitive(self, name: str, equation: Any, operands: Sequence[Numbers]) -> Sequence[Numbers]:
        atoms, outs = equation.invars, equation.outvars
        known = [found or self.numbers(atom) for found, atom in zip(operands, atoms, strict=True)]
        dims = UNKNOWN if name in _NOT_SPLIT else dims_of(equation)
        if dims is UNKNOWN:
            self._whole += itertools.chain(*known, *map(self.numbers, outs))
            return [*map(self.numbers, outs)]
        if name == 'reshape':
            return [self._reshaped(equation, known[0])]
        if name == 'dot_general':
            for pair in dims.summed:
                self._joined(known, pair)
        # Products and reductions sum over dimensions, and a lookup takes places of them: all of that splits.
        used = {place for sources in dims.summed for place in sources}
        results = []
        for out, sources in zip(outs, dims.results, strict=True):
            mine = list(self.numbers(out))
            for i, places in enumerate(sources):
                same = [place for place in places if _size(atoms, place) == shape_of(out)[i]]
                if same:
                    mine[i] = self._joined(known, same)
                elif places:
                    self._whole.append(mine[i])
                used.update(same)
            results.append(tuple(mine))
        if name not in ('gather', 'broadcast_in_dim'):
            every = [(place, dim) for place, found in enumerate(known) for dim in range(len(found))]
            left = [place for place in every if place not in used and _size(atoms, place) > 1]
            self._whole += [known[place][dim] for place, dim in left]
        return results

    def element_of(self, stack: Numbers) -> Numbers:
        self._whole += stack[:1]
        return stack[1:]

    def stack_of(self, element: Numbers) -> Numbers:
        return (_STACK, *element)

    def joined(self, facts: Sequence[Numbers]) -> Numbers:
        """Values that are one: so are their dimensions."""
        first, *others = filter(None, facts) if any(facts) else [()]
        for other in others:
            for one, same in zip(first, other, strict=True):
                self._classes.unite(one, same)
        return first

    def _joined(self, known: Sequence[Numbers], places: Iterable[tuple[int, int]]) -> int:
        """The number of dimensions of operands that are one."""
        numbers = [known[place][dim] for place, dim in places]
        for number in numbers[1:]:
            self._classes.unite(numbers[0], number)
        return numbers[0]

    def _reshaped(self, equation: Any, known: Numbers) -> Numbers:
        """The dimensions of a reshape: of those that it merges or splits the first ones are one."""
        operand, out = equation.invars[0], equation.outvars[0]
        found, left = list(self.numbers(out)), {*range(len(known))}
        for (merged, *_), (split, *_) in reshaped(equation):
            if shape_of(operand)[merged] % self._shards == shape_of(out)[split] % self._shards == 0:
                found[split] = known[merged]
                left.discard(merged)
        self._whole += [known[dim] for dim in left]
        return tuple(found)


def _size(atoms: Sequence[Any], place: tuple[int, int]) -> int:
    operand, dim = place
    return shape_of(atoms[operand])[dim]
