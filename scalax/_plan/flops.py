"""Floating-point operations of a function, counted in its jaxpr with loops multiplied out.

A jaxpr is the whole step before partitioning. It contains the forward and the backward pass and everything
that ``jax.checkpoint`` recomputes, and the lengths of scans are known. (The compiler's ``cost_analysis()``
counts the body of a loop once.) Unused results are not counted, because compilers remove them.

A multiplication and an addition are two operations: a product of M x K and K x N matrices takes 2 M N K.
Matrix products, convolutions and FFTs are counted. Elementwise operations and reductions are not: they run
on other units, and the peak of hardware is that of its matrix units.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from scalax._plan.formulas import (
    Counted,
    at_least_one_round,
    fft_flops,
    loop_rounds,
    product_flops,
    window_overlaps,
)

Live = tuple[bool, ...]

# Primitives that run their jaxpr once, with their own arguments and results in order: name -> parameter.
_CALLS = {
    **dict.fromkeys(('jit', 'pjit', 'core_call', 'closed_call', 'remat', 'remat2', 'checkpoint'), ''),
    **dict.fromkeys(('custom_jvp_call', 'custom_vjp_call', 'custom_vjp_call_jaxpr'), ''),
    **dict.fromkeys(('composite', 'custom_partitioning', 'xla_metadata_call', 'shard_map', 'run_scoped'), ''),
    'custom_linear_solve': 'solve',
    'linear_call': 'callee',
    'linear_solve': 'solve',
}
# Primitives that hold a jaxpr of scalars, such as the sum of a reduction.
_REDUCERS = ('reduce', 'scatter', 'select_and_scatter', 'select_and_gather')
# Primitives whose operations are not counted: other computations with matrices, and external code.
_UNCOUNTED = frozenset(
    {
        *('cholesky', 'cholesky_update', 'eig', 'eigh', 'hessenberg', 'householder_product', 'lu', 'qr'),
        *('geqrf', 'geqp3', 'ormqr', 'schur', 'svd', 'symmetric_product', 'triangular_solve', 'tridiagonal'),
        *('ffi_call', 'tpu_custom_call', 'triton_kernel_call', 'scaled_matmul', 'scaled_dot'),
        *('dot_product_attention_fwd', 'dot_product_attention_fwd_wrapper'),
        *('dot_product_attention_bwd', 'dot_product_attention_bwd_wrapper'),
    }
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of one call, on all devices together.

    Attributes:
        count: the operations of matrix products, convolutions and FFTs.
        counted: how well that is known: AT_LEAST if the length of a loop depends on data, or if something
            runs whose operations cannot be counted; AT_MOST if branches differ (the largest counts).
    """

    count: int
    counted: Counted = Counted.EXACTLY

    def __add__(self, other: Flops) -> Flops:
        # Zero is exact, even if the number of executions is not known.
        mine, theirs = (Counted.EXACTLY if part._is_none else part.counted for part in (self, other))
        return Flops(self.count + other.count, mine.along(theirs))

    def times(self, count: int, counted: Counted = Counted.EXACTLY) -> Flops:
        """The operations of *count* executions."""
        if self._is_none:
            return self
        return Flops(self.count * count, self.counted.along(counted) if count else Counted.EXACTLY)

    @property
    def _is_none(self) -> bool:
        return not self.count and self.counted in (Counted.EXACTLY, Counted.AT_MOST)


_NONE = Flops(0)


def count_flops(jaxpr: ClosedJaxpr) -> Flops:
    """The floating-point operations of one call of a function.

    Args:
        jaxpr: what ``jax.jit(...).trace(...).jaxpr`` gives.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def power(x):
        ...     return jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]
        >>> count_flops(jax.jit(power).trace(jnp.ones((4, 4))).jaxpr).count
        640
    """
    return _Counter().jaxpr(jaxpr.jaxpr, (True,) * len(jaxpr.jaxpr.outvars))[0]


class _Counter:
    """Counts jaxprs; one that is used in several places is counted once."""

    def __init__(self) -> None:
        # The jaxprs are kept as well, so that no other object gets their ids.
        self._known: dict[tuple[int, Live], tuple[Jaxpr, Flops, Live]] = {}

    def jaxpr(self, jaxpr: Jaxpr, live: Live) -> tuple[Flops, Live]:
        """The operations for the *live* results, and which arguments these need."""
        known = self._known.get((id(jaxpr), live))
        if known is None:
            known = jaxpr, *self._count(jaxpr, live)
            self._known[id(jaxpr), live] = known
        return known[1], known[2]

    def _count(self, jaxpr: Jaxpr, live: Live) -> tuple[Flops, Live]:
        used = {id(var) for var, is_live in zip(jaxpr.outvars, live, strict=True) if is_live}
        total = _NONE
        for equation in reversed(jaxpr.eqns):
            wanted = tuple(id(var) in used for var in equation.outvars)
            if any(wanted) or equation.effects:
                flops, needed = self._equation(equation, wanted)
                total += flops
                used |= {id(var) for var, need in zip(equation.invars, needed, strict=True) if need}
        return total, tuple(id(var) in used for var in jaxpr.invars)

    def _equation(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        name, every = equation.primitive.name, (True,) * len(equation.invars)
        inner = list(_jaxprs_in(equation.params))
        if name in _UNCOUNTED:
            return Flops(0, Counted.AT_LEAST), every
        if not inner:
            return Flops(flops_of_primitive(equation)), every
        if name == 'scan':
            return self._scan(equation, equation.params['jaxpr'].jaxpr, live)
        if name == 'while':
            return self._while(equation), every
        if name == 'cond':
            return self._branches(equation, live)
        if name in _CALLS:
            return self._call(equation, _CALLS[name], live)
        if name == 'pallas_call':
            grid = equation.params['grid_mapping'].grid
            known = all(isinstance(size, int) for size in grid)
            rounds = at_least_one_round(math.prod(grid) if known else None)
            return self._all_of(equation.params['jaxpr']).times(*rounds), every
        flops = sum(map(self._all_of, inner), _NONE)
        if name.startswith(_REDUCERS):
            return flops, every
        # An unknown primitive runs its jaxprs an unknown number of times; a single one at least once.
        counted = Counted.AT_LEAST if len(inner) == 1 else Counted.UNKNOWN
        return flops.times(1, counted), every

    def _all_of(self, jaxpr: Jaxpr) -> Flops:
        return self.jaxpr(jaxpr, (True,) * len(jaxpr.outvars))[0]

    def _call(self, equation: Any, parameter: str, live: Live) -> tuple[Flops, Live]:
        params: Any = equation.params
        if parameter:
            solvers = params.get('jaxprs')
            params = [getattr(solvers, parameter)] if solvers is not None else params[parameter]
        inner = next(_jaxprs_in(params))
        fits = len(inner.outvars) == len(live) and len(inner.invars) == len(equation.invars)
        flops, needed = self.jaxpr(inner, live if fits else (True,) * len(inner.outvars))
        if equation.primitive.name == 'shard_map':
            # Inside, shapes are those of a block, of which there is one for each device along manual axes.
            manual = equation.params.get('newly_manual_axes') or equation.params.get('manual_axes')
            sizes = equation.params['mesh'].shape
            flops = flops.times(math.prod(sizes[axis] for axis in manual or sizes))
        return flops, needed if fits else (True,) * len(equation.invars)

    def _scan(self, equation: Any, body: Jaxpr, live: Live) -> tuple[Flops, Live]:
        carried = _leading(equation.outvars, body.outvars)
        stacked = _leading(equation.invars[::-1], body.invars[::-1], alike=False)
        constants = len(body.invars) - carried - stacked
        while True:  # state that a round needs has to be a result of the previous round
            flops, needed = self.jaxpr(body, live)
            state = needed[constants : constants + carried]
            grown = tuple(map(any, zip(state, live, strict=False))) + live[carried:]
            if grown == live:
                return flops.times(equation.params['length']), needed
            live = grown

    def _while(self, equation: Any) -> Flops:
        params = equation.params
        rounds, known = at_least_one_round(rounds_of_while(equation))
        # The condition runs once more than the body.
        return self._all_of(params['body_jaxpr'].jaxpr).times(rounds, known) + self._all_of(
            params['cond_jaxpr'].jaxpr
        ).times(rounds + 1, known)

    def _branches(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        branches = [self.jaxpr(branch.jaxpr, live) for branch in equation.params['branches']]
        largest = max((flops for flops, _ in branches), key=lambda flops: flops.count)
        same = len({flops for flops, _ in branches}) == 1
        needed = (True, *map(any, zip(*(needs for _, needs in branches), strict=True)))
        return largest.times(1, Counted.EXACTLY if same else Counted.AT_MOST), needed


def _leading(outside: Sequence[Any], inside: Sequence[Any], alike: bool = True) -> int:
    """The number of leading variables with the same rank outside and inside a scan (or with another rank).

    Carried state keeps its rank; stacked arrays have one dimension more outside.
    """
    pairs = zip(outside, inside, strict=True)
    same = (len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)
    return sum(1 for _ in itertools.takewhile(lambda fits: fits is alike, same))


def _jaxprs_in(value: Any) -> Iterator[Jaxpr]:
    """The jaxprs anywhere in the parameters of an equation, also inside tuples, dicts and dataclasses."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _jaxprs_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _jaxprs_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _jaxprs_in(getattr(value, field.name, None))


def rounds_of_while(equation: Any) -> int | None:
    """The number of rounds of a ``while`` equation; None if that depends on data.

    Recognised is ``for (i = start; i < stop; i += step)`` of constants. (``jax.lax.fori_loop`` over Python
    integers is a scan, whose length is known.)

    Example:
        >>> import jax
        >>> loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1]), (1, x))
        >>> [rounds_of_while(equation) for equation in jax.jit(loop).trace(0.0).jaxpr.eqns]
        [4]
    """
    params = equation.params
    asked, body = params['cond_jaxpr'].jaxpr, params['body_jaxpr'].jaxpr
    first, constants = params['cond_nconsts'], params['body_nconsts']
    if len(asked.eqns) != 1 or asked.eqns[0].primitive.name != 'lt':
        return None
    test = asked.eqns[0]
    if test.outvars[0] is not asked.outvars[0]:
        return None
    index, bound = (_state_index(var, asked.invars, first) for var in test.invars)
    if index is None or index < 0:
        return None
    state = equation.invars[first + constants :]
    start = _constant(state[index])
    if bound is None:
        stop = _constant(test.invars[1])
    elif bound >= 0 and body.outvars[bound] is body.invars[constants + bound]:
        stop = _constant(state[bound])
    else:
        return None
    return loop_rounds(start, stop, _increment(body, body.invars[constants + index], body.outvars[index]))


def _state_index(var: Any, arguments: list[Any], constants: int) -> int | None:
    """The element of a loop's state that a variable is; negative for a constant, None for neither."""
    return next((i - constants for i, other in enumerate(arguments) if other is var), None)


def _increment(body: Any, before: Any, after: Any) -> int | None:
    """The constant that a round adds to an element of the state; None if it does not."""
    for equation in body.eqns:
        if after is equation.outvars[0] and equation.primitive.name == 'add':
            others = [var for var in equation.invars if var is not before]
            return _constant(others[0]) if len(others) == 1 else None
    return None


def _constant(var: Any) -> int | None:
    """The value of a literal integer; None for anything else."""
    value = getattr(var, 'val', None)
    if value is None or np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.integer):
        return None
    return int(value)


def flops_of_primitive(equation: Any) -> int:
    """The floating-point operations of one equation of a jaxpr, without those of jaxprs inside it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.jit(jnp.matmul).trace(jnp.ones((3, 5)), jnp.ones((5, 7))).jaxpr
        >>> [flops_of_primitive(equation) for equation in jaxpr.eqns]
        [210]
    """
    count = _FLOPS_OF.get(equation.primitive.name)
    return 0 if count is None else count(equation)


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params['dimension_numbers']
    if not contracted:
        return 0  # an elementwise product
    left, (result,) = equation.invars[0].aval, _shapes(equation.outvars)
    return _product(math.prod(result) * math.prod(left.shape[i] for i in contracted), equation)


def _ragged_dot(equation: Any) -> int:
    """Each row is multiplied by the matrix of one group."""
    numbers = equation.params['ragged_dot_dimension_numbers']
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right = _shapes(equation.invars[:2])
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = math.prod(size for i, size in enumerate(right) if i not in shared)
    return _product(math.prod(left) * free, equation)


def _convolution(equation: Any) -> int:
    """Counts products with elements of the input, not with padding or the holes of a dilated input."""
    params = equation.params
    numbers = params['dimension_numbers']
    left, right = _shapes(equation.invars[:2])
    (result,) = _shapes(equation.outvars)
    taken = math.prod(
        window_overlaps(left[i], right[j], result[k], stride, padding[0], dilated_input, dilated_kernel)
        for i, j, k, stride, padding, dilated_input, dilated_kernel in zip(
            *(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]),
            *(params['window_strides'], params['padding'], params['lhs_dilation'], params['rhs_dilation']),
            strict=True,
        )
    )
    outputs = result[numbers.out_spec[0]] * result[numbers.out_spec[1]]
    return _product(outputs * right[numbers.rhs_spec[1]] * taken, equation)


def _fft(equation: Any) -> int:
    variables = equation.invars[0], equation.outvars[0]
    complex_ = all(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) for var in variables)
    return fft_flops(variables[0].aval.shape, equation.params['fft_lengths'], complex_)


def _product(count: int, equation: Any) -> int:
    return product_flops(
        count, all(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) for var in equation.invars[:2])
    )


def _shapes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(variable.aval.shape) for variable in variables]


_FLOPS_OF: dict[str, Callable[[Any], int]] = {
    'dot_general': _dot,
    'ragged_dot': _ragged_dot,
    'ragged_dot_general': _ragged_dot,
    'conv_general_dilated': _convolution,
    'fft': _fft,
}
