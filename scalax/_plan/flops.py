"""How many floating-point operations does a function take? Counted in its jaxpr, loops multiplied out.

A jaxpr is the whole step, before it is divided among devices: forward, backward, and what
``jax.checkpoint`` computes again are all written out in it, and the lengths of scans are known. (What the
compiler reports, ``cost_analysis()``, counts the body of a loop once.) Whatever nobody uses is left out,
as compilers leave it out. Which primitives count, `_operations` says.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from scalax._plan.hlo_loops import Counted
from scalax._plan.jaxpr_loops import rounds_of
from scalax._plan.primitive_flops import UNCOUNTED, flops_of

Live = tuple[bool, ...]

# What runs its jaxpr once, with its own arguments and results in order: name -> parameter.
_CALLS = {
    **dict.fromkeys(('jit', 'pjit', 'core_call', 'closed_call', 'remat', 'remat2', 'checkpoint'), ''),
    **dict.fromkeys(('custom_jvp_call', 'custom_vjp_call', 'custom_vjp_call_jaxpr'), ''),
    **dict.fromkeys(('composite', 'custom_partitioning', 'xla_metadata_call', 'shard_map', 'run_scoped'), ''),
    'custom_linear_solve': 'solve',
    'linear_call': 'callee',
    'linear_solve': 'solve',
}
# What runs a jaxpr of scalars inside a primitive of its own, such as the sum of a reduction.
_REDUCERS = ('reduce', 'scatter', 'select_and_scatter', 'select_and_gather')


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of one call, on all devices together.

    Attributes:
        count: how many: those of matrix products, convolutions and FFTs.
        counted: how well that is known: AT_LEAST where a loop's length depends on data, or where something
            is run whose operations cannot be counted; AT_MOST where branches differ (the largest counts).
    """

    count: int
    counted: Counted = Counted.EXACTLY

    def __add__(self, other: Flops) -> Flops:
        # Nothing is known exactly, however often it may run.
        mine, theirs = (Counted.EXACTLY if part._is_none else part.counted for part in (self, other))
        return Flops(self.count + other.count, mine.along(theirs))

    def times(self, count: int, counted: Counted = Counted.EXACTLY) -> Flops:
        """So often."""
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
    """Counts jaxprs; one that is run in several places is looked at once."""

    def __init__(self) -> None:
        # The jaxprs are kept alongside, so that no other object takes over their ids meanwhile.
        self._known: dict[tuple[int, Live], tuple[Jaxpr, Flops, Live]] = {}

    def jaxpr(self, jaxpr: Jaxpr, live: Live) -> tuple[Flops, Live]:
        """What it takes to compute those results that are *live*, and which arguments that needs."""
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
        inner = list(jaxprs_in(equation.params))
        if name in UNCOUNTED:
            return Flops(0, Counted.AT_LEAST), every
        if not inner:
            return Flops(flops_of(equation)), every
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
            rounds = math.prod(grid) if known else 1
            return self._whole(equation.params['jaxpr']).times(rounds, _exactly_if(known)), every
        flops = sum(map(self._whole, inner), _NONE)
        if name.startswith(_REDUCERS):
            return flops, every
        # Something new: how often it runs what it holds is not known; once, if it is one thing.
        counted = Counted.AT_LEAST if len(inner) == 1 else Counted.UNKNOWN
        return flops.times(1, counted), every

    def _whole(self, jaxpr: Jaxpr) -> Flops:
        return self.jaxpr(jaxpr, (True,) * len(jaxpr.outvars))[0]

    def _call(self, equation: Any, parameter: str, live: Live) -> tuple[Flops, Live]:
        params: Any = equation.params
        if parameter:
            solvers = params.get('jaxprs')
            params = [getattr(solvers, parameter)] if solvers is not None else params[parameter]
        inner = next(jaxprs_in(params))
        fits = len(inner.outvars) == len(live) and len(inner.invars) == len(equation.invars)
        flops, needed = self.jaxpr(inner, live if fits else (True,) * len(inner.outvars))
        if equation.primitive.name == 'shard_map':
            # Inside, shapes are those of one block; every device along the manual axes has one.
            manual = equation.params.get('newly_manual_axes') or equation.params.get('manual_axes')
            sizes = equation.params['mesh'].shape
            flops = flops.times(math.prod(sizes[axis] for axis in manual or sizes))
        return flops, needed if fits else (True,) * len(equation.invars)

    def _scan(self, equation: Any, body: Jaxpr, live: Live) -> tuple[Flops, Live]:
        carried = _carried(equation.outvars, body.outvars)
        stacked = _carried(equation.invars[::-1], body.invars[::-1], alike=False)
        constants = len(body.invars) - carried - stacked
        while True:  # what a round needs of the state must come out of the round before
            flops, needed = self.jaxpr(body, live)
            state = needed[constants : constants + carried]
            grown = tuple(map(any, zip(state, live, strict=False))) + live[carried:]
            if grown == live:
                return flops.times(equation.params['length']), needed
            live = grown

    def _while(self, equation: Any) -> Flops:
        params = equation.params
        rounds = rounds_of(equation)
        known = _exactly_if(rounds is not None)
        rounds = 1 if rounds is None else rounds
        # The condition is asked once more than the body is run.
        return self._whole(params['body_jaxpr'].jaxpr).times(rounds, known) + self._whole(
            params['cond_jaxpr'].jaxpr
        ).times(rounds + 1, known)

    def _branches(self, equation: Any, live: Live) -> tuple[Flops, Live]:
        branches = [self.jaxpr(branch.jaxpr, live) for branch in equation.params['branches']]
        largest = max((flops for flops, _ in branches), key=lambda flops: flops.count)
        same = len({flops for flops, _ in branches}) == 1
        needed = (True, *map(any, zip(*(needs for _, needs in branches), strict=True)))
        return largest.times(1, Counted.EXACTLY if same else Counted.AT_MOST), needed


def _exactly_if(known: bool) -> Counted:
    return Counted.EXACTLY if known else Counted.AT_LEAST


def _carried(outside: Sequence[Any], inside: Sequence[Any], alike: bool = True) -> int:
    """How many variables, from the first on, have (or have not) one rank outside and inside a loop.

    What a scan carries keeps its rank; what it stacks has one dimension more outside.
    """
    pairs = zip(outside, inside, strict=True)
    same = (len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)
    return sum(1 for _ in itertools.takewhile(lambda fits: fits is alike, same))


def jaxprs_in(value: Any) -> Iterator[Jaxpr]:
    """The jaxprs anywhere in the parameters of an equation, also inside tuples, dicts and dataclasses."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from jaxprs_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from jaxprs_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from jaxprs_in(getattr(value, field.name, None))
