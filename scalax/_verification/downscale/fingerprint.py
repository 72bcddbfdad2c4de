"""What is compared of two programs that should differ in the sizes of their dimensions only.

Of two programs of the same code for meshes of the same axes, these are compared:

- *operations*: for each equation the lines of the user's code that led to it, the primitive, and of each
  operand and result the dtype and which dimensions have one element; which dimensions of operands those of
  results come from; where a sharding is given, its axes, and how they divide the dimension. Layers that are
  written out are the same operations again;
- *meetings*: which operation takes what another one, or an argument, gives;
- *divisions*: which dimensions of each result divide by the sizes of mesh axes.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._core.pytree.partition_specs import entries, entry_axes
from scalax._core.render.tables import array_text
from scalax._core.util.user_frames import is_cell
from scalax._jax.equations import (
    SHARDING_PARAMS,
    all_equations,
    inner_jaxprs,
    name_stack,
    open_jaxpr,
    shape_of,
    size_of,
    traceback_of,
)
from scalax._jaxpr.dim_rules import dim_rule
from scalax._jaxpr.source_lines import line_of
from scalax._jaxpr.user_shardings import user_shardings_of

Axes = tuple[str, ...]
Path = tuple[tuple[str, int], ...]
Facts = dict[int, tuple[Any, Sequence[Any]]]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_LIBRARY = ('<', *[folder + os.sep for folder in (os.path.dirname(jax.__file__), _PACKAGE)])
_AGAIN = 40_000
_DIGITS = re.compile(r'\d+')
# What takes or gives as many values as there are layers, or arrays in a tree.
_VARIADIC = frozenset({'concatenate', 'optimization_barrier', 'split', 'stack', 'unstack'})


class ProgramFingerprint:
    """A program without its sizes.

    Args:
        jaxpr: the jaxpr.
        names: what its arguments are called. Those of layers differ in numbers.
        mesh: mesh axis -> size.
        like: a program that it is compared with.

    Attributes:
        axes: the mesh axes that shard a dimension together, for all dimensions that are said to be sharded.
        operations: its operations and their meetings, by numbers that programs to be compared share; for each
            the equation, and those around it, from the innermost one.
        divisibility: the same for the divisions.
        elements: how many all arguments and results have; an operation that is written out again counts as
            `_AGAIN` of them.
    """

    def __init__(
        self,
        jaxpr: Any,
        names: Sequence[str],
        mesh: Mapping[str, int],
        like: ProgramFingerprint | None = None,
    ) -> None:
        self._numbers: dict[Hashable, int] = {} if like is None else like._numbers
        self.axes: frozenset[Axes] = _axes_of(jaxpr) | (frozenset() if like is None else like.axes)
        self._parts = {each: math.prod(mesh.get(axis, 1) for axis in each) for each in sorted(self.axes)}
        self.operations: Facts = {}
        self.divisibility: Facts = {}
        self.elements = sum(map(size_of, open_jaxpr(jaxpr).invars))
        self._read(open_jaxpr(jaxpr), [self._number(stem(name)) for name in names], (), ())

    def _number(self, thing: Hashable) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def _read(
        self, jaxpr: Any, given: Sequence[int | None], path: Path, calls: Sequence[Any]
    ) -> list[int | None]:
        """Reads a jaxpr; the numbers of the operations that give its results.

        Args:
            jaxpr: the open jaxpr.
            given: the numbers of what gives it its arguments.
            path: the lines of the equations around it.
            calls: those equations, from the innermost one.
        """
        makers: dict[int, int | None] = dict(zip(map(id, jaxpr.invars), given, strict=False))
        paths = [tuple(_lines(each)) for each in jaxpr.eqns]
        # JAX keeps the jaxprs of functions: the lines of a later call are those of the first one.
        own = [
            lines
            for lines, each in zip(paths, jaxpr.eqns, strict=True)
            if lines and each.primitive.name not in SHARDING_PARAMS
        ]
        same = itertools.takewhile(lambda each: len({*each}) == 1, zip(*own, strict=False))
        shared = sum(1 for _ in same)
        for equation, lines in zip(jaxpr.eqns, paths, strict=True):
            number = self._equation(equation, makers, (*path, *lines[shared:]), calls)
            makers.update(dict.fromkeys(map(id, equation.outvars), number))
        return [makers.get(id(atom)) for atom in jaxpr.outvars]

    def _equation(
        self, equation: Any, makers: Mapping[int, int | None], path: Path, calls: Sequence[Any]
    ) -> int:
        """Reads an equation; its number."""

        def note(facts: Facts, *thing: Hashable) -> int:
            number = self._number(thing)
            facts.setdefault(number, (equation, calls))
            return number

        name, held = equation.primitive.name, [*inner_jaxprs(equation)]
        sources = [makers.get(id(atom)) for atom in equation.invars]
        taken, made = self._values(equation)
        whole = not held and name not in _VARIADIC
        dims = dim_rule(equation)
        known: Hashable = (tuple(taken), tuple(made), dims.results, dims.reduced) if whole else ()
        inside = tuple([each.primitive.name for each in calls])
        count = len(self.operations)
        number = note(self.operations, inside, path, name, stem(name_stack(equation)), known)
        self.elements += _AGAIN if len(self.operations) == count else 0
        for place, source in enumerate(sources):
            # Of what takes whole trees, each array with what it is; of others, in which place it is.
            note(self.operations, number, 'takes', source, place if whole else taken[place])
        results: Sequence[int | None] = [None] * len(made)
        for inner in held:
            given = sources[max(0, len(sources) - len(inner.invars)) :]
            found = self._read(inner, given, path, (equation, *calls))
            results = found if len(found) == len(made) else results
        for shape, *result in zip(map(shape_of, equation.outvars), results, made, strict=True):
            if not whole:
                note(self.operations, number, 'gives', *result)
            self.elements += math.prod(shape)
            divides = [size % each == 0 for size in shape for each in self._parts.values()]
            note(self.divisibility, number, *divides)
        return number

    def _values(self, equation: Any) -> list[list[Hashable]]:
        """Of operands, and of results: dtypes, which dimensions have one element, and where they are said."""

        def value(atom: Any, said: Any) -> Hashable:
            shape = shape_of(atom)
            return _dtype(atom), tuple([size > 1 for size in shape]), self._sharded(shape, said)

        sides = zip((equation.invars, equation.outvars), user_shardings_of(equation), strict=True)
        return [[value(atom, said.get(i)) for i, atom in enumerate(atoms)] for atoms, said in sides]

    def _sharded(self, shape: Sequence[int], said: Any) -> Hashable:
        """The mesh axes of each dimension, and how they divide it."""
        pairs = zip(shape, map(entry_axes, _entries(said)), strict=False)
        found = [(axes, division(size, self._parts[axes])) if axes else () for size, axes in pairs]
        while found and not found[-1]:
            found.pop()
        return tuple(found)


def missing_facts(wanted: Facts, found: Facts) -> Facts:
    """What another program does not have, or else what it has instead."""
    missing = {number: where for number, where in wanted.items() if number not in found}
    return missing or {number: where for number, where in found.items() if number not in wanted}


def lines(facts: Facts) -> list[str]:
    """The lines of operations with what they compute, each line once."""
    found: dict[str, str] = {}
    for _, (equation, calls) in sorted(facts.items()):
        what = f'{equation.primitive.name} {_array(equation)}'.strip()
        found.setdefault(line_of(equation, calls), what)
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


def _axes_of(jaxpr: Any) -> frozenset[Axes]:
    sides = itertools.chain.from_iterable(map(user_shardings_of, all_equations(jaxpr)))
    given = itertools.chain.from_iterable(said.values() for said in sides)
    return frozenset(axes for each in given for axes in map(entry_axes, _entries(each)) if axes)


def _entries(given: Any) -> Sequence[Any]:
    spec = getattr(given, 'spec', given)
    return entries(spec) if isinstance(spec, jax.sharding.PartitionSpec) else ()


def _dtype(atom: Any) -> str:
    return str(getattr(atom.aval, 'dtype', ''))


def _array(equation: Any) -> str:
    out = equation.outvars[0] if equation.outvars else None
    return '' if out is None else array_text(_dtype(out), shape_of(out))


def _lines(equation: Any) -> Iterator[tuple[str, int]]:
    """The lines that led to an equation, from the outermost one, without those of JAX and of scalax."""
    stack = traceback_of(equation)
    while stack is not None:
        file = stack.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARY) or is_cell(file):
            yield file, stack.tb_lineno
        stack = stack.tb_next
