"""Mesh axes on the torus of chips: which place along an axis each device has, and the links it runs over."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scalax._plan.hardware import hardware_of
from scalax._plan.torus import Place, Route, Torus, line_text, route_of, torus_of
from scalax.errors import PlanError

NO_DEVICE = -1
"""Marks a position in the torus without a device of the mesh."""


_STUB = 0.6  # of the way to the next chip


class Link(NamedTuple):
    """Neighbours in a layer of chips that are joined, in a row or a column.

    Attributes:
        start: the column and the row of the first of them; before the first of all for the link of a ring,
            which joins it to the last.
        end: those of the last; after the last of all for such a link.
        is_own: whether the mesh axis runs over the links between them.
    """

    start: tuple[float, float]
    end: tuple[float, float]
    is_own: bool


@dataclasses.dataclass(frozen=True)
class AxisOnTorus:
    """One mesh axis on the torus of one slice.

    Attributes:
        axis: the mesh axis.
        number: its place in the mesh.
        size: its size.
        layers: for each position along the third axis of the torus a grid: rows along the second axis,
            columns along the first; the devices of a chip are side by side. Numbers are indices along the
            mesh axis, or `NO_DEVICE`.
        groups: grids alike: numbers are those of the group of devices along the axis.
        per_chip: the devices of a chip.
        rings: whether rows are rings, and whether columns are.
        slices: the number of slices of the mesh.
        across: whether the axis runs from slice to slice only: its index is the same all over a slice.
        way: where it runs, such as ``'ring of 4 along x'``; empty if that is not known.
    """

    axis: str
    number: int
    size: int
    layers: tuple[npt.NDArray[np.int64], ...]
    groups: tuple[npt.NDArray[np.int64], ...]
    per_chip: int
    rings: tuple[bool, bool]
    slices: int
    across: bool
    way: str = ''

    @property
    def label(self) -> str:
        """The heading of its drawing."""
        if self.across:
            return f'{self.axis}={self.size}: from slice to slice'
        return f'{self.axis}={self.size}: {self.way or "a shade for each place along it"}'

    def links(self, layer: int) -> Iterator[Link]:
        """The links of a layer, joined to as long lines as there are."""
        index, group = self.layers[layer], self.groups[layer]
        rows, columns = index.shape
        for row in range(rows):
            for start, end, is_own in self._runs(index[row], group[row], self.per_chip, self.rings[0]):
                yield Link((start, row), (end, row), is_own)
        for column in range(columns):
            for start, end, is_own in self._runs(index[:, column], group[:, column], 1, self.rings[1]):
                yield Link((column, start), (column, end), is_own)

    @staticmethod
    def _runs(
        index: npt.NDArray[np.int64], group: npt.NDArray[np.int64], per_chip: int, is_ring: bool
    ) -> Iterator[tuple[float, float, bool]]:
        last = len(index) - 1

        def is_own(one: int, other: int) -> bool:
            return bool(group[one] == group[other] and index[one] != index[other])

        def kind(place: int) -> bool | None:
            if NO_DEVICE in index[place : place + 2] or (place + 1) % per_chip:
                return None
            return is_own(place, place + 1)

        if is_ring and NO_DEVICE not in index[[0, last]]:
            yield -_STUB, 0, is_own(0, last)
            yield last, last + _STUB, is_own(0, last)
        for own, places in itertools.groupby(range(last), kind):
            if own is not None:
                found = [*places]
                yield found[0], found[-1] + 1, own


def axes_on_torus(
    mesh: Mapping[str, int], places: Sequence[Place], device_kind: str = ''
) -> tuple[AxisOnTorus, ...]:
    """One for each mesh axis larger than 1, on the first slice; none if the devices are not in a torus.

    Args:
        mesh: mesh axis name -> size.
        places: the positions of the devices, in the order of the mesh.
        device_kind: what JAX calls the devices; that of some says which axes of the torus are rings.
    """
    if not places or not all(place.coords for place in places):
        return ()
    first = min(place.slice for place in places)
    slices = len({place.slice for place in places})
    inside = np.array([place.slice == first for place in places])
    coords = np.array([(*place.coords, 0, 0)[:3] for place in places])[inside]
    cores = np.array([place.core for place in places])[inside]
    coords -= coords.min(axis=0)
    per_chip = int(cores.max()) + 1
    wide, high, deep = coords.max(axis=0) + 1
    shape = tuple(mesh.values())
    numbers = np.arange(len(places)).reshape(shape)
    at_axes = np.unravel_index(np.arange(len(places)), shape)

    def grid(values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        drawn = np.full((deep, high, wide * per_chip), NO_DEVICE, np.int64)
        drawn[coords[:, 2], coords[:, 1], coords[:, 0] * per_chip + cores] = values[inside]
        return tuple(drawn)

    torus = _torus(places, device_kind)
    along_x, along_y, *_ = (*(() if torus is None else torus.rings), False, False)
    shown = []
    for number, ((axis, size), at) in enumerate(zip(mesh.items(), at_axes, strict=True)):
        if size == 1:
            continue
        # A group is known by its first device.
        groups = np.broadcast_to(np.take(numbers, [0], number), shape).reshape(-1)
        across = slices > 1 and len(np.unique(at[inside])) == 1
        way = '' if torus is None or across else _way(numbers, number, places, torus)
        shown.append(
            AxisOnTorus(
                axis, number, size, grid(at), grid(groups), per_chip, (along_x, along_y), slices, across, way
            )
        )
    return tuple(shown)


def _torus(places: Sequence[Place], device_kind: str) -> Torus | None:
    """The torus of the devices; None if its numbers are not known."""
    hardware = hardware_of(device_kind)
    try:
        return None if hardware is None else torus_of(places, hardware)
    except PlanError:
        return None


def _way(numbers: npt.NDArray[np.int64], axis: int, places: Sequence[Place], torus: Torus) -> str:
    """Where a mesh axis runs, if it is the same for all of its groups."""
    groups = np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])
    try:
        routes = {route_of([places[i] for i in group], torus, 'it') for group in groups.tolist()}
    except PlanError:
        return ''
    return _route_text(routes.pop()) if len(routes) == 1 else ''


def _route_text(route: Route) -> str:
    parts = [line_text(line) for line in route.lines]
    if route.chips < route.devices:
        parts.insert(0, f'the {route.devices // route.chips} devices of a chip')
    if route.slices > 1:
        parts.append(f'{route.slices} slices')
    return ' and '.join(parts)
