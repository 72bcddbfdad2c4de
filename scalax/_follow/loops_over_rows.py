"""Loops over the rows of a batch, such as ``jax.lax.map(f, x)``: each device runs over its own rows.

A loop takes one row a round, and only one device has it. So the compiler gathers all rows, and every device
computes each of them. Where rounds do not depend on each other, the loop may as well take one row of each
device in a round: the rows are ``(devices, rows of a device, ...)``, and ``jax.vmap`` maps a round over the
devices. A loop that only adds up, as the gradient of another one does, has a sum on each device, and these
are added up behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.ragged import if_mapped
from scalax._follow.rows_by_number import with_rows_by_number
from scalax._follow.trail import Trails
from scalax._follow.types import Followed
from scalax._jax.equations import (
    OWN_GRADIENTS,
    Loop,
    draws_alike,
    equations,
    loop_of,
    makers_of,
    opened,
    scan_options,
    with_inside,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, equation_if_mapped, run, with_inlined
from scalax._jaxprs.carry_accumulation import added_by_round
from scalax._jaxprs.dependence import Dependence


def with_own_rows(jaxpr: Any, found: Followed, trails: Trails, mesh: Mesh | AbstractMesh) -> Any:
    """The jaxpr whose loops over rows run on each device's own ones; the same one if there is none.

    If a loop takes rows by number, only these are changed, to stacks: the jaxpr has to be followed again.

    Args:
        jaxpr: the jaxpr.
        found: the same one, followed.
        trails: answers about trails.
        mesh: a mesh of Auto axes. It is in force.
    """
    around = [equation for each in found.lost for equation in (each.equation, *each.calls)]
    if 'scan' in map(primitive_name, around) and (changed := with_rows_by_number(jaxpr)) is not jaxpr:
        return changed
    stacks = [each for each in found.lost if any(each.rows[:1]) and primitive_name(each.equation) == 'scan']
    loops = {each.equation: each.rows[0] for each in stacks}
    if not loops:
        return jaxpr

    def change(equation: Any) -> Any:
        if equation not in loops:
            return equation
        axes, products = loops[equation], found.ordered['ragged_dot_general']

        def mappable(inner: Any) -> Any:
            return if_mapped(inner, products[inner], axes, trails, mesh) if inner in products else inner

        return _on_own_rows(equation, trails.shards(axes), Rewriter(mappable).jaxpr(loop_of(equation).body))

    return Rewriter(change).jaxpr(jaxpr)


def _on_own_rows(equation: Any, devices: int, each_round: Any) -> Any:
    """A `scan` that takes a row of each device in a round; the same one if rounds depend on each other.

    Args:
        equation: the `scan`.
        devices: how many devices have rows.
        each_round: its body, as it is mapped.
    """
    loop = loop_of(equation)
    body = opened(with_inlined(loop.body, _is_seen_through))
    length = loop.length
    if body.effects or not length or length % devices or not draws_alike(body) or _rows_choose(loop):
        return equation
    _, state, _ = loop.parts(body.invars)
    makers = makers_of(body)
    summed = [i for i, var in enumerate(state) if not _is_same(var, body.outvars[i], makers)]
    if any(added_by_round(body, state[i], body.outvars[i]) is None for i in summed):
        return equation

    def dealt(stack: Any) -> Any:
        return jnp.moveaxis(stack.reshape(devices, length // devices, *stack.shape[1:]), 0, 1)

    def together(stack: Any) -> Any:
        return jnp.moveaxis(stack, 0, 1).reshape(length, *stack.shape[2:])

    def on_own_rows(*operands: Any) -> list[Any]:
        given, first, stacks = loop.parts(operands)

        def step(sums: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, Any]:
            def round_of(own: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
                carried = dict(enumerate(first)) | dict(zip(summed, own, strict=True))
                results = run(each_round, [*given, *carried.values(), *row])
                return [results[i] for i in summed], results[loop.carried :]

            return jax.vmap(round_of)(sums, rows)

        zeros = [jnp.zeros((devices, *first[i].shape), first[i].dtype) for i in summed]
        own, rows = jax.lax.scan(step, zeros, [*map(dealt, stacks)], **scan_options(equation))
        totals = {i: first[i] + each.sum(0, dtype=each.dtype) for i, each in zip(summed, own, strict=True)}
        return [*(dict(enumerate(first)) | totals).values(), *map(together, rows)]

    found = equation_if_mapped(jax.jit(on_own_rows), equation)
    # Of what can only be run one after the other, jax.vmap makes a loop over devices.
    is_one_loop = found is not None and _count('scan', found) == _count('scan', equation)
    return found if is_one_loop else equation


def _is_seen_through(call: Any) -> bool:
    """Whether what a call adds up is seen, and so is the gradient of that."""
    return primitive_name(call) not in OWN_GRADIENTS


def _is_same(var: Any, out: Any, makers: Mapping[int, Any]) -> bool:
    """Whether a value is another one, handed on."""
    made = makers.get(id(out))
    if made is None or primitive_name(made) != 'convert_element_type' or out.aval.dtype != var.aval.dtype:
        return out is var
    return _is_same(var, made.invars[0], makers)


def _rows_choose(loop: Loop) -> bool:
    """Whether some rows may skip what others run: the branches of a `cond`, or a `while` in a `while`.

    `jax.vmap` computes these for all rows. What guards a loop that would not end then guards it no longer;
    and the gradient of a branch that a row did not choose is times zero, but it may be infinite.
    """
    count = len(opened(loop.body).invars)
    state = loop.constants + loop.carried
    rows = Dependence(loop.body, [i >= state for i in range(count)])
    for equation in equations(loop.body):
        if primitive_name(equation) == 'cond' and equation.invars[0] in rows:
            return True
        if primitive_name(equation) == 'while' and _count('while', equation) > 1:
            return True
    return False


def _count(name: str, equation: Any) -> int:
    """How many equations of this name there are in one, itself among them."""
    return [*map(primitive_name, with_inside([equation]))].count(name)
