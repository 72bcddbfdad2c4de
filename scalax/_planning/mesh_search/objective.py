"""The objective of `autoshard` and `search`: which of several plans is best, and which errors are an outcome.

The objective averages the fully overlapped and the serial step time, because a part of the step overlaps.
Seconds count in steps of 0.2 per cent. Of plans in the same step the one with less memory is better, in steps
of one per cent; of those that are equal in both, the one that was there first.
"""

from __future__ import annotations

import math

import jax

from scalax._jax.error_texts import is_indivisible, is_unpartitioned
from scalax._planning.report.plan_data import PlanData
from scalax._planning.time.roofline import StepTime
from scalax.errors import IndivisibleWarning, MeshError, PlanError, ScalaxError, ShardingError, StagesError

EQUAL = 0.002
"""Seconds within this part of one another are equal."""
_EQUAL_MEMORY = 0.01
# For devices of unknown speed, such as simulated ones: a chip of 400 Tflop/s, with a memory of 2.5 TB/s and
# links of 100 GB/s.
_FLOPS, _MEMORY, _LINK = 4e14, 2.5e12, 1e11


def seconds_of(plan: PlanData) -> StepTime:
    """The seconds of a step. By counting where speeds are unknown; infinite where links are not known."""
    if (roofline := plan.known_roofline) is not None:
        return roofline.step_seconds
    if plan.hardware is not None:
        return StepTime(math.inf, math.inf)
    moved = sum(row.count * row.bytes for row in plan.collectives)
    parts = [plan.device_cost.flops / _FLOPS, plan.device_cost.bytes / _MEMORY, moved / _LINK]
    return StepTime(max(parts), sum(parts))


def mean(seconds: StepTime) -> float:
    """The objective: the average of the overlapped and the serial time.

    Example:
        >>> mean(StepTime(overlapped=2.0, serial=4.0))
        3.0
    """
    return sum(seconds) / 2


def rank(seconds: float, memory: float) -> tuple[float, float]:
    """Sorts plans, the best first, by their mean seconds and the bytes on a device.

    Example:
        >>> rank(1.0, 2e9) < rank(1.1, 1e9), rank(1.1, 1e9) < rank(1.1002, 2e9)
        (True, True)
    """
    return _step(seconds, EQUAL), _step(memory, _EQUAL_MEMORY)


def _step(value: float, part: float) -> float:
    return math.floor(math.log(value) / part) if 0 < value < math.inf else value or -math.inf


def slower(seconds: float, best: float) -> str:
    """How much longer a plan takes than the best one, in words.

    Example:
        >>> slower(1.5, 1.0), slower(1.001, 1.0), slower(math.inf, 1.0)
        ('50.0% slower', 'nearly equal', 'seconds unknown')
    """
    if seconds == math.inf:
        return 'seconds unknown'
    return f'{seconds / best - 1:.1%} slower' if seconds >= best * (1 + EQUAL) > 0 else 'nearly equal'


def reason_of_failure(error: Exception, candidate: str) -> str:
    """Why a candidate has no plan, in a line.

    Only these are outcomes: the compiler, or JAX for it, refuses; its dimensions or its mesh do not divide;
    its pipeline is refused. All else is a mistake of the step or of scalax, which would look as if the
    candidate had lost.

    Args:
        error: what the candidate raised.
        candidate: its name, which is added to an error that is raised again.

    Raises:
        Exception: *error*, if it is none of these.
    """
    refused = isinstance(error, PlanError) and isinstance(error.__cause__, jax.errors.JaxRuntimeError)
    refused = refused or is_unpartitioned(error)
    if not (
        refused or isinstance(error, MeshError | IndivisibleWarning | StagesError) or _does_not_divide(error)
    ):
        error.add_note(f'This was raised by the candidate {candidate}.')
        raise error
    if isinstance(error, ShardingError):
        first, *others = error.problems
        return f'{first.leaf}: {first.detail}' + (f' (and {len(others)} more)' if others else '')
    lines = str(error).splitlines()[: 1 if isinstance(error, StagesError) else 2]  # then what to do
    kind = '' if isinstance(error, ScalaxError | IndivisibleWarning) else f'{type(error).__name__}: '
    return kind + ' '.join(line.strip() for line in lines)


def _does_not_divide(error: Exception) -> bool:
    if isinstance(error, ShardingError):
        return all(problem.kind == 'indivisible' for problem in error.problems)
    return not isinstance(error, ScalaxError) and is_indivisible(error)  # JAX has no type for it
