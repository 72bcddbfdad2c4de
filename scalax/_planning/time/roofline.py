"""The roofline of a step: seconds of computing, of memory, of the host and of each network, on some hardware.

A step has an *overlapped* time, if everything overlaps that can, and a *serial* time, if nothing
overlaps: https://jax-ml.github.io/scaling-book/roofline, "Where Does the Time Go?". The forward pass, the
backward pass and the update follow one another, as each needs what the one before it has made. Within each,
computing and moving bytes overlap; communication overlaps with all of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scalax._core.render.tables import human_flops, milliseconds
from scalax._planning.cost.collectives import Collective
from scalax._planning.cost.device_cost import DeviceCost
from scalax._planning.hardware.specs import Hardware, network_text, numbers_of
from scalax._planning.hardware.torus import (
    NETWORKS,
    DevicePosition,
    Network,
    Route,
    Torus,
    TorusSegment,
    devices_per_chip,
    route_of,
    segment_text,
    torus_of,
)
from scalax._planning.program.counting import Exactness, Phase
from scalax._planning.program.replica_groups import devices_along
from scalax._planning.time.collective_time import COMMUNICATION, collective_seconds, part_of_links
from scalax.errors import PlanError


class StepTime(NamedTuple):
    """The time of a step.

    Attributes:
        overlapped: the time if everything overlaps that can, a lower bound: the longest of each network, the
            link to the host, and the phases one after the other, each bound by its compute or its memory.
        serial: the time if nothing overlaps: the sum of all parts.
    """

    overlapped: float
    serial: float


class PhaseTime(NamedTuple):
    """What one device does in one phase of a step, before the next one can begin.

    Attributes:
        name: ``'forward'``, ``'backward'`` (with what is recomputed) or ``'update'``; ``'step'`` without a
            gradient.
        compute: seconds of computing.
        hbm: seconds of moving bytes between the memory and the cores.
    """

    name: str
    compute: float
    hbm: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """The communication along mesh axes over one network, in one call.

    Attributes:
        network: ``'ici'`` inside a slice, ``'dcn'`` between slices, ``'chip'`` between the devices of a chip.
        axes: the mesh axes.
        segments: the axes of the torus that they run along.
        seconds: the total time, one collective after the other.
        busy: the time for which the links are in use, if permutes run at the same time over different ones.
    """

    network: Network
    axes: tuple[str, ...]
    segments: tuple[TorusSegment, ...]
    seconds: float
    busy: float

    @property
    def name(self) -> str:
        """Such as ``'ici:tp'``."""
        return f'{self.network}:{"+".join(self.axes)}'


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time of a step on some hardware, and its bottleneck; ``str()`` of it is a table.

    Attributes:
        hardware: the hardware whose numbers are used.
        devices: the number of devices that run the step.
        peak: the operations a second of all of them.
        compute: seconds of computing.
        hbm: seconds of moving bytes between the memory and the cores of each device.
        communication: seconds of each network along each set of mesh axes, the longest first.
        collectives: the collectives of the plan, each with the seconds of all its executions, one after the
            other.
        model_flops: the operations that the model needs; None if unknown.
        exactness: how well the counts behind these numbers are known.
        to_host: seconds of writing to the memory of the host.
        from_host: seconds of reading there; both may go on at a time.
        compiled_for: what JAX calls the devices that the program was compiled for; empty if unknown.
        phases: computing and memory of each phase of the step; if there are none, all is one.
    """

    hardware: Hardware
    devices: int
    peak: float
    compute: float
    hbm: float
    communication: tuple[Communication, ...]
    collectives: tuple[tuple[Collective, float], ...] = ()
    model_flops: int | None = None
    exactness: Exactness = Exactness.EXACT
    to_host: float = 0.0
    from_host: float = 0.0
    compiled_for: str = ''
    phases: tuple[PhaseTime, ...] = ()

    @property
    def not_compiled_for(self) -> str:
        """A sentence: the program was compiled for other devices than `hardware`. Empty if it was for these.

        Example:
            >>> from scalax.plan import HARDWARE
            >>> of_cpus = Roofline(HARDWARE['h100'], 8, 8e15, 1.0, 1.0, (), compiled_for='cpu')
            >>> of_cpus.not_compiled_for
            'not compiled for h100: the program is that of cpu devices, with the numbers of h100'
        """
        if not self.compiled_for or self.compiled_for in self.hardware.device_kinds:
            return ''
        return (
            f'not compiled for {self.hardware.name}: the program is that of {self.compiled_for} devices, '
            f'with the numbers of {self.hardware.name}'
        )

    @property
    def parts(self) -> dict[str, float]:
        """The time of each part: ``'compute'``, ``'hbm'``, ``'host:out'``, ``'ici:tp'`` ... -> seconds."""
        parts = {'compute': self.compute, 'hbm': self.hbm, **self._host}
        for row in self.communication:
            parts[row.name] = parts.get(row.name, 0.0) + row.seconds
        return parts

    @property
    def step_seconds(self) -> StepTime:
        """The time of a step."""
        return StepTime(max(seconds for _, seconds in self._busy()), sum(self.parts.values()))

    @property
    def bottleneck(self) -> str:
        """The bottleneck: ``'compute'``, ``'hbm'``, ``'host:in'``, ``'ici:tp'``, ``'dcn:data'`` ...

        If mesh axes share the busiest links, it is the one that uses them most. If it is the phases, it is
        what bounds most of their time.
        """
        return max(self._busy(), key=lambda pair: pair[1])[0]

    @property
    def mfu(self) -> float | None:
        """The model's own operations as a fraction of the peak, if the step takes no longer than its bound.

        None if the model's operations are unknown (see `Plan.with_model_flops`), or the step takes no time.
        """
        seconds = self.step_seconds.overlapped
        return None if self.model_flops is None or not seconds else self.model_flops / (self.peak * seconds)

    def _busy(self) -> list[tuple[str, float]]:
        """The busy seconds of each unit and each set of links, under the name of its largest user."""
        users: dict[tuple[str, int], list[Communication]] = collections.defaultdict(list)
        for row in self.communication:  # the longest first
            for link in [segment.axis for segment in row.segments] or [0]:
                users[row.network, link].append(row)
        links = [(rows[0].name, sum(row.busy for row in rows)) for rows in users.values()]
        phases = self.phases or [PhaseTime('step', self.compute, self.hbm)]
        on_device = {
            'compute': sum(phase.compute for phase in phases if phase.compute >= phase.hbm),
            'hbm': sum(phase.hbm for phase in phases if phase.compute < phase.hbm),
        }
        longest = max(on_device, key=on_device.__getitem__)
        return [(longest, sum(on_device.values())), *self._host.items(), *links]

    @property
    def _host(self) -> dict[str, float]:
        """The link to the host, one way and the other, if the step uses it."""
        both = {'host:out': self.to_host, 'host:in': self.from_host}
        return {name: seconds for name, seconds in both.items() if seconds}

    def __str__(self) -> str:
        step = self.step_seconds
        segments = {
            row.name: row.segments for row in reversed(self.communication)
        }  # the longest of each name
        shown = {name: network_text(name, self.hardware) for name in (*self.parts, self.bottleneck)}
        cells = [
            (shown[name], milliseconds(seconds), ' and '.join(map(segment_text, segments.get(name, ()))))
            for name, seconds in self.parts.items()
        ]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        known = '' if self.exactness is Exactness.EXACT else f' ({self.exactness.value})'
        used = ''
        if self.mfu is not None and self.model_flops is not None:
            used = f'; MFU at most {self.mfu:.1%}: the model needs {human_flops(self.model_flops)}'
            if self.mfu > 1:
                used += ', more than the program computes: attention may skip what a mask hides'
        return '\n'.join(
            [
                f'one call on {self.devices} devices of {self.hardware.name}{known}: '
                f'at least {milliseconds(step.overlapped)}, {milliseconds(step.serial)} if nothing overlaps',
                f'bound by {shown[self.bottleneck]}{used}',
                *filter(None, [self.not_compiled_for]),
                *(
                    f'  {name:<{widths[0]}}  {time:>{widths[1]}}  {along}'.rstrip()
                    for name, time, along in cells
                ),
            ]
        )


_PHASES: dict[str, tuple[Phase, ...]] = {
    'forward': ('other', 'forward'),
    'backward': ('backward', 'recomputed'),
    'update': ('update',),
}


def phase_times(work: DeviceCost, compute: float, hbm: float) -> tuple[PhaseTime, ...]:
    """The phases of a step that takes a gradient; none of another.

    Args:
        work: the work of one device.
        compute: the seconds of all its computing. Of kernels, phases have a part as of other operations.
        hbm: the seconds of all that it moves.
    """
    shares = [
        tuple(
            sum(amounts.get(part, 0) for part in parts) / (sum(amounts.values()) or 1)
            for parts in _PHASES.values()
        )
        for amounts in (work.by_phase, work.bytes_by_phase)
    ]
    if not any(any(of_parts[1:]) for of_parts in shares):
        return ()
    return tuple(
        PhaseTime(name, compute * of_flops, hbm * of_bytes)
        for name, of_flops, of_bytes in zip(_PHASES, *shares, strict=True)
    )


class Timed(NamedTuple):
    """The fields of a `Roofline` that are about communication."""

    communication: tuple[Communication, ...] = ()
    collectives: tuple[tuple[Collective, float], ...] = ()
    exactness: Exactness = Exactness.EXACT


def time_collectives(
    collectives: Sequence[Collective],
    mesh: Mapping[str, int],
    positions: Sequence[DevicePosition],
    device_kind: str,
    hardware: Hardware,
) -> Timed:
    """The seconds of the collectives of a step.

    Args:
        collectives: those of the step.
        mesh: mesh axis name -> size.
        positions: the positions of the devices, in the order of the mesh.
        device_kind: what JAX calls the devices, for messages.
        hardware: the hardware whose numbers are used.

    Raises:
        PlanError: a number of the hardware is unknown, or the devices are not in a torus.
    """
    if not collectives:
        return Timed()
    [torus_axes] = numbers_of(hardware, 'torus_axes', for_=COMMUNICATION)
    if not positions or (torus_axes and not all(position.coords for position in positions)):
        raise PlanError(
            f'{device_kind!r} devices are not in a torus, as chips of {hardware.name!r} are: give '
            "the axes of it that each mesh axis runs along: roofline(..., torus={'fsdp': (4, 4), 'tp': 4})"
        )
    per_chip = devices_per_chip(positions, hardware)
    alone: dict[tuple[Network, tuple[str, ...], tuple[TorusSegment, ...]], float] = collections.defaultdict(
        float
    )
    busy = alone.copy()
    timed, exactness = [], Exactness.EXACT
    for row, routes in zip(collectives, routes_of(collectives, mesh, positions, hardware), strict=True):
        exactness = exactness.combine(row.exactness)
        spent = 0.0
        senders = _senders(row, positions, hardware, per_chip)
        for network, route, seconds in _slowest(row, routes, hardware, per_chip, senders):
            segments, part = (
                (route.segments, part_of_links(row.kind, route)) if network == 'ici' else ((), 1.0)
            )
            alone[network, row.axes, segments] += row.count * seconds
            busy[network, row.axes, segments] += row.count * seconds * part
            spent += row.count * seconds
        timed.append((row, spent))
    rows = (Communication(*key, seconds, busy[key]) for key, seconds in alone.items())
    return Timed(tuple(sorted(rows, key=lambda row: (-row.seconds, row.name))), tuple(timed), exactness)


def _senders(
    row: Collective, positions: Sequence[DevicePosition], hardware: Hardware, per_chip: int
) -> float | None:
    """How many devices of each host send to another slice in a permute, if all hosts share that."""
    if not row.crossing:
        return None
    of_slice = len(positions) / len({position.slice for position in positions})
    of_host = min(of_slice, (hardware.chips_per_host or 1) * per_chip)
    return max(1.0, row.crossing * of_host / of_slice)


def routes_of(
    rows: Sequence[Collective],
    mesh: Mapping[str, int],
    positions: Sequence[DevicePosition],
    hardware: Hardware,
) -> list[set[Route]]:
    """The routes of the groups of each collective."""
    torus = torus_of(positions, hardware)
    known: dict[tuple[tuple[str, ...], tuple[int, ...]], set[Route]] = {}
    for row in rows:
        if (row.axes, row.part) not in known:
            known[row.axes, row.part] = set(_routes(row, mesh, positions, torus))
    return [known[row.axes, row.part] for row in rows]


def _routes(
    row: Collective, mesh: Mapping[str, int], positions: Sequence[DevicePosition], torus: Torus
) -> Iterable[Route]:
    """The route of each group of devices of a collective."""
    along = ' x '.join(row.axes)
    if row.part:
        yield route_of([positions[i] for i in row.part], torus, f'a part of {along}')
        return
    grid = np.arange(len(positions)).reshape(tuple(mesh.values()))
    own = [i for i, name in enumerate(mesh) if name in row.axes]
    rest = [i for i in range(grid.ndim) if i not in own]
    for group in grid.transpose([*rest, *own]).reshape(-1, devices_along(row.axes, mesh)):
        yield route_of([positions[i] for i in group], torus, along)


def _slowest(
    row: Collective, routes: Iterable[Route], hardware: Hardware, per_chip: int, senders: float | None
) -> Iterable[tuple[Network, Route, float]]:
    """The time of the slowest group on each network that carries the collective."""
    kind = 'reduce-scatter' if row.scattered else row.kind
    times = [
        (collective_seconds(kind, row.bytes, route, hardware, per_chip, senders), route) for route in routes
    ]
    for index, network in enumerate(NETWORKS):
        time, route = max(times, key=lambda timed: (timed[0][index], timed[1].segments))
        if time[index] and network in (row.networks or NETWORKS):
            yield network, route, time[index]
