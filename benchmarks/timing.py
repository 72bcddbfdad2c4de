"""The time of one call against another: interleaved, in one process, medians.

Machines are shared and noisy, so no time is compared with a time of another run: contestants take turns,
call by call, the order changes from turn to turn, and what counts is the ratio of their medians.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what was measured.
        ours: seconds with scalax; with `counted`, a number of something.
        reference: the same by hand.
        aim: the ratio (with `counted`, the number) that is not to be exceeded; None where none is set.
        counted: whether this is a number of something, and no time.
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
        """The row as text, column by column."""
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
    """The median seconds of each contestant; they take turns, in an order that rotates.

    Args:
        contestants: what to time; each call is timed by itself, with garbage collection off.
        rounds: how often each is called.
        warmup: calls before that, which do not count.
        before: is called before each of them, and not timed.
        clock: what time it is, in seconds.
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
    """Seconds with a fitting unit: ``12.3 us``."""
    for unit, size in (('s', 1.0), ('ms', 1e-3), ('us', 1e-6)):
        if seconds >= size:
            return f'{seconds / size:.3g} {unit}'
    return f'{seconds * 1e9:.3g} ns'


def render(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    cells = [head, *lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    rows = [
        '| ' + ' | '.join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + ' |'
        for line in cells
    ]
    return '\n'.join([rows[0], '|' + '|'.join('-' * (width + 2) for width in widths) + '|', *rows[1:]])
