"""Cost breakdown of a plan, by phase and by module."""

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
"""The phases in the order in which plans show them."""
NO_SCOPE = 'not known'


class CostEntry(NamedTuple):
    """The cost of a phase or a scope on each device.

    Attributes:
        flops: the FLOPs.
        bytes: the HBM bytes.
        collective_bytes: the bytes of collectives, counted as in `Plan.totals`.
        compute: the seconds of compute.
        hbm: the seconds of HBM traffic.
        network: the seconds of the collectives in sequence.
        scheduled: the seconds along the compiler's schedule.
    """

    flops: int = 0
    bytes: int = 0
    collective_bytes: int = 0
    compute: float = 0.0
    hbm: float = 0.0
    network: float = 0.0
    scheduled: float = 0.0

    def plus(self, other: CostEntry) -> CostEntry:
        """Returns the sum of two costs."""
        return CostEntry(*map(operator.add, self, other))


def _entries(plan: PlanData, roofline: Roofline | None) -> Iterator[tuple[str, Phase, CostEntry]]:
    """Yields costs with their scope and phase."""
    flop_seconds = byte_seconds = 0.0
    if roofline is not None:
        hardware, flop_seconds = roofline.hardware, roofline.devices / roofline.peak
        byte_seconds = flop_seconds * (hardware.flops_per_second or 1) / (hardware.hbm_bytes_per_second or 1)
    for row in plan.device_cost.by_scope:
        compute, hbm = row.flops * flop_seconds, row.bytes * byte_seconds
        yield row.scope, row.phase, CostEntry(row.flops, row.bytes, compute=compute, hbm=hbm)
    seconds_of = {} if roofline is None else {id(row): seconds for row, seconds in roofline.collectives}
    for collective in plan.collectives:
        seconds = seconds_of.get(id(collective), 0.0) / max(1, collective.count)
        for runs in collective.scopes:
            entry = CostEntry(collective_bytes=runs.count * collective.bytes, network=runs.count * seconds)
            yield runs.scope, collective.phase, entry
    for kernel in plan.schedule.kernels if plan.schedule else ():
        yield kernel.scope, kernel.phase, CostEntry(scheduled=kernel.seconds)


def costs_by_phase(plan: PlanData, roofline: Roofline | None) -> dict[Phase, CostEntry]:
    """Returns the cost of each phase of the step that has any."""
    costs = {phase: CostEntry() for phase in SHOWN_PHASES}
    for _, phase, entry in _entries(plan, roofline):
        costs[phase] = costs[phase].plus(entry)
    return {phase: entry for phase, entry in costs.items() if any(entry)}


def costs_by_scope(plan: PlanData, roofline: Roofline | None) -> list[tuple[str, CostEntry]]:
    """Returns the cost of each module or named scope including everything inside it, the largest first.

    Numbered scopes with the same FLOPs are one row. A scope that contains only one other scope is left out.
    """
    costs: dict[str, CostEntry] = {}
    # The first of many layers needs no gradient of its input, so backward passes may differ.
    forward_flops: collections.Counter[str] = collections.Counter()
    for scope, phase, entry in _entries(plan, roofline):
        costs[scope] = costs.get(scope, CostEntry()).plus(entry)
        forward_flops[scope] += entry.flops if phase in ('forward', 'other') else 0
    totals: dict[tuple[str, ...], CostEntry] = {}
    for item in fold((scope, forward_flops[scope]) for scope in costs):
        names = [part if isinstance(part, str) else part.name(MOST_RUNS) for part in item.parts]
        for path in item.paths:
            for depth in range(len(names)):
                outer = tuple(names[: depth + 1])
                totals[outer] = totals.get(outer, CostEntry()).plus(costs[path])
    same_as_inner = {
        names[:-1] for names, entry in totals.items() if totals.get(names[:-1], ())[:3] == entry[:3]
    }
    rows = [
        ('/'.join(names) or NO_SCOPE, entry) for names, entry in totals.items() if names not in same_as_inner
    ]
    return sorted(rows, key=lambda row: (-row[1].flops, -row[1].collective_bytes))
