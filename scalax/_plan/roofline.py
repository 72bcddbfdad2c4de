"""The roofline of a step: seconds of computing, of memory and of each network, on some hardware.

Every time has a *bound*, the least time if everything overlaps, and an *estimate*, the time if nothing
overlaps: https://jax-ml.github.io/scaling-book/roofline, "Where Does the Time Go?".

The time of a collective: V is the bytes of the whole (gathered) array of one group, N its devices, w the
one-way bandwidth of a link, and hop the least time from one chip to the next
(https://jax-ml.github.io/scaling-book/sharding).

- all-gather and reduce-scatter: V / (w * ways), where *ways* is 2 for each ring and 1 for each line, at least
  hop * (half of each ring + the whole of each line). Where nothing is a ring, a chip receives only what it
  lacks: V (N - 1) / N. See the book's problems "AllGather time" and "AllGather latency".
- all-reduce: twice that.
- all-to-all: a quarter of V crosses the middle of the longest axis each way. On one ring that takes a quarter
  of an all-gather.
- collective-permute: each device sends its part to a neighbour, over one link.

Groups that share links (interleaved on one axis, or on the devices of one chip) share their bandwidth.
Between slices each device has its share of the bandwidth of its host, and receives what it lacks; the
members of a group that are in one slice share that work, and exchange it there
(https://jax-ml.github.io/scaling-book/training, "Scaling Across Pods"). Devices joined by a switch
(``torus_axes=0``) receive what they lack (https://jax-ml.github.io/scaling-book/gpus).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scalax._plan.collectives import Collective, Kind
from scalax._plan.formulas import Counted
from scalax._plan.hardware import Hardware, numbers_of
from scalax._plan.replica_groups import devices_along
from scalax._plan.torus import NETWORKS, Line, Network, Place, Route, Torus, route_of, torus_of
from scalax.errors import PlanError

_TWICE: tuple[Kind, ...] = ('all-reduce',)
_EXCHANGES: tuple[Kind, ...] = ('all-to-all', 'ragged-all-to-all')
_FOR = 'a roofline of communication'


class Seconds(NamedTuple):
    """The time of a step.

    Attributes:
        bound: the longest of computing, memory and each network, if all of them overlap.
        estimate: their sum, if nothing overlaps.
    """

    bound: float
    estimate: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """The communication along mesh axes over one network, in one call.

    Attributes:
        network: ``'ici'`` inside a slice, ``'dcn'`` between slices, ``'chip'`` between the devices of a chip.
        axes: the mesh axes.
        lines: the axes of the torus that they run along.
        seconds: the total time.
    """

    network: Network
    axes: tuple[str, ...]
    lines: tuple[Line, ...]
    seconds: float

    @property
    def name(self) -> str:
        """Such as ``'ici:tp'``."""
        return f'{self.network}:{"+".join(self.axes)}'


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time of a step on some hardware, and what bounds it; ``str()`` of it is a table.

    Attributes:
        hardware: the hardware whose numbers are used.
        devices: the number of devices that run the step.
        peak: the operations a second of all of them.
        compute: seconds of computing.
        hbm: seconds of moving bytes between the memory and the cores of each device.
        communication: seconds of each network along each set of mesh axes, the longest first.
        model_flops: the operations that the model needs; None if unknown.
        counted: how well the counts behind these numbers are known.
    """

    hardware: Hardware
    devices: int
    peak: float
    compute: float
    hbm: float
    communication: tuple[Communication, ...]
    model_flops: int | None = None
    counted: Counted = Counted.EXACTLY

    @property
    def parts(self) -> dict[str, float]:
        """The time of each part: ``'compute'``, ``'hbm'``, ``'ici:tp'`` ... -> seconds."""
        parts = {'compute': self.compute, 'hbm': self.hbm}
        for row in self.communication:
            parts[row.name] = parts.get(row.name, 0.0) + row.seconds
        return parts

    @property
    def step_seconds(self) -> Seconds:
        """The time of a step."""
        return Seconds(max(seconds for _, seconds in self._busy()), sum(self.parts.values()))

    @property
    def bound(self) -> str:
        """The longest part: ``'compute'``, ``'hbm'``, ``'ici:tp'``, ``'dcn:data'`` ...

        If mesh axes share the busiest links, it is the one that uses them most.
        """
        return max(self._busy(), key=lambda pair: pair[1])[0]

    @property
    def mfu(self) -> float | None:
        """The model's own operations as a part of the peak, if the step takes no longer than its bound.

        None if the model's operations are unknown (see `Plan.with_model_flops`), or the step takes no time.
        """
        bound = self.step_seconds.bound
        return None if self.model_flops is None or not bound else self.model_flops / (self.peak * bound)

    def _busy(self) -> list[tuple[str, float]]:
        """The busy seconds of each unit and each set of links, under the name of its largest user."""
        users: dict[tuple[str, int], list[Communication]] = collections.defaultdict(list)
        for row in self.communication:  # the longest first
            for link in [line.axis for line in row.lines] or [0]:
                users[row.network, link].append(row)
        links = [(rows[0].name, sum(row.seconds for row in rows)) for rows in users.values()]
        return [('compute', self.compute), ('hbm', self.hbm), *links]

    def __str__(self) -> str:
        step = self.step_seconds
        lines = {row.name: row.lines for row in reversed(self.communication)}  # the longest of each name
        cells = [
            (name, f'{1e3 * seconds:,.3f} ms', ' x '.join(map(_line_text, lines.get(name, ()))))
            for name, seconds in self.parts.items()
        ]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        known = '' if self.counted is Counted.EXACTLY else f' ({self.counted.value})'
        used = '' if self.mfu is None else f'; MFU at most {self.mfu:.1%}'
        return '\n'.join(
            [
                f'one call on {self.devices} devices of {self.hardware.name}{known}: '
                f'{1e3 * step.bound:,.3f} ms if all overlaps, {1e3 * step.estimate:,.3f} ms if nothing does',
                f'bound by {self.bound}{used}',
                *(
                    f'  {name:<{widths[0]}}  {time:>{widths[1]}}  {along}'.rstrip()
                    for name, time, along in cells
                ),
            ]
        )


def _line_text(line: Line) -> str:
    apart = f', {line.stride} links apart' if line.stride > 1 else ''
    return f'{"ring" if line.ring else "line"} of {line.length} (axis {line.axis}{apart})'


def communication_of(
    collectives: Sequence[Collective],
    mesh: Mapping[str, int],
    places: Sequence[Place],
    device_kind: str,
    hardware: Hardware,
) -> tuple[tuple[Communication, ...], Counted]:
    """The communication of a step, the longest first, and how well its collectives are counted.

    Args:
        collectives: those of the step.
        mesh: mesh axis name -> size.
        places: the positions of the devices, in the order of the mesh.
        device_kind: what JAX calls the devices, for messages.
        hardware: the hardware whose numbers are used.

    Raises:
        PlanError: a number of the hardware is unknown, or the devices are not in a torus.
    """
    if not collectives:
        return (), Counted.EXACTLY
    _require_torus(hardware, places, device_kind)
    torus = torus_of(places, hardware)
    routes: dict[tuple[tuple[str, ...], tuple[int, ...]], set[Route]] = {}
    total: dict[tuple[Network, tuple[str, ...], tuple[Line, ...]], float] = {}
    counted = Counted.EXACTLY
    for row in collectives:
        counted = counted.along(row.counted)
        if (row.axes, row.part) not in routes:
            routes[row.axes, row.part] = set(_routes(row, mesh, places, torus))
        for network, lines, seconds in _slowest(
            row, routes[row.axes, row.part], hardware, torus.devices_per_chip
        ):
            key = network, row.axes, lines
            total[key] = total.get(key, 0.0) + row.count * seconds
    rows = (Communication(network, axes, lines, seconds) for (network, axes, lines), seconds in total.items())
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name))), counted


def _require_torus(hardware: Hardware, places: Sequence[Place], device_kind: str) -> None:
    hardware.need('torus_axes', for_=_FOR)
    if not places or (hardware.torus_axes and not all(place.coords for place in places)):
        raise PlanError(
            f'{device_kind!r} devices are not in a torus, as chips of {hardware.name!r} are: say along '
            "which of its axes each mesh axis runs: roofline(..., torus={'fsdp': (4, 4), 'tp': 4})"
        )


def _routes(
    row: Collective, mesh: Mapping[str, int], places: Sequence[Place], torus: Torus
) -> Iterable[Route]:
    """The route of each group of devices of a collective."""
    along = ' x '.join(row.axes)
    if row.part:
        yield route_of([places[i] for i in row.part], torus, f'a part of {along}')
        return
    grid = np.arange(len(places)).reshape(tuple(mesh.values()))
    own = [i for i, name in enumerate(mesh) if name in row.axes]
    rest = [i for i in range(grid.ndim) if i not in own]
    for group in grid.transpose([*rest, *own]).reshape(-1, devices_along(row.axes, mesh)):
        yield route_of([places[i] for i in group], torus, along)


def _slowest(
    row: Collective, routes: Iterable[Route], hardware: Hardware, per_chip: int
) -> Iterable[tuple[Network, tuple[Line, ...], float]]:
    """The time of the slowest group on each network."""
    kind = 'reduce-scatter' if row.scattered else row.kind
    times = [(collective_seconds(kind, row.bytes, route, hardware, per_chip), route) for route in routes]
    for place, network in enumerate(NETWORKS):
        seconds, lines = max((time[place], route.lines if network == 'ici' else ()) for time, route in times)
        if seconds:
            yield network, lines, seconds


class NetworkSeconds(NamedTuple):
    """The seconds of one collective on each network."""

    ici: float = 0.0
    dcn: float = 0.0
    chip: float = 0.0


def collective_seconds(
    kind: Kind, whole: float, route: Route, hardware: Hardware, per_chip: int
) -> NetworkSeconds:
    """The time of one collective.

    Args:
        kind: the kind of the collective.
        whole: the bytes of the whole array of one group.
        route: the links that join the devices of the group.
        hardware: the hardware that has these links.
        per_chip: how many devices share a chip.

    Raises:
        PlanError: a number of the hardware is unknown.

    Example:
        >>> from scalax._plan.hardware import HARDWARE
        >>> from scalax._plan.torus import Line
        >>> ring = Route(1, 4, 4, (Line(0, 4, True),))
        >>> round(1e6 * collective_seconds('all-gather', 2 * 1024 * 4096 / 4, ring, HARDWARE['v4'], 1).ici, 1)
        23.3
    """
    times = 2 if kind in _TWICE else 1
    inside = whole / route.slices if kind in _EXCHANGES else whole
    ici = chip = dcn = 0.0
    if route.chips > 1:
        join = _on_torus if route.lines else _on_switch
        ici = times * join(kind, inside, route, hardware)
    elif route.devices > 1:
        [hbm_rate] = numbers_of(hardware, 'hbm_bytes_per_second', for_=_FOR)
        chip = times * inside / hbm_rate
    if route.slices > 1:
        dcn = times * _between_slices(kind, whole, route, hardware, per_chip)
    return NetworkSeconds(ici, dcn, chip)


def _on_torus(kind: Kind, whole: float, route: Route, hardware: Hardware) -> float:
    [link_rate] = numbers_of(hardware, 'ici_bytes_per_second', for_=_FOR)
    link = link_rate / route.crowd
    hop = hardware.hop_seconds
    if kind == 'collective-permute':
        way = max(line.ways / (2 if line.ring else 1) for line in route.lines)
        return max(hop * min(line.stride for line in route.lines), whole / route.size / (link * way))
    least = hop * sum(line.hops for line in route.lines)
    if kind in _EXCHANGES:
        box = math.prod(line.length for line in route.lines)
        middles = (link * line.ways * box / line.length for line in route.lines)
        return max(least, max(whole / 4 / middle for middle in middles))
    ring = any(line.ring for line in route.lines)
    lacking = whole if ring else whole * (route.chips - 1) / route.chips
    return max(least, lacking / (link * sum(line.ways for line in route.lines)))


def _on_switch(kind: Kind, whole: float, route: Route, hardware: Hardware) -> float:
    [link_rate] = numbers_of(hardware, 'ici_bytes_per_second', for_=_FOR)
    return max(hardware.hop_seconds, _lacking(kind, whole, route.devices, route.size) / link_rate)


def _between_slices(kind: Kind, whole: float, route: Route, hardware: Hardware, per_chip: int) -> float:
    host_rate, chips = numbers_of(
        hardware, 'dcn_bytes_per_second', 'chips_per_host', for_=f'{_FOR} between slices'
    )
    share = host_rate / (chips * per_chip)
    part = whole if kind in (*_EXCHANGES, 'collective-permute') else whole / route.devices
    return _lacking(kind, part, route.slices, route.size) / share


def _lacking(kind: Kind, whole: float, parts: int, devices: int) -> float:
    """The bytes that one device has to receive of *whole* bytes that are spread over *parts* places."""
    if kind == 'collective-permute':
        return whole / devices
    lacking = whole * (parts - 1) / parts
    return lacking / devices if kind in _EXCHANGES else lacking
