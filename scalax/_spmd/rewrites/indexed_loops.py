"""Loops that index rows by the iteration, `x[i]`: the rows become xs of the scan.

Only the device that holds an example could read it by index, whereas each device can scan over its local
shard of xs. Rows that an iteration writes, ``c.at[i].set(row)``, or adds, as the gradient of `x[i]` does,
become ys. An iteration may read or write several rows, such as a microbatch:
``jax.lax.dynamic_slice_in_dim(x, i * k, k)``.

The index is counted by the loop, or is an element of ``jnp.arange``. JAX also computes indices from it, such
as ``i + n`` for negative `i`; the rewrite evaluates these integers for all iterations. A loop that indexes
rows in another order, such as in reverse, stays as it is.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalax._jax.equations import (
    CALLS,
    OWN_GRADIENTS,
    Literal,
    Loop,
    all_equations,
    call_jaxpr,
    loop_of,
    open_jaxpr,
    producers_of,
    scan_options,
    shape_of,
    size_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import (
    eval_jaxpr,
    extract_subjaxpr,
    inline_calls,
    replace_jaxpr,
    trace_equation,
    with_jaxprs,
)
from scalax._jaxpr.dim_rules import is_row_gather, is_row_scatter, reshape_groups
from scalax._jaxpr.static_integers import IntegerValues, StaticIntegers
from scalax._jaxpr.user_shardings import user_shardings_of
from scalax._spmd.batch.replicated_batch_dims import BatchDims
from scalax._spmd.rewrites.facts import StepFacts

# The longest loop whose indices are evaluated.
_MAX_LENGTH = 2**20
# Nested loops are rewritten from pass to pass.
_MAX_PASSES = 4
_INDEXED = frozenset(('dynamic_slice', 'dynamic_update_slice', 'gather', 'scatter', 'scatter-add'))


_IsRowIndex = Callable[[Any, int], bool]
"""Whether a value is the index of the first of *count* rows of the iteration."""
_LoopFilter = Callable[[Any], bool]
"""Whether a `scan` is rewritten."""


def stack_examples(jaxpr: Any, facts: StepFacts) -> Any:
    """Turns examples that loops index into xs and ys of the loops.

    Args:
        jaxpr: the closed jaxpr.
        facts: the properties of the step.
    """
    placements = [argument.placements for argument in facts.arguments]
    sizes = [facts.mesh.shape[axis] for axis in facts.axes]
    for _ in range(_MAX_PASSES):
        previous, batch_dims = jaxpr, BatchDims(jaxpr, placements, sizes)
        jaxpr = with_stacks(
            jaxpr, functools.partial(_has_examples, batch_dims, _split_batch_ids(jaxpr, batch_dims))
        )
        if jaxpr is previous:
            break
    return jaxpr


def indexes_rows(equation: Any) -> bool:
    """Returns whether a `scan` indexes an array."""
    return any(primitive_name(inner) in _INDEXED for inner in all_equations(loop_of(equation).body))


def _split_batch_ids(jaxpr: Any, batch_dims: BatchDims) -> set[int]:
    """Returns the ids of variables whose first dimension is the first part of a split batch dimension."""
    split_ids = set()
    for equation in all_equations(jaxpr):
        if primitive_name(equation) == 'reshape':
            batch = batch_dims.dims(equation.invars[0])
            if any(
                0 in new_dims and not batch.isdisjoint(old_dims)
                for old_dims, new_dims in reshape_groups(equation)
            ):
                split_ids.add(id(equation.outvars[0]))
    return split_ids


def _has_examples(batch_dims: BatchDims, split_ids: Container[int], equation: Any) -> bool:
    """Whether a loop has consts or a carry whose first dimension is a batch dimension."""
    consts, carry, _ = loop_of(equation).split(equation.invars)
    return any(
        id(atom) in split_ids or 0 in batch_dims.dims(atom)
        for atom in (*consts, *carry, *equation.outvars[: len(carry)])
        if shape_of(atom)
    )


def with_stacks(jaxpr: Any, is_rewritten: _LoopFilter = lambda equation: True) -> Any:
    """Turns rows that loops index into xs and ys of the loops.

    Args:
        jaxpr: the jaxpr. Without such loops, the same object is returned.
        is_rewritten: which loops are rewritten.
    """
    return _with_stacks(jaxpr, [None] * len(open_jaxpr(jaxpr).invars), is_rewritten)[0]


def _with_stacks(
    jaxpr: Any, arguments: Sequence[IntegerValues | None], is_rewritten: _LoopFilter
) -> tuple[Any, StaticIntegers]:
    """Rewrites the loops of a jaxpr, given the static integers among its arguments.

    Returns:
        The jaxpr, and its static integers.
    """
    inner, equations = open_jaxpr(jaxpr), []
    integers = StaticIntegers(inner, iotas=True)
    integers.set(inner.invars, arguments)
    for equation in inner.eqns:
        name = primitive_name(equation)
        if name in CALLS:
            body, body_integers = _with_stacks(
                call_jaxpr(equation), [*map(integers.of, equation.invars)], is_rewritten
            )
            integers.set(equation.outvars, [*map(body_integers.of, open_jaxpr(body).outvars)])
            equation = with_jaxprs(equation, body)
        elif name == 'scan':
            equation, results = _scan(equation, [*map(integers.of, equation.invars)], is_rewritten)
            integers.set(equation.outvars, results)
        equations.append(equation)
    same = all(map(operator.is_, equations, inner.eqns))
    return jaxpr if same else replace_jaxpr(jaxpr, eqns=equations), integers


def _scan(
    equation: Any, operands: Sequence[IntegerValues | None], is_rewritten: _LoopFilter
) -> tuple[Any, Sequence[IntegerValues | None]]:
    """Rewrites a `scan`, and returns it with the static integers of its results."""
    loop, options = loop_of(equation), scan_options(equation)
    length = loop.length or 0
    results: list[IntegerValues | None] = [None] * len(equation.outvars)
    if not 0 < length <= _MAX_LENGTH:
        return equation, results
    indices = np.arange(length)
    body = inline_calls(loop.body, functools.partial(_may_index_rows, length=length))
    (atoms, init, _), (const_integers, _, xs_integers) = map(loop.split, (equation.invars, operands))
    counters = [] if options['reverse'] else _counters(loop._replace(body=body), init, indices)
    counter_integers = [indices.astype(x.aval.dtype) if i in counters else None for i, x in enumerate(init)]
    element_integers = [None if x is None or x.shape != indices.shape else x for x in xs_integers]
    scalar_consts = [None if size_of(atom) == 1 else x for atom, x in zip(atoms, const_integers, strict=True)]
    new_body, integers = _with_stacks(
        body, [*scalar_consts, *counter_integers, *element_integers], is_rewritten
    )
    ys_integers = [
        integers.of(x) if size_of(x) == 1 else None for x in open_jaxpr(new_body).outvars[loop.num_carry :]
    ]
    results[loop.num_carry :] = [
        None if x is None else np.broadcast_to(x, indices.shape) for x in ys_integers
    ]
    if not open_jaxpr(new_body).effects and is_rewritten(equation):
        is_row_index = functools.partial(_is_row_index, integers, indices)
        new_loop = _with_stacked_rows(loop._replace(body=new_body), is_row_index, counters, options)
        if new_loop is not None:
            return trace_equation(jax.jit(new_loop), equation), results
    return equation if new_body is body else with_jaxprs(equation, new_body), results


def _is_row_index(integers: StaticIntegers, indices: IntegerValues, atom: Any, count: int) -> bool:
    """Whether a value in an iteration is the index of the first of *count* rows of the iteration."""
    values = integers.of(atom)
    return values is not None and np.array_equal(values, indices * count)


def _may_index_rows(call: Any, length: int) -> bool:
    """Whether a call may index rows of an array that has *length* times as many."""
    # Inlined, they would lose their custom gradients.
    if primitive_name(call) in OWN_GRADIENTS:
        return False
    indexing = [
        equation for equation in all_equations(call_jaxpr(call)) if primitive_name(equation) in _INDEXED
    ]
    has_rows = any(_rows_per_iteration(equation.invars[0], length) for equation in indexing)
    return has_rows and not any(user_shardings_of(call))


def _rows_per_iteration(atom: Any, length: int) -> int:
    """Returns the number of rows of an array for each iteration; 0 if they do not divide evenly."""
    rows = (shape_of(atom) or (0,))[0]
    return 0 if rows % length else rows // length


def _counters(loop: Loop, init: Sequence[Any], indices: IntegerValues) -> Sequence[int]:
    """Returns the indices of the carried values that count iterations from zero."""
    body, counters = open_jaxpr(loop.body), []
    integers = StaticIntegers(body)
    for i, var in enumerate(loop.split(body.invars)[1]):
        if isinstance(init[i], Literal) and not init[i].val:
            dtype = var.aval.dtype
            integers.reset([var], [indices.astype(dtype)])
            after = integers.of(body.outvars[i])
            if after is not None and np.array_equal(after, (indices + 1).astype(dtype)):
                counters.append(i)
    return counters


def _with_stacked_rows(
    loop: Loop, is_row_index: _IsRowIndex, counters: Sequence[int], options: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """Returns a rewritten loop as a function of its operands; None if it indexes no rows.

    Args:
        loop: the loop.
        is_row_index: whether a value is the index of the first of *count* rows of the iteration.
        counters: the indices of the carried values that count iterations from zero.
        options: the options of `jax.lax.scan`.
    """
    body, length = open_jaxpr(loop.body), loop.length or 0
    consts, carry, xs = loop.split(body.invars)
    carry_out, producers = body.outvars[: loop.num_carry], producers_of(body)
    writes_by_carry = [
        _written_rows(producers, var, out, is_row_index, _rows_per_iteration(var, length))
        for var, out in zip(carry, carry_out, strict=True)
    ]
    writes = {i: rows for i, rows in enumerate(writes_by_carry) if rows}
    # Each row of these arrays is unchanged until the iteration that reads it.
    sources = {id(var): i for i, var in enumerate(consts)}
    for i, var in enumerate(carry):
        if i in writes or carry_out[i] is var:
            sources[id(var)] = loop.num_consts + i
    reads = [
        (sources[id(eqn.invars[0])], eqn.outvars[0])
        for eqn in body.eqns
        if eqn.invars and id(eqn.invars[0]) in sources and _reads_rows(eqn, is_row_index, length)
    ]
    other_carry = [i for i in range(loop.num_carry) if i not in writes and i not in counters]
    new_carry, read_vars = [carry[i] for i in (*other_carry, *counters)], [var for _, var in reads]
    results = [*[carry_out[i] for i in other_carry], *[row for rows in writes.values() for row, _ in rows]]
    results += body.outvars[loop.num_carry :]
    new_body = extract_subjaxpr(loop.body, [*consts, *new_carry, *xs, *read_vars], results)
    used_ids = {id(x) for eqn in open_jaxpr(new_body).eqns for x in eqn.invars} | {*map(id, results)}
    if not (reads or writes or counters) or any(id(carry[i]) in used_ids for i in writes):
        return None
    ys_targets = [(i, is_added) for i, rows in writes.items() for _, is_added in rows]

    def scan_over_rows(*operands: Any) -> list[Any]:
        const_values, init, xs_values = loop.split(operands)

        def body_fn(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
            results = eval_jaxpr(new_body, [*const_values, *carry, *xs])
            return results[: len(other_carry)], results[len(other_carry) :]

        counter_xs = [jnp.arange(length).astype(init[i].dtype) for i in counters]
        row_xs = [operands[operand].reshape(length, *shape_of(var)) for operand, var in reads]
        xs = [*counter_xs, *xs_values, *row_xs]
        carry, ys = jax.lax.scan(body_fn, [init[i] for i in other_carry], xs, length, **options)
        final_carry = dict(zip(other_carry, carry, strict=True))
        final_carry |= {i: jnp.asarray(length).astype(init[i].dtype) for i in counters}
        final_carry |= {i: init[i] for i in writes}
        for (i, is_added), x in zip(ys_targets, ys, strict=False):
            rows = x.reshape(init[i].shape)
            final_carry[i] = final_carry[i] + rows if is_added else rows
        return [*[final_carry[i] for i in range(loop.num_carry)], *ys[len(ys_targets) :]]

    return scan_over_rows


def _reads_rows(equation: Any, is_row_index: _IsRowIndex, length: int) -> bool:
    """Whether an equation reads all rows of the iteration."""
    name, count = primitive_name(equation), _rows_per_iteration(equation.invars[0], length)
    if name not in ('dynamic_slice', 'gather') or not count or not is_row_index(equation.invars[1], count):
        return False
    row_shape, result_shape = shape_of(equation.invars[0])[1:], shape_of(equation.outvars[0])
    if name == 'dynamic_slice':
        return result_shape == (count, *row_shape)
    return count == 1 and result_shape == row_shape and is_row_gather(equation)


def _written_rows(
    producers: Mapping[int, Any], var: Any, out: Any, is_row_index: _IsRowIndex, count: int
) -> Sequence[tuple[Any, bool]] | None:
    """Returns the rows that an iteration successively writes to an array, each with whether it is added.

    Args:
        producers: the equation that computes each variable, by variable id.
        var: the array; None for zeros.
        out: the array after the iteration.
        is_row_index: whether a value is the index of the first of *count* rows of the iteration.
        count: the number of rows of each iteration; 0 if they do not divide evenly.

    Returns:
        The rows, or None if the iteration may change other rows.
    """
    producer: Any = producers.get(id(out))
    if out is var or (var is None and _creates_zeros(producer)):
        return []
    name = '' if producer is None else primitive_name(producer)
    if name in ('add', 'add_any') and var is not None:
        for before, addend in (producer.invars, producer.invars[::-1]):
            added = _written_rows(producers, None, addend, is_row_index, count)
            if (
                added
                and len(added) == 1
                and (rows := _written_rows(producers, var, before, is_row_index, count)) is not None
            ):
                return [*rows, (added[0][0], True)]
    if name == 'dynamic_update_slice' and shape_of(out):  # a scalar has no rows
        target, row, index = producer.invars[:3]
        is_row = count > 0 and shape_of(row) == (count, *shape_of(out)[1:])
    elif name in ('scatter', 'scatter-add'):
        target, index, row = producer.invars
        is_row = count == 1 and shape_of(row) == shape_of(out)[1:] and is_row_scatter(producer)
    else:
        return None
    rows = (
        _written_rows(producers, var, target, is_row_index, count)
        if is_row and is_row_index(index, count)
        else None
    )
    return None if rows is None else [*rows, (row, name == 'scatter-add')]


def _creates_zeros(producer: Any) -> bool:
    """Whether an equation creates an array of zeros."""
    fill_value = (
        producer.invars[0]
        if producer is not None and primitive_name(producer) == 'broadcast_in_dim'
        else None
    )
    return isinstance(fill_value, Literal) and not fill_value.val
