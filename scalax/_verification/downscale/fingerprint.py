"""Fingerprint of a program: the structure that does not depend on the sizes of dimensions.

Two programs of the same code, for meshes with the same axes, have equal fingerprints if they differ in sizes
only. A fingerprint consists of:

- *operations*: for each equation, the lines of the user's code that led to it, its primitive, and the dtypes
  of its operands and results; which dimensions have more than one element; which dimensions of the operands
  those of the results come from; and for constrained values, the mesh axes and how they divide each
  dimension. Unrolled layers repeat the same operations;
- *edges*: which operation or argument each operand comes from;
- *divisibility*: which dimensions of each result are divisible by the sizes of mesh axes.
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
CodePath = tuple[tuple[str, int], ...]
"""Files and lines, outermost call first."""
Facts = dict[int, tuple[Any, Sequence[Any]]]
"""The id of a fact -> an equation that it is about, and the calls around that."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_LIBRARY = ('<', *[folder + os.sep for folder in (os.path.dirname(jax.__file__), _PACKAGE)])
_ELEMENTS_PER_REPEAT = 40_000  # the cost of a repeated operation, in elements
_DIGITS = re.compile(r'\d+')
# Operations with an operand or a result for each layer, or for each leaf of a tree.
_VARIADIC = frozenset({'concatenate', 'optimization_barrier', 'split', 'stack', 'unstack'})


class ProgramFingerprint:
    """The structure of a program, without its sizes.

    Args:
        jaxpr: the jaxpr.
        paths: the leaf paths of its arguments. Their numbers are ignored: layers differ in them.
        mesh: mesh axis -> size.
        like: a fingerprint to compare with, which shares the ids of facts.

    Attributes:
        axes: the tuples of mesh axes that shard a dimension of a constrained value.
        operations: the operations and their edges.
        divisibility: the divisibility of the results.
        elements: the cost of the program: the number of elements of all arguments and results; a repeated
            operation adds `_ELEMENTS_PER_REPEAT`.
    """

    def __init__(
        self,
        jaxpr: Any,
        paths: Sequence[str],
        mesh: Mapping[str, int],
        like: ProgramFingerprint | None = None,
    ) -> None:
        self._fact_ids: dict[Hashable, int] = {} if like is None else like._fact_ids
        self.axes: frozenset[Axes] = _axes_of(jaxpr) | (frozenset() if like is None else like.axes)
        self._num_shards = {axes: math.prod(mesh.get(axis, 1) for axis in axes) for axes in sorted(self.axes)}
        self.operations: Facts = {}
        self.divisibility: Facts = {}
        self.elements = sum(map(size_of, open_jaxpr(jaxpr).invars))
        self._read_jaxpr(open_jaxpr(jaxpr), [self._fact_id(without_numbers(path)) for path in paths], (), ())

    def _fact_id(self, fact: Hashable) -> int:
        return self._fact_ids.setdefault(fact, len(self._fact_ids))

    def _read_jaxpr(
        self, jaxpr: Any, sources: Sequence[int | None], code_path: CodePath, calls: Sequence[Any]
    ) -> list[int | None]:
        """Reads a jaxpr, and returns the ids of the operations that produce its results.

        Args:
            jaxpr: the open jaxpr.
            sources: the ids of the operations that produce its arguments.
            code_path: the lines of the equations around it.
            calls: the equations around it, innermost first.
        """
        producers: dict[int, int | None] = dict(zip(map(id, jaxpr.invars), sources, strict=False))
        lines_of_equations = [tuple(_user_lines(equation)) for equation in jaxpr.eqns]
        # JAX caches the jaxprs of functions, with the lines of the first call. So the lines that all
        # equations share are those of the call, and are left out.
        user_lines = [
            lines
            for lines, equation in zip(lines_of_equations, jaxpr.eqns, strict=True)
            if lines and equation.primitive.name not in SHARDING_PARAMS
        ]
        same = itertools.takewhile(lambda lines: len({*lines}) == 1, zip(*user_lines, strict=False))
        num_shared = sum(1 for _ in same)
        for equation, lines in zip(jaxpr.eqns, lines_of_equations, strict=True):
            operation = self._read_equation(equation, producers, (*code_path, *lines[num_shared:]), calls)
            producers.update(dict.fromkeys(map(id, equation.outvars), operation))
        return [producers.get(id(atom)) for atom in jaxpr.outvars]

    def _read_equation(
        self,
        equation: Any,
        producers: Mapping[int, int | None],
        code_path: CodePath,
        calls: Sequence[Any],
    ) -> int:
        """Reads an equation, and returns the id of its operation."""

        def add(facts: Facts, *fact: Hashable) -> int:
            fact_id = self._fact_id(fact)
            facts.setdefault(fact_id, (equation, calls))
            return fact_id

        name, inner = equation.primitive.name, [*inner_jaxprs(equation)]
        sources = [producers.get(id(atom)) for atom in equation.invars]
        operands, results = self._describe_values(equation)
        is_plain = not inner and name not in _VARIADIC
        dims = dim_rule(equation)
        details: Hashable = (tuple(operands), tuple(results), dims.results, dims.reduced) if is_plain else ()
        call_names = tuple(call.primitive.name for call in calls)
        count = len(self.operations)
        operation = add(
            self.operations, call_names, code_path, name, without_numbers(name_stack(equation)), details
        )
        self.elements += _ELEMENTS_PER_REPEAT if len(self.operations) == count else 0
        for i, source in enumerate(sources):
            # Equations that take trees may take more leaves: their operands are told apart by description.
            add(self.operations, operation, 'takes', source, i if is_plain else operands[i])
        inner_results: Sequence[int | None] = [None] * len(results)
        for jaxpr in inner:
            inner_sources = sources[max(0, len(sources) - len(jaxpr.invars)) :]
            producers_of_results = self._read_jaxpr(jaxpr, inner_sources, code_path, (equation, *calls))
            if len(producers_of_results) == len(results):
                inner_results = producers_of_results
        for shape, *result in zip(map(shape_of, equation.outvars), inner_results, results, strict=True):
            if not is_plain:
                add(self.operations, operation, 'gives', *result)
            self.elements += math.prod(shape)
            is_divisible = [size % count == 0 for size in shape for count in self._num_shards.values()]
            add(self.divisibility, operation, *is_divisible)
        return operation

    def _describe_values(self, equation: Any) -> list[list[Hashable]]:
        """Describes operands and results: dtypes, dimensions with more than one element, and specs."""

        def describe(atom: Any, sharding: Any) -> Hashable:
            shape = shape_of(atom)
            return _dtype(atom), tuple(size > 1 for size in shape), self._describe_spec(shape, sharding)

        sides = zip((equation.invars, equation.outvars), user_shardings_of(equation), strict=True)
        return [
            [describe(atom, shardings.get(i)) for i, atom in enumerate(atoms)] for atoms, shardings in sides
        ]

    def _describe_spec(self, shape: Sequence[int], sharding: Any) -> Hashable:
        """Describes a spec: the mesh axes of each dimension, and how they divide it."""
        pairs = zip(shape, map(entry_axes, _entries(sharding)), strict=False)
        dims = [(axes, division(size, self._num_shards[axes])) if axes else () for size, axes in pairs]
        while dims and not dims[-1]:
            dims.pop()
        return tuple(dims)


def missing_facts(expected: Facts, actual: Facts) -> Facts:
    """Returns the facts that another program lacks; if there are none, its additional facts."""
    missing = {fact_id: where for fact_id, where in expected.items() if fact_id not in actual}
    return missing or {fact_id: where for fact_id, where in actual.items() if fact_id not in expected}


def fact_lines(facts: Facts) -> list[str]:
    """Returns the lines of the operations with their primitives and results, each line once."""
    operations: dict[str, str] = {}
    for _, (equation, calls) in sorted(facts.items()):
        operation = f'{equation.primitive.name} {_result_text(equation)}'.strip()
        operations.setdefault(line_of(equation, calls), operation)
    return [f'{line}: {operation}' if line else operation for line, operation in operations.items()]


def without_numbers(path: str) -> str:
    """Replaces the numbers in a path, so that all layers have the same one.

    Example:
        >>> without_numbers('params/layers_12/3/w')
        'params/layers_#/#/w'
    """
    return _DIGITS.sub('#', path)


def division(size: int, num_shards: int) -> str:
    """Describes how a dimension is divided: one element a shard, several, or not evenly."""
    return 'unevenly' if size % num_shards else 'one each' if size == num_shards else 'some each'


def _axes_of(jaxpr: Any) -> frozenset[Axes]:
    """Returns the tuples of mesh axes that shard a dimension of a constrained value."""
    sides = itertools.chain.from_iterable(map(user_shardings_of, all_equations(jaxpr)))
    shardings = itertools.chain.from_iterable(by_index.values() for by_index in sides)
    all_axes = (axes for sharding in shardings for axes in map(entry_axes, _entries(sharding)))
    return frozenset(axes for axes in all_axes if axes)


def _entries(sharding: Any) -> Sequence[Any]:
    spec = getattr(sharding, 'spec', sharding)
    return entries(spec) if isinstance(spec, jax.sharding.PartitionSpec) else ()


def _dtype(atom: Any) -> str:
    return str(getattr(atom.aval, 'dtype', ''))


def _result_text(equation: Any) -> str:
    result = equation.outvars[0] if equation.outvars else None
    return '' if result is None else array_text(_dtype(result), shape_of(result))


def _user_lines(equation: Any) -> Iterator[tuple[str, int]]:
    """Yields the source lines that led to an equation, outermost first, without those of JAX and scalax."""
    frame = traceback_of(equation)
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARY) or is_cell(file):
            yield file, frame.tb_lineno
        frame = frame.tb_next
