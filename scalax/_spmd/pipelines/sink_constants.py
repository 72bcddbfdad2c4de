"""Moves the computation of large constants of a scan into its body.

JAX hoists what does not change from layer to layer out of the loop, for example a mask as large as all
attention scores. A microbatch needs only a part of such a constant, and a stage should neither hold nor
receive more than the smaller values that it is computed from.
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


def sink_constants(jaxpr: Any, producers: Mapping[int, Any], equation: Any) -> Any:
    """Returns a `scan` whose body computes its constants from smaller values.

    Returns the same `scan` if its constants cannot be computed from smaller values.

    Args:
        jaxpr: the jaxpr of the `scan`.
        producers: the equations of this jaxpr, by the ids of their results.
        equation: the `scan`.
    """
    loop = loop_of(equation)
    consts, init, stacks = loop.split(equation.invars)
    sources: dict[int, Any] = {}
    smallest: dict[int, tuple[float, Sequence[Any]]] = {}
    for atom in consts:
        sources.update((id(source), source) for source in _smallest_sources(atom, producers, smallest)[1])
    if all(isinstance(atom, Literal) or id(atom) in sources for atom in consts):
        return equation
    consts_jaxpr = extract_subjaxpr(jaxpr, [*sources.values()], consts)

    def body(source_values: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        return eval_jaxpr(loop.body, [*eval_jaxpr(consts_jaxpr, source_values), *carry, *xs])

    return with_results(scan_like(equation, body, [*sources.values()], init, stacks), equation.outvars)


def scan_like(
    equation: Any,
    body: Callable[..., list[Any]],
    consts: Sequence[Any],
    init: Sequence[Any],
    stacks: Sequence[Any],
) -> Any:
    """Returns a `scan` with the length and the options of another one.

    Args:
        equation: the other one.
        body: a function of the constants, the carry and the xs, which returns the next carry and the ys.
        consts: the constants.
        init: the initial carry.
        stacks: the scanned-over operands.
    """
    length, num_consts, xs_start = loop_of(equation).length, len(consts), len(consts) + len(init)

    def run(*operands: Any) -> list[Any]:
        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = body(operands[:num_consts], carry, xs)
            # Without a barrier, JAX would remove a carry, or an element, that is returned unchanged.
            passed_through = [*[[x] for x in carry], *[xs] * (len(results) - len(carry))]
            for i, (x, inputs) in enumerate(zip(results, passed_through, strict=True)):
                results[i] = jax.lax.optimization_barrier(x) if any(x is y for y in inputs) else x
            return results[: len(init)], results[len(init) :]

        operand_init, operand_xs = [*operands[num_consts:xs_start]], [*operands[xs_start:]]
        carry, ys = jax.lax.scan(step, operand_init, operand_xs, length, **scan_options(equation))
        return [*carry, *ys]

    return trace_added_equation(run, equation, [*consts, *init, *stacks])


def _smallest_sources(
    atom: Any, producers: Mapping[int, Any], smallest: dict[int, tuple[float, Sequence[Any]]]
) -> tuple[float, Sequence[Any]]:
    """Returns the smallest values that a value can be computed from cheaply, and their bytes.

    They are the value itself, or other values.
    """
    if isinstance(atom, Literal):
        return 0, ()
    if id(atom) not in smallest:
        best: tuple[float, Sequence[Any]] = size_of(atom) * element_bits(atom.aval.dtype) / 8, (atom,)
        producer = producers.get(id(atom))
        if producer is not None and primitive_name(producer) in _CHEAP:
            operands = [_smallest_sources(operand, producers, smallest) for operand in producer.invars]
            size = sum(operand_size for operand_size, _ in operands)
            if size < best[0]:
                best = size, [source for _, sources in operands for source in sources]
        smallest[id(atom)] = best
    return smallest[id(atom)]
