"""The blocks of an array and the devices that hold them, from a sharding and a shape alone."""

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
    """How one dimension of an array is cut.

    Attributes:
        size: of the whole array.
        ranges: the (start, stop) of each part, in order.
        axes: the mesh axes that cut it, as ``fsdp=4 x tp=2``; empty if there are none.
    """

    size: int
    ranges: tuple[tuple[int, int], ...]
    axes: str = ''

    @property
    def is_cut(self) -> bool:
        """Whether there are several parts."""
        return len(self.ranges) > 1


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one array, and the devices that hold them.

    Attributes:
        dimensions: how each dimension is cut; the blocks are all products of their parts.
        holders: the index of a block, a part of each dimension -> the devices that hold it, in mesh order.
        devices: the numbers of all devices, in mesh order.
        numbering: the meaning of the numbers of devices, as a sentence.
        placement: the spec, or the type of another sharding; and its memory, if not the default.
        notes: more about the blocks, as sentences.
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
    def cut(self) -> tuple[int, ...]:
        """The dimensions with several parts."""
        return tuple(number for number, dimension in enumerate(self.dimensions) if dimension.is_cut)

    def at(self, index: Index) -> tuple[int, ...]:
        """The devices that hold a block."""
        return self.holders[index]

    def slices(self, index: Index) -> str:
        """The part of the array in a block, as an index: ``[0:2, 8:16]``."""
        pairs = zip(self.dimensions, index, strict=True)
        return f'[{", ".join(range_text(dimension.ranges[part]) for dimension, part in pairs)}]'


def range_text(bounds: tuple[int, int]) -> str:
    """A part of a dimension as an index: ``0:2``."""
    return f'{bounds[0]}:{bounds[1]}'


def blocks_of(sharding: Sharding, shape: Sequence[int]) -> Blocks:
    """The blocks that a sharding makes of an array.

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
        return _of_spec(sharding, tuple(shape))
    device: Any = next(iter(sharding.device_set))
    whole = tuple(Dimension(size, ((0, size),)) for size in shape)
    placement = f'{type(sharding).__name__}{_memory(sharding)}'
    return Blocks(whole, {(0,) * len(shape): (device.id,)}, (device.id,), _ids([device]), placement)


def _of_spec(sharding: NamedSharding, shape: tuple[int, ...]) -> Blocks:
    """The blocks of a spec; also for shapes that do not divide, and for meshes without devices."""
    mesh, spec = sharding.mesh, sharding.spec
    axes = MeshAxes.of(mesh)
    entries = [*map(partition_specs.entry_axes, partition_specs.entries(spec)), *[()] * len(shape)][
        : len(shape)
    ]
    counts = [axes.size(names) for names in entries]
    dimensions = tuple(
        Dimension(
            size,
            _even(size, count),
            ' x '.join(f'{name}={axes.sizes[name]}' for name in names) if count > 1 else '',
        )
        for size, count, names in zip(shape, counts, entries, strict=True)
    )
    order = [axis for names in entries for axis in names]
    order += [axis for axis in axes.sizes if axis not in order]
    names_in_mesh = list(axes.sizes)
    numbers = _numbers(mesh).transpose([names_in_mesh.index(axis) for axis in order])
    rows = numbers.reshape(math.prod(counts), -1).tolist()
    holders = dict(zip(itertools.product(*map(range, counts)), map(tuple, rows), strict=True))
    placement = f'{partition_specs.canonical(spec)}{_memory(sharding)}'
    notes = tuple(_notes(spec, dimensions))
    devices = tuple(_numbers(mesh).ravel().tolist())
    return Blocks(dimensions, holders, devices, _numbering(mesh, axes), placement, notes)


def _even(size: int, count: int) -> tuple[tuple[int, int], ...]:
    """Equal parts; if the size does not divide, the last ones are smaller or empty."""
    step = -(-size // count)
    return tuple((min(part * step, size), min((part + 1) * step, size)) for part in range(count))


def _numbers(mesh: Mesh | AbstractMesh) -> np.ndarray[Any, Any]:
    """The ids of the devices in the shape of the mesh; of a mesh without devices, positions."""
    sizes = tuple(mesh.shape.values())
    if isinstance(mesh, AbstractMesh):
        return np.arange(math.prod(sizes)).reshape(sizes)
    return np.array([device.id for device in mesh.devices.flat]).reshape(sizes)


def _numbering(mesh: Mesh | AbstractMesh, axes: MeshAxes) -> str:
    if isinstance(mesh, AbstractMesh):
        return f'Numbers are positions, in mesh order, in the abstract mesh ({axes}), which has no devices.'
    return f'{_ids(mesh.devices.flat)[:-1]}, in the mesh ({axes}).'


def _ids(devices: Iterable[Any]) -> str:
    known = list(devices)
    processes = {device.process_index for device in known}
    of = f' of {len(processes)} processes' if len(processes) > 1 else ''
    return f'Numbers are ids of {known[0].platform.upper()} devices{of}.'


def _memory(sharding: Sharding) -> str:
    kind = sharding.memory_kind
    return '' if kind in (None, 'device') else f' in {kind}'


def _notes(spec: Any, dimensions: Sequence[Dimension]) -> Iterable[str]:
    for number, dimension in enumerate(dimensions):
        count = len(dimension.ranges)
        if dimension.size % count:
            yield (
                f'dim {number} of size {dimension.size} does not divide by {count}: '
                'the last blocks are smaller, and padded by the compiler'
            )
    if spec.unreduced:
        yield (
            f'unreduced over {", ".join(map(str, sorted(spec.unreduced)))}: '
            'devices of one block hold terms still to be combined, not copies'
        )
