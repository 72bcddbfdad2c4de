"""Figures of a plan: bars of memory and seconds, and sums by scope."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from scalax._plan.formulas import Part
from scalax._plan.memory import Memory
from scalax._plan.plan_data import PlanData
from scalax._plan.roofline import Roofline
from scalax._report import blocks
from scalax._report.tables import human_bytes, milliseconds
from scalax._util.folding import MOST_RUNS, fold

STEP: tuple[Part, ...] = ('forward', 'backward', 'recomputed', 'update', 'other')
"""The parts of a step as they are shown."""
NO_SCOPE = 'not known'
_ROUNDING = 1e-9
_DEEPEST = 50  # scopes inside of one another; the names of deeper ones stay joined


def memory_parts(memory: Memory) -> list[blocks.Part]:
    """The parts of the memory of a device from the first bytes on."""
    kept = min(memory.arguments + memory.outputs, memory.peak)
    sizes = {
        'arguments': min(memory.arguments, memory.peak),
        'outputs': max(0, kept - memory.arguments),
        'temporaries': memory.peak - kept,
        'gaps': max(0, memory.total - memory.peak),
    }
    labels = {'temporaries': 'temporaries at the peak', 'gaps': 'gaps at the peak'}
    return [
        blocks.Part(labels.get(kind, kind), size, human_bytes(size), kind)
        for kind, size in sizes.items()
        if size or kind != 'gaps'
    ]


def time_parts(plan: PlanData, roofline: Roofline) -> dict[str, list[blocks.Part]]:
    """The seconds of each part of a roofline, by the parts of the step."""
    networks = {row.name: row.axes for row in roofline.communication}
    work: dict[str, Mapping[Part, float]] = {'compute': plan.work.by_part, 'hbm': plan.work.bytes_by_part}
    shown = {}
    for name, seconds in roofline.parts.items():
        alike = [(row.phase, time) for row, time in roofline.collectives if row.axes == networks.get(name)]
        weights = work.get(name) or {
            part: sum(time for phase, time in alike if phase == part) for part in STEP
        }
        whole = sum(weights.values())
        times = (
            {part: seconds * weights.get(part, 0) / whole for part in STEP} if whole else {'other': seconds}
        )
        shown[name] = [
            blocks.Part(part, time, milliseconds(time), part)
            for part, time in times.items()
            if time > _ROUNDING * seconds
        ]
    return shown


def _rates(roofline: Roofline) -> tuple[float, float]:
    """The seconds of a device for one operation, and for one byte of its memory."""
    hardware = roofline.hardware
    flops_rate, hbm_rate = hardware.flops_per_second or 1, hardware.hbm_bytes_per_second or 1
    seconds = roofline.devices / roofline.peak
    return seconds, seconds * flops_rate / hbm_rate


class Sums(NamedTuple):
    """What a device computes and moves in a part of a step, or in a scope.

    Attributes:
        flops: the floating-point operations.
        bytes: the bytes that are moved from and to the memory.
        moved: the bytes of collectives, as `Plan.totals` counts them.
        compute: the seconds of the operations.
        hbm: the seconds of the bytes.
        network: the seconds of the collectives, one after the other.
    """

    flops: int = 0
    bytes: int = 0
    moved: int = 0
    compute: float = 0.0
    hbm: float = 0.0
    network: float = 0.0

    def plus(self, other: Sums) -> Sums:
        """Both together."""
        return Sums(*map(operator.add, self, other))


def sums(plan: PlanData, roofline: Roofline | None) -> Iterator[tuple[str, Part, Sums]]:
    """What each scope computes and moves: (scope, part of the step, its sums)."""
    rate, of_byte = (0.0, 0.0) if roofline is None else _rates(roofline)
    for row in plan.work.by_scope:
        compute, hbm = row.flops * rate, row.bytes * of_byte
        yield row.scope, row.part, Sums(row.flops, row.bytes, compute=compute, hbm=hbm)
    times = {} if roofline is None else {id(row): seconds for row, seconds in roofline.collectives}
    for each in plan.collectives:
        once = times.get(id(each), 0.0) / max(1, each.count)
        known = sum(runs.count for runs in each.scopes)
        for scope, count in [
            *((runs.scope, runs.count) for runs in each.scopes),
            ('', max(0, each.count - known)),
        ]:
            if count:
                yield scope, each.phase, Sums(moved=count * each.bytes, network=count * once)


def sums_by_part(plan: PlanData, roofline: Roofline | None) -> dict[Part, Sums]:
    """The sums of each part of the step that has any."""
    found = {part: Sums() for part in STEP}
    for _, part, more in sums(plan, roofline):
        found[part] = found[part].plus(more)
    return {part: each for part, each in found.items() if any(each)}


_NONE = Sums()


@dataclasses.dataclass
class Scope:
    """A module or named scope, with all that is inside of it.

    Attributes:
        name: its name, without those around it; of several that are alike, such as ``'layers_{0..31}'``.
        sums: its sums.
        inside: the scopes inside of it, in the order of the program.
    """

    name: str
    sums: Sums = _NONE
    inside: dict[str, Scope] = dataclasses.field(default_factory=dict)

    @property
    def is_of_functions(self) -> bool:
        """Whether the program has no named scopes, so that functions stand for them."""
        return all(name.partition('/')[0].endswith('()') for name in self.inside if name != NO_SCOPE)

    def settled(self) -> Scope:
        """The same scope; one that holds nothing but another one is that, with a longer name."""
        inside = {name: scope.settled() for name, scope in self.inside.items()}
        if len(inside) == 1 and self.name:
            [only] = inside.values()
            if only.sums[:3] == self.sums[:3]:  # but for how floats are rounded
                return Scope(f'{self.name}/{only.name}', only.sums, only.inside)
        return Scope(self.name, self.sums, inside)


def scopes(plan: PlanData, roofline: Roofline | None) -> Scope:
    """All scopes of a plan in one without a name; numbered ones that compute alike are one."""
    found: dict[str, Sums] = {}
    # The first of many layers needs no gradient of its input, so backward passes may differ.
    forward: collections.Counter[str] = collections.Counter()
    for scope, part, more in sums(plan, roofline):
        found[scope] = found.get(scope, Sums()).plus(more)
        forward[scope] += more.flops if part in ('forward', 'other') else 0
    top = Scope('')
    for item in fold((scope, forward[scope]) for scope in found):
        total = Sums()
        for path in item.paths:
            total = total.plus(found[path])
        names = [part if isinstance(part, str) else part.name(MOST_RUNS) for part in item.parts]
        if len(names) > _DEEPEST:
            names = [*names[:_DEEPEST], '/'.join(names[_DEEPEST:])]
        here = top
        here.sums = here.sums.plus(total)
        for name in names if any(names) else [NO_SCOPE]:
            here = here.inside.setdefault(name, Scope(name))
            here.sums = here.sums.plus(total)
    return top.settled()
