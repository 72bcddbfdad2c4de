"""A layout: a mesh, where the rows of the batch are on it, and where each group of leaves is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from jax.sharding import PartitionSpec

from scalax._find.groups import Group

Placement = tuple[tuple[str, ...], ...]
"""For each dimension the mesh axes that shard it."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of the mesh axes.

    Attributes:
        slices: that from slice to slice; empty if there is one slice.
        batch: that over which rows and weights are.
        other: that over which weights are, and rows only in some layouts.
    """

    slices: str
    batch: str
    other: str

    @property
    def rows(self) -> tuple[str, ...]:
        """Those over which rows are in any case."""
        return (self.slices, self.batch) if self.slices else (self.batch,)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A candidate.

    Attributes:
        mesh: the mesh axes with their sizes.
        batch: the placement of the batch.
        groups: that of each group.
    """

    mesh: tuple[tuple[str, int], ...]
    batch: Placement
    groups: tuple[Placement, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> its size."""
        return dict(self.mesh)

    def with_group(self, number: int, placement: Placement) -> Layout:
        """The same with one group elsewhere."""
        groups = (*self.groups[:number], placement, *self.groups[number + 1 :])
        return dataclasses.replace(self, groups=groups)


def fitted(placement: Placement, shape: Sequence[int], sizes: Mapping[str, int]) -> Placement:
    """What a shape can have of a placement: mesh axes are dropped from the right until it divides."""
    found = []
    for axes, size in zip(placement, shape, strict=False):
        while axes and size % math.prod(sizes[axis] for axis in axes):
            axes = axes[:-1]
        found.append(axes)
    return tuple(found)


def without(placement: Placement, axes: Collection[str]) -> Placement:
    """The same without some mesh axes."""
    return tuple(tuple(axis for axis in each if axis not in axes) for each in placement)


def spec_of(placement: Placement) -> PartitionSpec:
    """The placement as a PartitionSpec, without empty entries at its end."""
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in placement]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def usual(
    group: Group,
    axes: Axes,
    sizes: Mapping[str, int],
    split: Collection[int],
    experts: Collection[int] = (),
    *,
    together: bool = False,
) -> Placement:
    """Where a group is if its dimensions of some classes are split over the other axis.

    The axis of the batch shards its dimension of experts, or else the largest one that is left.

    Args:
        group: the group.
        axes: the names of the mesh axes.
        sizes: their sizes.
        split: the classes that are over `Axes.other`.
        experts: classes that are over `Axes.batch`, if a group has one.
        together: whether that axis shards the dimension that is split as well, if both divide it.
    """
    own = [i for i, number in enumerate(group.classes) if number is not None]
    width = sizes.get(axes.other, 1)
    over_other = next(
        (i for i in own if width > 1 and group.classes[i] in split and group.shape[i] % width == 0), None
    )
    rows = sizes[axes.batch]
    rest = [i for i in own if i != over_other and group.shape[i] % rows == 0 and rows > 1]
    chosen = next((i for i in rest if group.classes[i] in experts), None)
    if chosen is None:
        chosen = max(rest, key=lambda i: group.shape[i], default=None)
    divides = rows > 1 and over_other is not None and group.shape[over_other] % (rows * width) == 0
    if divides and (chosen is None or together):
        chosen = over_other
    return _placed(group, axes, over_other, chosen)


def elsewhere(group: Group, placement: Placement, axes: Axes, sizes: Mapping[str, int]) -> list[Placement]:
    """The placements of a group that differ from one in one of the two axes: over another dimension, or none.

    If the other axis goes to the dimension of the first one, that goes where it usually is.
    """
    own = [i for i, number in enumerate(group.classes) if number is not None]
    width, rows = sizes.get(axes.other, 1), sizes[axes.batch]
    here = {axis: i for i, each in enumerate(placement) for axis in each}
    found = []
    for dim in [*own, None] if rows > 1 else []:
        found.append(_placed(group, axes, here.get(axes.other), dim))
    for dim in [*own, None] if width > 1 else []:
        found.append(_placed(group, axes, dim, here.get(axes.batch)))
        if dim is not None and dim == here.get(axes.batch):
            rest = [i for i in own if i != dim and group.shape[i] % rows == 0]
            found.append(_placed(group, axes, dim, max(rest, key=lambda i: group.shape[i], default=None)))
    possible = (each for each in found if fitted(each, group.shape, sizes) == each)
    return [each for each in dict.fromkeys(possible) if each != placement]


def _placed(group: Group, axes: Axes, other: int | None, batch: int | None) -> Placement:
    return tuple(
        ((axes.other,) if i == other else ()) + ((axes.batch,) if i == batch else ())
        for i in range(len(group.classes))
    )
