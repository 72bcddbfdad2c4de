"""Positions of devices in the torus of chips, and the links between the devices of a group.

In most meshes the chips of a group are evenly spaced along each axis of the torus, so that they form a box in
each slice. If one axis of the torus serves several mesh axes, the groups are segments of it, or interleaved
on it. Chips that form no box, such as every other chip of a path that winds through the torus, are assumed to
use the links of the smallest box around them, and to share them with the other groups in that box.
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
from scalax._planning.hardware.specs import Hardware, required_specs
from scalax._planning.program.replica_groups import Groups
from scalax.errors import PlanError, did_you_mean

Network = Literal['ici', 'dcn', 'chip']
NETWORKS: tuple[Network, ...] = get_args(Network)
_DIRECTIONS = 'xyz'


class DevicePosition(NamedTuple):
    """The position of one device.

    Attributes:
        slice: the index of its slice, whose devices do not need the data-center network to communicate; the
            index of its host if JAX reports no slice.
        coords: the coordinates of its chip in the torus; empty without a torus.
        core: its index among the devices of its chip.
    """

    slice: int
    coords: tuple[int, ...] = ()
    core: int = 0


def positions_of(devices: Iterable[Any]) -> tuple[DevicePosition, ...]:
    """Returns the positions that devices report."""
    return tuple(map(_position, devices))


def _position(device: Any) -> DevicePosition:
    coords, index = coords_of(device), slice_of(device)
    # Devices of a single TPU slice may report no slice index. GPUs and CPUs never do; a host counts as a
    # slice.
    if index is None:
        index = 0 if coords else device.process_index
    return DevicePosition(index, coords, core_of(device))


def networks_of(
    groups: Groups, positions: Sequence[DevicePosition], *, switched: bool = False
) -> tuple[Network, ...]:
    """Returns the networks that groups use: 'ici' between chips, 'dcn' between slices, 'chip' in a chip.

    Args:
        groups: one row per group, of indices into *positions*.
        positions: the positions of the devices of the mesh, in the order of the mesh.
        switched: whether slices without a torus are nodes, whose devices are connected by a switch.

    Returns:
        The networks that at least one group uses; none if the connections of the devices are unknown.

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
    """Returns positions where each mesh axis runs along its own axes of the torus, one device per chip.

    Args:
        torus: mesh axis -> the lengths of the torus axes that it runs along. Other mesh axes run across
            slices.
        mesh: mesh axis -> size.
        hardware: the hardware with the torus.

    Raises:
        PlanError: *torus* does not fit the mesh or the hardware.

    Example:
        >>> from scalax._planning.hardware.specs import HARDWARE
        >>> positions_on_torus({'tp': 2}, {'data': 2, 'tp': 2}, HARDWARE['v5e'])[1:3]
        (DevicePosition(slice=0, coords=(1, 0), core=0), DevicePosition(slice=1, coords=(0, 0), core=0))
    """
    [rank] = required_specs(hardware, 'torus_axes', for_='torus=')
    lengths = {name: (value,) if isinstance(value, int) else tuple(value) for name, value in torus.items()}
    for name, axis_lengths in lengths.items():
        if name not in mesh:
            raise PlanError(
                f'torus= names {name!r}, which is not an axis of the mesh ({did_you_mean(name, mesh)})'
            )
        if math.prod(axis_lengths) != mesh[name]:
            raise PlanError(
                f'torus={{{name!r}: {axis_lengths}}} has {math.prod(axis_lengths)} chips, '
                f'but the mesh axis {name!r} has {mesh[name]}'
            )
    used = sum(map(len, lengths.values()))
    if used > rank:
        raise PlanError(f'torus= uses {used} axes, but the torus of {hardware.name!r} has {rank}')
    slice_axes = {name: size for name, size in mesh.items() if name not in lengths}
    positions = []
    for mesh_index in np.ndindex(tuple(mesh.values())):
        index_of = dict(zip(mesh, mesh_index, strict=True))
        coords = [
            int(i)
            for name, axis_lengths in lengths.items()
            for i in np.unravel_index(index_of[name], axis_lengths)
        ]
        slice_index = 0
        for name, size in slice_axes.items():
            slice_index = slice_index * size + index_of[name]
        positions.append(DevicePosition(slice_index, (*coords, *(0,) * (rank - used))))
    return tuple(positions)


def positions_in_nodes(positions: Sequence[DevicePosition], hardware: Hardware) -> tuple[DevicePosition, ...]:
    """Returns the positions of simulated devices that stand for hardware in nodes, which they fill in order.

    Positions on hardware with a torus, in a torus, or in several processes are returned unchanged.

    Example:
        >>> from scalax._planning.hardware.specs import HARDWARE
        >>> [position.slice for position in positions_in_nodes([DevicePosition(0)] * 10, HARDWARE['h100'])]
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    """
    node_size = hardware.chips_per_slice or hardware.chips_per_host
    if (
        hardware.torus_axes != 0
        or node_size is None
        or any(position != DevicePosition(0) for position in positions)
    ):
        return tuple(positions)
    return tuple(DevicePosition(i // node_size) for i in range(len(positions)))


@dataclasses.dataclass(frozen=True, order=True)
class TorusSegment:
    """The chips of a group along one axis of the torus.

    Attributes:
        axis: the index of the axis.
        length: the number of chips of the group along the axis.
        ring: whether a link connects the last chip to the first.
        stride: the number of links from one chip to the next. It is also the number of interleaved groups,
            which share every link.
    """

    axis: int
    length: int
    ring: bool
    stride: int = 1

    @property
    def links_per_chip(self) -> float:
        """The links into the chip with the fewest of them: two in a ring, one at the end of a line."""
        return (2 if self.ring else 1) / self.stride

    @property
    def hops(self) -> float:
        """The links to the farthest chip; in a ring, half of its length, as in the scaling book."""
        return self.stride * (self.length / 2 if self.ring else self.length - 1)


def segment_text(segment: TorusSegment) -> str:
    """Describes a segment of the torus.

    Example:
        >>> segment_text(TorusSegment(0, 4, True)), segment_text(TorusSegment(2, 4, False, 2))
        ('ring of 4 along x', 'line of 4 along z, 2 links apart')
    """
    spacing = f', {segment.stride} links apart' if segment.stride > 1 else ''
    direction = _DIRECTIONS[segment.axis] if segment.axis < len(_DIRECTIONS) else f'axis {segment.axis}'
    return f'{"ring" if segment.ring else "line"} of {segment.length} along {direction}{spacing}'


@dataclasses.dataclass(frozen=True)
class Route:
    """The links between the devices of one group.

    Attributes:
        slices: the number of slices.
        devices: the number of its devices in each slice.
        chips: the number of their chips.
        segments: the chips along each axis of the torus.
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
        rings: which axes of the torus are rings.
    """

    extents: tuple[int, ...]
    devices_per_chip: int
    rings: tuple[bool, ...]


def torus_of(positions: Sequence[DevicePosition], hardware: Hardware) -> Torus:
    """Returns the torus of the slices that devices fill.

    Raises:
        PlanError: the torus has more axes than that of the hardware, or a required spec is unknown.
    """
    coords = [position.coords for position in positions]
    extents = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
    rank = sum(extent > 1 for extent in extents)
    if hardware.torus_axes is not None and rank > hardware.torus_axes:
        raise PlanError(
            f'the devices are along {rank} axes of a torus ({"x".join(map(str, extents))}), '
            f'but that of {hardware.name!r} has {hardware.torus_axes}'
        )
    for_ = 'a roofline of communication along a torus'
    [multiple] = required_specs(hardware, 'ring_multiple', for_=for_) if rank else [0]
    closed = tuple(multiple > 0 and extent % multiple == 0 for extent in extents)
    if hardware.ring_needs_all:
        closed = (all(closed),) * len(extents)
    rings = tuple(extent > 1 and ring for extent, ring in zip(extents, closed, strict=True))
    return Torus(extents, devices_per_chip(positions, hardware), rings)


def devices_per_chip(positions: Sequence[DevicePosition], hardware: Hardware) -> int:
    """Returns the number of devices per chip that positions show; by default that of the hardware, or one."""
    if any(position.coords for position in positions):
        return max(collections.Counter((position.slice, position.coords) for position in positions).values())
    return hardware.devices_per_chip or 1


def route_of(group: Sequence[DevicePosition], torus: Torus, along: str) -> Route:
    """Returns the links between the devices of one group.

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
            f'the devices along {along} have different positions in one slice or node than in another'
        )
    return dataclasses.replace(routes.pop(), slices=len(slices))


def _route_in_slice(members: Sequence[DevicePosition], torus: Torus, along: str) -> Route:
    """Returns the links between the members of a group in one slice."""
    if not torus.extents:
        return Route(1, len(members), len(members), ())
    chips = {position.coords for position in members}
    cores, rest = divmod(len(members), len(chips))
    if rest:
        raise PlanError(
            f'some chips have one device along {along}, others {cores + 1}: '
            'the time of their collectives is unknown'
        )
    groups_sharing_links = torus.devices_per_chip // cores
    axes: list[Sequence[int]] = [sorted(set(coordinates)) for coordinates in zip(*chips, strict=True)]
    gaps = [{after - before for before, after in itertools.pairwise(axis)} for axis in axes]
    is_box = math.prod(map(len, axes)) == len(chips) and all(len(sizes) <= 1 for sizes in gaps)
    if not is_box:
        # Other groups in the smallest box around the chips also use its links.
        axes = [range(axis[0], axis[-1] + 1) for axis in axes]
        gaps = [{1}] * len(axes)
        groups_sharing_links *= -(-math.prod(map(len, axes)) // len(chips))
    segments = []
    for i, (axis, sizes) in enumerate(zip(axes, gaps, strict=True)):
        if len(axis) > 1:
            [stride] = sizes
            is_ring = torus.rings[i] and len(axis) * stride == torus.extents[i]
            segments.append(TorusSegment(i, len(axis), is_ring, stride))
    return Route(1, len(members), len(chips), tuple(segments), groups_sharing_links)
