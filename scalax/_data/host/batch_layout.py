"""The layout of a batch over the devices of a mesh, and the rows that each process needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import MeshAxes
from scalax._core.pytree.spec_validation import validated_axes
from scalax._data.host import process_collectives
from scalax.errors import DataError, MeshError


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """How a batch is cut over a mesh: into equal tiles, one for each device.

    Attributes:
        mesh: the mesh.
        axes: the mesh axes that cut the batch.
        count: the number of tiles.
        tiles: for each device, in the order of `Processes`, the number of its tile.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    count: int
    tiles: tuple[int, ...]

    @functools.cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """For each process the numbers of the tiles that its devices hold, in ascending order."""
        processes = process_collectives.processes_of(self.mesh)
        held: list[set[int]] = [set() for _ in processes.indices]
        for tile, owner in zip(self.tiles, processes.owners, strict=True):
            held[owner].add(tile)
        return tuple(tuple(sorted(tiles)) for tiles in held)

    @functools.cached_property
    def here(self) -> tuple[int, ...]:
        """The tiles that this process's devices hold."""
        return self.held[process_collectives.processes_of(self.mesh).here]

    @functools.cached_property
    def is_in_order(self) -> bool:
        """Whether equal parts, in the order of the processes, are what the devices of each need."""
        in_order = [*itertools.chain(*self.held)] == [*range(self.count)]
        return in_order and len({len(tiles) for tiles in self.held}) == 1


def layout_of(mesh: Mesh, mesh_axis_subset: Sequence[str] | str | None) -> BatchLayout:
    """The layout of batches over some mesh axes, or over all of them.

    Raises:
        ArgumentError: what is given for the axes is not a name or several.
        MeshError: an axis that the mesh does not have or that is repeated, or axes of several types.
    """
    known = MeshAxes.of(mesh)
    subset = known.sizes if mesh_axis_subset is None else mesh_axis_subset
    axes, types = validated_axes('mesh_axis_subset', subset, known), known.types
    if len(set(axes)) != len(axes):
        raise MeshError(f'mesh_axis_subset: mesh axes are named once each, got {axes}')
    if len({types[axis] for axis in axes}) > 1:
        listed = ', '.join(f'{axis} is {types[axis].name}' for axis in axes)
        raise MeshError(
            f'the batch cannot be sharded over mesh axes of different types together ({listed}): choose '
            'axes of one type with mesh_axis_subset'
        )
    return _layout(mesh, axes)


@functools.lru_cache(maxsize=64)
def _layout(mesh: Mesh, axes: tuple[str, ...]) -> BatchLayout:
    count = math.prod(mesh.shape[name] for name in axes)
    spec = PartitionSpec(axes) if axes else PartitionSpec()
    # A batch of one row for each tile, so that the row is the number of the tile.
    placed: Mapping[Any, Any] = NamedSharding(mesh, spec).devices_indices_map((count,))
    devices = process_collectives.processes_of(mesh).devices
    tiles = tuple((placed[device][0].start or 0) if axes else 0 for device in devices)
    return BatchLayout(mesh, axes, count, tiles)


def process_examples(mesh: Mesh, global_batch: int, layout: BatchLayout) -> slice | np.ndarray:
    """The rows of a batch that the devices of this process need: a slice, or their numbers in order."""
    if isinstance(global_batch, bool) or not isinstance(global_batch, int | np.integer) or global_batch < 0:
        raise DataError(f'global_batch is the number of examples of the global batch, got {global_batch!r}')
    if global_batch % layout.count:
        raise DataError(
            f'the global batch of {global_batch} examples does not divide by {layout.count} shards, over '
            f'mesh axes {layout.axes}: choose a batch that does, or fewer axes with mesh_axis_subset'
        )
    size = int(global_batch) // layout.count
    tiles = layout.here
    if tiles == tuple(range(tiles[0], tiles[0] + len(tiles))):
        return slice(tiles[0] * size, (tiles[-1] + 1) * size)
    return np.concatenate([np.arange(tile * size, (tile + 1) * size) for tile in tiles])


def checked_axis(batch_axis: Any) -> int:
    """The batch axis as an int.

    Raises:
        DataError: it is not an integer.
    """
    if isinstance(batch_axis, bool) or not isinstance(batch_axis, int | np.integer):
        raise DataError(f'batch_axis is an integer, got {batch_axis!r} (mesh axes go to mesh_axis_subset)')
    return int(batch_axis)
