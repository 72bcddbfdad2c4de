"""FLOPs of a function, counted in its jaxpr with the trip counts of loops.

A jaxpr is the step before partitioning. It contains the forward and the backward pass and everything that
``jax.checkpoint`` recomputes, and the lengths of scans are known. (The compiler's ``cost_analysis()`` counts
the body of a loop once.) Unused results are not counted, because compilers remove them.

A multiply-add is two operations: a matmul of M x K and K x N matrices takes 2 M N K. Matmuls, convolutions
and FFTs are counted. Elementwise operations and reductions are not: they run on other units than the matrix
units, which determine the peak of the hardware.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from scalax._jax import equations, kernels
from scalax._jax.equations import RUN_ONCE, ClosedJaxpr, Jaxpr, loop_of, open_jaxpr, shape_of
from scalax._jax.primitives import KERNEL, primitive_name
from scalax._jaxpr.dim_rules import count_multiplications, dim_rule
from scalax._jaxpr.static_integers import IntegerValues, StaticIntegers
from scalax._planning.cost.flop_formulas import fft_flops, multiply_add_flops, window_overlaps
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.phases import PHASES, Phase, phase_of
from scalax._planning.program.trip_count import State, simulated_trip_count

Live = tuple[bool, ...]

# Primitives with a jaxpr for scalars, such as the sum of a reduction.
_REDUCERS = ('reduce', 'scatter', 'select_and_scatter', 'select_and_gather')
# Primitives whose FLOPs are not counted: matrix decompositions, and external code.
_UNCOUNTED = frozenset(
    {
        *('cholesky', 'cholesky_update', 'eig', 'eigh', 'hessenberg', 'householder_product', 'lu', 'qr'),
        *('geqrf', 'geqp3', 'ormqr', 'schur', 'svd', 'symmetric_product', 'triangular_solve', 'tridiagonal'),
        *('ffi_call', 'tpu_custom_call', 'triton_kernel_call'),
        *('scaled_dot', 'scaled_matmul', 'scaled_matmul_wrapper'),
    }
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """The FLOPs of one call, on all devices together.

    Attributes:
        count: the FLOPs of matmuls, convolutions and FFTs.
        exactness: the exactness of the count: AT_LEAST if a trip count depends on data, or an operation's
            FLOPs cannot be counted; AT_MOST if branches differ (the largest counts), or if a loop may end
            early.
        by_phase: the FLOPs of each phase of a step that has any. Comparisons ignore it.
    """

    count: int
    exactness: Exactness = Exactness.EXACT
    by_phase: Mapping[Phase, int] = dataclasses.field(default_factory=dict, compare=False)

    def __add__(self, other: Flops) -> Flops:
        # Zero is exact, even if the number of executions is not.
        left, right = (Exactness.EXACT if flops._is_zero else flops.exactness for flops in (self, other))
        by_phase = Counter(self.by_phase) + Counter(other.by_phase)
        return Flops(self.count + other.count, left.combine(right), by_phase)

    def times(self, count: int, exactness: Exactness = Exactness.EXACT) -> Flops:
        """Returns the FLOPs of *count* executions."""
        if not count or self._is_zero:
            return _ZERO
        by_phase = {phase: flops * count for phase, flops in self.by_phase.items()}
        return Flops(self.count * count, self.exactness.combine(exactness), by_phase)

    def within(self, scope: Phase) -> Flops:
        """Returns the same FLOPs as part of a scope of some phase."""
        by_phase = Counter[Phase]()
        for phase, flops in self.by_phase.items():
            by_phase[max(scope, phase, key=PHASES.index)] += flops  # the innermost phase
        return dataclasses.replace(self, by_phase=by_phase)

    @property
    def _is_zero(self) -> bool:
        return not self.count and self.exactness in (Exactness.EXACT, Exactness.AT_MOST)


_ZERO = Flops(0)


def count_flops(jaxpr: ClosedJaxpr) -> Flops:
    """Counts the FLOPs of one call of a function.

    Args:
        jaxpr: its jaxpr, from ``jax.jit(...).trace(...).jaxpr``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def power(x):
        ...     return jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]
        >>> count_flops(jax.jit(power).trace(jnp.ones((4, 4))).jaxpr).count
        640
    """
    return _Counter().all_of(jaxpr.jaxpr)


def count_model_flops(jaxpr: ClosedJaxpr) -> int | None:
    """Counts the FLOPs that the model needs in one call, in the forward and the backward pass.

    https://arxiv.org/abs/2204.02311, appendix B, defines model FLOPs utilization by this count.
    Recomputation and the optimizer do not count; for a function without a gradient everything counts.
    Attention counts in full, as in that paper, even if a mask hides half of it. Recomputation in the backward
    pass of a ``custom_vjp`` also counts, because it cannot be distinguished.

    Args:
        jaxpr: its jaxpr, from ``jax.jit(...).trace(...).jaxpr``.

    Returns:
        The count; None if it is zero, or if not all operations can be counted.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> @jax.checkpoint
        ... def loss(w, x):
        ...     return jnp.square(jnp.tanh(x @ w) @ w).sum()
        >>> square = jnp.ones((4, 4))
        >>> step = jax.jit(jax.value_and_grad(loss)).trace(square, square).jaxpr
        >>> count_flops(step).count // 128, count_model_flops(step) // 128  # matmuls
        (7, 5)
    """
    flops = count_flops(jaxpr)
    if flops.exactness not in (Exactness.EXACT, Exactness.AT_MOST):
        return None
    backward = flops.by_phase.get('backward', 0)
    if not backward:
        return flops.count or None
    # If the loss is not returned, JAX leaves out unused operations of the forward pass, and "recomputes" them
    # for the first time. Keeping unused results counts them once.
    return backward + _Counter(keep_all=True).all_of(jaxpr.jaxpr).by_phase.get('forward', 0)


def count_flops_of(equation: Any) -> int:
    """Counts the FLOPs of one equation, for all of its results."""
    return _Counter().of(equation).count


class _Counter:
    """Counts the FLOPs of jaxprs. The count of a jaxpr is cached.

    Args:
        keep_all: also counts unused results.

    Attributes:
        jaxpr: returns the FLOPs of a jaxpr for some of its results, and the arguments that these need.
    """

    def __init__(self, keep_all: bool = False) -> None:
        self._keep_all = keep_all
        self.jaxpr: Callable[[Jaxpr, Live], tuple[Flops, Live]] = functools.cache(self._count)

    def _count(self, jaxpr: Jaxpr, live: Live) -> tuple[Flops, Live]:
        """Returns the FLOPs for the *live* results, and which arguments these need."""
        used = {id(var) for var, is_live in zip(jaxpr.outvars, live, strict=True) if is_live}
        total = _ZERO
        for equation in reversed(jaxpr.eqns):
            live_outputs = tuple(id(var) in used for var in equation.outvars)
            if self._keep_all or any(live_outputs) or equation.effects:
                flops, needed = self._equation(equation, live_outputs, jaxpr)
                total += flops.within(phase_of(equations.name_stack(equation)))
                used |= {id(var) for var, is_needed in zip(equation.invars, needed, strict=True) if is_needed}
        return total, tuple(id(var) in used for var in jaxpr.invars)

    def _equation(self, equation: Any, live: Live, outer: Jaxpr | None) -> tuple[Flops, Live]:
        name, all_inputs = primitive_name(equation), (True,) * len(equation.invars)
        inner = list(equations.inner_jaxprs(equation))
        if name in _UNCOUNTED:
            return Flops(0, Exactness.AT_LEAST), all_inputs
        if name in kernels.ATTENTION:
            return _attention(equation, 'bwd' in name), all_inputs
        if not inner:
            count = _FLOPS_OF[name](equation) if name in _FLOPS_OF else 0
            return Flops(count, by_phase={'other': count} if count else {}), all_inputs
        if name == 'scan':
            return self._scan(equation, live)
        if name == 'while':
            return self._while(equation, outer), all_inputs
        if name == 'cond':
            return self._branches(equation, live)
        if name in RUN_ONCE:
            return self._call(equation, live)
        if name == KERNEL:
            grid, once = kernels.grid(equation), self.all_of(kernels.kernel_jaxpr(equation))
            if all(isinstance(size, int) for size in grid):
                return once.times(math.prod(grid)), all_inputs
            return once.times(1, Exactness.AT_LEAST), all_inputs
        flops = sum(map(self.all_of, inner), _ZERO)
        if name.startswith(_REDUCERS):
            return flops, all_inputs
        # An unknown primitive runs its jaxprs an unknown number of times; a single one at least once.
        exactness = Exactness.AT_LEAST if len(inner) == 1 else Exactness.APPROXIMATE
        return flops.times(1, exactness), all_inputs

    def all_of(self, jaxpr: Jaxpr) -> Flops:
        """Returns the FLOPs of a jaxpr for all results."""
        return self.jaxpr(jaxpr, (True,) * len(jaxpr.outvars))[0]

    def of(self, equation: Any) -> Flops:
        """Returns the FLOPs of an equation for all results."""
        return self._equation(equation, (True,) * len(equation.outvars), None)[0]

    def _call(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        inner = equations.run_once_jaxpr(equation)
        fits = len(inner.outvars) == len(live) and len(inner.invars) == len(equation.invars)
        flops, needed = self.jaxpr(inner, live if fits else (True,) * len(inner.outvars))
        if primitive_name(equation) == 'shard_map':
            # Inside, shapes are those of a local shard, of which there is one per device along manual axes.
            flops = flops.times(equations.count_shard_map_devices(equation))
        return flops, needed if fits else (True,) * len(equation.invars)

    def _scan(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        loop = loop_of(equation)
        while True:  # state that an iteration needs has to be a result of the previous iteration
            flops, needed = self.jaxpr(open_jaxpr(loop.body), live)
            _, state, _ = loop.split(needed)
            live_outputs = tuple(map(any, zip(state, live, strict=False))) + live[loop.num_carry :]
            if live_outputs == live:
                return flops.times(loop.length or 0), needed
            live = live_outputs

    def _while(self, equation: Any, outer: Jaxpr | None) -> Flops:
        loop, (trip_count, exactness) = loop_of(equation), while_trip_count(equation, outer)
        # The condition runs once more than the body.
        body, test = map(self.all_of, map(open_jaxpr, (loop.body, loop.cond)))
        return body.times(trip_count, exactness) + test.times(trip_count + 1, exactness)

    def _branches(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        branches = [self.jaxpr(open_jaxpr(branch), live) for branch in equations.branches(equation)]
        largest = max((flops for flops, _ in branches), key=lambda flops: flops.count)
        same = len({flops for flops, _ in branches}) == 1
        needed = (True, *map(any, zip(*(inputs for _, inputs in branches), strict=True)))
        return largest.times(1, Exactness.EXACT if same else Exactness.AT_MOST), needed


def while_trip_count(equation: Any, outer: Any = None) -> tuple[int, Exactness]:
    """Returns the trip count of a ``while`` equation, and its exactness.

    ``jax.lax.fori_loop`` over Python integers becomes a scan, whose length is known.

    Args:
        equation: the equation.
        outer: the jaxpr that contains it, where the initial state may be constant.

    Example:
        >>> import jax
        >>> loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1]), (1, x))
        >>> [while_trip_count(equation) for equation in jax.jit(loop).trace(0.0).jaxpr.eqns]
        [(4, <Exactness.EXACT: 'exact'>)]
    """
    loop, outer_integers = loop_of(equation), StaticIntegers(outer)
    cond, body = open_jaxpr(loop.cond), open_jaxpr(loop.body)
    operands = [*map(outer_integers.of, equation.invars)]
    constants, start, _ = loop.split(operands)
    cond_integers, body_integers = StaticIntegers(cond), StaticIntegers(body)

    def test(state: State) -> IntegerValues | None:
        cond_integers.reset(cond.invars, [*operands[: loop.num_cond_consts], *state.values()])
        return cond_integers.of(cond.outvars[0])

    def next_state(state: State) -> State:
        body_integers.reset(body.invars, [*constants, *state.values()])
        return {i: body_integers.of(body.outvars[i]) for i in state}

    return simulated_trip_count(dict(enumerate(start)), test, next_state)


def _attention(equation: Any, backward: bool) -> Flops:
    """Counts all pairs of positions of an attention kernel, whatever a mask hides, as for attention in JAX.

    In the backward pass, each of the two matmuls has two, and the first one is recomputed.
    """
    pairs, key_size, value_size = kernels.attention_sizes(equation)
    scores = multiply_add_flops(pairs * key_size, False)
    outputs = multiply_add_flops(pairs * value_size, False)
    by_phase: dict[Phase, int] = {'other': scores + outputs}
    if backward:
        by_phase = {'other': 2 * (scores + outputs), 'recomputed': scores}
    return Flops(sum(by_phase.values()), by_phase=by_phase)


def _dot(equation: Any) -> int:
    # Without a contracted dimension it is an elementwise product.
    count = count_multiplications(equation) if dim_rule(equation).reduced else 0
    return multiply_add_flops(count, _are_complex(equation.invars[:2]))


def _convolution(equation: Any) -> int:
    """Counts multiplications with elements of the input, not with padding or the holes of a dilated input."""
    numbers = equations.conv_dims(equation)
    left, right, result = map(shape_of, (*equation.invars, *equation.outvars))
    count = result[numbers.out_spec[0]] * result[numbers.out_spec[1]] * right[numbers.rhs_spec[1]]
    windows = (numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:])
    for i, j, k, (stride, (low, _), *dilated) in zip(*windows, equations.conv_windows(equation), strict=True):
        count *= window_overlaps(left[i], right[j], result[k], stride, low, *dilated)
    return multiply_add_flops(count, _are_complex(equation.invars))


def _fft(equation: Any) -> int:
    atoms = (*equation.invars, *equation.outvars)
    return fft_flops(shape_of(atoms[0]), equations.fft_lengths(equation), _are_complex(atoms))


def _are_complex(variables: Sequence[Any]) -> bool:
    return all(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) for var in variables)


_FLOPS_OF: dict[str, Callable[[Any], int]] = {
    'dot_general': _dot,
    'ragged_dot_general': _dot,
    'conv_general_dilated': _convolution,
    'fft': _fft,
}
