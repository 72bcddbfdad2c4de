"""The roofline of a step: the seconds of compute, HBM, host transfers and each network on some hardware.

A step has an *overlapped* time, if everything overlaps that can, and a *serial* time, if nothing overlaps
(https://jax-ml.github.io/scaling-book/roofline, "Where Does the Time Go?"). The forward pass, the backward
pass and the update run in sequence, as each needs the results of the one before. Compute and HBM traffic
overlap within each of them, and communication overlaps with everything.
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
from scalax._planning.hardware.specs import Hardware, network_text, required_specs
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
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.phases import Phase
from scalax._planning.program.replica_groups import devices_along
from scalax._planning.time.collective_time import COMMUNICATION, collective_seconds, link_fraction
from scalax.errors import PlanError


class StepTime(NamedTuple):
    """The time of a step.

    Attributes:
        overlapped: the time if everything overlaps that can, a lower bound: the longest of each network, the
            link to the host, and the sequence of phases, each bound by its compute or its HBM traffic.
        serial: the time if nothing overlaps: the sum of all parts.
    """

    overlapped: float
    serial: float


class PhaseTime(NamedTuple):
    """The time of one phase of a step on each device.

    Attributes:
        name: ``'forward'``, ``'backward'`` (including recomputation) or ``'update'``; ``'step'`` without a
            gradient.
        compute: seconds of compute.
        hbm: seconds of HBM traffic.
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
        segments: the segments of the torus along which the groups communicate.
        seconds: the total time, one collective after the other.
        busy: the time that links are in use if permutes over different links run at the same time.
    """

    network: Network
    axes: tuple[str, ...]
    segments: tuple[TorusSegment, ...]
    seconds: float
    busy: float

    @property
    def name(self) -> str:
        """The network and the axes, such as ``'ici:tp'``."""
        return f'{self.network}:{"+".join(self.axes)}'


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time of a step on some hardware, and its bottleneck; ``str()`` of it is a table.

    Attributes:
        hardware: the hardware.
        devices: the number of devices that run the step.
        peak: the FLOP/s of all devices together.
        compute: seconds of compute.
        hbm: seconds of HBM traffic of each device.
        communication: the time of each network along each set of mesh axes, the longest first.
        collectives: the collectives of the plan, each with the seconds of all its executions in sequence.
        model_flops: the FLOPs that the model needs; None if unknown.
        exactness: the exactness of the counts that the times are computed from.
        to_host: seconds of writing to host memory.
        from_host: seconds of reading from host memory, which may overlap with writing.
        compiled_for: JAX's name of the devices that the program was compiled for; empty if unknown.
        phases: compute and HBM time of each phase of the step; empty if the step has only one phase.
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
        """A note that the program was compiled for other devices than `hardware`; empty if it was not.

        Example:
            >>> from scalax.plan import HARDWARE
            >>> roofline = Roofline(HARDWARE['h100'], 8, 8e15, 1.0, 1.0, (), compiled_for='cpu')
            >>> roofline.not_compiled_for
            'not compiled for h100: this is the program for cpu devices, timed with the specs of h100'
        """
        if not self.compiled_for or self.compiled_for in self.hardware.device_kinds:
            return ''
        return (
            f'not compiled for {self.hardware.name}: this is the program for {self.compiled_for} devices, '
            f'timed with the specs of {self.hardware.name}'
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

        If several sets of mesh axes share the busiest links, it is the one that uses them most. If the phases
        take longest, it is ``'compute'`` or ``'hbm'``, whichever bounds more of their time.
        """
        return max(self._busy(), key=lambda pair: pair[1])[0]

    @property
    def mfu(self) -> float | None:
        """The model FLOPs utilization if the step takes its overlapped time, which makes it an upper bound.

        None if the FLOPs of the model are unknown (see `Plan.with_model_flops`), or the step takes no time.
        """
        seconds = self.step_seconds.overlapped
        return None if self.model_flops is None or not seconds else self.model_flops / (self.peak * seconds)

    def _busy(self) -> list[tuple[str, float]]:
        """Returns the busy seconds of each unit and each set of links, with the name of its largest user."""
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
        """The time of the link to the host in each direction, if the step uses it."""
        directions = {'host:out': self.to_host, 'host:in': self.from_host}
        return {name: seconds for name, seconds in directions.items() if seconds}

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
        exactness = '' if self.exactness is Exactness.EXACT else f' ({self.exactness.value})'
        utilization = ''
        if self.mfu is not None and self.model_flops is not None:
            utilization = f'; MFU at most {self.mfu:.1%}: the model needs {human_flops(self.model_flops)}'
            if self.mfu > 1:
                utilization += ', more than the program computes: attention may skip what a mask hides'
        return '\n'.join(
            [
                f'one call on {self.devices} devices of {self.hardware.name}{exactness}: '
                f'at least {milliseconds(step.overlapped)}, {milliseconds(step.serial)} if nothing overlaps',
                f'bound by {shown[self.bottleneck]}{utilization}',
                *filter(None, [self.not_compiled_for]),
                *(
                    f'  {name:<{widths[0]}}  {time:>{widths[1]}}  {along}'.rstrip()
                    for name, time, along in cells
                ),
            ]
        )


_PHASES_IN_SEQUENCE: dict[str, tuple[Phase, ...]] = {
    'forward': ('other', 'forward'),
    'backward': ('backward', 'recomputed'),
    'update': ('update',),
}


def phase_times(cost: DeviceCost, compute: float, hbm: float) -> tuple[PhaseTime, ...]:
    """Splits the time of a step into its phases. Returns none for a step without a gradient.

    Args:
        cost: the cost of one device.
        compute: the seconds of its compute, including kernels, which are attributed to phases in proportion
            to the other operations.
        hbm: the seconds of its HBM traffic.
    """
    shares = [
        tuple(
            sum(amounts.get(phase, 0) for phase in phases) / (sum(amounts.values()) or 1)
            for phases in _PHASES_IN_SEQUENCE.values()
        )
        for amounts in (cost.by_phase, cost.bytes_by_phase)
    ]
    if not any(any(phase_shares[1:]) for phase_shares in shares):
        return ()
    return tuple(
        PhaseTime(name, compute * flops_share, hbm * bytes_share)
        for name, flops_share, bytes_share in zip(_PHASES_IN_SEQUENCE, *shares, strict=True)
    )


_Links = tuple[Network, tuple[str, ...], tuple[TorusSegment, ...]]
"""A network, mesh axes along it, and their segments of the torus."""


class CommunicationTimes(NamedTuple):
    """The fields of a `Roofline` about communication."""

    communication: tuple[Communication, ...] = ()
    collectives: tuple[tuple[Collective, float], ...] = ()
    exactness: Exactness = Exactness.EXACT


def time_collectives(
    collectives: Sequence[Collective],
    mesh: Mapping[str, int],
    positions: Sequence[DevicePosition],
    device_kind: str,
    hardware: Hardware,
) -> CommunicationTimes:
    """Returns the seconds of the collectives of a step.

    Args:
        collectives: the collectives.
        mesh: mesh axis name -> size.
        positions: the positions of the devices, in the order of the mesh.
        device_kind: JAX's name of the devices, for messages.
        hardware: the hardware.

    Raises:
        PlanError: a required spec is unknown, or the devices are not in a torus.
    """
    if not collectives:
        return CommunicationTimes()
    [torus_axes] = required_specs(hardware, 'torus_axes', for_=COMMUNICATION)
    if not positions or (torus_axes and not all(position.coords for position in positions)):
        raise PlanError(
            f'{device_kind!r} devices are not in a torus like chips of {hardware.name!r}: pass '
            "the torus axes that each mesh axis runs along: roofline(..., torus={'fsdp': (4, 4), 'tp': 4})"
        )
    per_chip = devices_per_chip(positions, hardware)
    serial: dict[_Links, float] = collections.defaultdict(float)
    busy: dict[_Links, float] = collections.defaultdict(float)
    timed_collectives, exactness = [], Exactness.EXACT
    for row, routes in zip(collectives, routes_of(collectives, mesh, positions, hardware), strict=True):
        exactness = exactness.combine(row.exactness)
        total = 0.0
        senders = _senders_per_host(row, positions, hardware, per_chip)
        for network, route, seconds in _slowest(row, routes, hardware, per_chip, senders):
            is_ici = network == 'ici'
            segments, fraction = (route.segments, link_fraction(row.kind, route)) if is_ici else ((), 1.0)
            serial[network, row.axes, segments] += row.count * seconds
            busy[network, row.axes, segments] += row.count * seconds * fraction
            total += row.count * seconds
        timed_collectives.append((row, total))
    rows = (Communication(*key, seconds, busy[key]) for key, seconds in serial.items())
    communication = tuple(sorted(rows, key=lambda row: (-row.seconds, row.name)))
    return CommunicationTimes(communication, tuple(timed_collectives), exactness)


def _senders_per_host(
    row: Collective, positions: Sequence[DevicePosition], hardware: Hardware, per_chip: int
) -> float | None:
    """Returns how many devices of each host send to another slice in a permute, assuming equal hosts."""
    if not row.crossing:
        return None
    slice_size = len(positions) / len({position.slice for position in positions})
    host_size = min(slice_size, (hardware.chips_per_host or 1) * per_chip)
    return max(1.0, row.crossing * host_size / slice_size)


def routes_of(
    rows: Sequence[Collective],
    mesh: Mapping[str, int],
    positions: Sequence[DevicePosition],
    hardware: Hardware,
) -> list[set[Route]]:
    """Returns the routes of the groups of each collective."""
    torus = torus_of(positions, hardware)
    cache: dict[tuple[tuple[str, ...], tuple[int, ...]], set[Route]] = {}
    for row in rows:
        if (row.axes, row.replica_group) not in cache:
            cache[row.axes, row.replica_group] = set(_group_routes(row, mesh, positions, torus))
    return [cache[row.axes, row.replica_group] for row in rows]


def _group_routes(
    row: Collective, mesh: Mapping[str, int], positions: Sequence[DevicePosition], torus: Torus
) -> Iterable[Route]:
    """Yields the route of each group of devices of a collective."""
    along = ' x '.join(row.axes)
    if row.replica_group:
        yield route_of([positions[i] for i in row.replica_group], torus, f'a part of {along}')
        return
    grid = np.arange(len(positions)).reshape(tuple(mesh.values()))
    group_dims = [i for i, name in enumerate(mesh) if name in row.axes]
    other_dims = [i for i in range(grid.ndim) if i not in group_dims]
    for group in grid.transpose([*other_dims, *group_dims]).reshape(-1, devices_along(row.axes, mesh)):
        yield route_of([positions[i] for i in group], torus, along)


def _slowest(
    row: Collective, routes: Iterable[Route], hardware: Hardware, per_chip: int, senders: float | None
) -> Iterable[tuple[Network, Route, float]]:
    """Yields the route and the time of the slowest group on each network that carries a collective."""
    kind = 'reduce-scatter' if row.scattered else row.kind
    times = [
        (collective_seconds(kind, row.bytes, route, hardware, per_chip, senders), route) for route in routes
    ]
    for i, network in enumerate(NETWORKS):
        seconds, route = max(times, key=lambda item: (item[0][i], item[1].segments))
        if seconds[i] and network in (row.networks or NETWORKS):
            yield network, route, seconds[i]
