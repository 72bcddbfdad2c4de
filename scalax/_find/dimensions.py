"""Which dimensions of a function's arguments are one: those that meet in products, sums and loops.

The columns of one matrix that are multiplied with the rows of the next one are a dimension of the model, such
as its width or its heads. To split one of them over a mesh axis pays if all are split.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from scalax._follow.dependence import Dependence
from scalax._follow.primitives import ELEMENTWISE, RULES
from scalax._follow.trail import LOST, Trail, merged, of_dims
from scalax._follow.weights import SAME
from scalax._jax import equations
from scalax._jax.equations import CALLS, Literal, loop_of, opened, shape_of
from scalax._jax.primitives import primitive_name

Place = tuple[int, int]
"""A dimension of an argument: the number of the argument, and that of the dimension."""

T = TypeVar('T', int, str)
_PRODUCTS = frozenset({'dot_general', 'ragged_dot_general', 'conv_general_dilated', 'gather'})
_SLICES = frozenset({'slice', 'dynamic_slice', 'split'})
_MOST_ROUNDS = 3  # of following what a loop carries


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
        _Value(tuple((_name(i, dim),) for dim in range(len(shape_of(var)))), i) if i in chosen else _UNKNOWN
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

    trail: Trail = LOST
    argument: int | None = None


_UNKNOWN = _Value()


class _Follower:
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
        self._from_batch = from_batch
        self.stacked: set[str] = set()
        self.multiplied: set[int] = set()
        self.experts: set[str] = set()
        self.classes = Classes[str]()
        self._known: dict[Any, tuple[Any, list[_Value]]] = {}

    def results(self, jaxpr: Any, values: Sequence[_Value]) -> list[_Value]:
        """The results of a jaxpr. It is kept as well, so that no other object gets its id."""
        key = id(jaxpr), tuple(values)
        if key not in self._known:
            self._known[key] = jaxpr, self._run(opened(jaxpr), values)
        return self._known[key][1]

    def _run(self, jaxpr: Any, values: Sequence[_Value]) -> list[_Value]:
        found = {var: value for var, value in zip(jaxpr.invars, values, strict=True) if value.trail}

        def value(atom: Any) -> _Value:
            return _UNKNOWN if isinstance(atom, Literal) else found.get(atom, _UNKNOWN)

        for equation in jaxpr.eqns:
            operands = [value(atom) for atom in equation.invars]
            if any(each.trail for each in operands):
                results = self._equation(equation, operands)
                found.update(
                    (var, each) for var, each in zip(equation.outvars, results, strict=True) if each.trail
                )
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, operands: Sequence[_Value]) -> list[_Value]:
        name = primitive_name(equation)
        if name in CALLS:
            return self.results(equations.called(equation), operands)
        if name in ('scan', 'while'):
            return self._loop(equation, operands)
        if name == 'cond':
            found = [self.results(branch, operands[1:]) for branch in equations.branches(equation)]
            return [self._met(each) for each in zip(*found, strict=True)]
        if name not in RULES:
            return [_UNKNOWN] * len(equation.outvars)
        trails = [each.trail for each in operands]
        self._note(equation, operands)
        results = RULES[name](equation, trails)
        if name in _SLICES:
            results = [self._sliced(equation, trails[0], out) for out in equation.outvars]
        argument = operands[0].argument if name in SAME else None
        if name in ELEMENTWISE and equation.outvars[0] not in self._from_batch:
            argument = next((each.argument for each in operands if each.argument is not None), None)
        return [_Value(trail, argument) for trail in results]

    def _note(self, equation: Any, operands: Sequence[_Value]) -> None:
        """Takes note of the dimensions that meet in an equation."""
        name = primitive_name(equation)
        trails = [each.trail for each in operands]
        if name in _PRODUCTS:
            self.multiplied.update(each.argument for each in operands if each.argument is not None)
        if name == 'dot_general':
            (left, right), (left_batch, right_batch) = equations.dot_dims(equation)
            for each, dims in zip(operands, (left_batch, right_batch), strict=True):
                if each.argument is not None:
                    self.experts.update(name for i in dims for name in each.trail[i])
            if all(trails):
                for i, j in zip((*left, *left_batch), (*right, *right_batch), strict=True):
                    self._unite(trails[0][i], trails[1][j])
        elif name == 'conv_general_dilated' and all(trails) and equations.conv_groups(equation)[0] == 1:
            numbers = equations.conv_dims(equation)
            self._unite(trails[0][numbers.lhs_spec[1]], trails[1][numbers.rhs_spec[1]])
        elif name in ELEMENTWISE or name == 'concatenate':
            self._met([each for each in operands if each.trail])

    def _sliced(self, equation: Any, trail: Trail, out: Any) -> Trail:
        """A part along some dimensions; one of which a single element is taken is that of a stack."""
        old, new = shape_of(equation.invars[0]), shape_of(out)
        for axes, before, after in zip(trail, old, new, strict=False):
            if before > after == 1:
                self.stacked.update(axes)
        return of_dims({i: axes for i, axes in enumerate(trail) if old[i] == new[i]}, len(new))

    def _loop(self, equation: Any, operands: Sequence[_Value]) -> list[_Value]:
        loop = loop_of(equation)
        constants, carried, stacks = loop.parts(operands)
        for each in stacks:
            self.stacked.update(*each.trail[:1])
        behind = [_Value(each.trail[1:], each.argument) for each in stacks]
        for _ in range(_MOST_ROUNDS):
            results = self.results(loop.body, [*constants, *carried, *behind])
            after = [self._met(pair) for pair in zip(carried, results, strict=False)]
            if after == carried:
                break
            carried = after
        stacked = [_Value(((), *each.trail)) if each.trail else _UNKNOWN for each in results[loop.carried :]]
        return [*carried, *stacked]

    def _met(self, values: Iterable[_Value]) -> _Value:
        """One value in place of several of one shape: their dimensions are the same ones."""
        trails = [value.trail for value in values if value.trail]
        if not trails:
            return _UNKNOWN
        rank = max(map(len, trails))
        same = [trail for trail in trails if len(trail) == rank]
        for dims in zip(*same, strict=True):
            for one, other in itertools.pairwise([axes for axes in dims if axes]):
                self._unite(one, other)
        return _Value(merged(same, rank))

    def _unite(self, one: Sequence[str], other: Sequence[str]) -> None:
        for name in one[:1]:
            for another in other[:1]:
                self.classes.unite(name, another)
