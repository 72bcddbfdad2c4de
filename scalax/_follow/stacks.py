"""Runs a function of stacked matrices, which treats each alone, on a stack of another size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scalax._jax.equations import CALLS, Literal, broadcast_dims, called, loop_of, opened, scan_options, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import bound
from scalax._jaxprs.dims import ELEMENTWISE, FORWARDS, dims_of

# Of operands with a dimension more, these compute the same for each of its elements, in any number.
_ALONG = frozenset({'cumlogsumexp', 'cummax', 'cummin', 'cumprod', 'cumsum', 'rev'})
_MATRICES = frozenset({'cholesky', 'eigh', 'qr', 'svd', 'triangular_solve'})
_REDUCTIONS = frozenset({'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and', 'reduce_or'})
_EACH = (ELEMENTWISE - _ALONG) | FORWARDS | _MATRICES | _REDUCTIONS | {'dot_general'}

Stacked = tuple[Any, int | None]
"""A value, and which of its dimensions is the stack; None if it is none, and the same for all matrices."""


def run_stacked(jaxpr: Any, operands: Sequence[Stacked]) -> list[Stacked]:
    """The results of a closed jaxpr of stacks, for stacks of another size.

    Raises:
        ValueError: it does not treat each matrix alone, or that is not known.
    """
    inner = opened(jaxpr)
    consts = [(value, None) for value in getattr(jaxpr, 'consts', ())]
    known = dict(zip(map(id, [*inner.constvars, *inner.invars]), [*consts, *operands], strict=True))

    def read(atom: Any) -> Stacked:
        return (atom.val, None) if isinstance(atom, Literal) else known[id(atom)]

    for equation in inner.eqns:
        results = _results(equation, [*map(read, equation.invars)])
        known.update(zip(map(id, equation.outvars), results, strict=True))
    return [*map(read, inner.outvars)]


def _results(equation: Any, operands: Sequence[Stacked]) -> Sequence[Stacked]:
    name = primitive_name(equation)
    values, dims = [value for value, _ in operands], [dim for _, dim in operands]
    if all(dim is None for dim in dims):
        found = bound(equation, *values)
        return [(each, None) for each in (found if equation.primitive.multiple_results else [found])]
    if name in CALLS:
        return run_stacked(called(equation), operands)
    if name == 'scan':
        return _scan(equation, values, dims)
    dim = _stack_dim(equation, dims)
    if name in ('broadcast_in_dim', 'reshape'):
        shape, [own] = [*shape_of(equation.outvars[0])], [each for each in dims if each is not None]
        shape[dim] = values[0].shape[own]
        if name == 'reshape':
            return [(jax.lax.reshape(values[0], shape), dim)]
        return [(jax.lax.broadcast_in_dim(values[0], shape, broadcast_dims(equation)), dim)]
    found = bound(equation, *values)
    return [(each, dim) for each in (found if equation.primitive.multiple_results else [found])]


def _scan(equation: Any, values: Sequence[Any], dims: Sequence[int | None]) -> Sequence[Stacked]:
    loop = loop_of(equation)
    (given, state, stacks), (given_dims, state_dims, stacks_dims) = map(loop.parts, (values, dims))
    if any(dim is not None for dim in stacks_dims):
        raise ValueError('a loop runs over matrices')
    if len(equation.outvars) > loop.carried:
        raise ValueError('a loop stacks matrices')

    def step(state: Sequence[Any], elements: Sequence[Any]) -> tuple[Any, None]:
        operands = [*given, *state, *elements]
        results = run_stacked(loop.body, [*zip(operands, [*given_dims, *state_dims, *stacks_dims], strict=True)])
        if [dim for _, dim in results] != [*state_dims]:
            raise ValueError('a round moves the stack')
        return [value for value, _ in results], None

    results, _ = jax.lax.scan(step, [*state], [*stacks], loop.length, **scan_options(equation))
    return [*zip(results, state_dims, strict=True)]


def _stack_dim(equation: Any, dims: Sequence[int | None]) -> int:
    """The dimension of the results that is the stack."""
    stacks = {(place, dim) for place, dim in enumerate(dims) if dim is not None}
    rules = dims_of(equation)
    found = {
        tuple(i for i, sources in enumerate(result) if not stacks.isdisjoint(sources))
        for result in rules.results
    }
    sources = [sources for result in rules.results for sources in result if not stacks.isdisjoint(sources)]
    summed = any(not stacks.isdisjoint(each) for each in rules.summed)
    if primitive_name(equation) not in _EACH or summed or not all(stacks.issuperset(each) for each in sources):
        raise ValueError(f'{equation.primitive.name} mixes matrices')
    [[dim]] = found
    return dim
