"""Constants of a loop that its rounds compute themselves, of something smaller.

JAX computes what does not change from layer to layer once, before the loop: a mask as large as all scores of
attention. A microbatch needs a part of it only, and a stage should neither hold nor get more than it was
computed of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from scalax._core.pytree.paths import element_bits
from scalax._jax.equations import Literal, loop_of, scan_options, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import eval_jaxpr, extract_subjaxpr, trace_added_equation, with_results
from scalax._jaxpr.dim_rules import CHEAP_ELEMENTWISE, SHAPE_OPS

_CHEAP = CHEAP_ELEMENTWISE | SHAPE_OPS | {'iota'}


def sink_constants(jaxpr: Any, makers: Mapping[int, Any], equation: Any) -> Any:
    """A `scan` whose rounds compute its constants of smaller values; the same one if there are none.

    Args:
        jaxpr: the jaxpr that it is in.
        makers: the equations of this jaxpr by the ids of their results.
        equation: the `scan`.
    """
    loop = loop_of(equation)
    constants, first, stacks = loop.split(equation.invars)
    roots: dict[int, Any] = {}
    known: dict[int, tuple[float, Sequence[Any]]] = {}
    for atom in constants:
        roots.update((id(root), root) for root in _smallest(atom, makers, known)[1])
    if all(isinstance(atom, Literal) or id(atom) in roots for atom in constants):
        return equation
    given = extract_subjaxpr(jaxpr, [*roots.values()], constants)

    def layer(values: Sequence[Any], carried: Sequence[Any], elements: Sequence[Any]) -> list[Any]:
        return eval_jaxpr(loop.body, [*eval_jaxpr(given, values), *carried, *elements])

    return with_results(scan_like(equation, layer, [*roots.values()], first, stacks), equation.outvars)


def scan_like(
    equation: Any,
    layer: Callable[..., list[Any]],
    constants: Sequence[Any],
    first: Sequence[Any],
    stacks: Sequence[Any],
) -> Any:
    """A `scan` that goes as another one, of other operands.

    Args:
        equation: the other one.
        layer: a round, a function of constants, what is carried, and elements of stacks.
        constants: the constants.
        first: what is carried first.
        stacks: the stacks.
    """
    length, count, end = loop_of(equation).length, len(constants), len(constants) + len(first)

    def looped(*operands: Any) -> list[Any]:
        def step(carried: list[Any], elements: list[Any]) -> tuple[list[Any], list[Any]]:
            results = layer(operands[:count], carried, elements)
            # JAX leaves out of a loop what it carries unchanged, and elements that it gives as they are.
            given = [*[[x] for x in carried], *[elements] * (len(results) - len(carried))]
            for i, (x, taken) in enumerate(zip(results, given, strict=True)):
                results[i] = jax.lax.optimization_barrier(x) if any(x is y for y in taken) else x
            return results[: len(first)], results[len(first) :]

        begun, elements = [*operands[count:end]], [*operands[end:]]
        carried, stacked = jax.lax.scan(step, begun, elements, length, **scan_options(equation))
        return [*carried, *stacked]

    return trace_added_equation(looped, equation, [*constants, *first, *stacks])


def _smallest(
    atom: Any, makers: Mapping[int, Any], known: dict[int, tuple[float, Sequence[Any]]]
) -> tuple[float, Sequence[Any]]:
    """The bytes of the smallest values of which a value is cheap to compute, and these: itself, or others."""
    if isinstance(atom, Literal):
        return 0, ()
    if id(atom) not in known:
        own: tuple[float, Sequence[Any]] = size_of(atom) * element_bits(atom.aval.dtype) / 8, (atom,)
        made = makers.get(id(atom))
        if made is not None and primitive_name(made) in _CHEAP:
            parts = [_smallest(each, makers, known) for each in made.invars]
            size = sum(each for each, _ in parts)
            if size < own[0]:
                own = size, [x for _, each in parts for x in each]
        known[id(atom)] = own
    return known[id(atom)]
