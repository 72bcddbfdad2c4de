"""Global batches from the local batches of processes, whose examples keep the order of the processes.

It takes three steps, so that a prefetching thread can do the first two:

- `make_local_batch` checks the local batch, and determines the shapes and shardings of the global arrays;
- `copy_to_devices` copies the local batch to the devices of this process, without communication;
- every process calls the function that `copy_to_devices` returns, which moves examples to the devices that
  need them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import MeshAxes, canonical
from scalax._core.pytree.paths import (
    NamedTree,
    dtype_on_devices,
    has_foreign_dtype,
    is_prng_key,
    is_weakly_typed,
    leaf_shape,
    overflowed_dtype,
    type_text,
)
from scalax._data.host import agreement, process_collectives
from scalax._data.host.batch_layout import BatchLayout, checked_axis, layout_of
from scalax._data.host.transfer import reject_tracers, weakly_typed, wrap_keys
from scalax._jax.tracing import is_abstract
from scalax.errors import DataError, ScalaxError, shown_leaves
from scalax.rules._resolve import named_sharding

LocalBatchChoice = Literal['equal_share', 'addressable']
ADVICE = (
    'What to do: pass data of the same structure, shapes and dtypes on every process, with equal scalars; '
    'drop the incomplete batch at the end of the data, or pad it.'
)


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Options that join local batches to a global batch: the same on every process."""

    mesh: Mesh
    batch_axis: int = 0
    mesh_axis_subset: Sequence[str] | str | None = None
    local_batch: LocalBatchChoice = 'equal_share'

    @functools.cached_property
    def call(self) -> str:
        """The options as text, on which processes have to agree."""
        over = 'all mesh axes' if self.mesh_axis_subset is None else f'mesh axes {self.mesh_axis_subset!r}'
        return (
            f'mesh ({MeshAxes.of(self.mesh)}), batch on axis {self.batch_axis!r} over {over}, '
            f'local_batch={self.local_batch!r}'
        )


@dataclasses.dataclass(frozen=True)
class LocalBatch:
    """The local batch of this process, checked.

    Attributes:
        options: the options of the global batch.
        layout: the layout of the global batch.
        tree: the leaves of the local batch.
        axes: the batch axis of each leaf; None for scalars.
        shapes: the shapes of the global arrays.
        shardings: the shardings of the global arrays.
    """

    options: BatchOptions
    layout: BatchLayout
    tree: NamedTree
    axes: Sequence[int | None]
    shapes: Sequence[tuple[int, ...]]
    shardings: Sequence[NamedSharding]


Finish = Callable[[], Any]
"""Completes the global arrays; every process has to call it."""


def local_data_to_global_array(options: BatchOptions, pytree: Any, check: bool, check_replicas: bool) -> Any:
    """Implements `MeshShardingHelper.local_data_to_global_array`."""
    process_collectives.require_this_process(options.mesh)
    is_multiprocess = process_collectives.processes_of(options.mesh).is_multiprocess
    if not is_multiprocess:
        leaves, treedef = jax.tree.flatten(pytree)
        if shardings := _cached_shardings(options, leaves):
            return jax.tree.unflatten(treedef, jax.device_put(leaves, shardings))

    def prepare() -> tuple[Iterator[tuple[str, str]], tuple[LocalBatch, Finish]]:
        batch = make_local_batch(options, pytree)
        return _statement_leaves(batch), (batch, copy_to_devices(batch))

    if check:
        batch, finish = agreement.prepare_and_agree(
            options.mesh, 'local_data_to_global_array', options.call, ADVICE, prepare
        )
    else:
        _, (batch, finish) = prepare()
        if is_multiprocess:
            process_collectives.bound_queue(options.mesh)
    if check_replicas and is_multiprocess:
        _compare_replicas(batch)
    return finish()


def _compare_replicas(batch: LocalBatch) -> None:
    """Compares checksums of the examples that several processes load; raises on all processes, or on none.

    It costs one all-gather of about 30 bytes for each leaf and shard.

    Raises:
        DataError: lists leaves, examples and processes.
    """
    tree, layout = batch.tree, batch.layout
    tiles = [tile for process_tiles in layout.tiles_by_process for tile in process_tiles]
    if batch.options.local_batch != 'addressable' or len(tiles) == len(set(tiles)):
        return  # no two processes load the same examples
    checksums = []
    for i, (leaf, axis) in enumerate(zip(tree.leaves, batch.axes, strict=True)):
        if axis is not None:
            blocks = np.split(_to_numpy(leaf, copy=False), len(layout.local_tiles), axis)
            for tile, block in zip(layout.local_tiles, blocks, strict=True):
                checksums.append((i, tile, hashlib.blake2b(block.tobytes(), digest_size=8).hexdigest()))
    first: dict[tuple[int, int], tuple[int, str]] = {}
    different: dict[tuple[int, int], list[int]] = {}
    gathered = process_collectives.gather_json(layout.mesh, checksums)
    indices = process_collectives.processes_of(layout.mesh).indices
    for process, process_checksums in zip(indices, gathered, strict=True):
        for i, tile, checksum in process_checksums:
            if first.setdefault((i, tile), (process, checksum))[1] != checksum:
                different.setdefault((i, tile), []).append(process)
    lines = []
    for (i, tile), processes in sorted(different.items()):
        size = batch.shapes[i][batch.axes[i] or 0] // layout.num_tiles
        lines.append(
            f'{tree.paths[i] or "(the leaf itself)"}: examples {tile * size}:{(tile + 1) * size} of process '
            f'{", ".join(map(str, processes))} differ from those of process {first[i, tile][0]}'
        )
    if lines:
        raise DataError(
            'local_data_to_global_array: processes that load the same examples hold different values '
            f'({batch.options.call}):\n'
            f'{shown_leaves(lines)}\n'
            'What to do: load exactly the examples that helper.process_examples gives, with the same '
            'shuffling, augmentation and seed on every process.'
        )


def _cached_shardings(options: BatchOptions, leaves: Sequence[Any]) -> list[NamedSharding] | None:
    """Returns the shardings of the global arrays, if all leaves are valid NumPy arrays; otherwise None."""
    if set(map(type, leaves)) != {np.ndarray}:
        return None
    subset = options.mesh_axis_subset
    types = tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
    try:
        axes = tuple(subset) if isinstance(subset, list) else subset
        return _shardings_of(options.mesh, options.batch_axis, axes, options.local_batch, types)
    except (TypeError, ScalaxError):  # not hashable, or invalid: `read` raises the error
        return None


# Typed: True equals 1, and is not a batch axis.
@functools.lru_cache(maxsize=256, typed=True)
def _shardings_of(
    mesh: Mesh,
    batch_axis: int,
    axes: Any,
    local_batch: LocalBatchChoice,
    types: Sequence[tuple[tuple[int, ...], Any]],
) -> list[NamedSharding]:
    """Returns the shardings of arrays on one process, which do not depend on values or paths."""
    arrays = [np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in types]
    return list(make_local_batch(BatchOptions(mesh, batch_axis, axes, local_batch), arrays).shardings)


def agree(
    options: BatchOptions,
    function: str,
    batch: LocalBatch | None,
    error: BaseException | None,
    state: str = '',
) -> None:
    """Returns if the local batches of all processes are compatible; otherwise raises on every process."""
    leaves = () if batch is None else _statement_leaves(batch)
    agreement.agree(options.mesh, function, options.call, leaves, ADVICE, error, state=state)


def _statement_leaves(batch: LocalBatch) -> Iterator[tuple[str, str]]:
    """Yields (leaf path, text that must be the same on every process)."""
    # Users know the local shapes, but with local_batch='addressable' these may differ between processes.
    has_equal_shapes = batch.options.local_batch == 'equal_share'
    shapes = batch.tree.shapes if has_equal_shapes else batch.shapes
    for path, leaf, shape in zip(batch.tree.paths, batch.tree.leaves, shapes, strict=True):
        dtype = dtype_on_devices(leaf)
        if shape:
            yield path, agreement.weak_text(leaf) + type_text(dtype, shape)
        else:
            yield path, agreement.scalar_text(leaf, dtype)


def make_local_batch(options: BatchOptions, pytree: Any) -> LocalBatch:
    """Checks the local batch, and determines the shapes and shardings of the global arrays.

    Raises:
        DataError: some leaves do not fit the mesh; lists all of them.
        MeshError: the mesh lacks an axis of the options.
    """
    layout = layout_of(options.mesh, options.mesh_axis_subset)
    batch_axis = checked_axis(options.batch_axis)
    if options.local_batch not in ('equal_share', 'addressable'):
        raise DataError(f"local_batch is 'equal_share' or 'addressable', got {options.local_batch!r}")
    tree = NamedTree.of(pytree)
    reject_tracers(tree.leaves, 'local_data_to_global_array')
    faults = [_fault(tree, i, batch_axis, layout, options.local_batch) for i in range(len(tree))]
    if any(faults):
        raise DataError(
            f'local data does not fit the mesh ({MeshAxes.of(options.mesh)}), with the batch on axis '
            f'{batch_axis} over mesh axes {layout.axes}:\n{shown_leaves(filter(None, faults))}\n'
            'What to do: pad the batch or drop its last examples, or shard it over fewer axes with '
            'mesh_axis_subset.'
        )
    axes = [batch_axis % len(shape) if shape else None for shape in tree.shapes]
    shapes = [
        shape
        if axis is None
        else (
            *shape[:axis],
            _global_batch_size(shape[axis], layout, options.local_batch),
            *shape[axis + 1 :],
        )
        for shape, axis in zip(tree.shapes, axes, strict=True)
    ]
    specs = [PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, layout.axes) for axis in axes]
    shardings = [named_sharding(options.mesh, canonical(spec)) for spec in specs]
    return LocalBatch(options, layout, tree, axes, shapes, shardings)


def _fault(
    tree: NamedTree, index: int, batch_axis: int, layout: BatchLayout, local_batch: LocalBatchChoice
) -> str | None:
    """Returns why a leaf does not fit the mesh; None if it does."""
    leaf = tree.leaves[index]
    shape = leaf_shape(leaf)
    if shape is None or is_abstract(leaf):
        return f'{tree.describe(index)} is not an array'
    if has_foreign_dtype(leaf):
        return f'{tree.describe(index)}: JAX has no arrays of dtype {leaf.dtype}'
    if dtype := overflowed_dtype(leaf):
        return f'{tree.describe(index)}: {leaf} does not fit in {dtype}, to which JAX converts a Python int'
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return f'{tree.describe(index)} is a global array already, with shards on other processes'
    if not shape:
        return None
    if not -len(shape) <= batch_axis < len(shape):
        return f'{tree.describe(index)} has no axis {batch_axis}'
    local_size = shape[batch_axis]
    if local_batch == 'addressable':
        count = len(layout.local_tiles)
        if local_size % count:
            return (
                f'{tree.describe(index)}: {local_size} examples are not divisible by the {count} shards that '
                "this process's devices need"
            )
        return None
    global_size = _global_batch_size(local_size, layout, local_batch)
    if global_size % layout.num_tiles:
        return (
            f'{tree.describe(index)}: the global batch of {global_size} examples is not divisible by '
            f'{layout.num_tiles} shards'
        )
    return None


def _global_batch_size(local_size: int, layout: BatchLayout, local_batch: LocalBatchChoice) -> int:
    """Returns the number of examples of the global batch."""
    if local_batch == 'addressable':
        return local_size // len(layout.local_tiles) * layout.num_tiles
    return local_size * len(process_collectives.processes_of(layout.mesh).indices)


def copy_to_devices(batch: LocalBatch, *, keep: bool = True) -> Finish:
    """Copies a local batch to this process's devices; returns the function that completes the global arrays.

    Only that function communicates, and only if examples have to move.

    Args:
        batch: the local batch.
        keep: whether the memory of the batch stays unchanged while the arrays exist, so that they may share
            it (as they do on CPU), or copy from it later.
    """
    tree, mesh = batch.tree, batch.options.mesh
    copy = not keep and mesh.devices.flat[0].platform == 'cpu'
    if process_collectives.processes_of(mesh).is_multiprocess:
        placed = [_place_leaf(batch, i, copy) for i in range(len(tree))]
        if not keep:
            jax.block_until_ready(placed)
        return lambda: tree.treedef.unflatten(_complete(batch, placed))
    # One transfer for all leaves, in which Python numbers get weak types: this process has all examples.
    leaves = [
        _to_numpy(leaf, copy) if copy and hasattr(leaf, 'dtype') and not isinstance(leaf, jax.Array) else leaf
        for leaf in tree.leaves
    ]
    arrays = jax.device_put(leaves, list(batch.shardings))
    if not keep:
        jax.block_until_ready(arrays)
    return lambda: tree.treedef.unflatten(arrays)


def _to_numpy(leaf: Any, copy: bool) -> np.ndarray:
    """Converts a leaf to a NumPy array of the dtype that it has on devices; keys to their data."""
    if isinstance(leaf, jax.Array):
        return np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
    if not hasattr(leaf, 'dtype'):
        return np.asarray(leaf).astype(dtype_on_devices(leaf))
    return np.array(leaf) if copy else np.asarray(leaf)


def _place_leaf(batch: LocalBatch, index: int, copy: bool) -> Any:
    """Returns a leaf on this process's devices: the global array, or examples that `_complete` moves."""
    layout, axis, sharding = batch.layout, batch.axes[index], batch.shardings[index]
    array = _to_numpy(batch.tree.leaves[index], copy)
    if axis is None:
        return jax.make_array_from_callback(array.shape, sharding, lambda _: array)
    # The data of keys have additional trailing dimensions.
    shape = (*batch.shapes[index], *array.shape[len(batch.shapes[index]) :])
    if not array.size:
        # Nothing has to move, and XLA gives every device the unsharded output if it has no elements.
        empty = np.empty(sharding.shard_shape(shape), array.dtype)
        return jax.make_array_from_callback(shape, sharding, lambda _: empty)
    if batch.options.local_batch == 'equal_share' and not layout.is_in_process_order:
        return process_collectives.concat_by_process(layout.mesh, array, axis)
    tiles = np.split(array, len(layout.local_tiles), axis)
    tile_by_index = dict(zip(layout.local_tiles, tiles, strict=True))
    size = shape[axis] // layout.num_tiles

    def tile(index: tuple[slice, ...] | None) -> np.ndarray:
        return tile_by_index[(cast(tuple[slice, ...], index)[axis].start or 0) // size]

    return jax.make_array_from_callback(shape, sharding, tile)


def _complete(batch: LocalBatch, placed: Sequence[Any]) -> list[jax.Array]:
    """Moves examples to the devices that need them, and returns the global arrays."""
    arrays = list(placed)
    for i, (array, sharding) in enumerate(zip(placed, batch.shardings, strict=True)):
        if isinstance(array, np.ndarray):
            arrays[i] = process_collectives.allgather_and_shard(
                batch.options.mesh, array, cast(int, batch.axes[i]), sharding
            )
        elif array.sharding != sharding:
            process_collectives.bound_queue(batch.options.mesh)
            arrays[i] = process_collectives.without_mesh_context(jax.device_put, array, sharding)
    for i, leaf in enumerate(batch.tree.leaves):
        if is_prng_key(leaf):
            arrays[i] = wrap_keys(arrays[i], leaf, batch.shardings[i])
        elif is_weakly_typed(leaf):
            arrays[i] = weakly_typed(arrays[i])
    return arrays
