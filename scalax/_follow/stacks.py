"""Runs a function of a stack of matrices, which treats each alone, on a stack of another size.

Its jaxpr has the size of the stack in it: in shapes, and in those of the loops inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scalax._jax import equations
from scalax._jax.equations import (
    CALLS,
    OWN_GRADIENTS,
    Literal,
    called,
    loop_of,
    opened,
    scan_options,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import bound, constants_of
from scalax._jaxprs.dims import ALONG, ELEMENTWISE, FORWARDS, dims_of

# Of a stack these compute the same as of each of its elements alone, however many there are.
_EACH = (ELEMENTWISE | FORWARDS) - ALONG | {
    *('dot_general', 'cholesky', 'eigh', 'qr', 'svd', 'triangular_solve'),
    *('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and', 'reduce_or'),
}

Stacked = tuple[Any, int | None]
"""A value, and which of its dimensions is the stack; None of what is one value for all matrices."""


def run_stacked(jaxpr: Any, operands: Sequence[Stacked]) -> list[Stacked]:
    """The results of a closed jaxpr of stacks, for stacks of another size.

    Raises:
        NotImplementedError: it does not treat each matrix alone, or that is not known.
    """
    inner = opened(jaxpr)
    known: dict[int, Stacked] = {id(var): (value, None) for var, value in constants_of(jaxpr)}
    known.update(zip(map(id, inner.invars), operands, strict=True))

    def read(atom: Any) -> Stacked:
        return (atom.val, None) if isinstance(atom, Literal) else known[id(atom)]

    for equation in inner.eqns:
        results = _results(equation, [*map(read, equation.invars)])
        known.update(zip(map(id, equation.outvars), results, strict=True))
    return [*map(read, inner.outvars)]


def _results(equation: Any, operands: Sequence[Stacked]) -> Sequence[Stacked]:
    name = primitive_name(equation)
    values, dims = [value for value, _ in operands], [dim for _, dim in operands]
    stacks = {(place, dim) for place, dim in enumerate(dims) if dim is not None}
    if name in OWN_GRADIENTS:
        raise NotImplementedError(f'{name} has a gradient of its own')
    if name in CALLS:
        return run_stacked(called(equation), operands)
    if name == 'scan' and stacks:
        return _scan(equation, values, dims)
    dim = dims_of(equation).of_alone(stacks) if stacks and name in _EACH else None
    if stacks and dim is None:
        raise NotImplementedError(f'{name} may mix matrices')
    if name in ('broadcast_in_dim', 'reshape') and dim is not None:
        shape, [(_, own)] = [*shape_of(equation.outvars[0])], stacks
        shape[dim] = values[0].shape[own]
        if name == 'reshape':
            return [(jax.lax.reshape(values[0], shape), dim)]
        return [(jax.lax.broadcast_in_dim(values[0], shape, equations.broadcast_dims(equation)), dim)]
    found = bound(equation, *values)
    return [(each, dim) for each in (found if equation.primitive.multiple_results else [found])]


def _scan(equation: Any, values: Sequence[Any], dims: Sequence[int | None]) -> Sequence[Stacked]:
    """A loop that carries stacks; what it runs over is the same for all matrices."""
    loop = loop_of(equation)
    (given, first, elements), (of_given, of_state, of_elements) = map(loop.parts, (values, dims))
    if any(dim is not None for dim in of_elements):
        raise NotImplementedError('a loop runs over matrices')

    def step(state: Sequence[Any], elements: Sequence[Any]) -> tuple[Any, None]:
        pairs = zip([*given, *state, *elements], [*of_given, *of_state, *of_elements], strict=True)
        results = run_stacked(loop.body, [*pairs])
        if [dim for _, dim in results] != [*of_state]:
            raise NotImplementedError('a loop moves the stack, or gives one of each round')
        return [value for value, _ in results], None

    state, _ = jax.lax.scan(step, [*first], [*elements], loop.length, **scan_options(equation))
    return [*zip(state, of_state, strict=True)]
