"""The blocks of an array and the devices that hold them, computed from a sharding and a shape."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from scalax._core.pytree import partition_specs
from scalax._core.pytree.partition_specs import MeshAxes

Index = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension of an array, and how it is sharded.

    Attributes:
        size: the size in the global array.
        ranges: the (start, stop) of each part, in order.
        axes: the mesh axes that shard it, as ``fsdp=4 x tp=2``; empty if it is unsharded.
    """

    size: int
    ranges: tuple[tuple[int, int], ...]
    axes: str = ''

    @property
    def is_sharded(self) -> bool:
        """Whether the dimension has several parts."""
        return len(self.ranges) > 1


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one array, and the devices that hold them.

    Attributes:
        dimensions: the dimensions; a block is the product of one part of each.
        holders: the index of a block (the index of a part of each dimension) -> the devices that hold it, in
            mesh order.
        devices: the numbers of all devices, in mesh order.
        numbering: the meaning of the device numbers, as a sentence.
        placement: the spec, or the type of another sharding; and its memory, if not the default.
        notes: further facts about the blocks, as sentences.
    """

    dimensions: tuple[Dimension, ...]
    holders: Mapping[Index, tuple[int, ...]]
    devices: tuple[int, ...]
    numbering: str
    placement: str
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(dimension.size for dimension in self.dimensions)

    @property
    def sharded_dims(self) -> tuple[int, ...]:
        """The dimensions with several parts."""
        return tuple(dim for dim, dimension in enumerate(self.dimensions) if dimension.is_sharded)

    def at(self, index: Index) -> tuple[int, ...]:
        """Returns the devices that hold a block."""
        return self.holders[index]

    def slices(self, index: Index) -> str:
        """Returns the slice of the array in a block: ``[0:2, 8:16]``."""
        pairs = zip(self.dimensions, index, strict=True)
        return f'[{", ".join(range_text(dimension.ranges[part]) for dimension, part in pairs)}]'


def range_text(bounds: tuple[int, int]) -> str:
    """Returns a part of a dimension as a slice: ``0:2``."""
    return f'{bounds[0]}:{bounds[1]}'


def blocks_of(sharding: Sharding, shape: Sequence[int]) -> Blocks:
    """Returns the blocks of an array under a sharding.

    Args:
        sharding: a NamedSharding of a ``Mesh`` or an ``AbstractMesh``, or a sharding of one device.
        shape: the global shape.

    Example:
        >>> from jax.sharding import PartitionSpec
        >>> mesh = AbstractMesh((2, 2), ('data', 'model'))
        >>> blocks = blocks_of(NamedSharding(mesh, PartitionSpec('model')), (8, 3))
        >>> dict(blocks.holders)
        {(0, 0): (0, 2), (1, 0): (1, 3)}
    """
    if isinstance(sharding, NamedSharding):
        return _blocks_of_spec(sharding, tuple(shape))
    device: Any = next(iter(sharding.device_set))
    dimensions = tuple(Dimension(size, ((0, size),)) for size in shape)
    holders = {(0,) * len(shape): (device.id,)}
    placement = f'{type(sharding).__name__}{_memory_text(sharding)}'
    return Blocks(dimensions, holders, (device.id,), _device_ids_text([device]), placement)


def _blocks_of_spec(sharding: NamedSharding, shape: tuple[int, ...]) -> Blocks:
    """Returns the blocks under a spec. Shapes need not be divisible, and meshes need no devices."""
    mesh, spec = sharding.mesh, sharding.spec
    axes = MeshAxes.of(mesh)
    entries = list(map(partition_specs.entry_axes, partition_specs.entries(spec)))
    dim_axes = [*entries, *[()] * len(shape)][: len(shape)]
    counts = [axes.size(names) for names in dim_axes]
    dimensions = tuple(
        Dimension(
            size,
            _ranges(size, count),
            ' x '.join(f'{name}={axes.sizes[name]}' for name in names) if count > 1 else '',
        )
        for size, count, names in zip(shape, counts, dim_axes, strict=True)
    )
    order = [axis for names in dim_axes for axis in names]
    order += [axis for axis in axes.sizes if axis not in order]
    mesh_axes = list(axes.sizes)
    numbers = _device_numbers(mesh)
    numbers_by_block = numbers.transpose([mesh_axes.index(axis) for axis in order])
    numbers_by_block = numbers_by_block.reshape(math.prod(counts), -1)
    indices = itertools.product(*map(range, counts))
    holders = dict(zip(indices, map(tuple, numbers_by_block.tolist()), strict=True))
    placement = f'{partition_specs.canonical(spec)}{_memory_text(sharding)}'
    notes = tuple(_notes(spec, dimensions))
    devices = tuple(numbers.ravel().tolist())
    return Blocks(dimensions, holders, devices, _numbering_text(mesh, axes), placement, notes)


def _ranges(size: int, count: int) -> tuple[tuple[int, int], ...]:
    """Returns equal parts; if the size is not divisible, the last parts are smaller or empty."""
    step = -(-size // count)
    return tuple((min(part * step, size), min((part + 1) * step, size)) for part in range(count))


def _device_numbers(mesh: Mesh | AbstractMesh) -> np.ndarray[Any, Any]:
    """Returns the device ids, or the positions in an abstract mesh, in the shape of the mesh."""
    sizes = tuple(mesh.shape.values())
    if isinstance(mesh, AbstractMesh):
        return np.arange(math.prod(sizes)).reshape(sizes)
    return np.array([device.id for device in mesh.devices.flat]).reshape(sizes)


def _numbering_text(mesh: Mesh | AbstractMesh, axes: MeshAxes) -> str:
    if isinstance(mesh, AbstractMesh):
        return f'Numbers are positions, in mesh order, in the abstract mesh ({axes}), which has no devices.'
    return f'{_device_ids_text(list(mesh.devices.flat))[:-1]}, in the mesh ({axes}).'


def _device_ids_text(devices: Sequence[Any]) -> str:
    processes = {device.process_index for device in devices}
    of_processes = f' of {len(processes)} processes' if len(processes) > 1 else ''
    return f'Numbers are ids of {devices[0].platform.upper()} devices{of_processes}.'


def _memory_text(sharding: Sharding) -> str:
    kind = sharding.memory_kind
    return '' if kind in (None, 'device') else f' in {kind}'


def _notes(spec: Any, dimensions: Sequence[Dimension]) -> Iterable[str]:
    for dim, dimension in enumerate(dimensions):
        count = len(dimension.ranges)
        if dimension.size % count:
            yield (
                f'dim {dim} of size {dimension.size} is not divisible by {count}: '
                'the last blocks are smaller, and padded by the compiler'
            )
    if spec.unreduced:
        yield (
            f'unreduced over {", ".join(map(str, sorted(spec.unreduced)))}: '
            'devices of one block hold terms still to be combined, not copies'
        )
