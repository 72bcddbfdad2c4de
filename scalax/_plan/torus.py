"""What joins the devices of a group? Rings and lines of the torus of chips, and the data centre's network.

A group of devices is read off their coordinates. In each slice its chips form a box whose members are evenly
spaced along each axis of the torus: that is what most meshes give, also where one axis of the torus serves
several mesh axes (its groups are then segments of it, or are interleaved on it), or a mesh axis takes several
axes of the torus. A group of another form, such as every other chip of a path that winds through the torus,
is taken to use the links of the smallest box around it, and to share them with the other groups in there.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from scalax._plan.device_coords import Place
from scalax._plan.hardware import Hardware
from scalax.errors import PlanError


@dataclasses.dataclass(frozen=True, order=True)
class Line:
    """Chips along one axis of the torus.

    Attributes:
        axis: which axis.
        length: how many chips of the group lie along it.
        ring: whether the last is joined to the first.
        stride: the links between one and the next. So many groups lie interleaved, and share every link.
    """

    axis: int
    length: int
    ring: bool
    stride: int = 1

    @property
    def ways(self) -> float:
        """The links into the chip that has the fewest: two in a ring, one at the end of a line."""
        return (2 if self.ring else 1) / self.stride

    @property
    def hops(self) -> float:
        """The links to the farthest chip; on average of both directions in a ring, as the book counts."""
        return self.stride * (self.length / 2 if self.ring else self.length - 1)


@dataclasses.dataclass(frozen=True)
class Route:
    """What joins the devices of one group.

    Attributes:
        slices: over how many slices it extends.
        devices: how many of its devices lie in each slice.
        chips: on how many chips these are.
        lines: the axes of the torus along which these chips lie.
        crowd: how many groups share the links: through the devices of a chip, or the box that they lie in.
    """

    slices: int
    devices: int
    chips: int
    lines: tuple[Line, ...]
    crowd: int = 1


@dataclasses.dataclass(frozen=True)
class Torus:
    """The slices in which the devices of a mesh lie.

    Attributes:
        extents: how long each axis of the torus is.
        devices_per_chip: how many devices share a chip.
        rings: which axes of the torus are closed.
    """

    extents: tuple[int, ...]
    devices_per_chip: int
    rings: tuple[bool, ...]


def torus_of(places: Sequence[Place], hardware: Hardware) -> Torus:
    """The torus of the slices that devices fill.

    Raises:
        PlanError: it has more axes than that of the hardware, or a number of that is not known.
    """
    coords = [place.coords for place in places]
    chips = collections.Counter((place.slice, place.coords) for place in places)
    extents = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
    long = sum(extent > 1 for extent in extents)
    if hardware.torus_axes is not None and long > hardware.torus_axes:
        raise PlanError(
            f'the devices lie along {long} axes of a torus ({"x".join(map(str, extents))}), '
            f'but that of {hardware.name!r} has {hardware.torus_axes}'
        )
    if long:
        hardware.need('ring_multiple', for_='a roofline of communication along a torus')
    multiple = hardware.ring_multiple
    closed = tuple(bool(multiple) and extent % (multiple or 1) == 0 for extent in extents)
    if hardware.ring_needs_all:
        closed = (all(closed),) * len(extents)
    per_chip = max(chips.values()) if extents else hardware.devices_per_chip or 1
    return Torus(
        extents, per_chip, tuple(extent > 1 and ring for extent, ring in zip(extents, closed, strict=True))
    )


def route_of(group: Sequence[Place], torus: Torus, along: str) -> Route:
    """What joins the devices of one group.

    Args:
        group: where they lie.
        torus: the torus of their slices.
        along: what to call the group in messages.

    Raises:
        PlanError: they lie in a way that is not understood.

    Example:
        >>> places = [Place(0, (x, y)) for x in range(16) for y in range(4)]
        >>> route_of(places[::4], Torus((16, 4), 1, (True, False)), 'data').lines
        (Line(axis=0, length=16, ring=True, stride=1),)
    """
    slices: dict[int, list[Place]] = {}
    for place in group:
        slices.setdefault(place.slice, []).append(place)
    routes = {_inside(members, torus, along) for members in slices.values()}
    if len(routes) > 1:
        raise PlanError(f'the devices along {along} lie otherwise in one slice than in another')
    return dataclasses.replace(routes.pop(), slices=len(slices))


def _inside(members: Sequence[Place], torus: Torus, along: str) -> Route:
    """What joins those members of a group that lie in one slice."""
    if not torus.extents:
        return Route(1, len(members), len(members), ())
    chips = {place.coords for place in members}
    cores, rest = divmod(len(members), len(chips))
    if rest:
        raise PlanError(
            f'of some chips one device lies along {along}, of others {cores + 1}: '
            'what they send one another cannot be timed'
        )
    crowd = torus.devices_per_chip // cores
    along_each: list[Sequence[int]] = [sorted(set(places)) for places in zip(*chips, strict=True)]
    strides = [{after - before for before, after in itertools.pairwise(places)} for places in along_each]
    even = all(len(steps) <= 1 for steps in strides)
    if not even or math.prod(map(len, along_each)) != len(chips):
        # The others that lie in this box use its links as well.
        along_each = [range(places[0], places[-1] + 1) for places in along_each]
        strides = [{1}] * len(along_each)
        crowd *= -(-math.prod(map(len, along_each)) // len(chips))
    lines = (
        Line(axis, len(places), torus.rings[axis] and len(places) * stride == torus.extents[axis], stride)
        for axis, (places, (stride, *_)) in enumerate(
            zip(along_each, (steps or {1} for steps in strides), strict=True)
        )
        if len(places) > 1
    )
    return Route(1, len(members), len(chips), tuple(lines), crowd)
