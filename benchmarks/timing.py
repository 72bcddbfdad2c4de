"""The time of one call compared with another: interleaved, in one process, as medians.

Machines are shared and noisy, so times are only compared within a run: contestants take turns call by call,
in an order that changes each turn, and the result is the ratio of their medians.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: the name of the measurement.
        ours: seconds with scalax; with `counted`, a count.
        reference: seconds, or the count, of the hand-written code.
        aim: the maximum ratio (with `counted`, the maximum count); None if there is none.
        counted: whether this is a count instead of a time.
    """

    name: str
    ours: float
    reference: float
    aim: float | None = None
    counted: bool = False

    @property
    def ratio(self) -> float:
        return self.ours / self.reference

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns the row as text, column by column."""
        aim = '' if self.aim is None else f'{self.aim:g}'
        if self.counted:
            return self.name, f'{self.ours:g}', f'{self.reference:g}', '', aim
        return self.name, human_seconds(self.ours), human_seconds(self.reference), f'{self.ratio:.3f}', aim


def medians(
    contestants: Sequence[Callable[[], object]],
    rounds: int,
    warmup: int = 5,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the median seconds of each contestant; they take turns, in an order that rotates.

    Args:
        contestants: the functions to time; each call is timed separately, with garbage collection off.
        rounds: the number of timed calls of each.
        warmup: the number of untimed calls before them.
        before: called before each call, untimed.
        clock: returns the time in seconds.
    """
    times: list[list[float]] = [[] for _ in contestants]
    for contestant in contestants:
        for _ in range(warmup):
            contestant()
    order = list(range(len(contestants)))
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for i in order if turn % 2 else reversed(order):
                if before is not None:
                    before()
                start = clock()
                contestants[i]()
                times[i].append(clock() - start)
    finally:
        gc.enable()
    return [statistics.median(measured) for measured in times]


def compare(
    name: str,
    ours: Callable[[], object],
    reference: Callable[[], object],
    rounds: int,
    aim: float | None = None,
    *,
    warmup: int = 5,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Row:
    """Times two contestants against each other."""
    our_seconds, reference_seconds = medians([ours, reference], rounds, warmup, before, clock)
    return Row(name, our_seconds, reference_seconds, aim)


def human_seconds(seconds: float) -> str:
    """Returns seconds with a suitable unit: ``12.3 us``."""
    for unit, size in (('s', 1.0), ('ms', 1e-3), ('us', 1e-6)):
        if seconds >= size:
            return f'{seconds / size:.3g} {unit}'
    return f'{seconds * 1e9:.3g} ns'


def render(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    cells = [head, *lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    rows = [
        '| ' + ' | '.join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + ' |'
        for line in cells
    ]
    return '\n'.join([rows[0], '|' + '|'.join('-' * (width + 2) for width in widths) + '|', *rows[1:]])
