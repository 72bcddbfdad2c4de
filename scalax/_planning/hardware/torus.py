"""Positions of devices in the torus of chips, and the links that join the devices of a group.

In most meshes the chips of a group are evenly spaced along each axis of the torus, in a box of each slice. If
one axis of the torus serves several mesh axes, the groups are segments of it, or are interleaved on it. Chips
of another form, such as every other chip of a path that winds through the torus, are assumed to use the links
of the smallest box around them, and to share these with the other groups in the box.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from scalax._jax.devices import coords_of, core_of, slice_of
from scalax._planning.hardware.specs import Hardware, numbers_of
from scalax._planning.program.replica_groups import Groups
from scalax.errors import PlanError, did_you_mean

Network = Literal['ici', 'dcn', 'chip']
NETWORKS: tuple[Network, ...] = get_args(Network)
_DIRECTIONS = 'xyz'


class DevicePosition(NamedTuple):
    """The position of one device.

    Attributes:
        slice: the slice, in which devices are joined without the data-center network; the host if JAX
            reports no slice.
        coords: the coordinates of its chip in the torus; empty if there is no torus.
        core: its number among the devices of its chip.
    """

    slice: int
    coords: tuple[int, ...] = ()
    core: int = 0


def positions_of(devices: Iterable[Any]) -> tuple[DevicePosition, ...]:
    """The positions that devices report, in their order."""
    return tuple(map(_position, devices))


def _position(device: Any) -> DevicePosition:
    coords, index = coords_of(device), slice_of(device)
    # TPUs of a single slice may have no index; GPUs and CPUs have none, and count as one slice a host.
    if index is None:
        index = 0 if coords else device.process_index
    return DevicePosition(index, coords, core_of(device))


def networks_of(
    groups: Groups, positions: Sequence[DevicePosition], *, switched: bool = False
) -> tuple[Network, ...]:
    """The networks that groups need: 'ici' between chips, 'dcn' between slices, 'chip' inside a chip.

    Args:
        groups: one row a group, of indices into *positions*.
        positions: the positions of the devices of the mesh, in the order of the mesh.
        switched: whether slices without a torus are nodes, whose devices are joined all the same.

    Returns:
        Every network that some group needs; none if nothing is known to join the devices.

    Example:
        >>> positions = [DevicePosition(slice, (x,)) for slice in range(2) for x in range(2)]
        >>> (
        ...     networks_of(np.array([[0, 2], [1, 3]]), positions),
        ...     networks_of(np.array([[0, 1, 2, 3]]), positions),
        ... )
        (('dcn',), ('ici', 'dcn'))
    """
    if not positions or not (switched or all(position.coords for position in positions)):
        return ()
    used: set[Network] = set()
    for group in groups.tolist():
        slices: dict[int, list[tuple[int, ...]]] = collections.defaultdict(list)
        for device in group:
            slices[positions[device].slice].append(positions[device].coords or (device,))
        used |= {'dcn'} if len(slices) > 1 else set()
        used |= {'ici' if len({*chips}) > 1 else 'chip' for chips in slices.values() if len(chips) > 1}
    return tuple(network for network in NETWORKS if network in used)


def positions_on_torus(
    torus: Mapping[str, int | Sequence[int]], mesh: Mapping[str, int], hardware: Hardware
) -> tuple[DevicePosition, ...]:
    """The positions of devices if each mesh axis has its own axes of the torus, and each device is a chip.

    Args:
        torus: mesh axis -> the lengths of the axes of the torus that it runs along. Mesh axes that are not
            named run across slices.
        mesh: mesh axis -> size.
        hardware: the hardware that has the torus.

    Raises:
        PlanError: it does not fit the mesh or the torus.

    Example:
        >>> from scalax._planning.hardware.specs import HARDWARE
        >>> positions_on_torus({'tp': 2}, {'data': 2, 'tp': 2}, HARDWARE['v5e'])[1:3]
        (DevicePosition(slice=0, coords=(1, 0), core=0), DevicePosition(slice=1, coords=(0, 0), core=0))
    """
    [dimensions] = numbers_of(hardware, 'torus_axes', for_='torus=')
    lengths = {name: (value,) if isinstance(value, int) else tuple(value) for name, value in torus.items()}
    for name, wanted in lengths.items():
        if name not in mesh:
            raise PlanError(
                f'torus= names {name!r}, which is no axis of the mesh ({did_you_mean(name, mesh)})'
            )
        if math.prod(wanted) != mesh[name]:
            raise PlanError(
                f'torus={{{name!r}: {wanted}}} has {math.prod(wanted)} chips, '
                f'but the mesh axis {name!r} has {mesh[name]}'
            )
    used = sum(map(len, lengths.values()))
    if used > dimensions:
        raise PlanError(f'torus= uses {used} axes, but the torus of {hardware.name!r} has {dimensions}')
    slices = {name: size for name, size in mesh.items() if name not in lengths}
    positions = []
    for index in np.ndindex(tuple(mesh.values())):
        at = dict(zip(mesh, index, strict=True))
        coords = [int(i) for name, wanted in lengths.items() for i in np.unravel_index(at[name], wanted)]
        across = 0
        for name, size in slices.items():
            across = across * size + at[name]
        positions.append(DevicePosition(across, (*coords, *(0,) * (dimensions - used))))
    return tuple(positions)


def positions_in_nodes(positions: Sequence[DevicePosition], hardware: Hardware) -> tuple[DevicePosition, ...]:
    """The positions of simulated devices if they stand for hardware in nodes: these are filled in order.

    Others stay as they are: those of hardware with a torus, or in a torus, or in several processes.

    Example:
        >>> from scalax._planning.hardware.specs import HARDWARE
        >>> [position.slice for position in positions_in_nodes([DevicePosition(0)] * 10, HARDWARE['h100'])]
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    """
    each = hardware.chips_per_slice or hardware.chips_per_host
    if (
        hardware.torus_axes != 0
        or each is None
        or any(position != DevicePosition(0) for position in positions)
    ):
        return tuple(positions)
    return tuple(DevicePosition(i // each) for i in range(len(positions)))


@dataclasses.dataclass(frozen=True, order=True)
class TorusSegment:
    """Chips along one axis of the torus.

    Attributes:
        axis: the axis.
        length: the number of chips of the group along it.
        ring: whether the last chip is joined to the first.
        stride: the links between one chip and the next; also the number of interleaved groups, which share
            every link.
    """

    axis: int
    length: int
    ring: bool
    stride: int = 1

    @property
    def ways(self) -> float:
        """The links into the chip with the fewest: two in a ring, one at the end of a line."""
        return (2 if self.ring else 1) / self.stride

    @property
    def hops(self) -> float:
        """The links to the farthest chip; in a ring the average of both directions, as the book counts."""
        return self.stride * (self.length / 2 if self.ring else self.length - 1)


def segment_text(segment: TorusSegment) -> str:
    """Where chips are along an axis of the torus.

    Example:
        >>> segment_text(TorusSegment(0, 4, True)), segment_text(TorusSegment(2, 4, False, 2))
        ('ring of 4 along x', 'line of 4 along z, 2 links apart')
    """
    apart = f', {segment.stride} links apart' if segment.stride > 1 else ''
    direction = _DIRECTIONS[segment.axis] if segment.axis < len(_DIRECTIONS) else f'axis {segment.axis}'
    return f'{"ring" if segment.ring else "line"} of {segment.length} along {direction}{apart}'


@dataclasses.dataclass(frozen=True)
class Route:
    """The links that join the devices of one group.

    Attributes:
        slices: the number of slices.
        devices: the number of its devices in each slice.
        chips: the number of chips that these are on.
        segments: the axes of the torus along which these chips are.
        groups_sharing_links: the number of groups that use the same links, because they
            share chips or a box of the torus.
    """

    slices: int
    devices: int
    chips: int
    segments: tuple[TorusSegment, ...]
    groups_sharing_links: int = 1

    @property
    def size(self) -> int:
        """The number of devices of the group."""
        return self.slices * self.devices


@dataclasses.dataclass(frozen=True)
class Torus:
    """The torus of the slices of a mesh.

    Attributes:
        extents: the length of each axis of the torus.
        devices_per_chip: the number of devices that share a chip.
        rings: which axes of the torus are closed.
    """

    extents: tuple[int, ...]
    devices_per_chip: int
    rings: tuple[bool, ...]


def torus_of(positions: Sequence[DevicePosition], hardware: Hardware) -> Torus:
    """The torus of the slices that devices fill.

    Raises:
        PlanError: it has more axes than the torus of the hardware, or a number of the hardware is unknown.
    """
    coords = [position.coords for position in positions]
    extents = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
    long = sum(extent > 1 for extent in extents)
    if hardware.torus_axes is not None and long > hardware.torus_axes:
        raise PlanError(
            f'the devices are along {long} axes of a torus ({"x".join(map(str, extents))}), '
            f'but that of {hardware.name!r} has {hardware.torus_axes}'
        )
    for_ = 'a roofline of communication along a torus'
    [multiple] = numbers_of(hardware, 'ring_multiple', for_=for_) if long else [0]
    closed = tuple(multiple > 0 and extent % multiple == 0 for extent in extents)
    if hardware.ring_needs_all:
        closed = (all(closed),) * len(extents)
    rings = tuple(extent > 1 and ring for extent, ring in zip(extents, closed, strict=True))
    return Torus(extents, devices_per_chip(positions, hardware), rings)


def devices_per_chip(positions: Sequence[DevicePosition], hardware: Hardware) -> int:
    """The number that the devices report, else that of the hardware, else one."""
    if any(position.coords for position in positions):
        return max(collections.Counter((position.slice, position.coords) for position in positions).values())
    return hardware.devices_per_chip or 1


def route_of(group: Sequence[DevicePosition], torus: Torus, along: str) -> Route:
    """The links that join the devices of one group.

    Args:
        group: the positions of the devices.
        torus: the torus of their slices.
        along: the mesh axes, for messages.

    Raises:
        PlanError: the positions differ from slice to slice, or some chips have more devices than others.

    Example:
        >>> positions = [DevicePosition(0, (x, y)) for x in range(16) for y in range(4)]
        >>> route_of(positions[::4], Torus((16, 4), 1, (True, False)), 'data').segments
        (TorusSegment(axis=0, length=16, ring=True, stride=1),)
    """
    slices: dict[int, list[DevicePosition]] = {}
    for position in group:
        slices.setdefault(position.slice, []).append(position)
    routes = {_route_in_slice(members, torus, along) for members in slices.values()}
    if len(routes) > 1:
        raise PlanError(
            f'the devices along {along} are placed differently in one slice or node than in another'
        )
    return dataclasses.replace(routes.pop(), slices=len(slices))


def _route_in_slice(members: Sequence[DevicePosition], torus: Torus, along: str) -> Route:
    """The links that join the members of a group in one slice."""
    if not torus.extents:
        return Route(1, len(members), len(members), ())
    chips = {position.coords for position in members}
    cores, rest = divmod(len(members), len(chips))
    if rest:
        raise PlanError(
            f'some chips have one device along {along}, others {cores + 1}: '
            'the time of their collectives is not known'
        )
    groups_sharing_links = torus.devices_per_chip // cores
    coordinates_by_axis: list[Sequence[int]] = [
        sorted(set(coordinates)) for coordinates in zip(*chips, strict=True)
    ]
    strides = [
        {after - before for before, after in itertools.pairwise(coordinates)}
        for coordinates in coordinates_by_axis
    ]
    even = all(len(steps) <= 1 for steps in strides)
    if not even or math.prod(map(len, coordinates_by_axis)) != len(chips):
        # Other groups in this box use its links, too.
        coordinates_by_axis = [
            range(coordinates[0], coordinates[-1] + 1) for coordinates in coordinates_by_axis
        ]
        strides = [{1}] * len(coordinates_by_axis)
        groups_sharing_links *= -(-math.prod(map(len, coordinates_by_axis)) // len(chips))
    segments = (
        TorusSegment(
            axis,
            len(coordinates),
            torus.rings[axis] and len(coordinates) * stride == torus.extents[axis],
            stride,
        )
        for axis, (coordinates, (stride, *_)) in enumerate(
            zip(coordinates_by_axis, (steps or {1} for steps in strides), strict=True)
        )
        if len(coordinates) > 1
    )
    return Route(1, len(members), len(chips), tuple(segments), groups_sharing_links)
