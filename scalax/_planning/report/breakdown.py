"""What the parts of a step, and its modules, compute and move: sums for tables."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterator
from typing import NamedTuple

from scalax._core.util.folding import MOST_RUNS, fold
from scalax._planning.program.phases import Phase
from scalax._planning.report.plan_data import PlanData
from scalax._planning.time.roofline import Roofline

SHOWN_PHASES: tuple[Phase, ...] = ('forward', 'backward', 'recomputed', 'update', 'other')
"""The parts of a step as they are shown."""
NO_SCOPE = 'not known'


class CostEntry(NamedTuple):
    """What a device computes and moves in a part of a step, or in a scope.

    Attributes:
        flops: the floating-point operations.
        bytes: the bytes that are moved from and to the memory.
        moved: the bytes of collectives, as `Plan.totals` counts them.
        compute: the seconds of the operations.
        hbm: the seconds of the bytes.
        network: the seconds of the collectives, one after the other.
        scheduled: the seconds along the compiler's schedule.
    """

    flops: int = 0
    bytes: int = 0
    moved: int = 0
    compute: float = 0.0
    hbm: float = 0.0
    network: float = 0.0
    scheduled: float = 0.0

    def plus(self, other: CostEntry) -> CostEntry:
        """Both together."""
        return CostEntry(*map(operator.add, self, other))


def _sums(plan: PlanData, roofline: Roofline | None) -> Iterator[tuple[str, Phase, CostEntry]]:
    """What each scope computes and moves: (scope, part of the step, its sums)."""
    rate = of_byte = 0.0  # the seconds of a device for one operation, and for one byte of its memory
    if roofline is not None:
        hardware, rate = roofline.hardware, roofline.devices / roofline.peak
        of_byte = rate * (hardware.flops_per_second or 1) / (hardware.hbm_bytes_per_second or 1)
    for row in plan.device_cost.by_scope:
        compute, hbm = row.flops * rate, row.bytes * of_byte
        yield row.scope, row.phase, CostEntry(row.flops, row.bytes, compute=compute, hbm=hbm)
    times = {} if roofline is None else {id(row): seconds for row, seconds in roofline.collectives}
    for each in plan.collectives:
        once = times.get(id(each), 0.0) / max(1, each.count)
        for runs in each.scopes:
            yield runs.scope, each.phase, CostEntry(moved=runs.count * each.bytes, network=runs.count * once)
    for kernel in plan.schedule.kernels if plan.schedule else ():
        yield kernel.scope, kernel.phase, CostEntry(scheduled=kernel.seconds)


def costs_by_phase(plan: PlanData, roofline: Roofline | None) -> dict[Phase, CostEntry]:
    """The sums of each part of the step that has any."""
    found = {part: CostEntry() for part in SHOWN_PHASES}
    for _, part, more in _sums(plan, roofline):
        found[part] = found[part].plus(more)
    return {part: each for part, each in found.items() if any(each)}


def costs_by_scope(plan: PlanData, roofline: Roofline | None) -> list[tuple[str, CostEntry]]:
    """The sums of each module or named scope with all that is inside of it, the largest first.

    Numbered ones that compute alike are one. One that holds nothing but another one is left out.
    """
    found: dict[str, CostEntry] = {}
    # The first of many layers needs no gradient of its input, so backward passes may differ.
    forward: collections.Counter[str] = collections.Counter()
    for scope, part, more in _sums(plan, roofline):
        found[scope] = found.get(scope, CostEntry()).plus(more)
        forward[scope] += more.flops if part in ('forward', 'other') else 0
    whole: dict[tuple[str, ...], CostEntry] = {}
    for item in fold((scope, forward[scope]) for scope in found):
        names = [part if isinstance(part, str) else part.name(MOST_RUNS) for part in item.parts]
        for path in item.paths:
            for depth in range(len(names)):
                outer = tuple(names[: depth + 1])
                whole[outer] = whole.get(outer, CostEntry()).plus(found[path])
    same_as_inner = {names[:-1] for names, each in whole.items() if whole.get(names[:-1], ())[:3] == each[:3]}
    rows = [
        ('/'.join(names) or NO_SCOPE, each) for names, each in whole.items() if names not in same_as_inner
    ]
    return sorted(rows, key=lambda row: (-row[1].flops, -row[1].moved))
