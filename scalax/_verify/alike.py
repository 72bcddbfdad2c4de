"""What is compared of two programs that should differ in the sizes of their dimensions only.

Of two programs of the same code for meshes of the same axes, these are compared:

- *operations*: for each equation the lines of the user's code that led to it, the primitive, and of each
  operand and result the dtype and which dimensions have one element; which dimensions of operands those of
  results come from; where a sharding is given, its axes, and whether the dimension divides by
  them. Layers that are written out are the same operations again;
- *meetings*: which operation takes what another one, or an argument, gives;
- *sizes*: which dimensions of each result divide by the sizes of mesh axes, and which of them are equal.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._follow.followed_batch import line_of
from scalax._follow.said import placed_by_user
from scalax._jax.equations import (
    PLACES,
    jaxprs_in,
    loop_of,
    name_stack,
    opened,
    shape_of,
    size_of,
    traceback_of,
)
from scalax._jaxprs.dims import dims_of
from scalax._report.tables import array_text
from scalax._tree.specs import entries, entry_axes
from scalax._util.user_frames import is_cell

Axes = tuple[str, ...]
Path = tuple[tuple[str, int], ...]

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_LIBRARY = ('<', *[folder + os.sep for folder in (os.path.dirname(jax.__file__), _PACKAGE)])
_AGAIN = 40_000
_DIGITS = re.compile(r'\d+')
# What takes or gives as many values as there are layers, or arrays in a tree.
_VARIADIC = frozenset({'concatenate', 'optimization_barrier', 'split', 'stack', 'unstack'})


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A program without its sizes. What it consists of has numbers, which its `Reader` knows.

    Attributes:
        operations: its operations and their meetings.
        sizes: what is known of the sizes of their results.
        axes: the mesh axes that shard a dimension together, for all dimensions that are said to be sharded.
        elements: how many all arguments and results have, these in every round of a loop; an operation that
            is written out again counts as `_AGAIN` of them.
    """

    operations: frozenset[int]
    sizes: frozenset[int]
    axes: frozenset[Axes]
    elements: int


class Reader:
    """Reads programs that are to be compared with one another."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._equations: dict[int, tuple[Any, Sequence[Any]]] = {}

    def program(
        self, jaxpr: Any, names: Sequence[str], mesh: Mapping[str, int], axes: Iterable[Axes] = ()
    ) -> Program:
        """Reads a program.

        Args:
            jaxpr: the jaxpr.
            names: what its arguments are called. Those of layers differ in numbers.
            mesh: mesh axis -> size.
            axes: further mesh axes that shard a dimension together.
        """
        every = frozenset(axes) | _axes_of(opened(jaxpr))
        parts = {each: math.prod(mesh.get(axis, 1) for axis in each) for each in sorted(every)}
        found = _Reading(self, parts)
        found.elements = sum(map(size_of, opened(jaxpr).invars))
        found.read(opened(jaxpr), (), (), [self.number(stem(name)) for name in names], 1, ())
        return Program(frozenset(found.operations), frozenset(found.sizes), every, found.elements)

    def number(self, thing: Hashable, equation: Any = None, calls: Sequence[Any] = ()) -> int:
        """The number of an operation, or of what is known of one.

        Args:
            thing: the operation, or what is known.
            equation: an equation of it.
            calls: the equations around it, from the innermost one.
        """
        number = self._numbers.setdefault(thing, len(self._numbers))
        if equation is not None:
            self._equations.setdefault(number, (equation, calls))
        return number

    def where(self, numbers: Iterable[int]) -> list[str]:
        """The lines of some operations with what they compute, each line once."""
        found: dict[str, str] = {}
        for number in sorted(numbers):
            equation, calls = self._equations[number]
            found.setdefault(
                line_of(equation, calls), f'{equation.primitive.name} {_array(equation)}'.strip()
            )
        return [f'{line}: {what}' if line else what for line, what in found.items()]


def stem(path: str) -> str:
    """A path without its numbers: the same for each layer.

    Example:
        >>> stem('params/layers_12/3/w')
        'params/layers_#/#/w'
    """
    return _DIGITS.sub('#', path)


def division(size: int, parts: int) -> str:
    """How a dimension is divided into parts: one element each, several each, or not evenly."""
    return 'unevenly' if size % parts else 'one each' if size == parts else 'some each'


class _Reading:
    """The equations of one program; see `Program`."""

    def __init__(self, reader: Reader, parts: Mapping[Axes, int]) -> None:
        self._reader, self._parts = reader, parts
        self.operations: set[int] = set()
        self.sizes: set[int] = set()
        self.elements = 0

    def read(
        self,
        jaxpr: Any,
        inside: tuple[str, ...],
        path: Path,
        given: Sequence[int | None],
        rounds: int,
        calls: Sequence[Any],
    ) -> list[int | None]:
        """Reads a jaxpr; the numbers of the operations that give its results.

        Args:
            jaxpr: the open jaxpr.
            inside: the primitives around it.
            path: the lines of those.
            given: the numbers of what gives it its arguments.
            rounds: how often it runs.
            calls: the equations around it, from the innermost one.
        """
        makers: dict[int, int | None] = dict(zip(map(id, jaxpr.invars), given, strict=False))
        paths = [*map(_path, jaxpr.eqns)]
        # JAX keeps the jaxprs of functions: the lines of a later call are those of the first one.
        shared = _common(
            own
            for own, each in zip(paths, jaxpr.eqns, strict=True)
            if own and each.primitive.name not in PLACES
        )
        for equation, own in zip(jaxpr.eqns, paths, strict=True):
            own = (*path, *own[shared:])
            number = self._equation(equation, inside, own, makers, rounds, calls)
            makers.update(dict.fromkeys(map(id, equation.outvars), number))
        return [makers.get(id(atom)) for atom in jaxpr.outvars]

    def _equation(
        self,
        equation: Any,
        inside: tuple[str, ...],
        path: Path,
        makers: Mapping[int, int | None],
        rounds: int,
        calls: Sequence[Any],
    ) -> int:
        """Reads an equation; its number."""
        name = equation.primitive.name

        def note(thing: Hashable) -> int:
            return self._reader.number(thing, equation, calls)

        sources = [makers.get(id(atom)) for atom in equation.invars]
        taken, made = self._values(equation)
        held = [*jaxprs_in(equation)]
        whole = not held and name not in _VARIADIC
        dims = dims_of(equation)
        known: Hashable = (tuple(taken), tuple(made), dims.results, dims.summed) if whole else ()
        number = note((inside, path, name, stem(name_stack(equation)), known))
        self.elements += _AGAIN if number in self.operations else 0
        self.operations.add(number)
        for place, source in enumerate(sources):
            # Of what takes whole trees, each array with what it is; of others, in which place it is.
            self.operations.add(note((number, 'takes', source, place if whole else taken[place])))
        again = rounds * (loop_of(equation).length or 1) if name == 'scan' else rounds
        results: Sequence[int | None] = [None] * len(made)
        for inner in held:
            given = sources[max(0, len(sources) - len(inner.invars)) :]
            found = self.read(inner, (*inside, name), path, given, again, (equation, *calls))
            results = found if len(found) == len(made) else results
        if not whole:
            self.operations.update(note((number, 'gives', *each)) for each in zip(results, made, strict=True))
        for shape in map(shape_of, equation.outvars):
            self.elements += rounds * math.prod(shape)
            alike = tuple([shape.index(size) for size in shape])
            parts = tuple([size % each == 0 for size in shape for each in self._parts.values()])
            self.sizes.add(note((number, 'has', alike, parts)))
        return number

    def _values(self, equation: Any) -> list[list[Hashable]]:
        """Of operands, and of results: dtypes, which dimensions have one element, and where they are said."""

        def value(atom: Any, said: Any) -> Hashable:
            shape = shape_of(atom)
            return _dtype(atom), tuple([size > 1 for size in shape]), self._sharded(shape, said)

        sides = zip((equation.invars, equation.outvars), placed_by_user(equation), strict=True)
        return [[value(atom, said.get(i)) for i, atom in enumerate(atoms)] for atoms, said in sides]

    def _sharded(self, shape: Sequence[int], said: Any) -> Hashable:
        """The mesh axes of each dimension, and how they divide it."""
        pairs = zip(shape, map(entry_axes, _entries(said)), strict=False)
        found = [(axes, division(size, self._parts[axes])) if axes else () for size, axes in pairs]
        while found and not found[-1]:
            found.pop()
        return tuple(found)


def _common(paths: Iterable[Path]) -> int:
    """How many lines all paths begin with."""
    return sum(1 for _ in itertools.takewhile(lambda each: len({*each}) == 1, zip(*paths, strict=False)))


def _axes_of(jaxpr: Any) -> frozenset[Axes]:
    found: set[Axes] = set()
    for equation in jaxpr.eqns:
        for said in placed_by_user(equation):
            found.update(axes for given in said.values() for axes in map(entry_axes, _entries(given)) if axes)
        for inner in jaxprs_in(equation):
            found |= _axes_of(inner)
    return frozenset(found)


def _entries(given: Any) -> Sequence[Any]:
    spec = getattr(given, 'spec', given)
    return entries(spec) if isinstance(spec, jax.sharding.PartitionSpec) else ()


def _dtype(atom: Any) -> str:
    return str(getattr(atom.aval, 'dtype', ''))


def _array(equation: Any) -> str:
    out = equation.outvars[0] if equation.outvars else None
    return '' if out is None else array_text(_dtype(out), shape_of(out))


def _path(equation: Any) -> Path:
    """The lines that led to an equation, from the outermost one, without those of JAX and of scalax."""
    return tuple(_lines(equation))


def _lines(equation: Any) -> Iterator[tuple[str, int]]:
    stack = traceback_of(equation)
    while stack is not None:
        file = stack.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARY) or is_cell(file):
            yield file, stack.tb_lineno
        stack = stack.tb_next
