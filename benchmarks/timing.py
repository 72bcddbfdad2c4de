"""How long does one call take against another? Interleaved, in one process, medians.

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
    """One line of the table: what was measured, ours, theirs, and the ratio aimed at."""

    name: str
    ours: str
    theirs: str
    ratio: float | None
    aim: str

    @property
    def verdict(self) -> str:
        """The ratio as text."""
        return '' if self.ratio is None else f'{self.ratio:.3f}'


def medians(contestants: Sequence[Callable[[], object]], rounds: int, warmup: int = 5) -> list[float]:
    """The median seconds of each contestant; they take turns, in an order that rotates.

    Args:
        contestants: what to time; each call is timed by itself, with garbage collection off.
        rounds: how often each is called.
        warmup: calls before that, which do not count.
    """
    times: list[list[float]] = [[] for _ in contestants]
    for contestant in contestants:
        for _ in range(warmup):
            contestant()
    order = list(range(len(contestants)))
    clock = time.perf_counter
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for i in order if turn % 2 else reversed(order):
                start = clock()
                contestants[i]()
                times[i].append(clock() - start)
    finally:
        gc.enable()
    return [statistics.median(measured) for measured in times]


def compare(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int, aim: str
) -> Row:
    """Times two contestants against each other."""
    mine, other = medians([ours, theirs], rounds)
    return Row(name, human_seconds(mine), human_seconds(other), mine / other, aim)


def human_seconds(seconds: float) -> str:
    """Seconds with a fitting unit: ``12.3 us``."""
    for unit, size in (('s', 1.0), ('ms', 1e-3), ('us', 1e-6)):
        if seconds >= size:
            return f'{seconds / size:.3g} {unit}'
    return f'{seconds * 1e9:.3g} ns'


def render(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ('what', 'scalax', 'by hand', 'ratio', 'aim')
    cells = [head, *((r.name, r.ours, r.theirs, r.verdict, r.aim) for r in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = [
        '| ' + ' | '.join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + ' |'
        for line in cells
    ]
    return '\n'.join([lines[0], '|' + '|'.join('-' * (w + 2) for w in widths) + '|', *lines[1:]])
