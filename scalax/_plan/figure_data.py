"""Figures of a plan for pages and pictures: bars of memory and seconds, and mesh axes on the torus."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scalax._plan.memory import Memory
from scalax._plan.roofline import Roofline
from scalax._plan.torus import Place
from scalax._report.svg import told_apart

NO_DEVICE = -1
"""Marks a position in the torus without a device of the mesh."""
_ARGUMENTS, _TEMPORARIES, _OUTPUTS = told_apart(3)
_GAPS = '#bbbbbb'
_TIME_COLORS = {'compute': _OUTPUTS, 'hbm': _ARGUMENTS}


class Bar(NamedTuple):
    """One bar, or one part of one.

    Attributes:
        label: its text.
        value: bytes or seconds.
        color: such as ``'#77AADD'``.
        marked: whether it bounds the step.
    """

    label: str
    value: float
    color: str
    marked: bool = False


def memory_bars(memory: Memory) -> tuple[float, list[Bar]]:
    """The length of the whole bar in bytes, and its parts from the left."""
    kept = min(memory.arguments + memory.outputs, memory.peak)
    bars = [
        Bar('arguments', min(memory.arguments, memory.peak), _ARGUMENTS),
        Bar('outputs', max(0, kept - memory.arguments), _OUTPUTS),
        Bar('temporaries at the peak', memory.peak - kept, _TEMPORARIES),
    ]
    if memory.total > memory.peak:
        bars.append(Bar('gaps at the peak', memory.total - memory.peak, _GAPS))
    return max(memory.peak, memory.total, memory.limit or 0, 1), bars


def time_bars(roofline: Roofline) -> list[Bar]:
    """A bar for each part of a step."""
    return [
        Bar(name, seconds, _TIME_COLORS.get(name, _TEMPORARIES), name == roofline.bound)
        for name, seconds in roofline.parts.items()
    ]


@dataclasses.dataclass(frozen=True)
class AxisOnTorus:
    """One mesh axis on the torus of one slice.

    Attributes:
        axis: the mesh axis.
        size: its size.
        layers: for each position along the third axis of the torus a grid: rows along the second axis,
            columns along the first; the devices of a chip are side by side. Numbers are indices along the
            mesh axis, or `NO_DEVICE`.
        slices: the number of slices of the mesh.
        across: whether the axis runs from slice to slice only: its index is the same all over a slice.
    """

    axis: str
    size: int
    layers: tuple[npt.NDArray[np.int64], ...]
    slices: int
    across: bool

    @property
    def label(self) -> str:
        """The heading of its drawing."""
        return f'{self.axis}={self.size}: a colour for each place along it'


def axes_on_torus(mesh: Mapping[str, int], places: Sequence[Place]) -> tuple[AxisOnTorus, ...]:
    """One for each mesh axis larger than 1, on the first slice; none if the devices are not in a torus.

    Args:
        mesh: mesh axis name -> size.
        places: the positions of the devices, in the order of the mesh.
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
    at_axes = np.unravel_index(np.arange(len(places)), tuple(mesh.values()))
    shown = []
    for (axis, size), at in zip(mesh.items(), at_axes, strict=True):
        if size == 1:
            continue
        grid = np.full((deep, high, wide * per_chip), NO_DEVICE, np.int64)
        grid[coords[:, 2], coords[:, 1], coords[:, 0] * per_chip + cores] = at[inside]
        across = slices > 1 and len(np.unique(at[inside])) == 1
        shown.append(AxisOnTorus(axis, size, tuple(grid), slices, across))
    return tuple(shown)
