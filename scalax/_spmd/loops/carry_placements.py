"""Placements of the values that loops carry: a fixpoint over the iterations."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from scalax._spmd.placements.placement import REPLICATE, Partial, Placements, join
from scalax._spmd.values import CannotPartition, PartitionedJaxpr

_MAX_ITERATIONS = 12


def carry_fixpoint(
    partition_body: Callable[[], PartitionedJaxpr],
    carried: list[Placements],
    equation: Any,
    reduced: Collection[tuple[int, int]] = (),
) -> PartitionedJaxpr:
    """Partitions the body of a loop until the carried values have the same placements before and after it.

    Args:
        partition_body: partitions the body for the current placements of the carried values.
        carried: the placements of the carried values, which are updated in place.
        equation: the loop.
        reduced: pairs of the index of a carried value and of an axis along which it must not be partial.

    Returns:
        The partitioned body.
    """
    not_partial = set(reduced)  # also those that were assumed to be partial, and are not after an iteration
    for i, axis in reduced:
        carried[i] = (*carried[i][:axis], REPLICATE, *carried[i][axis + 1 :])
    for _ in range(_MAX_ITERATIONS):
        body, after = partition_body(), list[Placements]()
        for i, (initial, final) in enumerate(zip(carried, body.placements, strict=False)):
            placements = [*_next_placements(initial, final)]
            for axis, placement in enumerate(placements):
                if (i, axis) in not_partial and isinstance(placement, Partial):
                    placements[axis] = REPLICATE
                elif isinstance(initial[axis], Partial) and not isinstance(placement, Partial):
                    not_partial.add((i, axis))
            after.append(tuple(placements))
        if after == carried:
            return body
        carried[:] = after
    raise CannotPartition(equation, 'the placements of the values that it carries do not converge')


def _next_placements(initial: Placements, final: Placements) -> Placements:
    """Returns the placements to try next for a carried value, given those before and after an iteration.

    A value that was assumed to be partial, and is not after the iteration, gets its placement after it.
    """
    return tuple(
        [
            after if isinstance(before, Partial) and not isinstance(after, Partial) else join(before, after)
            for before, after in zip(initial, final, strict=True)
        ]
    )
