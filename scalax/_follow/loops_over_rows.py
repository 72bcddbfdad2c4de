"""Loops over the rows of a batch, such as ``jax.lax.map(f, x)``: each device runs over its own rows.

A loop takes one row a round, and only one device has it. So the compiler gathers all rows, and every device
computes each of them. Where rounds do not depend on each other, the loop may as well take one row of each
device in a round: the rows are ``(devices, rows of a device, ...)``, and ``jax.vmap`` maps a round over the
devices. A loop that only adds up, as the gradient of another one does, has a sum on each device, and these
are added up behind it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._follow.accumulations import added_by_round, makers_of
from scalax._follow.rows_by_number import with_rows_by_number
from scalax._follow.types import Noted
from scalax._jax.equations import (
    CALLS,
    Loop,
    branches,
    called,
    draws_alike,
    equations,
    jaxprs_in,
    loop_of,
    opened,
    scan_options,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, bound, equation_if_mapped, equation_of, run
from scalax._jaxprs.dependence import Dependence


def with_own_rows(jaxpr: Any, lost: Iterable[Noted], sizes: Mapping[str, int]) -> Any:
    """The jaxpr whose loops over rows run on each device's own ones; the same one if there is none.

    Args:
        jaxpr: the jaxpr.
        lost: where it loses rows.
        sizes: the sizes of the mesh axes.
    """
    lost = [*lost]
    if any(primitive_name(equation) == 'scan' for each in lost for equation in (each.equation, *each.calls)):
        before, jaxpr = jaxpr, with_rows_by_number(jaxpr)
        if jaxpr is not before:
            return jaxpr
    loops = {}
    for each in lost:
        if primitive_name(each.equation) == 'scan' and each.rows and each.rows[0]:
            loops[id(each.equation)] = math.prod(sizes[axis] for axis in each.rows[0])
    if not loops:
        return jaxpr
    return Rewriter(lambda each: _on_own_rows(each, loops[id(each)]) if id(each) in loops else each).jaxpr(
        jaxpr
    )


def _on_own_rows(equation: Any, devices: int) -> Any:
    """A `scan` that takes a row of each device in a round; the same one if rounds depend on each other."""
    loop = loop_of(equation)
    body = opened(loop.body)
    length = loop.length
    if body.effects or not length or length % devices or not draws_alike(body) or not _ends(body):
        return equation
    _, state, _ = loop.parts(body.invars)
    makers = makers_of(body)
    kept = [_is_same(var, out, makers) for var, out in zip(state, body.outvars, strict=False)]
    for var, out, same in zip(state, body.outvars, kept, strict=False):
        if not same and added_by_round(body, var, out) is None:
            return equation

    each_round = _with_choices(loop)

    def dealt(stack: Any) -> Any:
        return jnp.moveaxis(stack.reshape(devices, length // devices, *stack.shape[1:]), 0, 1)

    def together(stack: Any) -> Any:
        return jnp.moveaxis(stack, 0, 1).reshape(length, *stack.shape[2:])

    def on_own_rows(*operands: Any) -> list[Any]:
        given, first, stacks = loop.parts(operands)

        def step(sums: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, Any]:
            def round_of(own: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
                left = iter(own)
                carried = [x if same else next(left) for x, same in zip(first, kept, strict=True)]
                results = run(each_round, [*given, *carried, *row])
                added = [x for x, same in zip(results, kept, strict=False) if not same]
                return added, results[loop.carried :]

            return jax.vmap(round_of)(sums, rows)

        summed = [x for x, same in zip(first, kept, strict=True) if not same]
        zeros = [jnp.zeros((devices, *x.shape), x.dtype) for x in summed]
        own, rows = jax.lax.scan(step, zeros, [*map(dealt, stacks)], **scan_options(equation))
        totals = iter(
            [start + sums.sum(0, dtype=start.dtype) for start, sums in zip(summed, own, strict=True)]
        )
        return [
            *[x if same else next(totals) for x, same in zip(first, kept, strict=True)],
            *map(together, rows),
        ]

    own_loop = on_own_rows if each_round is loop.body else _with_gradient_of(equation, on_own_rows)
    found = equation_if_mapped(jax.jit(own_loop), equation)
    # Of what can only be run one after the other, jax.vmap makes a loop over devices.
    return found if _count_loops(found) == _count_loops(equation) else equation


def _with_gradient_of(equation: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the gradient of an equation, if one is taken behind all of this.

    In `chosen` also branches that a row did not choose have a gradient, times zero. It may be infinite, as
    that of a square root at zero.
    """
    own = jax.custom_jvp(function)
    own.defjvp(functools.partial(jax.jvp, lambda *operands: bound(equation, *operands)))
    return own


def _is_same(var: Any, out: Any, makers: Mapping[int, Any]) -> bool:
    """Whether a value is another one, handed on by calls."""
    made = None if out is var else makers.get(id(out))
    if made is None:
        return out is var
    if primitive_name(made) == 'convert_element_type' and out.aval.dtype == var.aval.dtype:
        return _is_same(var, made.invars[0], makers)
    if primitive_name(made) not in CALLS:
        return False
    inner = opened(called(made))
    [handed] = [x for x, result in zip(inner.outvars, made.outvars, strict=True) if result is out]
    own = [x for x, operand in zip(inner.invars, made.invars, strict=True) if operand is var]
    return any(_is_same(x, handed, makers_of(inner)) for x in own)


def _with_choices(loop: Loop) -> Any:
    """The body of a loop whose branches keep what is the same for all rows, such as weights, as one.

    `jax.vmap` computes all branches where rows choose one, and copies all of their operands for each row.
    """
    count = len(opened(loop.body).invars)
    state = loop.constants + loop.carried
    rows = Dependence(loop.body, [i >= state for i in range(count)])

    def change(equation: Any) -> Any:
        if primitive_name(equation) != 'cond' or equation.invars[0] not in rows:
            return equation
        return equation_of(_choice(equation), equation)

    return Rewriter(change).jaxpr(loop.body)


def _choice(equation: Any) -> Any:
    """A function of the operands of a `cond` that maps them as they are."""
    ways = [functools.partial(run, branch) for branch in branches(equation)]

    def of_one(index: Any, operands: Sequence[Any]) -> list[Any]:
        found: list[Any] = jax.lax.switch(index, ways, operands)
        return found

    choice = jax.custom_batching.custom_vmap(of_one)

    @choice.def_vmap
    def mapped(_: int, is_mapped: Any, index: Any, operands: Sequence[Any]) -> tuple[Any, Any]:
        def chosen(index: Any, operands: Sequence[Any]) -> list[Any]:
            results = zip(*[way(operands) for way in ways], strict=True)
            return [jax.lax.select_n(index, *each) for each in results]

        axes = jax.tree.map(lambda each: 0 if each else None, is_mapped)
        found = jax.vmap(chosen if is_mapped[0] else of_one, in_axes=tuple(axes))(index, operands)
        return found, [True] * len(found)

    return lambda index, *operands: choice(index, [*operands])


def _ends(jaxpr: Any, is_skipped: bool = False) -> bool:
    """Whether rounds end together if each of them does: no row skips a `while` that others run.

    `jax.vmap` computes branches, and rounds of a `while`, for all rows, also for those that never get there.
    What guards a loop that would not end then guards it no longer.

    Args:
        jaxpr: the jaxpr.
        is_skipped: whether some rows do not get there.
    """
    for equation in opened(jaxpr).eqns:
        name = primitive_name(equation)
        if name == 'while' and is_skipped:
            return False
        inside = is_skipped or name in ('cond', 'while')
        if not all(_ends(each, inside) for each in jaxprs_in(equation)):
            return False
    return True


def _count_loops(equation: Any) -> int:
    inside = [each for jaxpr in jaxprs_in(equation) for each in equations(jaxpr)]
    return [*map(primitive_name, [equation, *inside])].count('scan')
