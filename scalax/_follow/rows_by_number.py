"""Loops that take a row by the number of the round, `x[i]`: the rows become a stack that the loop runs over.

So do rows that each round writes, ``c.at[i].set(row)``, or adds, as the gradient of `x[i]` does: they become
results of the rounds. The number is counted by the loop, or an element of ``jnp.arange``. JAX computes others
of it, such as ``i + n`` where `i` is negative; these integers are computed here, for all rounds. Loops that
take the rows in another order, as the last one first, stay as they are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalax._jax.equations import (
    CALLS,
    OWN_GRADIENTS,
    Literal,
    Loop,
    called,
    equations,
    loop_of,
    makers_of,
    opened,
    scan_options,
    shape_of,
    size_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import equation_of, part_of, replaced, run, with_inlined, with_jaxprs
from scalax._jaxprs.dims import puts_rows, takes_rows
from scalax._jaxprs.integers import Integers, Values
from scalax._jaxprs.user_shardings import placed_by_user

# Of more rounds the numbers are not computed.
_MOST = 2**20
_INDEXED = frozenset(('dynamic_slice', 'dynamic_update_slice', 'gather', 'scatter', 'scatter-add'))


def with_rows_by_number(jaxpr: Any) -> Any:
    """The jaxpr with stacks in place of rows that loops take by number; the same one if there are none."""
    return _with_stacks(jaxpr, [None] * len(opened(jaxpr).invars))[0]


def _with_stacks(jaxpr: Any, given: Sequence[Values | None]) -> tuple[Any, Integers]:
    """The jaxpr with stacks in place of rows, and its integers, given those of its arguments."""
    inner, changed = opened(jaxpr), []
    numbers = Integers(inner, iotas=True)
    numbers.note(inner.invars, given)
    for equation in inner.eqns:
        name = primitive_name(equation)
        if name in CALLS:
            body, inside = _with_stacks(called(equation), [*map(numbers.of, equation.invars)])
            numbers.note(equation.outvars, [*map(inside.of, opened(body).outvars)])
            equation = with_jaxprs(equation, body)
        elif name == 'scan':
            equation, found = _scan(equation, [*map(numbers.of, equation.invars)])
            numbers.note(equation.outvars, found)
        changed.append(equation)
    same = all(map(operator.is_, changed, inner.eqns))
    return jaxpr if same else replaced(jaxpr, eqns=changed), numbers


def _scan(equation: Any, operands: Sequence[Values | None]) -> tuple[Any, Sequence[Values | None]]:
    """A loop with stacks in place of rows, and the integers of its results."""
    loop, options = loop_of(equation), scan_options(equation)
    length = loop.length or 0
    results: list[Values | None] = [None] * len(equation.outvars)
    if not 0 < length <= _MOST:
        return equation, results
    rows = np.arange(length)
    body = with_inlined(loop.body, functools.partial(_may_take_rows, length=length))
    (atoms, first, _), (constants, _, stacks) = map(loop.parts, (equation.invars, operands))
    counters = [] if options['reverse'] else _counters(loop._replace(body=body), first, rows)
    counted = [rows.astype(x.aval.dtype) if i in counters else None for i, x in enumerate(first)]
    elements = [None if x is None or x.shape != rows.shape else x for x in stacks]
    same = [None if size_of(atom) == 1 else x for atom, x in zip(atoms, constants, strict=True)]
    inside, numbers = _with_stacks(body, [*same, *counted, *elements])
    found = [numbers.of(x) if size_of(x) == 1 else None for x in opened(inside).outvars[loop.carried :]]
    results[loop.carried :] = [None if x is None else np.broadcast_to(x, rows.shape) for x in found]
    if not opened(inside).effects:
        is_own = functools.partial(_is_number, numbers, rows)
        changed = _by_number(loop._replace(body=inside), is_own, counters, options)
        if changed is not None:
            return equation_of(jax.jit(changed), equation), results
    return equation if inside is body else with_jaxprs(equation, inside), results


def _is_number(numbers: Integers, rows: Values, atom: Any) -> bool:
    """Whether a value of a round is the number of the row at the same place of a stack."""
    values = numbers.of(atom)
    return values is not None and np.array_equal(values, rows)


def _may_take_rows(call: Any, length: int) -> bool:
    """Whether a call may take rows of an array of so many, or write to one."""
    # Inlined, these would have the gradient of their equations in place of their own, if one is taken later.
    if primitive_name(call) in OWN_GRADIENTS:
        return False
    inside = [each for each in equations(called(call)) if primitive_name(each) in _INDEXED]
    has_rows = any(shape_of(each.invars[0])[:1] == (length,) for each in inside)
    return has_rows and not any(placed_by_user(call))


def _counters(loop: Loop, first: Sequence[Any], rows: Values) -> Sequence[int]:
    """Which carried values count the rounds, from zero on."""
    body, found = opened(loop.body), []
    known = Integers(body)
    for i, var in enumerate(loop.parts(body.invars)[1]):
        if isinstance(first[i], Literal) and not first[i].val:
            dtype = var.aval.dtype
            known.give([var], [rows.astype(dtype)])
            after = known.of(body.outvars[i])
            if after is not None and np.array_equal(after, (rows + 1).astype(dtype)):
                found.append(i)
    return found


def _by_number(
    loop: Loop, is_own: Callable[[Any], bool], counters: Sequence[int], options: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """A loop with stacks in place of rows, as a function of its operands; None if it has no such rows.

    Args:
        loop: the loop.
        is_own: whether a value is the number of the row of the round.
        counters: which carried values count the rounds, from zero on.
        options: those of `jax.lax.scan`.
    """
    body, length = opened(loop.body), loop.length or 0
    constants, state, elements = loop.parts(body.invars)
    outputs, makers = body.outvars[: loop.carried], makers_of(body)
    puts = [_written(makers, *pair, is_own) for pair in zip(state, outputs, strict=True)]
    written = {i: each for i, each in enumerate(puts) if each and shape_of(state[i])[0] == length}
    # Of these each row is what it was before the loop, until the round that takes it.
    sources = {id(var): i for i, var in enumerate(constants)}
    for i, var in enumerate(state):
        if i in written or outputs[i] is var:
            sources[id(var)] = loop.constants + i
    read = [
        (sources[id(each.invars[0])], each.outvars[0])
        for each in body.eqns
        if _reads(each, is_own) and id(each.invars[0]) in sources
        if shape_of(each.invars[0])[0] == length
    ]
    kept = [i for i in range(loop.carried) if i not in written and i not in counters]
    carried, taken = [state[i] for i in (*kept, *counters)], [var for _, var in read]
    results = [*[outputs[i] for i in kept], *[row for each in written.values() for row, _ in each]]
    results += body.outvars[loop.carried :]
    rounds = part_of(loop.body, [*constants, *carried, *elements, *taken], results)
    used = {id(x) for each in opened(rounds).eqns for x in each.invars} | {*map(id, results)}
    if not (read or written or counters) or any(id(state[i]) in used for i in written):
        return None
    links = [(i, is_added) for i, each in written.items() for _, is_added in each]

    def by_number(*operands: Any) -> list[Any]:
        given, first, stacks = loop.parts(operands)

        def step(state: Sequence[Any], elements: Sequence[Any]) -> tuple[Any, Any]:
            results = run(rounds, [*given, *state, *elements])
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
        return [*[found[i] for i in range(loop.carried)], *stacked[len(links) :]]

    return by_number


def _reads(equation: Any, is_own: Callable[[Any], bool]) -> bool:
    """Whether an equation takes the row of the round, as a whole."""
    name = primitive_name(equation)
    if name not in ('dynamic_slice', 'gather') or not any(map(is_own, equation.invars[1:2])):
        return False
    row, found = shape_of(equation.invars[0])[1:], shape_of(equation.outvars[0])
    if name == 'dynamic_slice':
        return found == (1, *row)
    return found == row and takes_rows(equation)


def _written(
    makers: Mapping[int, Any], var: Any, out: Any, is_own: Callable[[Any], bool]
) -> Sequence[tuple[Any, bool]] | None:
    """The rows that a round writes to an array one after the other, each with whether it is added.

    Args:
        makers: the equations of the values.
        var: the array; None for zeros.
        out: what becomes of it.
        is_own: whether a value is the number of the round.

    Returns:
        None if more than the row of the round may differ.
    """
    made: Any = makers.get(id(out))
    if out is var or (var is None and _is_zero(made)):
        return []
    name = '' if made is None else primitive_name(made)
    if name in ('add', 'add_any') and var is not None:
        for before, more in (made.invars, made.invars[::-1]):
            added = _written(makers, None, more, is_own)
            if added and len(added) == 1 and (links := _written(makers, var, before, is_own)) is not None:
                return [*links, (added[0][0], True)]
    if name == 'dynamic_update_slice' and shape_of(out):  # a scalar is written by no number
        into, row, number = made.invars[:3]
        is_row = shape_of(row) == (1, *shape_of(out)[1:])
    elif name in ('scatter', 'scatter-add'):
        into, number, row = made.invars
        is_row = shape_of(row) == shape_of(out)[1:] and puts_rows(made)
    else:
        return None
    links = _written(makers, var, into, is_own) if is_row and is_own(number) else None
    return None if links is None else [*links, (row, name == 'scatter-add')]


def _is_zero(made: Any) -> bool:
    """Whether an equation fills an array with zeros."""
    filled = made.invars[0] if made is not None and primitive_name(made) == 'broadcast_in_dim' else None
    return isinstance(filled, Literal) and not filled.val
