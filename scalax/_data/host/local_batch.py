"""Local batches from global arrays: the examples of each process, assembled from its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from scalax._core.pytree.paths import NamedTree, is_prng_key
from scalax._data.host.batch_layout import checked_axis
from scalax._data.host.boxes import Box, box_of, intersection, volume
from scalax._data.host.process_collectives import without_mesh_context
from scalax._data.host.transfer import agree_to_fetch, fetch, reject_tracers
from scalax.errors import DataError, shown_leaves

LocalBatchChoice = Literal['equal_share', 'addressable']


def global_array_to_local_data(pytree: Any, batch_axis: int, local_batch: LocalBatchChoice) -> Any:
    """Implements `MeshShardingHelper.global_array_to_local_data`."""
    axis = checked_axis(batch_axis)
    if local_batch not in ('equal_share', 'addressable'):
        raise DataError(f"local_batch is 'equal_share' or 'addressable', got {local_batch!r}")
    tree = NamedTree.of(pytree)
    reject_tracers(tree.leaves, 'global_array_to_local_data')
    faults = [_fault(tree, i, axis, local_batch) for i in range(len(tree))]
    if any(faults):
        raise DataError(
            f'global arrays have no local share along axis {axis}:\n{shown_leaves(filter(None, faults))}\n'
            'What to do: choose another batch_axis, or fetch entire arrays with helper.gather.'
        )
    if local_batch == 'equal_share' and (
        fetched := [i for i, leaf in enumerate(tree.leaves) if _needs_fetch(leaf, axis)]
    ):
        agree_to_fetch('global_array_to_local_data', tree, fetched)
    return tree.treedef.unflatten([_local_leaf(leaf, axis, local_batch) for leaf in tree.leaves])


def _fault(tree: NamedTree, index: int, axis: int, local_batch: LocalBatchChoice) -> str | None:
    """Returns why a leaf has no local batch on some process: the same text on every process."""
    leaf = tree.leaves[index]
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.ndim == 0:
        return None
    if not -leaf.ndim <= axis < leaf.ndim:
        return f'{tree.describe(index)} has no axis {axis}'
    boxes_by_process = _boxes_by_process(leaf)
    if local_batch == 'equal_share':
        size = leaf.shape[axis]
        if size % len(boxes_by_process):
            return (
                f'{tree.describe(index)}: {size} examples are not divisible by {len(boxes_by_process)} '
                "processes; local_batch='addressable' gives the examples that the devices of each "
                'process hold'
            )
    elif not all(
        _cover(boxes, leaf.shape, axis % leaf.ndim, *box[axis])
        for boxes in boxes_by_process.values()
        for box in boxes
    ):
        return (
            f'{tree.describe(index)}: no process holds entire examples, because another axis is sharded '
            f'over several processes ({leaf.sharding})'
        )
    return None


def _local_leaf(leaf: Any, batch_axis: int, local_batch: LocalBatchChoice) -> Any:
    """Returns the local batch of one leaf."""
    if is_prng_key(leaf):
        # NumPy has no typed keys, so this fetches their data and wraps it again.
        data = without_mesh_context(jax.random.key_data, leaf)
        local_data = _local_leaf(data, batch_axis % max(leaf.ndim, 1), local_batch)
        return jax.random.wrap_key_data(local_data, impl=jax.random.key_impl(leaf))
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    if leaf.ndim == 0:
        return np.asarray(leaf.addressable_data(0))
    axis = batch_axis % leaf.ndim
    boxes_by_process = _boxes_by_process(leaf)
    if local_batch == 'addressable':
        return _assemble(leaf, axis, sorted({box[axis] for box in boxes_by_process[jax.process_index()]}))
    start, stop = _equal_shares(leaf, axis, boxes_by_process)[jax.process_index()]
    if _needs_fetch(leaf, axis):
        return fetch(leaf)[(*[slice(None)] * axis, slice(start, stop))]
    return _assemble(leaf, axis, [(start, stop)])


def _equal_shares(leaf: jax.Array, axis: int, processes: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Returns process -> the start and stop of its equal share of the examples."""
    ordered = sorted(processes)
    size = leaf.shape[axis] // len(ordered)
    return {process: (i * size, (i + 1) * size) for i, process in enumerate(ordered)}


def _needs_fetch(leaf: Any, axis: int) -> bool:
    """Returns whether devices of other processes hold a share, so that all processes fetch the leaf."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.ndim == 0:
        return False
    axis, boxes_by_process = axis % leaf.ndim, _boxes_by_process(leaf)
    shares = _equal_shares(leaf, axis, boxes_by_process)
    return not all(
        _cover(boxes, leaf.shape, axis, *shares[process]) for process, boxes in boxes_by_process.items()
    )


def _boxes_by_process(leaf: jax.Array) -> dict[int, set[Box]]:
    """Returns process -> the distinct boxes that its devices hold."""
    indices: Mapping[Any, Any] = leaf.sharding.devices_indices_map(leaf.shape)
    boxes: dict[int, set[Box]] = {}
    for device, index in indices.items():
        boxes.setdefault(device.process_index, set()).add(box_of(index, leaf.shape))
    return boxes


def _cover(boxes: Iterable[Box], shape: Sequence[int], axis: int, start: int, stop: int) -> bool:
    """Returns whether disjoint boxes cover all elements of the examples *start*:*stop*."""
    covered = sum(volume(_clip(box, axis, start, stop)) for box in boxes)
    return covered == volume(_clip(tuple((0, size) for size in shape), axis, start, stop))


def _clip(box: Box, axis: int, start: int, stop: int) -> Box:
    """Clips a box to the examples *start*:*stop*."""
    return intersection(box, (*box[:axis], (start, stop), *box[axis + 1 :]))


def _assemble(leaf: jax.Array, axis: int, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Copies ranges of examples, which this process's devices hold, into one array."""
    shape = list(leaf.shape)
    shape[axis] = sum(stop - start for start, stop in ranges)
    result = np.empty(shape, leaf.dtype)
    shards = jax.device_get(
        {box_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
    )
    offset = 0
    for start, stop in ranges:
        for box, data in shards.items():
            part = _clip(box, axis, start, stop)
            if not volume(part):
                continue
            target = [slice(*bounds) for bounds in part]
            target[axis] = slice(part[axis][0] - start + offset, part[axis][1] - start + offset)
            source = slice(part[axis][0] - box[axis][0], part[axis][1] - box[axis][0])
            result[tuple(target)] = data[(*[slice(None)] * axis, source)]
        offset += stop - start
    return result
