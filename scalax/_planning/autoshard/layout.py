"""A layout: a mesh, where the rows of the batch are on it, and where each group of leaves is."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs, spec_validation
from scalax._planning.autoshard.leaf_groups import Group
from scalax._spmd.pipelines.config import Pipeline


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


class Placement(NamedTuple):
    """Where a group is: the dimension that each of two mesh axes shards, or None.

    Attributes:
        other: that of `Axes.other`, which comes first if both shard one dimension.
        batch: that of `Axes.batch`.
    """

    other: int | None
    batch: int | None

    def spec(self, axes: Axes) -> PartitionSpec:
        """The place as a PartitionSpec."""
        pairs = (self.other, axes.other), (self.batch, axes.batch)
        rank = max((dim + 1 for dim in self if dim is not None), default=0)
        return partition_specs.canonical(
            PartitionSpec(*(tuple(axis for dim, axis in pairs if dim == i) for i in range(rank)))
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """A candidate.

    Attributes:
        mesh: the mesh axes with their sizes.
        batch: where the rows of the batch are.
        groups: where each group is.
        pipeline: the pipeline over the axis from slice to slice; None without one.
    """

    mesh: tuple[tuple[str, int], ...]
    batch: PartitionSpec
    groups: tuple[Placement, ...]
    pipeline: Pipeline | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> its size."""
        return dict(self.mesh)

    def moved(self, places: Mapping[int, Placement]) -> Layout:
        """The same with some groups elsewhere."""
        groups = tuple(places.get(number, place) for number, place in enumerate(self.groups))
        return dataclasses.replace(self, groups=groups)

    def fitted(self, spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        """What a shape can have of a spec on the mesh: axes are dropped from the right until it divides."""
        first = PartitionSpec(*partition_specs.entries(spec)[: len(shape)])
        return spec_validation.drop_indivisible(first, tuple(shape), partition_specs.MeshAxes(self.sizes, {}))


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
    rows, width = sizes[axes.batch], sizes.get(axes.other, 1)
    others = (i for i in group.dividing(width) if group.classes[i] in split)
    other = next(others, None) if width > 1 else None
    if rows == 1:
        return Placement(other, None)
    batch = _largest(group, rows, other, experts)
    if (batch is None or together) and other in group.dividing(rows * width):
        batch = other
    return Placement(other, batch)


def elsewhere(group: Group, here: Placement, axes: Axes, sizes: Mapping[str, int]) -> list[Placement]:
    """The places of a group that differ from one in one of the two axes: over another dimension, or none.

    If the other axis goes to the dimension of the first one, that goes where it usually is.
    """
    rows, width = sizes[axes.batch], sizes.get(axes.other, 1)
    found = [Placement(here.other, dim) for dim in (*group.dividing(rows), None) if rows > 1]
    for dim in (*group.dividing(width), None) if width > 1 else ():
        found.append(Placement(dim, here.batch))
        if dim is not None and dim == here.batch:
            found.append(Placement(dim, _largest(group, rows, dim)))
    both = group.dividing(rows * width)
    possible = (
        place for place in found if None in place or place.other != place.batch or place.other in both
    )
    return [place for place in dict.fromkeys(possible) if place != here]


def _largest(group: Group, parts: int, but: int | None, first: Collection[int] = ()) -> int | None:
    """The largest dimension that divides, but one; those of some classes come first."""
    dims = [i for i in group.dividing(parts) if i != but]
    return max(dims, key=lambda i: (group.classes[i] in first, group.shape[i]), default=None)
