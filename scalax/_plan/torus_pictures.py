"""Where on the torus does each part of a mesh axis lie? Layer by layer, as pictures show."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scalax._plan.plan import Plan

NOBODY = -1
"""Of a place where no device of the mesh lies."""


@dataclasses.dataclass(frozen=True)
class Chips:
    """The devices of one slice, by their place along one mesh axis.

    Attributes:
        axis: the mesh axis.
        size: how many places it has.
        layers: for each place along the third axis of the torus a grid: rows along the second axis, columns
            along the first; the devices of a chip stand side by side. Numbers are places along the mesh axis.
        slices: over how many slices the mesh extends.
        across: whether the axis runs from slice to slice only: its place is the same all over a slice.
    """

    axis: str
    size: int
    layers: tuple[npt.NDArray[np.int64], ...]
    slices: int
    across: bool


def chips_of(plan: Plan) -> tuple[Chips, ...]:
    """One for each mesh axis that has several places; none where devices do not lie in a torus.

    Of several slices the first is shown.
    """
    if not plan.places or not all(place.coords for place in plan.places):
        return ()
    first = min(place.slice for place in plan.places)
    slices = len({place.slice for place in plan.places})
    inside = np.array([place.slice == first for place in plan.places])
    coords = np.array([(*place.coords, 0, 0)[:3] for place in plan.places])[inside]
    cores = np.array([place.core for place in plan.places])[inside]
    coords -= coords.min(axis=0)
    per_chip = int(cores.max()) + 1
    wide, high, deep = coords.max(axis=0) + 1
    at_axes = np.unravel_index(np.arange(len(plan.places)), tuple(plan.mesh.values()))
    shown = []
    for (axis, size), at in zip(plan.mesh.items(), at_axes, strict=True):
        if size == 1:
            continue
        grid = np.full((deep, high, wide * per_chip), NOBODY, np.int64)
        grid[coords[:, 2], coords[:, 1], coords[:, 0] * per_chip + cores] = at[inside]
        across = slices > 1 and len(np.unique(at[inside])) == 1
        shown.append(Chips(axis, size, tuple(grid), slices, across))
    return tuple(shown)
