"""What bounds a step? Seconds of computing, of memory and of each network, by the numbers of a hardware.

Of every number it says what cannot be beaten if all else overlaps (the *bound*), and what it takes if
nothing overlaps (the *estimate*): https://jax-ml.github.io/scaling-book/roofline, "Where Does the Time Go?".
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalax._plan.collective_cost import seconds_of
from scalax._plan.collectives import Collective
from scalax._plan.device_coords import NETWORKS, Network, Place
from scalax._plan.hardware import Hardware
from scalax._plan.hlo_loops import Counted
from scalax._plan.mesh_axes import devices_along
from scalax._plan.torus import Line, Route, Torus, route_of, torus_of
from scalax.errors import PlanError

if TYPE_CHECKING:
    from scalax._plan.plan import Plan


class Seconds(NamedTuple):
    """The time of a step.

    Attributes:
        bound: if computing, memory and all networks work at once: the longest of them.
        estimate: if they wait for one another: the sum.
    """

    bound: float
    estimate: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """What devices send one another along mesh axes, over one network, in one call.

    Attributes:
        network: ``'ici'`` inside a slice, ``'dcn'`` between slices, ``'chip'`` between the devices of a chip.
        axes: the mesh axes.
        lines: the axes of the torus that these lie along: which, how long, whether closed.
        seconds: how long all of it takes.
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
    """How long a step takes at least on some hardware, and why; ``str()`` of it is a table.

    Attributes:
        hardware: whose numbers it is made of.
        devices: how many devices run the step.
        peak: the operations a second of all of them.
        compute: seconds of computing.
        hbm: seconds of moving bytes between the memory and the cores of each device.
        communication: seconds of each network along each set of mesh axes, the longest first.
        model_flops: the operations that the model needs, as the plan was told; None if it was not.
        counted: how well the counts behind all this are known.
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
        """What takes how long: ``'compute'``, ``'hbm'``, ``'ici:tp'`` ... -> seconds."""
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
        """What takes longest: ``'compute'``, ``'hbm'``, ``'ici:tp'``, ``'dcn:data'`` ...

        Mesh axes may share links. Of those that share the busiest ones, it is the one that uses them most.
        """
        return max(self._busy(), key=lambda pair: pair[1])[0]

    @property
    def mfu(self) -> float | None:
        """The part of the peak that the model's own operations are, if the step takes no more than its bound.

        None unless the plan was told them (`Plan.with_model_flops`), and for a step that takes no time.
        """
        bound = self.step_seconds.bound
        return None if self.model_flops is None or not bound else self.model_flops / (self.peak * bound)

    def _busy(self) -> list[tuple[str, float]]:
        """How long each unit and each set of links is busy, by the name of what uses it most."""
        users: dict[tuple[str, int], list[Communication]] = collections.defaultdict(list)
        for row in self.communication:  # the longest first
            for link in [line.axis for line in row.lines] or [0]:
                users[row.network, link].append(row)
        links = [(rows[0].name, sum(row.seconds for row in rows)) for rows in users.values()]
        return [('compute', self.compute), ('hbm', self.hbm), *links]

    def __str__(self) -> str:
        step = self.step_seconds
        lines = {row.name: row.lines for row in reversed(self.communication)}  # those that take longest
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


def make_roofline(plan: Plan, hardware: Hardware, places: Sequence[Place]) -> Roofline:
    """See `Plan.roofline`, which is documented for users.

    Args:
        plan: the plan.
        hardware: whose numbers to use.
        places: where the devices of the mesh lie, in the order of the mesh.
    """
    hardware.need('flops_per_second', 'hbm_bytes_per_second', for_='a roofline')
    per_chip = _devices_per_chip(places, hardware)
    flops = max(plan.flops / plan.devices, plan.work.flops)
    memory = plan.memory
    moved = memory.arguments + memory.outputs + memory.donated + plan.work.bytes
    communication, counted = _communication(plan, hardware, places)
    return Roofline(
        hardware=hardware,
        devices=plan.devices,
        peak=plan.devices * (hardware.flops_per_second or 1) / per_chip,
        compute=flops * per_chip / (hardware.flops_per_second or 1),
        hbm=moved * per_chip / (hardware.hbm_bytes_per_second or 1),
        communication=communication,
        model_flops=plan.model_flops,
        counted=plan.flops_counted.along(plan.work.counted).along(counted),
    )


def _devices_per_chip(places: Sequence[Place], hardware: Hardware) -> int:
    """As devices say, else as the hardware has it, else one."""
    if any(place.coords for place in places):
        return max(collections.Counter((place.slice, place.coords) for place in places).values())
    return hardware.devices_per_chip or 1


def _communication(
    plan: Plan, hardware: Hardware, places: Sequence[Place]
) -> tuple[tuple[Communication, ...], Counted]:
    if not plan.collectives:
        return (), Counted.EXACTLY
    _require_places(hardware, places, plan.device_kind)
    torus = torus_of(places, hardware)
    per_chip = _devices_per_chip(places, hardware)
    routes: dict[tuple[tuple[str, ...], tuple[int, ...]], set[Route]] = {}
    total: dict[tuple[Network, tuple[str, ...], tuple[Line, ...]], float] = {}
    counted = Counted.EXACTLY
    for row in plan.collectives:
        counted = counted.along(row.counted)
        if (row.axes, row.part) not in routes:
            routes[row.axes, row.part] = set(_routes(row, plan.mesh, places, torus))
        for network, lines, seconds in _slowest(row, routes[row.axes, row.part], hardware, per_chip):
            key = network, row.axes, lines
            total[key] = total.get(key, 0.0) + row.count * seconds
    rows = (Communication(network, axes, lines, seconds) for (network, axes, lines), seconds in total.items())
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name))), counted


def _require_places(hardware: Hardware, places: Sequence[Place], device_kind: str) -> None:
    hardware.need('torus_axes', for_='a roofline of communication')
    if not places or (hardware.torus_axes and not all(place.coords for place in places)):
        raise PlanError(
            f'{device_kind!r} devices do not lie in a torus, as chips of {hardware.name!r} do: say along '
            "which of its axes each mesh axis is to lie: roofline(..., torus={'fsdp': (4, 4), 'tp': 4})"
        )


def _routes(
    row: Collective, mesh: Mapping[str, int], places: Sequence[Place], torus: Torus
) -> Iterable[Route]:
    """What joins each group of devices along the axes of a collective."""
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
    times = [(seconds_of(kind, row.bytes, route, hardware, per_chip), route) for route in routes]
    for place, network in enumerate(NETWORKS):
        seconds, lines = max((time[place], route.lines if network == 'ici' else ()) for time, route in times)
        if seconds:
            yield network, lines, seconds
