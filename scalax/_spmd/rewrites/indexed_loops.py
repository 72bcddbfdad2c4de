"""Loops that read rows by the number of the round, `x[i]`: the rows become a stack that the loop runs over.

Only the device that has an example could read it by its number; of a stack, each device runs over its own
block. Rows that each round writes, ``c.at[i].set(row)``, or adds, as the gradient of `x[i]` does, become
results of the rounds. Several rows may be read or written at once, as a microbatch is:
``jax.lax.dynamic_slice_in_dim(x, i * k, k)``.

The number is counted by the loop, or is an element of ``jnp.arange``. JAX computes others of it, such as
``i + n`` where `i` is negative; these integers are computed here, for all rounds. A loop that reads rows in
another order, such as the last row first, stays as it is.
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
from scalax._spmd.batch.batch_dims import BatchDims
from scalax._spmd.rewrites.facts import StepFacts

# Of more rounds the numbers are not computed.
_MOST = 2**20
# Loops in loops are rewritten one after the other.
_MOST_PASSES = 4
_INDEXED = frozenset(('dynamic_slice', 'dynamic_update_slice', 'gather', 'scatter', 'scatter-add'))


_IsOwn = Callable[[Any, int], bool]
"""Whether a value is the number of the first of so many rows of the round."""
_Filter = Callable[[Any], bool]
"""Whether a `scan` is rewritten."""


def stack_examples(jaxpr: Any, facts: StepFacts) -> Any:
    """Returns the jaxpr of a step with stacks in place of the examples that loops read or write by number.

    Args:
        jaxpr: the closed jaxpr.
        facts: what is known of the step.
    """
    if not any(map(_is_indexed, all_equations(jaxpr))):
        return jaxpr
    placements = [argument.placements for argument in facts.arguments]
    sizes = [facts.mesh.shape[axis] for axis in facts.axes]
    for _ in range(_MOST_PASSES):
        before, batch_dims = jaxpr, BatchDims(jaxpr, placements, sizes)
        jaxpr = with_stacks(
            jaxpr, functools.partial(_has_examples, batch_dims, _split_examples(jaxpr, batch_dims))
        )
        if jaxpr is before:
            break
    return jaxpr


def _is_indexed(equation: Any) -> bool:
    """Whether an equation is a loop that reads or writes something by number."""
    return primitive_name(equation) == 'scan' and any(
        primitive_name(inside) in _INDEXED for inside in all_equations(loop_of(equation).body)
    )


def _split_examples(jaxpr: Any, batch_dims: BatchDims) -> set[int]:
    """Returns the variables, by id, whose first dimension is the first part of a dimension of examples."""
    found = set()
    for equation in all_equations(jaxpr):
        if primitive_name(equation) == 'reshape':
            batch = batch_dims.dims(equation.invars[0])
            if any(0 in new and not batch.isdisjoint(old) for old, new in reshape_groups(equation)):
                found.add(id(equation.outvars[0]))
    return found


def _has_examples(batch_dims: BatchDims, split: Container[int], equation: Any) -> bool:
    """Whether a loop reads or carries something whose first dimension is one of examples."""
    constants, state, _ = loop_of(equation).split(equation.invars)
    return any(
        id(atom) in split or 0 in batch_dims.dims(atom)
        for atom in (*constants, *state, *equation.outvars[: len(state)])
        if shape_of(atom)
    )


def with_stacks(jaxpr: Any, is_rewritten: _Filter = lambda equation: True) -> Any:
    """Returns the jaxpr with stacks in place of rows that loops read or write by number.

    Args:
        jaxpr: the jaxpr; returned itself if it has no such loop.
        is_rewritten: which loops are rewritten.
    """
    return _with_stacks(jaxpr, [None] * len(open_jaxpr(jaxpr).invars), is_rewritten)[0]


def _with_stacks(
    jaxpr: Any, given: Sequence[IntegerValues | None], is_rewritten: _Filter
) -> tuple[Any, StaticIntegers]:
    """The jaxpr with stacks in place of rows, and its integers, given those of its arguments."""
    inner, changed = open_jaxpr(jaxpr), []
    numbers = StaticIntegers(inner, iotas=True)
    numbers.set(inner.invars, given)
    for equation in inner.eqns:
        name = primitive_name(equation)
        if name in CALLS:
            body, inside = _with_stacks(
                call_jaxpr(equation), [*map(numbers.of, equation.invars)], is_rewritten
            )
            numbers.set(equation.outvars, [*map(inside.of, open_jaxpr(body).outvars)])
            equation = with_jaxprs(equation, body)
        elif name == 'scan':
            equation, found = _scan(equation, [*map(numbers.of, equation.invars)], is_rewritten)
            numbers.set(equation.outvars, found)
        changed.append(equation)
    same = all(map(operator.is_, changed, inner.eqns))
    return jaxpr if same else replace_jaxpr(jaxpr, eqns=changed), numbers


def _scan(
    equation: Any, operands: Sequence[IntegerValues | None], is_rewritten: _Filter
) -> tuple[Any, Sequence[IntegerValues | None]]:
    """A loop with stacks in place of rows, and the integers of its results."""
    loop, options = loop_of(equation), scan_options(equation)
    length = loop.length or 0
    results: list[IntegerValues | None] = [None] * len(equation.outvars)
    if not 0 < length <= _MOST:
        return equation, results
    rows = np.arange(length)
    body = inline_calls(loop.body, functools.partial(_may_take_rows, length=length))
    (atoms, first, _), (constants, _, stacks) = map(loop.split, (equation.invars, operands))
    counters = [] if options['reverse'] else _counters(loop._replace(body=body), first, rows)
    counted = [rows.astype(x.aval.dtype) if i in counters else None for i, x in enumerate(first)]
    elements = [None if x is None or x.shape != rows.shape else x for x in stacks]
    same = [None if size_of(atom) == 1 else x for atom, x in zip(atoms, constants, strict=True)]
    inside, numbers = _with_stacks(body, [*same, *counted, *elements], is_rewritten)
    found = [numbers.of(x) if size_of(x) == 1 else None for x in open_jaxpr(inside).outvars[loop.num_carry :]]
    results[loop.num_carry :] = [None if x is None else np.broadcast_to(x, rows.shape) for x in found]
    if not open_jaxpr(inside).effects and is_rewritten(equation):
        is_own = functools.partial(_is_number, numbers, rows)
        changed = _by_number(loop._replace(body=inside), is_own, counters, options)
        if changed is not None:
            return trace_equation(jax.jit(changed), equation), results
    return equation if inside is body else with_jaxprs(equation, inside), results


def _is_number(numbers: StaticIntegers, rows: IntegerValues, atom: Any, count: int) -> bool:
    """Whether a value of a round is the number of the first of so many rows of the round."""
    values = numbers.of(atom)
    return values is not None and np.array_equal(values, rows * count)


def _may_take_rows(call: Any, length: int) -> bool:
    """Whether a call may take rows of an array of so many, or write to one."""
    # Inlined, these would have the gradient of their equations in place of their own, if one is taken later.
    if primitive_name(call) in OWN_GRADIENTS:
        return False
    inside = [each for each in all_equations(call_jaxpr(call)) if primitive_name(each) in _INDEXED]
    has_rows = any(_rows_of_round(each.invars[0], length) for each in inside)
    return has_rows and not any(user_shardings_of(call))


def _rows_of_round(atom: Any, length: int) -> int:
    """How many rows of an array each of so many rounds has; 0 if that is no whole number."""
    rows = (shape_of(atom) or (0,))[0]
    return 0 if rows % length else rows // length


def _counters(loop: Loop, first: Sequence[Any], rows: IntegerValues) -> Sequence[int]:
    """Which carried values count the rounds, from zero on."""
    body, found = open_jaxpr(loop.body), []
    known = StaticIntegers(body)
    for i, var in enumerate(loop.split(body.invars)[1]):
        if isinstance(first[i], Literal) and not first[i].val:
            dtype = var.aval.dtype
            known.reset([var], [rows.astype(dtype)])
            after = known.of(body.outvars[i])
            if after is not None and np.array_equal(after, (rows + 1).astype(dtype)):
                found.append(i)
    return found


def _by_number(
    loop: Loop, is_own: _IsOwn, counters: Sequence[int], options: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """A loop with stacks in place of rows, as a function of its operands; None if it has no such rows.

    Args:
        loop: the loop.
        is_own: whether a value is the number of the first of so many rows of the round.
        counters: which carried values count the rounds, from zero on.
        options: those of `jax.lax.scan`.
    """
    body, length = open_jaxpr(loop.body), loop.length or 0
    constants, state, elements = loop.split(body.invars)
    outputs, makers = body.outvars[: loop.num_carry], producers_of(body)
    puts = [
        _written(makers, var, out, is_own, _rows_of_round(var, length))
        for var, out in zip(state, outputs, strict=True)
    ]
    written = {i: each for i, each in enumerate(puts) if each}
    # Of these each row is what it was before the loop, until the round that takes it.
    sources = {id(var): i for i, var in enumerate(constants)}
    for i, var in enumerate(state):
        if i in written or outputs[i] is var:
            sources[id(var)] = loop.num_consts + i
    read = [
        (sources[id(each.invars[0])], each.outvars[0])
        for each in body.eqns
        if each.invars and id(each.invars[0]) in sources and _reads(each, is_own, length)
    ]
    kept = [i for i in range(loop.num_carry) if i not in written and i not in counters]
    carried, taken = [state[i] for i in (*kept, *counters)], [var for _, var in read]
    results = [*[outputs[i] for i in kept], *[row for each in written.values() for row, _ in each]]
    results += body.outvars[loop.num_carry :]
    rounds = extract_subjaxpr(loop.body, [*constants, *carried, *elements, *taken], results)
    used = {id(x) for each in open_jaxpr(rounds).eqns for x in each.invars} | {*map(id, results)}
    if not (read or written or counters) or any(id(state[i]) in used for i in written):
        return None
    links = [(i, is_added) for i, each in written.items() for _, is_added in each]

    def by_number(*operands: Any) -> list[Any]:
        given, first, stacks = loop.split(operands)

        def step(state: Sequence[Any], elements: Sequence[Any]) -> tuple[Any, Any]:
            results = eval_jaxpr(rounds, [*given, *state, *elements])
            return results[: len(kept)], results[len(kept) :]

        counted = [jnp.arange(length).astype(first[i].dtype) for i in counters]
        own = [operands[place].reshape(length, *shape_of(var)) for place, var in read]
        elements = [*counted, *stacks, *own]
        state, stacked = jax.lax.scan(step, [first[i] for i in kept], elements, length, **options)
        found = dict(zip(kept, state, strict=True))
        found |= {i: jnp.asarray(length).astype(first[i].dtype) for i in counters}
        found |= {i: first[i] for i in written}
        for (i, is_added), x in zip(links, stacked, strict=False):
            rows = x.reshape(first[i].shape)
            found[i] = found[i] + rows if is_added else rows
        return [*[found[i] for i in range(loop.num_carry)], *stacked[len(links) :]]

    return by_number


def _reads(equation: Any, is_own: _IsOwn, length: int) -> bool:
    """Whether an equation reads the rows of the round, all of them."""
    name, count = primitive_name(equation), _rows_of_round(equation.invars[0], length)
    if name not in ('dynamic_slice', 'gather') or not count or not is_own(equation.invars[1], count):
        return False
    row, found = shape_of(equation.invars[0])[1:], shape_of(equation.outvars[0])
    if name == 'dynamic_slice':
        return found == (count, *row)
    return count == 1 and found == row and is_row_gather(equation)


def _written(
    makers: Mapping[int, Any], var: Any, out: Any, is_own: _IsOwn, count: int
) -> Sequence[tuple[Any, bool]] | None:
    """The rows that a round writes to an array one after the other, each with whether it is added.

    Args:
        makers: the equations of the values.
        var: the array; None for zeros.
        out: what becomes of it.
        is_own: whether a value is the number of the first of so many rows of the round.
        count: how many rows each round has; 0 if rows do not divide by rounds.

    Returns:
        None if more than the row of the round may differ.
    """
    made: Any = makers.get(id(out))
    if out is var or (var is None and _is_zero(made)):
        return []
    name = '' if made is None else primitive_name(made)
    if name in ('add', 'add_any') and var is not None:
        for before, more in (made.invars, made.invars[::-1]):
            added = _written(makers, None, more, is_own, count)
            if (
                added
                and len(added) == 1
                and (links := _written(makers, var, before, is_own, count)) is not None
            ):
                return [*links, (added[0][0], True)]
    if name == 'dynamic_update_slice' and shape_of(out):  # a scalar is written by no number
        into, row, number = made.invars[:3]
        is_row = count > 0 and shape_of(row) == (count, *shape_of(out)[1:])
    elif name in ('scatter', 'scatter-add'):
        into, number, row = made.invars
        is_row = count == 1 and shape_of(row) == shape_of(out)[1:] and is_row_scatter(made)
    else:
        return None
    links = _written(makers, var, into, is_own, count) if is_row and is_own(number, count) else None
    return None if links is None else [*links, (row, name == 'scatter-add')]


def _is_zero(made: Any) -> bool:
    """Whether an equation fills an array with zeros."""
    filled = made.invars[0] if made is not None and primitive_name(made) == 'broadcast_in_dim' else None
    return isinstance(filled, Literal) and not filled.val
