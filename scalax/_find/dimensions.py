"""Which dimensions of a function's arguments are one: those that meet in products, sums and loops.

The columns of one matrix that are multiplied with the rows of the next one are a dimension of the model, such
as its width or its heads. To split one of them over a mesh axis pays if all are split.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scalax._jax.equations import opened, shape_of
from scalax._jaxprs.classes import Classes
from scalax._jaxprs.dependence import Dependence
from scalax._jaxprs.dims import ELEMENTWISE, PRODUCTS, VIEWS, dims_of
from scalax._jaxprs.interpreter import Interpreter

Place = tuple[int, int]
"""A dimension of an argument: the number of the argument, and that of the dimension."""

_SLICES = frozenset({'slice', 'dynamic_slice', 'split'})


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """What a jaxpr does with the dimensions of its arguments.

    Attributes:
        classes: dimension -> the number of its class; dimensions of one class meet somewhere.
        stacked: the dimensions that a loop takes one part of in each round.
        multiplied: the arguments that are multiplied, looked up or convolved with; others are only added to,
            or scaled, such as the state of an optimizer.
        experts: the dimensions along which a product has a matrix for each part of the rows.
        ranks: argument -> the number of its dimensions.
    """

    classes: Mapping[Place, int]
    stacked: frozenset[Place]
    multiplied: frozenset[int]
    experts: frozenset[Place]
    ranks: Mapping[int, int]


def dimensions(jaxpr: Any, arguments: Iterable[int]) -> Dimensions:
    """Follows the dimensions of some arguments through a jaxpr.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: the numbers of the arguments, not those of batches.
    """
    variables = opened(jaxpr).invars
    ranks = {i: len(shape_of(variables[i])) for i in sorted({*arguments})}
    values = [
        _Value(tuple([(i, dim) for dim in range(ranks[i])]), i) if ranks.get(i) else _UNKNOWN
        for i, _ in enumerate(variables)
    ]
    follower = _Follower(Dependence(jaxpr, [i not in ranks for i, _ in enumerate(variables)]))
    follower.results(jaxpr, values)
    places = [(i, dim) for i, rank in ranks.items() for dim in range(rank)]
    roots = {place: follower.classes.root(place) for place in places}
    numbers = {root: number for number, root in enumerate(dict.fromkeys(roots.values()))}
    return Dimensions(
        {place: numbers[root] for place, root in roots.items()},
        frozenset(follower.stacked),
        frozenset(follower.multiplied),
        frozenset(follower.experts),
        ranks,
    )


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value: for each dimension the place that it comes from, and the argument that it is.

    It is also one that is computed of an argument without the batch, such as a scaled one.
    """

    places: tuple[Place | None, ...] = ()
    argument: int | None = None


_UNKNOWN = _Value()


class _Follower(Interpreter[_Value]):
    """Follows values, and unites dimensions that meet.

    Args:
        from_batch: the variables that depend on the batch.

    Attributes:
        stacked: the dimensions that loops run over.
        multiplied: the arguments in products.
        experts: the dimensions of arguments that products have in common with rows.
        classes: dimensions, those that meet being one.
    """

    def __init__(self, from_batch: Dependence) -> None:
        super().__init__(nothing=_UNKNOWN)
        self._from_batch = from_batch
        self.stacked: set[Place] = set()
        self.multiplied: set[int] = set()
        self.experts: set[Place] = set()
        self.classes = Classes[Place]()

    def note(self, facts: dict[int, _Value]) -> None:
        """What a function is given in one place is not what it is given in another one."""

    def primitive(self, name: str, equation: Any, operands: Sequence[_Value]) -> Sequence[_Value]:
        dims = dims_of(equation)
        known = [each.places for each in operands]
        if name in PRODUCTS or name == 'gather':
            self.multiplied.update(each.argument for each in operands if each.argument is not None)
        if name in PRODUCTS:
            self._unite(dims.summed, known)
        if name == 'dot_general':
            shared = [source for sources in dims.results[0] if len(sources) > 1 for source in sources]
            found = [known[i][dim] for i, dim in shared if operands[i].argument is not None]
            self.experts.update(filter(None, found))
        if name in ELEMENTWISE or name in ('concatenate', 'dot_general'):
            for result in dims.results:
                self._unite(result, known)
        results = dims.through(known, None)
        if name in _SLICES:
            results = [self._sliced(equation, known[0], out) for out in equation.outvars]
        argument = operands[0].argument if name in VIEWS else None
        if name in ELEMENTWISE and equation.outvars[0] not in self._from_batch:
            argument = next((each.argument for each in operands if each.argument is not None), None)
        return [_value(each, argument) for each in results]

    def _sliced(self, equation: Any, known: Sequence[Place | None], out: Any) -> tuple[Place | None, ...]:
        """A part along some dimensions; one of which a single element is taken is that of a stack."""
        sizes = [*zip(known, shape_of(equation.invars[0]), shape_of(out), strict=False)]
        self.stacked.update(place for place, before, after in sizes if place and before > after == 1)
        return tuple([place if before == after else None for place, before, after in sizes])

    def element_of(self, stack: _Value) -> _Value:
        self.stacked.update(filter(None, stack.places[:1]))
        return _value(stack.places[1:], stack.argument)

    def stack_of(self, element: _Value) -> _Value:
        return _value((None, *element.places))

    def joined(self, facts: Sequence[_Value]) -> _Value:
        """One value in place of several of one shape: their dimensions are the same ones."""
        known = [each.places for each in facts if each.places]
        if not known:
            return _UNKNOWN
        same = [[(i, dim) for i, _ in enumerate(known)] for dim, _ in enumerate(known[0])]
        self._unite(same, known)
        return _value([next(filter(None, places), None) for places in zip(*known, strict=True)])

    def _unite(self, same: Iterable[Sequence[Place]], known: Sequence[Sequence[Place | None]]) -> None:
        """Makes one class of the dimensions of each of these groups of operands' dimensions."""
        for sources in same:
            found = [place for i, dim in sources if known[i] and (place := known[i][dim])]
            for one, other in itertools.pairwise(found):
                self.classes.unite(one, other)


def _value(places: Sequence[Place | None], argument: int | None = None) -> _Value:
    return _Value(tuple(places), argument) if any(places) else _UNKNOWN
