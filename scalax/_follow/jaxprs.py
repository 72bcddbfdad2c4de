"""Where primitives of JAX keep the jaxprs that they run, in all supported versions.

A jaxpr is kept open or closed (with its constants); since JAX 0.11 both are one class. Following the batch
and counting FLOPs both read this here: it is what differs between versions of JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core

# Primitives that run one jaxpr once, with their own operands and results in order: name -> parameter.
CALLS = {
    **dict.fromkeys(('jit', 'pjit', 'remat', 'remat2', 'checkpoint'), 'jaxpr'),
    **dict.fromkeys(('closed_call', 'core_call', 'eval_jaxpr'), 'call_jaxpr'),
    **dict.fromkeys(('custom_jvp_call', 'custom_vjp_call'), 'call_jaxpr'),
}
LOOPS = frozenset({'scan', 'while', 'cond'})
WITH_JAXPRS = LOOPS | CALLS.keys()


def opened(jaxpr: Any) -> Any:
    """The jaxpr without its constants."""
    return getattr(jaxpr, 'jaxpr', jaxpr)


def replaced(jaxpr: Any, **changes: Any) -> Any:
    """The jaxpr with other equations or results, as open or as closed as it was."""
    inner = opened(jaxpr)
    new = inner.replace(**changes)
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def with_inputs(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A closed jaxpr whose constants of an outer trace are its last inputs; and these constants."""
    inner = opened(jaxpr)
    pairs = [*zip(inner.constvars, jaxpr.consts, strict=True)]
    captured = [pair for pair in pairs if isinstance(pair[1], jax.core.Tracer)]
    if not captured:
        return jaxpr, []
    kept = [pair for pair in pairs if not isinstance(pair[1], jax.core.Tracer)]
    names = inner.debug_info.arg_names  # None where JAX does not know them
    new = inner.replace(
        constvars=[var for var, _ in kept],
        invars=[*inner.invars, *[var for var, _ in captured]],
        debug_info=inner.debug_info._replace(arg_names=names and (*names, *[''] * len(captured))),
    )
    closed = jax.extend.core.ClosedJaxpr(new, [value for _, value in kept])
    return closed, [value for _, value in captured]


def scan_parts(equation: Any) -> tuple[int, int]:
    """How many constants a scan has, and how many values it carries; its other operands are stacked.

    Carried values have the same rank inside and outside; stacked ones have one dimension more outside.
    """
    body = opened(equation.params['jaxpr'])
    carried = _leading(_same_rank, equation.outvars, body.outvars)
    stacked = _leading(lambda *pair: not _same_rank(*pair), equation.invars[::-1], body.invars[::-1])
    return len(body.invars) - carried - stacked, carried


def _same_rank(a: Any, b: Any) -> bool:
    return len(shape_of(a)) == len(shape_of(b))


def _leading(fits: Callable[[Any, Any], bool], a: Sequence[Any], b: Sequence[Any]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: fits(*pair), zip(a, b, strict=True)))


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal; that of what has none, such as a token, is empty."""
    return tuple(getattr(atom.aval, 'shape', ()))


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those inside it."""
    for equation in opened(jaxpr).eqns:
        yield equation
        for inside in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inside)
