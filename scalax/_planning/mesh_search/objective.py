"""Objective of `autoshard` and `search`: the order of plans, and the errors that count as an outcome.

The objective is the average of the fully overlapped and the serial step time, because a part of the step
overlaps. Times are compared in logarithmic steps of 0.2 percent. Of plans in the same step, the one with less
memory is better, in steps of 1 percent; of plans that are equal in both, the one that was tried first.
"""

from __future__ import annotations

import math

import jax

from scalax._jax.error_texts import is_indivisible, is_unpartitioned
from scalax._planning.report.plan_data import PlanData
from scalax._planning.time.roofline import StepTime
from scalax.errors import IndivisibleWarning, MeshError, PipelineError, PlanError, ScalaxError, ShardingError

TIME_TOLERANCE = 0.002
"""The relative difference up to which times count as equal."""
_MEMORY_TOLERANCE = 0.01
# Assumed for devices of unknown speed, such as simulated ones.
_FLOPS_PER_SECOND, _HBM_BYTES_PER_SECOND, _LINK_BYTES_PER_SECOND = 4e14, 2.5e12, 1e11


def step_time_of(plan: PlanData) -> StepTime:
    """Returns the time of a step, infinite if the speed of links is unknown, guessed if simulated."""
    if (roofline := plan.known_roofline) is not None:
        return roofline.step_seconds
    if plan.hardware is not None:
        return StepTime(math.inf, math.inf)
    sent_bytes = sum(row.count * row.bytes for row in plan.collectives)
    times = (
        plan.device_cost.flops / _FLOPS_PER_SECOND,
        plan.device_cost.bytes / _HBM_BYTES_PER_SECOND,
        sent_bytes / _LINK_BYTES_PER_SECOND,
    )
    return StepTime(max(times), sum(times))


def objective_seconds(seconds: StepTime) -> float:
    """Returns the average of the overlapped and the serial time.

    Example:
        >>> objective_seconds(StepTime(overlapped=2.0, serial=4.0))
        3.0
    """
    return sum(seconds) / 2


def rank(seconds: float, memory: float) -> tuple[float, float]:
    """Returns a sort key for plans, best first, from `objective_seconds` and the bytes on a device.

    Example:
        >>> rank(1.0, 2e9) < rank(1.1, 1e9), rank(1.1, 1e9) < rank(1.1002, 2e9)
        (True, True)
    """
    return _quantized(seconds, TIME_TOLERANCE), _quantized(memory, _MEMORY_TOLERANCE)


def _quantized(value: float, tolerance: float) -> float:
    return math.floor(math.log(value) / tolerance) if 0 < value < math.inf else value or -math.inf


def slowdown_text(seconds: float, best: float) -> str:
    """Describes how much longer a plan takes than the best one.

    Example:
        >>> slowdown_text(1.5, 1.0), slowdown_text(1.001, 1.0), slowdown_text(math.inf, 1.0)
        ('50.0% slower', 'nearly equal', 'seconds unknown')
    """
    if seconds == math.inf:
        return 'seconds unknown'
    return (
        f'{seconds / best - 1:.1%} slower' if seconds >= best * (1 + TIME_TOLERANCE) > 0 else 'nearly equal'
    )


def reason_of_failure(error: Exception, candidate: str) -> str:
    """Returns why a candidate has no plan, in one line.

    Three errors count as an outcome: the compiler or JAX rejects the program; a dimension or the mesh is
    not divisible; the pipeline is rejected. Any other error is a bug in the step or in scalax, and is raised
    again.

    Args:
        error: the error that the candidate raised.
        candidate: its name, for a note on an error that is raised again.

    Raises:
        Exception: *error*, if it is not an outcome.
    """
    is_rejected = isinstance(error, PlanError) and isinstance(error.__cause__, jax.errors.JaxRuntimeError)
    is_rejected = is_rejected or is_unpartitioned(error)
    if not (
        is_rejected
        or isinstance(error, MeshError | IndivisibleWarning | PipelineError)
        or _does_not_divide(error)
    ):
        error.add_note(f'This was raised by the candidate {candidate}.')
        raise error
    if isinstance(error, ShardingError):
        first, *others = error.problems
        return f'{first.leaf}: {first.detail}' + (f' (and {len(others)} more)' if others else '')
    lines = str(error).splitlines()[: 1 if isinstance(error, PipelineError) else 2]  # without the advice
    kind = '' if isinstance(error, ScalaxError | IndivisibleWarning) else f'{type(error).__name__}: '
    return kind + ' '.join(line.strip() for line in lines)


def _does_not_divide(error: Exception) -> bool:
    if isinstance(error, ShardingError):
        return all(problem.kind == 'indivisible' for problem in error.problems)
    return not isinstance(error, ScalaxError) and is_indivisible(error)  # JAX raises a plain ValueError
