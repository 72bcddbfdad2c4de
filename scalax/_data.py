"""How does the batch that each process loads become one global array, and back?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax import _mesh
from scalax._paths import NamedTree, has_foreign_dtype, leaf_shape
from scalax._resolve import named_sharding
from scalax._transfer import reject_tracers
from scalax.errors import DataError, MeshError, shown


def local_data_to_global_array(
    mesh: Mesh, pytree: Any, batch_axis: int, mesh_axis_subset: Sequence[str] | str | None
) -> Any:
    """See `MeshShardingHelper.local_data_to_global_array`, which is documented for users."""
    names = tuple(mesh.axis_names)
    axes = names if mesh_axis_subset is None else _mesh.axis_subset(mesh_axis_subset, names)
    types = dict(zip(names, mesh.axis_types, strict=True))
    if len({types[axis] for axis in axes}) > 1:
        listed = ', '.join(f'{axis} is {types[axis].name}' for axis in axes)
        raise MeshError(
            f'the batch cannot be sharded over mesh axes of different types together ({listed}): choose '
            'axes of one type with mesh_axis_subset'
        )
    if isinstance(batch_axis, bool) or not isinstance(batch_axis, int | np.integer):
        raise DataError(
            f'batch_axis is a whole number, got {batch_axis!r} (mesh axes go to mesh_axis_subset)'
        )
    tree = NamedTree.of(pytree)
    reject_tracers(tree.leaves, 'local_data_to_global_array')
    faults = [_fault(mesh, tree, i, batch_axis, axes) for i in range(len(tree))]
    if any(faults):
        sizes = ', '.join(f'{name}={size}' for name, size in mesh.shape.items())
        raise DataError(
            f'local data does not fit the mesh ({sizes}), with the batch on axis {batch_axis} over '
            f'mesh axes {axes}:\n{shown(filter(None, faults))}\n'
            'What to do: give arrays whose batch divides, or shard it over fewer axes with '
            'mesh_axis_subset.'
        )
    specs = [_spec(shape, batch_axis, axes) for shape in tree.shapes]
    shardings = [named_sharding(mesh, spec) for spec in specs]
    if jax.process_count() == 1:
        # All rows are here, so this is a plain transfer: one for all leaves, and no collective.
        arrays = jax.device_put(list(tree.leaves), shardings)
    else:
        arrays = [
            _from_processes(mesh, leaf, sharding, batch_axis)
            for leaf, sharding in zip(tree.leaves, shardings, strict=True)
        ]
    return tree.treedef.unflatten(arrays)


def _fault(mesh: Mesh, tree: NamedTree, index: int, batch_axis: int, axes: tuple[str, ...]) -> str | None:
    """What is wrong with one leaf, or None."""
    leaf = tree.leaves[index]
    shape = leaf_shape(leaf)
    if shape is None or has_foreign_dtype(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return f'{tree.describe(index)} is not an array'
    if shape and not -len(shape) <= batch_axis < len(shape):
        return f'{tree.describe(index)} has no axis {batch_axis}'
    rows = shape[batch_axis] * jax.process_count() if shape else 0
    shards = math.prod(mesh.shape[name] for name in axes)
    if rows % shards:
        return f'{tree.describe(index)}: the global batch of {rows} rows does not divide by {shards} shards'
    return None


def _spec(shape: tuple[int, ...], batch_axis: int, axes: tuple[str, ...]) -> PartitionSpec:
    """The batch axis over *axes*; scalars are replicated."""
    if not shape or not axes:
        return PartitionSpec()
    return PartitionSpec(*[None] * (batch_axis % len(shape)), axes)


def _from_processes(mesh: Mesh, leaf: Any, wanted: NamedSharding, batch_axis: int) -> jax.Array:
    """Builds a global array from the rows of all processes.

    Where each process holds the devices that its own rows belong to, nothing moves. Elsewhere every
    process first puts its rows on its own devices, in process order, and the arrays are then resharded,
    so that what must move moves between devices.
    """
    host = np.asarray(leaf)
    if not host.shape:
        return jax.make_array_from_callback((), wanted, lambda _: host)
    axis, here = batch_axis % host.ndim, host.shape[batch_axis]
    shape = (*host.shape[:axis], here * jax.process_count(), *host.shape[axis + 1 :])
    offset = here * jax.process_index()

    def rows(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[axis].indices(shape[axis])
        return host[(*index[:axis], slice(start - offset, stop - offset), *index[axis + 1 :])]

    if _each_holds_its_own(wanted, shape, axis, here):
        return jax.make_array_from_callback(shape, wanted, rows)
    staged = jax.make_array_from_callback(shape, _by_process(mesh, axis), rows)
    return jax.device_put(staged, wanted)


def _each_holds_its_own(sharding: NamedSharding, shape: tuple[int, ...], axis: int, here: int) -> bool:
    """Whether every device of the mesh needs rows of its own process only.

    Computed from all devices, those of other processes too, so that all processes agree.
    """
    placed: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in placed.items():
        start, stop, _ = index[axis].indices(shape[axis])
        if start < here * device.process_index or stop > here * (device.process_index + 1):
            return False
    return True


def _by_process(mesh: Mesh, axis: int) -> NamedSharding:
    """A sharding that gives each process its own rows, in process order, over its own devices."""
    devices = sorted(mesh.devices.flat, key=lambda device: device.process_index)
    owners = [device.process_index for device in devices]
    counts = [owners.count(process) for process in range(jax.process_count())]
    if len(set(counts)) != 1:
        raise DataError(f'every process must hold as many devices of the mesh as the others, got {counts}')
    grid = np.asarray(devices, dtype=object).reshape(len(counts), counts[0])
    return NamedSharding(Mesh(grid, ('process', 'device')), PartitionSpec(*[None] * axis, 'process'))


def global_array_to_local_data(pytree: Any, batch_axis: int) -> Any:
    """See `MeshShardingHelper.global_array_to_local_data`, which is documented for users."""
    return jax.tree.map(lambda leaf: _local_part(leaf, batch_axis), pytree)


def _local_part(leaf: Any, batch_axis: int) -> Any:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # numpy knows no typed keys: their data comes and becomes keys again.
        data = _local_part(jax.random.key_data(leaf), batch_axis % max(leaf.ndim, 1))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
        return np.asarray(leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf)
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    if not -leaf.ndim <= batch_axis < leaf.ndim:
        raise DataError(f'an array of shape {leaf.shape} has no axis {batch_axis}')
    axis = batch_axis % leaf.ndim
    blocks: dict[int, Any] = {}
    for shard in leaf.addressable_shards:
        whole = [i for i, part in enumerate(shard.index) if part != slice(None) and i != axis]
        if any(_length(shard.index[i], leaf.shape[i]) != leaf.shape[i] for i in whole):
            raise DataError(
                f'an array of shape {leaf.shape} is sharded along other axes than the batch axis '
                f'{batch_axis} ({leaf.sharding}): reshard it first'
            )
        start = shard.index[axis].indices(leaf.shape[axis])[0]
        blocks.setdefault(start, shard.data)
    return np.concatenate([np.asarray(blocks[start]) for start in sorted(blocks)], axis)


def _length(part: slice, size: int) -> int:
    start, stop, _ = part.indices(size)
    return stop - start
