"""Look-ups and updates by the number of the example, as in ``cache.at[arange(B), pos].set(k)``.

Such an index takes from each example, or puts into it, what belongs to that example. To the partitioner it is
an index like others, which may be that of any example. So the dimension becomes a batching dimension of the
`gather` or scatter, which has no index: then each device runs it on its own examples, and so it does for the
gradient, which is a scatter of the same indices.

That an index is the number is proved: its values are computed, or come from there, and are 0, 1, 2, ... along
one dimension, as many as the dimension has elements of which they take one. Then all of them are in bounds,
and whatever the operation does with others makes no difference.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scalax._jax.equations import (
    CALLS,
    WITH_JAXPRS,
    Literal,
    branches,
    broadcast_dims,
    call_jaxpr,
    dim_of,
    gather_dims,
    loop_of,
    open_jaxpr,
    producers_of,
    scatter_dims,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import (
    constants_of,
    rebind,
    replace_jaxpr,
    trace_added_equation,
    with_jaxprs,
    with_results,
)
from scalax._jaxpr.dim_rules import SCATTERS, reshape_groups
from scalax._jaxpr.static_integers import StaticIntegers
from scalax._spmd.rewrites.facts import StepFacts

LOOKUPS = frozenset(('gather',)) | SCATTERS

Columns = Mapping[int, int]
"""Of indices, the columns that are numbers of examples, and the dimension along which they count."""

_MOST = 2**20  # examples; a constant of more elements is not read
_Known = dict[Any, tuple[Any, list[Columns]]]
_SAME = frozenset(('copy', 'name', 'optimization_barrier', 'sharding_constraint', 'reshard'))


def batch_example_indices(jaxpr: Any, facts: StepFacts) -> Any:
    """Returns a jaxpr whose look-ups and updates have batching dimensions; the same jaxpr if none has one.

    Args:
        jaxpr: the closed jaxpr.
        facts: what is known of the step.
    """
    del facts
    return _rewritten(jaxpr, [{}] * len(open_jaxpr(jaxpr).invars), {})[0]


def _rewritten(jaxpr: Any, arguments: Sequence[Columns], known: _Known) -> tuple[Any, list[Columns]]:
    """The jaxpr with batching dimensions, and the columns of its results, given those of its arguments.

    *known* gets these of each jaxpr of whose arguments nothing is known, and which is used in many places.
    """
    if any(arguments):
        return _rewritten_with(jaxpr, arguments, known)
    if jaxpr not in known:
        known[jaxpr] = _rewritten_with(jaxpr, arguments, known)
    return known[jaxpr]


def _rewritten_with(jaxpr: Any, arguments: Sequence[Columns], known: _Known) -> tuple[Any, list[Columns]]:
    inner = open_jaxpr(jaxpr)
    columns = _Columns(jaxpr)
    columns.known.update(zip(map(id, inner.invars), arguments, strict=True))
    equations: list[Any] = []
    for equation in inner.eqns:
        name = primitive_name(equation)
        if name in LOOKUPS:
            equations += _batched(equation, columns)
        elif name in CALLS or name == 'scan':
            equations.append(_with_inside(equation, columns, known))
        elif name in WITH_JAXPRS:
            equations.append(_with_unknown_inside(equation, known))
        else:
            equations.append(equation)
    is_same = len(equations) == len(inner.eqns) and all(map(operator.is_, equations, inner.eqns))
    return jaxpr if is_same else replace_jaxpr(jaxpr, eqns=equations), [columns.of(x) for x in inner.outvars]


def _with_unknown_inside(equation: Any, known: _Known) -> Any:
    """A branch or a `while` whose jaxprs have batching dimensions, with nothing known of its operands."""
    if primitive_name(equation) == 'cond':
        jaxprs = [*branches(equation)]
    else:
        jaxprs = [loop_of(equation).body]
    new = [_rewritten(jaxpr, [{}] * len(open_jaxpr(jaxpr).invars), known)[0] for jaxpr in jaxprs]
    return equation if all(map(operator.is_, new, jaxprs)) else with_jaxprs(equation, *new)


def _with_inside(equation: Any, columns: _Columns, known: _Known) -> Any:
    """A call or a `scan` whose jaxpr has batching dimensions; notes the columns of its results."""
    operands = [columns.of(x) for x in equation.invars]
    if primitive_name(equation) in CALLS:
        jaxpr, results = _rewritten(call_jaxpr(equation), operands, known)
        before = call_jaxpr(equation)
    else:
        loop = loop_of(equation)
        constants, carried, stacks = loop.split(operands)
        inside = [*constants, *[{}] * len(carried), *[_shifted(stack, -1) for stack in stacks]]
        before = loop.body
        jaxpr, results = _rewritten(before, inside, known)
        results = [{}] * loop.num_carry + [_shifted(x, 1) for x in results[loop.num_carry :]]
    columns.known.update(zip(map(id, equation.outvars), results, strict=True))
    return equation if jaxpr is before else with_jaxprs(equation, jaxpr)


def _shifted(columns: Columns, by: int) -> Columns:
    """The columns of an element of a stack, or of a stack."""
    return {column: dim + by for column, dim in columns.items() if dim + by >= 0}


class _Columns:
    """The columns of indices in a jaxpr.

    Args:
        jaxpr: the jaxpr, open or closed.

    Attributes:
        known: those of some variables, by their ids.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.known: dict[int, Columns] = {}
        inner = open_jaxpr(jaxpr)
        self._producers, self._integers = producers_of(inner), StaticIntegers(inner, iotas=True)
        for var, value in constants_of(jaxpr):
            if _may_count(var) and getattr(value, 'is_fully_addressable', True):
                self._integers.set([var], [np.asarray(value)])

    def of(self, atom: Any) -> Columns:
        """The columns of a value that are numbers of examples."""
        if isinstance(atom, Literal):
            return {}
        if id(atom) not in self.known:
            self.known[id(atom)] = self._read(atom)
        return self.known[id(atom)]

    def _read(self, atom: Any) -> Columns:
        maker, rank = self._producers.get(id(atom)), len(shape_of(atom))
        if maker is None or getattr(atom.aval.dtype, 'kind', 'V') not in 'iu' or rank < 2:
            return {}
        name = primitive_name(maker)
        if name in _SAME:
            place = next(i for i, var in enumerate(maker.outvars) if var is atom)
            return self.of(maker.invars[place])
        if name != 'concatenate' or dim_of(maker) != rank - 1:
            return {}
        found, column = dict[int, int](), 0
        for part in maker.invars:
            width = shape_of(part)[-1]
            if width == 1 and (dim := self._counting_dim(part)) is not None:
                found[column] = dim
            column += width
        return found

    def _counting_dim(self, atom: Any) -> int | None:
        """The dimension along which a value counts 0, 1, 2, ..., alike along all others; None if none is."""
        shape = shape_of(atom)
        dims = [dim for dim, size in enumerate(shape) if size != 1]
        if len(dims) == 1:
            values = self._integers.of(atom)
            if values is not None and np.array_equal(values, np.arange(shape[dims[0]])):
                return dims[0]
        maker = self._producers.get(id(atom))
        if isinstance(atom, Literal) or maker is None:
            return None
        name = primitive_name(maker)
        if name == 'broadcast_in_dim':
            dim, new = self._counting_dim(maker.invars[0]), [*broadcast_dims(maker)]
            return None if dim is None else new[dim]
        if name == 'reshape':
            dim = self._counting_dim(maker.invars[0])
            return next(
                (new[0] for old, new in reshape_groups(maker) if [*old] == [dim] and len(new) == 1), None
            )
        return None


def _batched(equation: Any, columns: _Columns) -> list[Any]:
    """The equations of a look-up or an update with batching dimensions; the same one if it has none."""
    is_gather = primitive_name(equation) == 'gather'
    numbers = gather_dims(equation) if is_gather else scatter_dims(equation)
    indexed = [*(numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims)]
    gone = {*(numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims)}
    counterparts = [
        *(numbers.start_indices_batching_dims if is_gather else numbers.scatter_indices_batching_dims)
    ]
    shape, indices = shape_of(equation.invars[0]), equation.invars[1]
    if len(indexed) < 2:
        return [equation]
    pairs: dict[int, tuple[int, int]] = {}
    for column, dim in columns.of(indices).items():
        operand = indexed[column]
        is_taken = dim in counterparts or any(dim == x for _, x in pairs.values())
        if operand in gone and shape[operand] == shape_of(indices)[dim] and not is_taken:
            pairs[column] = operand, dim
    if len(pairs) == len(indexed):
        pairs.popitem()  # some index has to remain
    if not pairs:
        return [equation]
    batching = sorted([*zip(numbers.operand_batching_dims, counterparts, strict=True), *pairs.values()])
    batched, counting = tuple([x for x, _ in batching]), tuple([x for _, x in batching])
    left = tuple([dim for column, dim in enumerate(indexed) if column not in pairs])
    kept = tuple(sorted(gone - {operand for operand, _ in pairs.values()}))
    new: Any
    if is_gather:
        new = jax.lax.GatherDimensionNumbers(numbers.offset_dims, kept, left, batched, counting)
    else:
        new = jax.lax.ScatterDimensionNumbers(numbers.update_window_dims, kept, left, batched, counting)
    equations, parts = list[Any](), list[Any]()
    for start, end in _runs([column for column in range(len(indexed)) if column not in pairs]):
        equations.append(trace_added_equation(_columns_between(start, end), equation, [indices]))
        parts += equations[-1].outvars
    if len(parts) > 1:
        equations.append(trace_added_equation(_side_by_side, equation, parts))
        parts = equations[-1].outvars
    operands = [equation.invars[0], *parts, *equation.invars[2:]]
    # They may be sorted with the numbers of examples only.
    changed = {'dimension_numbers': new, 'indices_are_sorted': False}
    written = trace_added_equation(lambda *xs: rebind(equation, *xs, **changed), equation, operands)
    return [*equations, with_results(written, equation.outvars)]


def _may_count(var: Any) -> bool:
    """Whether a constant may be the numbers of examples, as ``np.arange(B)`` is."""
    shape = shape_of(var)
    return len(shape) == 1 and shape[0] <= _MOST and getattr(var.aval.dtype, 'kind', 'V') in 'iu'


def _runs(columns: Sequence[int]) -> list[tuple[int, int]]:
    """The beginnings and ends of runs of successive numbers."""
    runs = list[tuple[int, int]]()
    for column in columns:
        if runs and runs[-1][1] == column:
            runs[-1] = runs[-1][0], column + 1
        else:
            runs.append((column, column + 1))
    return runs


def _columns_between(start: int, end: int) -> Any:
    return lambda indices: jax.lax.slice_in_dim(indices, start, end, axis=indices.ndim - 1)


def _side_by_side(*parts: Any) -> Any:
    return jax.lax.concatenate(parts, parts[0].ndim - 1)
