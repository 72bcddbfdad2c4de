"""Layout of a batch over the devices of a mesh, and the examples that each process needs."""

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
    """The sharding of a batch over a mesh into equal tiles, one for each device.

    Attributes:
        mesh: the mesh.
        axes: the mesh axes over which the batch is sharded.
        num_tiles: the number of tiles.
        tiles: for each device, in the order of `Processes`, the index of its tile.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    num_tiles: int
    tiles: tuple[int, ...]

    @functools.cached_property
    def tiles_by_process(self) -> tuple[tuple[int, ...], ...]:
        """For each process, the indices of the tiles that its devices hold, in ascending order."""
        processes = process_collectives.processes_of(self.mesh)
        tiles_by_process: list[set[int]] = [set() for _ in processes.indices]
        for tile, owner in zip(self.tiles, processes.owners, strict=True):
            tiles_by_process[owner].add(tile)
        return tuple(tuple(sorted(tiles)) for tiles in tiles_by_process)

    @functools.cached_property
    def local_tiles(self) -> tuple[int, ...]:
        """The indices of the tiles that this process's devices hold."""
        return self.tiles_by_process[process_collectives.processes_of(self.mesh).position]

    @functools.cached_property
    def is_in_process_order(self) -> bool:
        """Whether the devices of each process need its equal share of the batch, in process order."""
        in_order = [*itertools.chain(*self.tiles_by_process)] == [*range(self.num_tiles)]
        return in_order and len({len(tiles) for tiles in self.tiles_by_process}) == 1


def layout_of(mesh: Mesh, mesh_axis_subset: Sequence[str] | str | None) -> BatchLayout:
    """Returns the layout of batches that are sharded over some mesh axes; None means all axes.

    Raises:
        ArgumentError: the axes are neither a name nor a sequence of names.
        MeshError: an axis is not in the mesh or is repeated, or the axes have different types.
    """
    mesh_axes = MeshAxes.of(mesh)
    subset = mesh_axes.sizes if mesh_axis_subset is None else mesh_axis_subset
    axes, types = validated_axes('mesh_axis_subset', subset, mesh_axes), mesh_axes.types
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
    # In a batch with one example per tile, the index of the example is the index of the tile.
    indices: Mapping[Any, Any] = NamedSharding(mesh, spec).devices_indices_map((count,))
    devices = process_collectives.processes_of(mesh).devices
    tiles = tuple((indices[device][0].start or 0) if axes else 0 for device in devices)
    return BatchLayout(mesh, axes, count, tiles)


def process_examples(mesh: Mesh, global_batch: int, layout: BatchLayout) -> slice | np.ndarray:
    """Returns the examples that the devices of this process need: a slice, or ascending indices."""
    if isinstance(global_batch, bool) or not isinstance(global_batch, int | np.integer) or global_batch < 0:
        raise DataError(f'global_batch is the number of examples of the global batch, got {global_batch!r}')
    if global_batch % layout.num_tiles:
        raise DataError(
            f'the global batch of {global_batch} examples is not divisible by {layout.num_tiles} shards, '
            f'over mesh axes {layout.axes}: choose a batch that is, or fewer axes with mesh_axis_subset'
        )
    size = int(global_batch) // layout.num_tiles
    tiles = layout.local_tiles
    if tiles == tuple(range(tiles[0], tiles[0] + len(tiles))):
        return slice(tiles[0] * size, (tiles[-1] + 1) * size)
    return np.concatenate([np.arange(tile * size, (tile + 1) * size) for tile in tiles])


def checked_axis(batch_axis: Any) -> int:
    """Returns the batch axis as an int.

    Raises:
        DataError: *batch_axis* is not an integer.
    """
    if isinstance(batch_axis, bool) or not isinstance(batch_axis, int | np.integer):
        raise DataError(f'batch_axis is an integer, got {batch_axis!r} (mesh axes go to mesh_axis_subset)')
    return int(batch_axis)
