"""Where primitives of JAX keep the jaxprs that they run, in all supported versions.

A jaxpr is kept open or closed (with its constants); since JAX 0.11 both are one class. Following the batch
and counting FLOPs both read this here: it is what differs between versions of JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from scalax._tree.specs import entries

# Primitives that run one jaxpr once, with their own operands and results in order: name -> parameter.
CALLS = {
    **dict.fromkeys(('jit', 'pjit', 'remat', 'remat2', 'checkpoint'), 'jaxpr'),
    **dict.fromkeys(('closed_call', 'core_call', 'eval_jaxpr'), 'call_jaxpr'),
    **dict.fromkeys(('custom_jvp_call', 'custom_vjp_call'), 'call_jaxpr'),
}
LOOPS = frozenset({'scan', 'while', 'cond'})
WITH_JAXPRS = LOOPS | CALLS.keys()
_JAXPRS = jax.extend.core.ClosedJaxpr, jax.extend.core.Jaxpr


def opened(jaxpr: Any) -> Any:
    """The jaxpr without its constants."""
    return getattr(jaxpr, 'jaxpr', jaxpr)


def parts_of(value: Any) -> Iterator[Any]:
    """What a parameter of an equation holds, also inside tuples, dicts and dataclasses."""
    if isinstance(value, dict):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, field.name, None) for field in dataclasses.fields(value))
    if isinstance(value, list | tuple):
        for part in value:
            yield from parts_of(part)
    else:
        yield value


def jaxprs_in(value: Any) -> Iterator[Any]:
    """The jaxprs that a parameter of an equation holds, without their constants."""
    return (opened(part) for part in parts_of(value) if isinstance(part, _JAXPRS))


def is_on_mesh(jaxpr: Any) -> bool:
    """Whether an equation, also in a jaxpr inside, says something of a mesh without its devices.

    Bare specs do. Constants that a transformation makes have the mesh in force too, without a word on it.
    """
    seen, found = set(), [opened(jaxpr)]
    for inner in found:  # which grows meanwhile
        for part in parts_of([equation.params for equation in inner.eqns]):
            if isinstance(part, _JAXPRS) and id(opened(part)) not in seen:
                seen.add(id(opened(part)))
                found.append(opened(part))
            elif isinstance(part, NamedSharding) and isinstance(part.mesh, AbstractMesh):
                if any(entries(part.spec)) or AxisType.Explicit in part.mesh.axis_types:
                    return True
            elif isinstance(part, AbstractMesh) and not part.empty:
                return True
    return False


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
