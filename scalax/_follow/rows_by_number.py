"""Loops that take a row by the number of the round, `x[i]`: the rows become a stack that the loop runs over.

So do rows that each round writes, ``c.at[i].set(row)``, or adds, as the gradient of `x[i]` does: they become
results of the rounds. The number is counted by the loop, or an element of ``jnp.arange``. What is computed of
it is known before the program runs: so a row is taken by the number if the integers say so.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalax._follow.accumulations import makers_of
from scalax._follow.said import placed_by_user
from scalax._jax.equations import (
    CALLS,
    Literal,
    Loop,
    called,
    equations,
    gather_dims,
    loop_of,
    opened,
    scan_options,
    scatter_dims,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import equation_of, part_of, replaced, run, with_inlined, with_jaxprs
from scalax._jaxprs.dims import FORWARDS

Numbers = np.ndarray[Any, Any] | None
"""The integers in a value with one dimension; of a value of one element, in a round, those of all rounds."""

# More integers are not computed.
_MOST = 2**20
_COMPUTED: Mapping[str, Callable[..., Any]] = {
    'add': np.add,
    'lt': np.less,
    'select_n': lambda which, *cases: np.choose(which, cases, mode='clip'),
}
_INDEXED = frozenset(('dynamic_slice', 'dynamic_update_slice', 'gather', 'scatter', 'scatter-add'))


def with_rows_by_number(jaxpr: Any) -> Any:
    """The jaxpr with stacks in place of rows that loops take by number; the same one if there are none."""
    return _followed(jaxpr, [None] * len(opened(jaxpr).invars))[0]


def _followed(jaxpr: Any, given: Sequence[Numbers]) -> tuple[Any, dict[int, Numbers]]:
    """The jaxpr, and the integers of its variables, by their ids, if these are those of its arguments."""
    inner, changed = opened(jaxpr), []
    known: dict[int, Numbers] = dict(zip(map(id, inner.invars), given, strict=True))
    for equation in inner.eqns:
        name, operands = primitive_name(equation), [*map(known.get, map(id, equation.invars))]
        found: Sequence[Numbers] = ()
        if name in CALLS:
            body, inside = _followed(called(equation), operands)
            found = [inside.get(id(x)) for x in opened(body).outvars]
            equation = equation if body is called(equation) else with_jaxprs(equation, body)
        elif name == 'scan':
            equation, found = _scan(equation, operands)
        elif len(equation.outvars) == 1:
            found = [_computed(name, equation, operands)]
        known.update(zip(map(id, equation.outvars), found, strict=False))
        changed.append(equation)
    same = all(map(operator.is_, changed, inner.eqns))
    return jaxpr if same else replaced(jaxpr, eqns=changed), known


def _computed(name: str, equation: Any, operands: Sequence[Numbers]) -> Numbers:
    """The integers of the result of an equation; None if they are not known."""
    [out], shape = equation.outvars, shape_of(equation.outvars[0])
    dtype = getattr(out.aval, 'dtype', float)
    is_whole = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)
    if max(shape, default=1) != math.prod(shape) or not is_whole:
        return None
    if name == 'iota' and shape[0] <= _MOST:
        return np.arange(shape[0]).astype(dtype) if len(shape) == 1 else None
    if name in FORWARDS and operands[0] is not None:
        return operands[0].astype(dtype) if _size(equation.invars[0]) == _size(out) else None
    pairs = [*zip(equation.invars, operands, strict=True)]
    if name not in _COMPUTED or not all(isinstance(x, Literal) or shape_of(x) == shape for x, _ in pairs):
        return None
    values = [x.val if isinstance(x, Literal) else numbers for x, numbers in pairs]
    return None if any(x is None for x in values) else np.asarray(_COMPUTED[name](*values)).astype(dtype)


def _scan(equation: Any, operands: Sequence[Numbers]) -> tuple[Any, Sequence[Numbers]]:
    """A loop with stacks in place of rows, and the integers of its results."""
    loop, options = loop_of(equation), scan_options(equation)
    assert loop.length is not None
    rounds = np.arange(min(loop.length, _MOST))[:: -1 if options['reverse'] else 1]
    body = with_inlined(loop.body, functools.partial(_may_take_rows, length=loop.length))
    (atoms, first, _), (constants, _, stacks) = map(loop.parts, (equation.invars, operands))
    steps = _steps(loop._replace(body=body), first)
    counted = [
        (np.asarray(x.val).astype('int64') + steps[i] * rounds).astype(x.aval.dtype) if i in steps else None
        for i, x in enumerate(first)
    ]
    elements = [None if x is None or x.shape != rounds.shape else x for x in stacks]
    same = [None if _size(atom) == 1 else x for atom, x in zip(atoms, constants, strict=True)]
    inside, known = _followed(body, [*same, *counted, *elements])
    found = [known.get(id(x)) if _size(x) == 1 else None for x in opened(inside).outvars[loop.carried :]]
    results = [None] * loop.carried + [None if x is None else np.broadcast_to(x, rounds.shape) for x in found]
    own = {var for var, x in known.items() if x is not None and np.array_equal(x, np.arange(loop.length))}
    changed = None if opened(inside).effects else _by_number(loop._replace(body=inside), own, steps, options)
    if changed is not None:
        return equation_of(jax.jit(changed), equation), results
    return equation if inside is body else with_jaxprs(equation, inside), results


def _may_take_rows(call: Any, length: int) -> bool:
    """Whether a call may take rows of an array of so many, or write to one."""
    # In place of these the gradient would be that of their equations, if it is taken of the whole function.
    if primitive_name(call) in ('custom_jvp_call', 'custom_vjp_call'):
        return False
    inside = [each for each in equations(called(call)) if primitive_name(each) in _INDEXED]
    has_rows = any(shape_of(each.invars[0])[:1] == (length,) for each in inside)
    return has_rows and not any(placed_by_user(call))


def _steps(loop: Loop, first: Sequence[Any]) -> dict[int, Any]:
    """The integers that a loop counts: number of a carried value -> what each round adds to it."""
    body, steps = opened(loop.body), dict[int, Any]()
    makers = makers_of(body)
    for i, (start, var, out) in enumerate(zip(first, loop.parts(body.invars)[1], body.outvars, strict=False)):
        made = makers.get(id(out))
        if made is None or primitive_name(made) != 'add' or not isinstance(start, Literal):
            continue
        added = [x for x in made.invars if x is not var]
        if len(added) == 1 and isinstance(added[0], Literal) and jnp.issubdtype(var.aval.dtype, jnp.integer):
            steps[i] = np.asarray(added[0].val).astype('int64')
    return steps


def _by_number(
    loop: Loop, own: Container[int], steps: Mapping[int, Any], options: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """A loop with stacks in place of rows, as a function of its operands; None if it has no such rows.

    Args:
        loop: the loop.
        own: the ids of the values that are the number of the round.
        steps: the carried values that the loop counts, and what each round adds to them.
        options: those of `jax.lax.scan`.
    """
    body, length = opened(loop.body), loop.length or 0
    constants, state, elements = loop.parts(body.invars)
    outputs, makers = body.outvars[: loop.carried], makers_of(body)
    rows = [_written(makers, *pair, own) for pair in zip(state, outputs, strict=True)]
    written = {i: each for i, each in enumerate(rows) if each and shape_of(state[i])[0] == length}
    kept: list[int] = []
    while True:
        # Of these each row is what it was before the loop, until the round that takes it.
        sources = {id(var): i for i, var in enumerate(constants)}
        for i, var in enumerate(state):
            if i in written or outputs[i] is var:
                sources[id(var)] = loop.constants + i
        read = [
            (sources[id(each.invars[0])], each.outvars[0])
            for each in body.eqns
            if _reads(each, own) and id(each.invars[0]) in sources
            if shape_of(each.invars[0])[0] == length
        ]
        kept = [i for i in range(loop.carried) if i not in written and i not in steps]
        carried, taken = [state[i] for i in (*kept, *steps)], [var for _, var in read]
        results = [*[outputs[i] for i in kept], *[row for each in written.values() for row, _ in each]]
        results += body.outvars[loop.carried :]
        rounds = part_of(loop.body, [*constants, *carried, *elements, *taken], results)
        used = {id(x) for each in opened(rounds).eqns for x in each.invars} | {*map(id, results)}
        still = {i: each for i, each in written.items() if id(state[i]) not in used}
        if len(still) == len(written):
            break
        written = still
    if not (read or written or steps):
        return None
    links = [(i, is_added) for i, each in written.items() for _, is_added in each]

    def by_number(*operands: Any) -> list[Any]:
        given, first, stacks = loop.parts(operands)
        places = jax.lax.iota('int32', length)[:: -1 if options['reverse'] else 1]
        each_step = {i: step.astype(first[i].dtype) for i, step in steps.items()}
        counted = [first[i] + step * places.astype(step.dtype) for i, step in each_step.items()]

        def step(state: Sequence[Any], elements: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
            counted, own, taken = elements
            shaped = [x.reshape(shape_of(var)) for x, (_, var) in zip(taken, read, strict=True)]
            results = run(rounds, [*given, *state, *counted, *own, *shaped])
            rows = zip(links, results[len(kept) :], strict=False)
            own_rows = [x.reshape(first[i].shape[1:]) for (i, _), x in rows]
            return results[: len(kept)], [*own_rows, *results[len(kept) + len(own_rows) :]]

        elements = counted, [*stacks], [operands[place] for place, _ in read]
        state, stacked = jax.lax.scan(step, [first[i] for i in kept], elements, length, **options)
        found = dict(zip(kept, state, strict=True))
        found |= {i: first[i] + (step * length).astype(first[i].dtype) for i, step in steps.items()}
        found |= {i: first[i] for i in written}
        for (i, is_added), x in zip(links, stacked, strict=False):
            found[i] = found[i] + x if is_added else x
        return [*[found[i] for i in range(loop.carried)], *stacked[len(links) :]]

    return by_number


def _reads(equation: Any, own: Container[int]) -> bool:
    """Whether an equation takes the row of the round, as a whole."""
    name = primitive_name(equation)
    if name not in ('dynamic_slice', 'gather') or not any(id(x) in own for x in equation.invars[1:2]):
        return False
    row, found = shape_of(equation.invars[0])[1:], shape_of(equation.outvars[0])
    if name == 'dynamic_slice':
        return found == (1, *row)
    dims = gather_dims(equation)
    return found == row and (*dims.collapsed_slice_dims,) == (0,) == (*dims.start_index_map,)


def _written(
    makers: Mapping[int, Any], var: Any, out: Any, own: Container[int]
) -> Sequence[tuple[Any, bool]] | None:
    """The rows that a round writes to an array one after the other, each with whether it is added.

    Args:
        makers: the equations of the values.
        var: the array; None for zeros.
        out: what becomes of it.
        own: the ids of the values that are the number of the round.

    Returns:
        None if more than the row of the round may differ.
    """
    made: Any = makers.get(id(out))
    if out is var or (var is None and _is_zero(made)):
        return []
    name = '' if made is None else primitive_name(made)
    if name in ('add', 'add_any') and var is not None:
        for before, more in (made.invars, made.invars[::-1]):
            added = _written(makers, None, more, own)
            if added and len(added) == 1 and (links := _written(makers, var, before, own)) is not None:
                return [*links, (added[0][0], True)]
    if name == 'dynamic_update_slice' and shape_of(out):  # a scalar is written by no number
        into, row, number = made.invars[:3]
        is_row = shape_of(row) == (1, *shape_of(out)[1:])
    elif name in ('scatter', 'scatter-add'):
        into, number, row = made.invars
        dims = scatter_dims(made)
        is_row = shape_of(row) == shape_of(out)[1:] and (*dims.inserted_window_dims,) == (0,)
        is_row = is_row and (*dims.scatter_dims_to_operand_dims,) == (0,)
    else:
        return None
    links = _written(makers, var, into, own) if is_row and id(number) in own else None
    return None if links is None else [*links, (row, name == 'scatter-add')]


def _is_zero(made: Any) -> bool:
    """Whether an equation fills an array with zeros."""
    filled = made.invars[0] if made is not None and primitive_name(made) == 'broadcast_in_dim' else None
    return isinstance(filled, Literal) and not filled.val


def _size(atom: Any) -> int:
    return math.prod(shape_of(atom))
