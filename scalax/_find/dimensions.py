"""Which dimensions of a function's arguments are one: those that meet in products, sums and loops.

The columns of one matrix that are multiplied with the rows of the next one are a dimension of the model, such
as its width or its heads. To split one of them over a mesh axis pays if all are split.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from scalax._jax.equations import opened, shape_of
from scalax._jaxprs.dependence import Dependence
from scalax._jaxprs.dims import ELEMENTWISE, PRODUCTS, VIEWS, dims_of
from scalax._jaxprs.interpreter import Interpreter

Place = tuple[int, int]
"""A dimension of an argument: the number of the argument, and that of the dimension."""

T = TypeVar('T', int, str)
_SLICES = frozenset({'slice', 'dynamic_slice', 'split'})


class Classes(Generic[T]):
    """Things of which some are one; of each class the least stands for all."""

    def __init__(self) -> None:
        self._parents: dict[T, T] = {}

    def root(self, thing: T) -> T:
        """What stands for the class of a thing."""
        while (parent := self._parents.get(thing, thing)) != thing:
            thing = parent
        return thing

    def unite(self, one: T, other: T) -> None:
        """Makes one class of two."""
        a, b = self.root(one), self.root(other)
        self._parents[max(a, b)] = min(a, b)


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
    chosen = set(arguments)
    variables = opened(jaxpr).invars
    follower = _Follower(Dependence(jaxpr, [i not in chosen for i in range(len(variables))]))
    values = [
        _Value(tuple(_name(i, dim) for dim in range(len(shape_of(var)))), i)
        if i in chosen and shape_of(var)
        else _UNKNOWN
        for i, var in enumerate(variables)
    ]
    follower.results(jaxpr, values)
    ranks = {i: len(shape_of(variables[i])) for i in sorted(chosen)}
    places = [(i, dim) for i, rank in ranks.items() for dim in range(rank)]
    roots = [follower.classes.root(_name(*place)) for place in places]
    numbers = {root: number for number, root in enumerate(dict.fromkeys(roots))}
    return Dimensions(
        {place: numbers[root] for place, root in zip(places, roots, strict=True)},
        frozenset(place for place in places if _name(*place) in follower.stacked),
        frozenset(follower.multiplied),
        frozenset(place for place in places if _name(*place) in follower.experts),
        ranks,
    )


def _name(argument: int, dim: int) -> str:
    return f'{argument}:{dim}'


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value: for each dimension that of the argument that it comes from, and the argument that it is.

    It is also one that is computed of an argument without the batch, such as a scaled one.
    """

    dims: tuple[str, ...] = ()
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
        classes: dimensions by their names, those that meet being one.
    """

    def __init__(self, from_batch: Dependence) -> None:
        super().__init__(nothing=_UNKNOWN)
        self._from_batch = from_batch
        self.stacked: set[str] = set()
        self.multiplied: set[int] = set()
        self.experts: set[str] = set()
        self.classes = Classes[str]()

    def primitive(self, name: str, equation: Any, operands: Sequence[_Value]) -> Sequence[_Value]:
        dims = dims_of(equation)
        known = [each.dims for each in operands]
        if name in PRODUCTS or name == 'gather':
            self.multiplied.update(each.argument for each in operands if each.argument is not None)
        if name in PRODUCTS:
            self._unite(dims.summed, known)
        if name == 'dot_general':
            shared = [place for sources in dims.results[0] if len(sources) > 1 for place in sources]
            self.experts.update(
                known[place][dim] for place, dim in shared if operands[place].argument is not None
            )
        if name in ELEMENTWISE or name in ('concatenate', 'dot_general'):
            for result in dims.results:
                self._unite(result, known)
        results = dims.through(known, '')
        if name in _SLICES:
            results = [self._sliced(equation, known[0], out) for out in equation.outvars]
        argument = operands[0].argument if name in VIEWS else None
        if name in ELEMENTWISE and equation.outvars[0] not in self._from_batch:
            argument = next((each.argument for each in operands if each.argument is not None), None)
        return [_Value(each, argument) if each else _UNKNOWN for each in results]

    def _sliced(self, equation: Any, known: Sequence[str], out: Any) -> tuple[str, ...]:
        """A part along some dimensions; one of which a single element is taken is that of a stack."""
        old, new = shape_of(equation.invars[0]), shape_of(out)
        if not known:
            return ()
        self.stacked.update(
            name for name, before, after in zip(known, old, new, strict=True) if name and before > after == 1
        )
        kept = tuple([name if a == b else '' for name, a, b in zip(known, old, new, strict=True)])
        return kept if any(kept) else ()

    def element_of(self, stack: _Value) -> _Value:
        self.stacked.update(filter(None, stack.dims[:1]))
        return _Value(stack.dims[1:], stack.argument) if any(stack.dims[1:]) else _UNKNOWN

    def stack_of(self, element: _Value) -> _Value:
        return _Value(('', *element.dims)) if element.dims else _UNKNOWN

    def joined(self, facts: Sequence[_Value]) -> _Value:
        """One value in place of several of one shape: their dimensions are the same ones."""
        known = [each.dims for each in facts if each.dims]
        if not known:
            return _UNKNOWN
        same = [[(place, i) for place, _ in enumerate(known)] for i, _ in enumerate(known[0])]
        self._unite(same, known)
        return _Value(tuple([next(filter(None, dims), '') for dims in zip(*known, strict=True)]))

    def _unite(self, same: Iterable[Sequence[Place]], known: Sequence[Sequence[str]]) -> None:
        """Makes one class of the dimensions of each of these groups of places."""
        for places in same:
            names = [known[place][dim] for place, dim in places if known[place] and known[place][dim]]
            for one, other in itertools.pairwise(names):
                self.classes.unite(one, other)
