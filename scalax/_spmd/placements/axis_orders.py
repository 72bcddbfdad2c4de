"""Orders of the mesh axes that shard one dimension, where Auto axes come before batch axes.

A ``jax.shard_map`` over the batch axes splits each dimension along them first, and the Auto axes split the
blocks. If a spec has the Auto axes first, as ``P(('tp', 'fsdp'))``, the array would be permuted, which moves
it between devices. Instead, each device keeps its block, and the array gets another order of blocks: that of
``P(('fsdp', 'tp'))``. The placements know it by `Shard.outer_axes`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._core.pytree.partition_specs import entry_axes, spec_axes
from scalax._spmd.placements.placement import Placements, Shard

AxisOrder = tuple[PartitionSpec, PartitionSpec] | None
"""The specs with the Auto axes first, and with the batch axes first; None if there is nothing to reorder."""


def with_outer_axes(
    placements: Placements, spec: PartitionSpec, batch_axes: Container[str], auto_axes: Container[str]
) -> Placements:
    """Returns the placements of a spec with the Auto axes that come first in its dimensions.

    Args:
        placements: the placements of the spec, without such axes.
        spec: the spec.
        batch_axes: the batch axes.
        auto_axes: the Auto axes.
    """
    outer_axes = dict[int, tuple[str, ...]]()
    for dim, entry in enumerate(spec):
        names = [axis for axis in entry_axes(entry) if axis in batch_axes or axis in auto_axes]
        outer = tuple([axis for axis in names if axis in auto_axes])
        if outer and tuple(names[: len(outer)]) == outer:
            outer_axes[dim] = outer
    return tuple(
        [
            x._replace(outer_axes=outer_axes[x.dim]) if isinstance(x, Shard) and x.dim in outer_axes else x
            for x in placements
        ]
    )


def axis_order(placements: Placements, axes: Sequence[str]) -> AxisOrder:
    """Returns the orders of the axes of a value outside of a step and inside of it.

    Args:
        placements: its placements.
        axes: the batch axes.
    """
    outer, inner = dict[int, tuple[str, ...]](), dict[int, list[str]]()
    for axis, placement in zip(axes, placements, strict=True):
        if isinstance(placement, Shard) and placement.outer_axes:
            outer[placement.dim] = placement.outer_axes
            inner.setdefault(placement.dim, []).append(axis)
    if not outer:
        return None
    dims = range(max(outer) + 1)
    outside = [(*outer[dim], *inner[dim]) if dim in outer else None for dim in dims]
    inside = [(*inner[dim], *outer[dim]) if dim in outer else None for dim in dims]
    return PartitionSpec(*outside), PartitionSpec(*inside)


def in_other_order(x: Any, old: PartitionSpec, new: PartitionSpec, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the array whose blocks over one spec are those of another array over another spec."""
    relabel = jax.shard_map(
        lambda block: block,
        mesh=mesh,
        in_specs=old,
        out_specs=new,
        axis_names={*spec_axes(old)},
        check_vma=False,
    )
    return relabel(x)
