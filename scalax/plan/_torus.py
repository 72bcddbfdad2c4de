"""What joins the devices of a group? Rings and lines of the torus of chips, and the data centre's network.

A group of devices is read off their coordinates. In each slice its chips have to form a box whose members
are evenly spaced along each axis of the torus: that is what meshes give, also where one axis of the torus
serves several mesh axes (its groups are then segments of it, or are interleaved on it), or a mesh axis takes
several axes of the torus. Anything else is refused rather than guessed at.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from scalax.errors import PlanError
from scalax.plan._hardware import Hardware
from scalax.plan._places import Place


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
        crowd: how many groups share each chip, and so its links.
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
    chips = {place.coords for place in members}
    cores = len(members) // len(chips)
    lines = []
    for axis, places in enumerate(zip(*chips, strict=True)):
        line = _line(axis, sorted(set(places)), torus, along)
        lines += [line] if line.length > 1 else []
    full = math.prod(line.length for line in lines)
    if not torus.extents:
        return Route(1, len(members), len(members), ())
    if full != len(chips) or cores * len(chips) != len(members):
        raise PlanError(
            f'the {len(members)} devices along {along} do not fill a box of the torus '
            f'({"x".join(map(str, torus.extents))}): what they send one another cannot be timed'
        )
    return Route(1, len(members), len(chips), tuple(lines), torus.devices_per_chip // cores)


def _line(axis: int, places: list[int], torus: Torus, along: str) -> Line:
    steps = {after - before for before, after in itertools.pairwise(places)}
    if len(steps) > 1:
        raise PlanError(
            f'the devices along {along} are unevenly spaced along axis {axis} of the torus (at '
            f'{", ".join(map(str, places))}): what they send one another cannot be timed'
        )
    stride = steps.pop() if steps else 1
    whole = len(places) * stride == torus.extents[axis]
    return Line(axis, len(places), ring=torus.rings[axis] and whole, stride=stride)
