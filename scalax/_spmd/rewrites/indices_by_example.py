"""Look-ups and updates at the index of the example, as in ``cache.at[arange(B), pos].set(k)``.

Such an operation reads or writes each example with values of the same example. For the partitioner, it could
index any example. So the rewrite turns the indexed dimension into a batching dimension of the `gather` or
scatter, which has no index. Each device can then run it on local examples, and also the gradient, which is a
scatter with the same indices.

The rewrite applies if the indices are static and equal to 0, 1, 2, ... along one dimension, for all elements
of the indexed dimension. All of them are then in bounds, so that the mode of the operation does not matter.
"""

from __future__ import annotations

import functools
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
"""Columns of an index array with the index of the example -> the dimension along which it counts."""

_MAX_CONSTANT = 2**20  # examples: larger constants are not evaluated
_Cache = dict[Any, tuple[Any, list[Columns]]]
_IDENTITY_OPS = frozenset(('copy', 'name', 'optimization_barrier', 'sharding_constraint', 'reshard'))


def batch_example_indices(jaxpr: Any, facts: StepFacts) -> Any:
    """Turns indices of examples into batching dimensions. Returns the same jaxpr if there are none.

    Args:
        jaxpr: the closed jaxpr.
        facts: the properties of the step.
    """
    del facts
    return _rewrite(jaxpr, [{}] * len(open_jaxpr(jaxpr).invars), {})[0]


def _rewrite(jaxpr: Any, arguments: Sequence[Columns], cache: _Cache) -> tuple[Any, list[Columns]]:
    """Rewrites a jaxpr, and returns it with the columns of its results.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: the columns of its arguments.
        cache: the results for jaxprs whose arguments have no columns, which may be called several times.
    """
    if any(arguments):
        return _rewrite_equations(jaxpr, arguments, cache)
    if jaxpr not in cache:
        cache[jaxpr] = _rewrite_equations(jaxpr, arguments, cache)
    return cache[jaxpr]


def _rewrite_equations(jaxpr: Any, arguments: Sequence[Columns], cache: _Cache) -> tuple[Any, list[Columns]]:
    inner = open_jaxpr(jaxpr)
    columns = _Columns(jaxpr)
    columns.by_id.update(zip(map(id, inner.invars), arguments, strict=True))
    equations: list[Any] = []
    for equation in inner.eqns:
        name = primitive_name(equation)
        if name in LOOKUPS:
            equations += _with_batching_dims(equation, columns)
        elif name in CALLS or name == 'scan':
            equations.append(_rewrite_inner(equation, columns, cache))
        elif name in WITH_JAXPRS:
            equations.append(_rewrite_branches(equation, cache))
        else:
            equations.append(equation)
    is_same = len(equations) == len(inner.eqns) and all(map(operator.is_, equations, inner.eqns))
    return jaxpr if is_same else replace_jaxpr(jaxpr, eqns=equations), [columns.of(x) for x in inner.outvars]


def _rewrite_branches(equation: Any, cache: _Cache) -> Any:
    """Rewrites the inner jaxprs of a `cond` or a `while`, for operands without columns."""
    if primitive_name(equation) == 'cond':
        jaxprs = [*branches(equation)]
    else:
        jaxprs = [loop_of(equation).body]
    new_jaxprs = [_rewrite(jaxpr, [{}] * len(open_jaxpr(jaxpr).invars), cache)[0] for jaxpr in jaxprs]
    return equation if all(map(operator.is_, new_jaxprs, jaxprs)) else with_jaxprs(equation, *new_jaxprs)


def _rewrite_inner(equation: Any, columns: _Columns, cache: _Cache) -> Any:
    """Rewrites the jaxpr of a call or a `scan`, and records the columns of its results."""
    operands = [columns.of(x) for x in equation.invars]
    if primitive_name(equation) in CALLS:
        jaxpr, results = _rewrite(call_jaxpr(equation), operands, cache)
        jaxpr_before = call_jaxpr(equation)
    else:
        loop = loop_of(equation)
        consts, carry, xs = loop.split(operands)
        body_arguments = [*consts, *[{}] * len(carry), *[_shifted(stack, -1) for stack in xs]]
        jaxpr_before = loop.body
        jaxpr, results = _rewrite(jaxpr_before, body_arguments, cache)
        results = [{}] * loop.num_carry + [_shifted(x, 1) for x in results[loop.num_carry :]]
    columns.by_id.update(zip(map(id, equation.outvars), results, strict=True))
    return equation if jaxpr is jaxpr_before else with_jaxprs(equation, jaxpr)


def _shifted(columns: Columns, by: int) -> Columns:
    """Returns columns whose dimensions are shifted, from a stack to its elements or back."""
    return {column: dim + by for column, dim in columns.items() if dim + by >= 0}


class _Columns:
    """The columns of the index arrays in a jaxpr.

    Args:
        jaxpr: the jaxpr, open or closed.

    Attributes:
        by_id: the columns of the variables for which they were determined, by variable id.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.by_id: dict[int, Columns] = {}
        self._jaxpr = jaxpr

    @functools.cached_property
    def _producers(self) -> dict[int, Any]:
        return producers_of(open_jaxpr(self._jaxpr))

    @functools.cached_property
    def _integers(self) -> StaticIntegers:
        integers = StaticIntegers(open_jaxpr(self._jaxpr), iotas=True)
        for var, value in constants_of(self._jaxpr):
            if _may_count(var) and getattr(value, 'is_fully_addressable', True):
                integers.set([var], [np.asarray(value)])
        return integers

    def of(self, atom: Any) -> Columns:
        """Returns the columns of a value that hold the index of the example."""
        if isinstance(atom, Literal):
            return {}
        if id(atom) not in self.by_id:
            self.by_id[id(atom)] = self._read(atom)
        return self.by_id[id(atom)]

    def _read(self, atom: Any) -> Columns:
        producer, rank = self._producers.get(id(atom)), len(shape_of(atom))
        if producer is None or getattr(atom.aval.dtype, 'kind', 'V') not in 'iu' or rank < 2:
            return {}
        name = primitive_name(producer)
        if name in _IDENTITY_OPS:
            result_index = next(i for i, var in enumerate(producer.outvars) if var is atom)
            return self.of(producer.invars[result_index])
        if name != 'concatenate' or dim_of(producer) != rank - 1:
            return {}
        dims, column = dict[int, int](), 0
        for part in producer.invars:
            width = shape_of(part)[-1]
            if width == 1 and (dim := self._counting_dim(part)) is not None:
                dims[column] = dim
            column += width
        return dims

    def _counting_dim(self, atom: Any) -> int | None:
        """Returns the dimension along which a value is 0, 1, 2, ..., and constant along all others.

        Returns None if there is no such dimension.
        """
        shape = shape_of(atom)
        dims = [dim for dim, size in enumerate(shape) if size != 1]
        if len(dims) == 1:
            values = self._integers.of(atom)
            if values is not None and np.array_equal(values, np.arange(shape[dims[0]])):
                return dims[0]
        producer = self._producers.get(id(atom))
        if isinstance(atom, Literal) or producer is None:
            return None
        name = primitive_name(producer)
        if name == 'broadcast_in_dim':
            dim, new_dims = self._counting_dim(producer.invars[0]), [*broadcast_dims(producer)]
            return None if dim is None else new_dims[dim]
        if name == 'reshape':
            dim = self._counting_dim(producer.invars[0])
            return next(
                (
                    new_dims[0]
                    for old_dims, new_dims in reshape_groups(producer)
                    if [*old_dims] == [dim] and len(new_dims) == 1
                ),
                None,
            )
        return None


def has_several_indices(equation: Any) -> bool:
    """Returns whether a look-up or an update has indices along several dimensions."""
    return len(_indexed_dims(equation)) > 1


def _indexed_dims(equation: Any) -> Sequence[int]:
    """Returns the dimensions of the operand along which a look-up or an update has indices."""
    if primitive_name(equation) == 'gather':
        return [*gather_dims(equation).start_index_map]
    return [*scatter_dims(equation).scatter_dims_to_operand_dims]


def _with_batching_dims(equation: Any, columns: _Columns) -> list[Any]:
    """Rewrites a look-up or an update; returns the same equation, in a list, if it does not apply."""
    is_gather = primitive_name(equation) == 'gather'
    dim_numbers = gather_dims(equation) if is_gather else scatter_dims(equation)
    indexed = _indexed_dims(equation)
    collapsed = {*(dim_numbers.collapsed_slice_dims if is_gather else dim_numbers.inserted_window_dims)}
    index_batching_dims = [
        *(dim_numbers.start_indices_batching_dims if is_gather else dim_numbers.scatter_indices_batching_dims)
    ]
    shape, indices = shape_of(equation.invars[0]), equation.invars[1]
    if len(indexed) < 2:
        return [equation]
    batched_columns: dict[int, tuple[int, int]] = {}
    for column, dim in columns.of(indices).items():
        operand = indexed[column]
        is_used = dim in index_batching_dims or any(dim == x for _, x in batched_columns.values())
        if operand in collapsed and shape[operand] == shape_of(indices)[dim] and not is_used:
            batched_columns[column] = operand, dim
    if len(batched_columns) == len(indexed):
        batched_columns.popitem()  # one index has to remain
    if not batched_columns:
        return [equation]
    batching = sorted(
        [*zip(dim_numbers.operand_batching_dims, index_batching_dims, strict=True), *batched_columns.values()]
    )
    operand_batching_dims, index_dims = tuple([x for x, _ in batching]), tuple([x for _, x in batching])
    remaining_dims = tuple([dim for column, dim in enumerate(indexed) if column not in batched_columns])
    remaining_collapsed = tuple(sorted(collapsed - {operand for operand, _ in batched_columns.values()}))
    new_dim_numbers: Any
    if is_gather:
        new_dim_numbers = jax.lax.GatherDimensionNumbers(
            dim_numbers.offset_dims, remaining_collapsed, remaining_dims, operand_batching_dims, index_dims
        )
    else:
        new_dim_numbers = jax.lax.ScatterDimensionNumbers(
            dim_numbers.update_window_dims,
            remaining_collapsed,
            remaining_dims,
            operand_batching_dims,
            index_dims,
        )
    equations, index_parts = list[Any](), list[Any]()
    for start, end in _runs([column for column in range(len(indexed)) if column not in batched_columns]):
        equations.append(trace_added_equation(_columns_between(start, end), equation, [indices]))
        index_parts += equations[-1].outvars
    if len(index_parts) > 1:
        equations.append(trace_added_equation(_concatenate_columns, equation, index_parts))
        index_parts = equations[-1].outvars
    operands = [equation.invars[0], *index_parts, *equation.invars[2:]]
    # The indices may have been sorted only thanks to the index of the example.
    params = {'dimension_numbers': new_dim_numbers, 'indices_are_sorted': False}
    new_equation = trace_added_equation(lambda *xs: rebind(equation, *xs, **params), equation, operands)
    return [*equations, with_results(new_equation, equation.outvars)]


def _may_count(var: Any) -> bool:
    """Whether a constant may be the indices of all examples, such as ``np.arange(B)``."""
    shape = shape_of(var)
    return len(shape) == 1 and shape[0] <= _MAX_CONSTANT and getattr(var.aval.dtype, 'kind', 'V') in 'iu'


def _runs(columns: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the starts and ends of runs of consecutive integers."""
    runs = list[tuple[int, int]]()
    for column in columns:
        if runs and runs[-1][1] == column:
            runs[-1] = runs[-1][0], column + 1
        else:
            runs.append((column, column + 1))
    return runs


def _columns_between(start: int, end: int) -> Any:
    return lambda indices: jax.lax.slice_in_dim(indices, start, end, axis=indices.ndim - 1)


def _concatenate_columns(*parts: Any) -> Any:
    return jax.lax.concatenate(parts, parts[0].ndim - 1)
