"""Which dimensions of the values of a jaxpr are one: those that meet in products, sums, loops and calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from scalax._follow.said import placed_by_user
from scalax._jax.equations import CALLS, Literal, branches, called, loop_of, opened, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dims import ELEMENTWISE, UNKNOWN, dims_of, reshaped

# What they give in one place depends on the places before.
_IN_ORDER = frozenset(('cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp', 'rev'))
# They take single places of a dimension of their first operand, or change these.
_PLACES = frozenset(('gather', 'scatter', 'scatter-add', 'scatter-sub', 'scatter-max', 'scatter-min'))
_REDUCTIONS = frozenset(
    ('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and', 'reduce_or', 'argmax', 'argmin')
)


Name = tuple[int, int]
"""A value of one call of a jaxpr: the number of the call, and the id of the variable."""


class Step(NamedTuple):
    """An equation that sums over dimensions, or looks up places in them.

    Attributes:
        equation: the equation.
        times: how often it runs.
        names: of each operand its name, and how often it is another value: a constant of a loop is one.
        total: the name of its first result, or of the sum that it is added to.
    """

    equation: Any
    times: int
    names: Sequence[tuple[Name, int]]
    total: Name


class Dimensions:
    """The dimensions of all values of a jaxpr, and of those inside it, in classes.

    A class is *whole* if some equation needs all places of such a dimension at once, or reads some of them
    alone: slices, sorts, what is not known, and what the user places.

    Args:
        jaxpr: the jaxpr, open or closed.
        shards: in how many parts a dimension would be; what a reshape merges or splits is one with the first
            dimension, if that divides.
    """

    def __init__(self, jaxpr: Any, shards: int) -> None:
        self._shards = shards
        self._first: dict[int, int] = {}
        self._parents: list[int] = []
        self._whole: list[int] = []
        self._steps: dict[int, list[Any]] = {}
        self._calls: dict[int, list[tuple[Any, Sequence[Any], int]]] = {}
        self._sums: dict[int, int] = {}
        self._jaxpr = opened(jaxpr)
        self._walk(self._jaxpr)
        self.whole = {*map(self._root, self._whole)}

    def of(self, atom: Any) -> list[int]:
        """The class of each dimension of a value."""
        if isinstance(atom, Literal):
            return []
        first = self._first.get(id(atom))
        return [] if first is None else [self._root(first + i) for i in range(len(shape_of(atom)))]

    def steps(self) -> Iterator[Step]:
        """Products, reductions and look-ups, once for each call of the jaxpr that they are in."""
        numbers = itertools.count()

        def within(jaxpr: Any, times: int, given: dict[int, tuple[Name, int]]) -> Iterator[Step]:
            number = next(numbers)

            def name(atom: Any) -> tuple[Name, int]:
                return given.get(id(atom), ((number, id(atom)), times))

            for equation in self._steps[id(jaxpr)]:
                total = id(equation.outvars[0])
                while total in self._sums:
                    total = self._sums[total]
                yield Step(equation, times, [*map(name, equation.invars)], (number, total))
            for inside, same, rounds in self._calls[id(jaxpr)]:
                known = {id(var): name(atom) for var, atom in zip(inside.invars, same, strict=False)}
                yield from within(inside, times * rounds, known)

        return within(self._jaxpr, 1, {})

    def _root(self, dim: int) -> int:
        parents = self._parents
        while parents[dim] != dim:
            parents[dim] = dim = parents[parents[dim]]
        return dim

    def _dim(self, atom: Any, i: int) -> int:
        first = self._first.get(id(atom))
        if first is None:
            first = self._first[id(atom)] = len(self._parents)
            self._parents += range(first, first + len(shape_of(atom)))
        return first + i

    def _unite(self, one: Any, i: int, other: Any, j: int) -> None:
        if isinstance(one, Literal) or isinstance(other, Literal):
            return
        a, b = self._root(self._dim(one, i)), self._root(self._dim(other, j))
        self._parents[max(a, b)] = min(a, b)

    def _keep_whole(self, atom: Any, dims: Iterable[int]) -> None:
        if not isinstance(atom, Literal):
            self._whole += [self._dim(atom, i) for i in dims]

    def _same(self, some: Sequence[Any], others: Sequence[Any], behind: int = 0) -> None:
        """Values that are one, or elements of stacks: these have so many dimensions more in front."""
        for one, other in zip(some, others, strict=False):
            for i in range(len(shape_of(one))):
                self._unite(one, i, other, i + behind)

    def _walk(self, jaxpr: Any) -> None:
        if id(jaxpr) in self._steps:
            return
        self._steps[id(jaxpr)], self._calls[id(jaxpr)] = [], []
        for equation in jaxpr.eqns:
            self._equation(equation, jaxpr)

    def _equation(self, equation: Any, jaxpr: Any) -> None:
        name = primitive_name(equation)
        for atoms, places in zip((equation.invars, equation.outvars), placed_by_user(equation), strict=True):
            for i in places:
                self._keep_whole(atoms[i], range(len(shape_of(atoms[i]))))
        if name in CALLS:
            inside = opened(called(equation))
            self._inside(jaxpr, inside, equation.invars)
            self._same(inside.invars, equation.invars)
            self._same(inside.outvars, equation.outvars)
        elif name == 'cond':
            for branch in map(opened, branches(equation)):
                self._inside(jaxpr, branch, equation.invars[1:])
                self._same(branch.invars, equation.invars[1:])
                self._same(branch.outvars, equation.outvars)
        elif name in ('scan', 'while'):
            self._loop(jaxpr, equation)
        else:
            self._plain(equation, name, jaxpr)

    def _inside(self, jaxpr: Any, inside: Any, same: Sequence[Any], times: int = 1) -> None:
        """A jaxpr in another one, and those operands that are its first arguments, each time that it runs."""
        self._walk(inside)
        self._calls[id(jaxpr)].append((inside, same, times))

    def _loop(self, jaxpr: Any, equation: Any) -> None:
        loop = loop_of(equation)
        body = opened(loop.body)
        constants, first, stacks = loop.parts(equation.invars)
        self._inside(jaxpr, body, constants, loop.length or 1)
        state = loop.constants + loop.carried
        self._same(body.invars, [*constants, *first])
        self._same(body.invars[state:], stacks, 1)
        self._same(body.outvars[: loop.carried], body.invars[loop.constants :])
        self._same(body.outvars[: loop.carried], equation.outvars)
        self._same(body.outvars[loop.carried :], equation.outvars[loop.carried :], 1)

    def _plain(self, equation: Any, name: str, jaxpr: Any) -> None:
        operands, results = equation.invars, equation.outvars
        dims = UNKNOWN if name in _IN_ORDER or name == 'conv_general_dilated' else dims_of(equation)
        if dims is UNKNOWN or name == 'ragged_dot_general':
            for atom in (*operands, *results):
                self._keep_whole(atom, range(len(shape_of(atom))))
            return
        if name == 'reshape':
            self._reshape(operands[0], results[0], equation)
            return
        left = {(i, dim) for i, atom in enumerate(operands) for dim in range(len(shape_of(atom)))}
        if name in ('add', 'add_any'):
            self._sums.update(dict.fromkeys(map(id, operands), id(results[0])))
        for result, sources in zip(results, dims.results, strict=True):
            for i, places in enumerate(sources):
                for operand, dim in places:
                    if shape_of(operands[operand])[dim] == shape_of(result)[i]:
                        left.discard((operand, dim))
                        self._unite(result, i, operands[operand], dim)
                    elif name in ELEMENTWISE:  # of scalars, or of size 1
                        left.discard((operand, dim))
                    else:
                        self._keep_whole(result, [i])
        if name == 'dot_general':
            for (_, i), (_, j) in dims.summed:
                self._unite(operands[0], i, operands[1], j)
            self._steps[id(jaxpr)].append(equation)
        elif name in _REDUCTIONS or name in _PLACES:
            self._steps[id(jaxpr)].append(equation)
        elif name != 'broadcast_in_dim':
            for operand, dim in left:
                if shape_of(operands[operand])[dim] > 1:
                    self._keep_whole(operands[operand], [dim])

    def _reshape(self, operand: Any, result: Any, equation: Any) -> None:
        united = set()
        for merged, split in reshaped(equation):
            sizes = shape_of(operand)[merged[0]], shape_of(result)[split[0]]
            if all(size % self._shards == 0 for size in sizes):
                self._unite(operand, merged[0], result, split[0])
                united.add(merged[0])
        self._keep_whole(operand, set(range(len(shape_of(operand)))) - united)
