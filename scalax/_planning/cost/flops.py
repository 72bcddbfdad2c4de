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

# Primitives that hold a jaxpr of scalars, such as the sum of a reduction.
_REDUCERS = ('reduce', 'scatter', 'select_and_scatter', 'select_and_gather')
# Primitives whose operations are not counted: other computations with matrices, and external code.
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
    """Floating-point operations of one call, on all devices together.

    Attributes:
        count: the operations of matrix products, convolutions and FFTs.
        exactness: how well that is known: AT_LEAST if the length of a loop depends on data, or if something
            runs whose operations cannot be counted; AT_MOST if branches differ (the largest counts), or if
            a loop may end before its counter does.
        by_phase: the operations of each part of a step that has any, which `phase_of` explains. Two counts
            are equal, whatever their parts.
    """

    count: int
    exactness: Exactness = Exactness.EXACT
    by_phase: Mapping[Phase, int] = dataclasses.field(default_factory=dict, compare=False)

    def __add__(self, other: Flops) -> Flops:
        # Zero is exact, even if the number of executions is not known.
        mine, theirs = (Exactness.EXACT if part._is_none else part.exactness for part in (self, other))
        parts = Counter(self.by_phase) + Counter(other.by_phase)
        return Flops(self.count + other.count, mine.combine(theirs), parts)

    def times(self, count: int, exactness: Exactness = Exactness.EXACT) -> Flops:
        """The operations of *count* executions."""
        if not count or self._is_none:
            return _NONE
        parts = {part: many * count for part, many in self.by_phase.items()}
        return Flops(self.count * count, self.exactness.combine(exactness), parts)

    def within(self, scope: Phase) -> Flops:
        """The same operations in a scope that belongs to a part of a step."""
        parts = Counter[Phase]()
        for part, many in self.by_phase.items():
            parts[max(scope, part, key=PHASES.index)] += many  # the innermost
        return dataclasses.replace(self, by_phase=parts)

    @property
    def _is_none(self) -> bool:
        return not self.count and self.exactness in (Exactness.EXACT, Exactness.AT_MOST)


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
    return _Counter().all_of(jaxpr.jaxpr)


def count_model_flops(jaxpr: ClosedJaxpr) -> int | None:
    """The operations that the model needs in one call: those of the forward and of the backward pass.

    https://arxiv.org/abs/2204.02311, appendix B, defines model FLOPs utilization by them. What is
    recomputed, and an optimizer, are not the model's; of a function that takes no gradient everything is.
    Attention counts in full, as it is written and as that paper counts it, also where a mask hides half of
    it. What the backward pass of a ``custom_vjp`` recomputes counts: it cannot be told apart.

    Args:
        jaxpr: what ``jax.jit(...).trace(...).jaxpr`` gives.

    Returns:
        None if there are none, or if not all of them can be counted.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> @jax.checkpoint
        ... def loss(w, x):
        ...     return jnp.square(jnp.tanh(x @ w) @ w).sum()
        >>> square = jnp.ones((4, 4))
        >>> step = jax.jit(jax.value_and_grad(loss)).trace(square, square).jaxpr
        >>> count_flops(step).count // 128, count_model_flops(step) // 128  # products
        (7, 5)
    """
    found = count_flops(jaxpr)
    if found.exactness not in (Exactness.EXACT, Exactness.AT_MOST):
        return None
    backward = found.by_phase.get('backward', 0)
    if not backward:
        return found.count or None
    # If nobody needs the loss itself, what is computed "again" may be computed for the first time: then the
    # operations of the forward pass are there, and are not used.
    return backward + _Counter(keep_all=True).all_of(jaxpr.jaxpr).by_phase.get('forward', 0)


def count_flops_of(equation: Any) -> int:
    """The floating-point operations of one equation, for all of its results."""
    return _Counter().of(equation).count


class _Counter:
    """Counts jaxprs; one that is used in several places is counted once.

    Args:
        keep_all: count unused results too.

    Attributes:
        jaxpr: counts a jaxpr for some of its results, and tells which arguments these need.
    """

    def __init__(self, keep_all: bool = False) -> None:
        self._keep_all = keep_all
        self.jaxpr: Callable[[Jaxpr, Live], tuple[Flops, Live]] = functools.cache(self._count)

    def _count(self, jaxpr: Jaxpr, live: Live) -> tuple[Flops, Live]:
        """The operations for the *live* results, and which arguments these need."""
        used = {id(var) for var, is_live in zip(jaxpr.outvars, live, strict=True) if is_live}
        total = _NONE
        for equation in reversed(jaxpr.eqns):
            wanted = tuple(id(var) in used for var in equation.outvars)
            if self._keep_all or any(wanted) or equation.effects:
                flops, needed = self._equation(equation, wanted, jaxpr)
                total += flops.within(phase_of(equations.name_stack(equation)))
                used |= {id(var) for var, need in zip(equation.invars, needed, strict=True) if need}
        return total, tuple(id(var) in used for var in jaxpr.invars)

    def _equation(self, equation: Any, live: Live, outside: Jaxpr | None) -> tuple[Flops, Live]:
        name, every = primitive_name(equation), (True,) * len(equation.invars)
        inner = list(equations.inner_jaxprs(equation))
        if name in _UNCOUNTED:
            return Flops(0, Exactness.AT_LEAST), every
        if name in kernels.ATTENTION:
            return _attention(equation, 'bwd' in name), every
        if not inner:
            count = _FLOPS_OF[name](equation) if name in _FLOPS_OF else 0
            return Flops(count, by_phase={'other': count} if count else {}), every
        if name == 'scan':
            return self._scan(equation, live)
        if name == 'while':
            return self._while(equation, outside), every
        if name == 'cond':
            return self._branches(equation, live)
        if name in RUN_ONCE:
            return self._call(equation, live)
        if name == KERNEL:
            grid, once = kernels.grid(equation), self.all_of(kernels.kernel_jaxpr(equation))
            if all(isinstance(size, int) for size in grid):
                return once.times(math.prod(grid)), every
            return once.times(1, Exactness.AT_LEAST), every
        flops = sum(map(self.all_of, inner), _NONE)
        if name.startswith(_REDUCERS):
            return flops, every
        # An unknown primitive runs its jaxprs an unknown number of times; a single one at least once.
        exactness = Exactness.AT_LEAST if len(inner) == 1 else Exactness.APPROXIMATE
        return flops.times(1, exactness), every

    def all_of(self, jaxpr: Jaxpr) -> Flops:
        """The operations for all results."""
        return self.jaxpr(jaxpr, (True,) * len(jaxpr.outvars))[0]

    def of(self, equation: Any) -> Flops:
        """The operations of an equation for all results."""
        return self._equation(equation, (True,) * len(equation.outvars), None)[0]

    def _call(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        inner = equations.run_once_jaxpr(equation)
        fits = len(inner.outvars) == len(live) and len(inner.invars) == len(equation.invars)
        flops, needed = self.jaxpr(inner, live if fits else (True,) * len(inner.outvars))
        if primitive_name(equation) == 'shard_map':
            # Inside, shapes are those of a block, of which there is one for each device along manual axes.
            flops = flops.times(equations.count_shard_map_devices(equation))
        return flops, needed if fits else (True,) * len(equation.invars)

    def _scan(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        loop = loop_of(equation)
        while True:  # state that a round needs has to be a result of the previous round
            flops, needed = self.jaxpr(open_jaxpr(loop.body), live)
            _, state, _ = loop.split(needed)
            grown = tuple(map(any, zip(state, live, strict=False))) + live[loop.num_carry :]
            if grown == live:
                return flops.times(loop.length or 0), needed
            live = grown

    def _while(self, equation: Any, outside: Jaxpr | None) -> Flops:
        loop, (rounds, known) = loop_of(equation), while_trip_count(equation, outside)
        # The condition runs once more than the body.
        body, test = map(self.all_of, map(open_jaxpr, (loop.body, loop.cond)))
        return body.times(rounds, known) + test.times(rounds + 1, known)

    def _branches(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        found = [self.jaxpr(open_jaxpr(branch), live) for branch in equations.branches(equation)]
        largest = max((flops for flops, _ in found), key=lambda flops: flops.count)
        same = len({flops for flops, _ in found}) == 1
        needed = (True, *map(any, zip(*(needs for _, needs in found), strict=True)))
        return largest.times(1, Exactness.EXACT if same else Exactness.AT_MOST), needed


def while_trip_count(equation: Any, outside: Any = None) -> tuple[int, Exactness]:
    """How often the body of a ``while`` equation runs, and how well that is known.

    (``jax.lax.fori_loop`` over Python integers is a scan, whose length is known.)

    Args:
        equation: the equation.
        outside: the jaxpr that it is in, where the loop's state may begin as a constant.

    Example:
        >>> import jax
        >>> loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1]), (1, x))
        >>> [while_trip_count(equation) for equation in jax.jit(loop).trace(0.0).jaxpr.eqns]
        [(4, <Exactness.EXACT: 'exact'>)]
    """
    loop, around = loop_of(equation), StaticIntegers(outside)
    asked, body = open_jaxpr(loop.cond), open_jaxpr(loop.body)
    given = [*map(around.of, equation.invars)]
    constants, start, _ = loop.split(given)
    in_test, in_body = StaticIntegers(asked), StaticIntegers(body)

    def test(state: State) -> IntegerValues | None:
        in_test.reset(asked.invars, [*given[: loop.num_cond_consts], *state.values()])
        return in_test.of(asked.outvars[0])

    def following(state: State) -> State:
        in_body.reset(body.invars, [*constants, *state.values()])
        return {i: in_body.of(body.outvars[i]) for i in state}

    return simulated_trip_count(dict(enumerate(start)), test, following)


def _attention(equation: Any, backward: bool) -> Flops:
    """All pairs, as of attention that is written in JAX, whatever a mask hides of them.

    On the way back each of the two products has two, and the first one is computed again.
    """
    pairs, of_keys, of_values = kernels.attention_sizes(equation)
    scores, mixed = multiply_add_flops(pairs * of_keys, False), multiply_add_flops(pairs * of_values, False)
    parts: dict[Phase, int] = {'other': scores + mixed}
    if backward:
        parts = {'other': 2 * (scores + mixed), 'recomputed': scores}
    return Flops(sum(parts.values()), by_phase=parts)


def _dot(equation: Any) -> int:
    # Without a sum it is an elementwise product.
    count = count_multiplications(equation) if dim_rule(equation).reduced else 0
    return multiply_add_flops(count, _are_complex(equation.invars[:2]))


def _convolution(equation: Any) -> int:
    """Counts products with elements of the input, not with padding or the holes of a dilated input."""
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
