"""Layouts: a mesh, the sharding of the batch, and the placement of each group of leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs, spec_validation
from scalax._planning.autoshard.leaf_groups import LeafGroup
from scalax._spmd.pipelines.config import Pipeline


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of the mesh axes.

    Attributes:
        dcn: the axis across slices; empty if there is one slice.
        fsdp: shards the batch and the weights.
        model: shards the weights, and in some layouts the batch.
    """

    dcn: str
    fsdp: str
    model: str

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that shard the batch in every layout."""
        return (self.dcn, self.fsdp) if self.dcn else (self.fsdp,)


class Placement(NamedTuple):
    """The dimensions of a group that mesh axes shard.

    Attributes:
        model: the dimension that `Axes.model` shards, or None. This axis comes first if both axes shard one
            dimension.
        fsdp: the dimension that `Axes.fsdp` shards, or None.
    """

    model: int | None
    fsdp: int | None

    def spec(self, axes: Axes) -> PartitionSpec:
        """Returns the placement as a PartitionSpec."""
        pairs = (self.model, axes.model), (self.fsdp, axes.fsdp)
        rank = max((dim + 1 for dim in self if dim is not None), default=0)
        return partition_specs.canonical(
            PartitionSpec(*(tuple(axis for dim, axis in pairs if dim == i) for i in range(rank)))
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with the shardings of the batch and of all groups of leaves.

    Attributes:
        mesh: the mesh axes with their sizes.
        batch_spec: the sharding of the batch.
        placements: the placement of each group.
        pipeline: the pipeline over the slices; None without one.
    """

    mesh: tuple[tuple[str, int], ...]
    batch_spec: PartitionSpec
    placements: tuple[Placement, ...]
    pipeline: Pipeline | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> its size."""
        return dict(self.mesh)

    def with_placements(self, changes: Mapping[int, Placement]) -> Layout:
        """Returns the layout with other placements of some groups, by group index."""
        placements = tuple(changes.get(i, placement) for i, placement in enumerate(self.placements))
        return dataclasses.replace(self, placements=placements)

    def fit_spec(self, spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        """Fits a spec to a shape: truncates it to the rank, and drops axes that do not divide."""
        truncated = PartitionSpec(*partition_specs.entries(spec)[: len(shape)])
        mesh_axes = partition_specs.MeshAxes(self.sizes, {})
        return spec_validation.drop_indivisible(truncated, tuple(shape), mesh_axes)


def default_placement(
    group: LeafGroup,
    axes: Axes,
    sizes: Mapping[str, int],
    model_classes: Collection[int],
    fsdp_classes: Collection[int] = (),
    *,
    both_on_one_dim: bool = False,
) -> Placement:
    """Returns the placement of a group from the classes of dimensions that the mesh axes shard.

    `Axes.fsdp` shards a dimension of *fsdp_classes*, or the largest dimension that `Axes.model` does not
    shard.

    Args:
        group: the group.
        axes: the names of the mesh axes.
        sizes: mesh axis -> size.
        model_classes: the classes that `Axes.model` shards.
        fsdp_classes: the classes that `Axes.fsdp` shards first.
        both_on_one_dim: whether `Axes.fsdp` also shards the dimension of `Axes.model`, if both divide it.
    """
    fsdp_size, model_size = sizes[axes.fsdp], sizes.get(axes.model, 1)
    model_dims = (i for i in group.dims_divisible_by(model_size) if group.classes[i] in model_classes)
    model_dim = next(model_dims, None) if model_size > 1 else None
    if fsdp_size == 1:
        return Placement(model_dim, None)
    fsdp_dim = _largest_dim(group, fsdp_size, model_dim, fsdp_classes)
    if (fsdp_dim is None or both_on_one_dim) and model_dim in group.dims_divisible_by(fsdp_size * model_size):
        fsdp_dim = model_dim
    return Placement(model_dim, fsdp_dim)


def neighbors(
    group: LeafGroup, placement: Placement, axes: Axes, sizes: Mapping[str, int]
) -> list[Placement]:
    """Returns the placements of a group that differ in one axis: another dimension, or none.

    If `Axes.model` takes the dimension of `Axes.fsdp`, one of them also moves `Axes.fsdp` to its default.
    """
    fsdp_size, model_size = sizes[axes.fsdp], sizes.get(axes.model, 1)
    placements = []
    if fsdp_size > 1:
        placements += [Placement(placement.model, dim) for dim in (*group.dims_divisible_by(fsdp_size), None)]
    if model_size > 1:
        for dim in (*group.dims_divisible_by(model_size), None):
            placements.append(Placement(dim, placement.fsdp))
            if dim is not None and dim == placement.fsdp:
                placements.append(Placement(dim, _largest_dim(group, fsdp_size, dim)))
    divisible_by_both = group.dims_divisible_by(fsdp_size * model_size)
    possible = (
        neighbor
        for neighbor in placements
        if None in neighbor or neighbor.model != neighbor.fsdp or neighbor.model in divisible_by_both
    )
    return [neighbor for neighbor in dict.fromkeys(possible) if neighbor != placement]


def _largest_dim(
    group: LeafGroup, num_shards: int, excluded: int | None, preferred_classes: Collection[int] = ()
) -> int | None:
    """Returns the largest divisible dimension except *excluded*, preferably one of some classes."""
    dims = [i for i in group.dims_divisible_by(num_shards) if i != excluded]
    return max(dims, key=lambda i: (group.classes[i] in preferred_classes, group.shape[i]), default=None)
