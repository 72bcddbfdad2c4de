"""Sums of a loop that are taken apart behind it, where each round does so.

A recurrent cell multiplies its rows with weights that it combines: concatenated, stacked, normalized. Each
round of its gradient then takes the gradient of what was combined apart, and adds the parts up. The compiler
adds a sum over rows up over devices once behind a loop, but not one of which rounds take parts. Taking apart
is linear, so the loop adds the sums up, and they are taken apart once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import Loop, loop_of, makers_of, opened, scan_options, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, equation_of, part_of, run
from scalax._jaxprs.dims import FORWARDS

_SUMS = frozenset({'add', 'add_any', 'sub'})
# Linear in the one operand that changes from round to round. A cast is none: sums are added up behind it.
_LINEAR = FORWARDS | {'slice', 'split', 'unstack', 'neg', 'reduce_sum', 'mul', 'div'}
_BASES = frozenset({'dot_general', 'convert_element_type'})


def with_sums_behind_loops(jaxpr: Any) -> Any:
    """The jaxpr with sums of loops taken apart behind them; the same one if none are taken apart."""
    return Rewriter(lambda each: _behind(each) if primitive_name(each) == 'scan' else each).jaxpr(jaxpr)


def _behind(equation: Any) -> Any:
    """A `scan` with its sums taken apart behind it, as one equation; the same one if it takes none apart."""
    loop = loop_of(equation)
    body = opened(loop.body)
    if body.effects:
        return equation
    _, state, elements = loop.parts(body.invars)
    makers = makers_of(body)
    changing = _changing(body, [*state, *elements])
    found: dict[int, Any] = {}  # number of a carried value -> what a round adds to it
    sums: dict[Any, str] = {}
    for i, (var, out) in enumerate(zip(state, body.outvars, strict=False)):
        added, used = added_by_round(body, var, out), dict[Any, str]()
        if added is None or len(added) != 1 or not _is_linear(added[0], makers, changing, used):
            continue
        if not {*used.values()} <= _BASES | FORWARDS:  # else the compiler adds up behind the loop by itself
            found[i] = added[0]
            sums.update({var: name for var, name in used.items() if name in _BASES})
    most = sum(size_of(state[i]) for i in found)
    if not found or sum(map(size_of, sums)) > most:
        return equation
    return equation_of(jax.jit(_function(equation, loop, found, [*sums])), equation)


def _changing(body: Any, given: Sequence[Any]) -> set[int]:
    """The ids of variables that differ from round to round, as these arguments do.

    All results of an equation do that reads one: behind the loop it runs as a whole, or not at all.
    """
    found = {*map(id, given)}
    for each in body.eqns:
        if not found.isdisjoint(map(id, each.invars)):
            found.update(map(id, each.outvars))
    return found


def added_by_round(body: Any, var: Any, out: Any) -> list[Any] | None:
    """What a round adds to a carried value that it uses for nothing else; None if it does otherwise."""
    readers = {id(x): each for each in body.eqns for x in each.invars}
    uses = Counter(map(id, [*[x for each in body.eqns for x in each.invars], *body.outvars]))
    found: list[Any] = []
    while uses[id(var)] == 1 and var is not out:
        reader = readers.get(id(var))
        if reader is None:
            return None
        name, after = primitive_name(reader), reader.outvars[0]
        is_same = name == 'convert_element_type' and after.aval.dtype == var.aval.dtype
        if name not in ('add', 'add_any') and not is_same:
            return None
        found += [x for x in reader.invars if x is not var]
        var = after
    return found if uses[id(var)] == 1 else None


def _is_linear(var: Any, makers: dict[int, Any], changing: set[int], used: dict[Any, str]) -> bool:
    """Whether a value is computed linearly of products. *used* gets all values, and their primitives."""
    made = makers.get(id(var))
    if made is None or id(var) not in changing:
        return False
    used[var] = name = primitive_name(made)
    if name in _BASES:
        return True
    parts = [x for x in made.invars if id(x) in changing]
    if name == 'div' and (parts[0] is not made.invars[0] or jnp.issubdtype(var.aval.dtype, jnp.integer)):
        return False  # integers are divided with a remainder
    if name in ('mul', 'div') and var.aval.dtype == jnp.float16:
        return False  # what is scaled down so that its sum does not overflow
    both = name in _SUMS and len(parts) == 2
    return (both or (name in _LINEAR and len(parts) == 1)) and all(
        _is_linear(x, makers, changing, used) for x in parts
    )


def _function(equation: Any, loop: Loop, found: dict[int, Any], sums: Sequence[Any]) -> Any:
    body = opened(loop.body)
    kept = [i for i in range(loop.carried) if i not in found]
    constants, state, elements = loop.parts(body.invars)
    outputs = [*[body.outvars[i] for i in kept], *sums, *body.outvars[loop.carried :]]
    rounds = part_of(loop.body, [*constants, *[state[i] for i in kept], *elements], outputs)
    apart = part_of(loop.body, [*constants, *sums], [*found.values()])
    count, end = len(kept), len(kept) + len(sums)

    def taken_apart(*operands: Any) -> list[Any]:
        given, first, stacks = loop.parts(operands)

        def step(state: Sequence[Any], elements: Sequence[Any]) -> tuple[Any, Any]:
            results = run(rounds, [*given, *state[:count], *elements])
            totals = [total + each for total, each in zip(state[count:], results[count:end], strict=True)]
            return (*results[:count], *totals), results[end:]

        start = (*[first[i] for i in kept], *[jnp.zeros(shape_of(var), var.aval.dtype) for var in sums])
        state, stacked = jax.lax.scan(step, start, [*stacks], loop.length, **scan_options(equation))
        parts = run(apart, [*given, *state[count:]])
        carried = dict(zip(kept, state, strict=False))
        carried |= {i: first[i] + part for i, part in zip(found, parts, strict=True)}
        return [*[carried[i] for i in range(loop.carried)], *stacked]

    return taken_apart
