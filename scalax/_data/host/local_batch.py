"""Host data of global arrays: the rows of each process, assembled from its devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from scalax._core.pytree.paths import NamedTree, is_prng_key
from scalax._data.host.batch_layout import checked_axis
from scalax._data.host.process_collectives import without_mesh_context
from scalax._data.host.transfer import agree_to_fetch, fetch, reject_tracers
from scalax.errors import DataError, shown_leaves

Box = tuple[tuple[int, int], ...]


def global_array_to_local_data(
    pytree: Any, batch_axis: int, local_batch: Literal['equal_share', 'addressable']
) -> Any:
    """The rows of global arrays that this process has, as NumPy arrays."""
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
    if fetched := [
        i
        for i, leaf in enumerate(tree.leaves)
        if local_batch == 'equal_share' and _has_rows_elsewhere(leaf, axis)
    ]:
        agree_to_fetch('global_array_to_local_data', tree, fetched)
    return tree.treedef.unflatten([_local_part(leaf, axis, local_batch) for leaf in tree.leaves])


def _fault(tree: NamedTree, index: int, axis: int, local_batch: str) -> str | None:
    """What is wrong with one leaf, or None; found from all devices, so that all processes find it."""
    leaf = tree.leaves[index]
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.ndim == 0:
        return None
    if not -leaf.ndim <= axis < leaf.ndim:
        return f'{tree.describe(index)} has no axis {axis}'
    boxes = _boxes_by_process(leaf)
    if local_batch == 'equal_share':
        size = leaf.shape[axis]
        if size % len(boxes):
            return (
                f'{tree.describe(index)}: {size} examples do not divide by {len(boxes)} processes; '
                "local_batch='addressable' gives those that the devices of each hold"
            )
    elif not all(
        _holds(mine, leaf.shape, axis % leaf.ndim, *box[axis]) for mine in boxes.values() for box in mine
    ):
        return (
            f'{tree.describe(index)}: no process holds entire examples, because another axis is sharded '
            f'over several processes ({leaf.sharding})'
        )
    return None


def _local_part(leaf: Any, batch_axis: int, local_batch: str) -> Any:
    if is_prng_key(leaf):
        # numpy has no typed keys: their data is fetched, and wrapped again.
        data = _local_part(
            without_mesh_context(jax.random.key_data, leaf), batch_axis % max(leaf.ndim, 1), local_batch
        )
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    if leaf.ndim == 0:
        return np.asarray(leaf.addressable_data(0))
    axis = batch_axis % leaf.ndim
    boxes = _boxes_by_process(leaf)
    if local_batch == 'addressable':
        return _assemble(leaf, axis, sorted({box[axis] for box in boxes[jax.process_index()]}))
    start, stop = _parts(leaf, axis, boxes)[jax.process_index()]
    if _has_rows_elsewhere(leaf, axis):
        return fetch(leaf)[(*[slice(None)] * axis, slice(start, stop))]
    return _assemble(leaf, axis, [(start, stop)])


def _parts(leaf: jax.Array, axis: int, boxes: Mapping[int, set[Box]]) -> dict[int, tuple[int, int]]:
    """For each process the rows of its equal part."""
    size = leaf.shape[axis] // len(boxes)
    return {process: (i * size, (i + 1) * size) for i, process in enumerate(sorted(boxes))}


def _has_rows_elsewhere(leaf: Any, axis: int) -> bool:
    """Whether the part of some process is on the devices of another, so that all processes fetch the leaf."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.ndim == 0:
        return False
    axis, boxes = axis % leaf.ndim, _boxes_by_process(leaf)
    parts = _parts(leaf, axis, boxes)
    return not all(_holds(boxes[process], leaf.shape, axis, *parts[process]) for process in boxes)


def _boxes_by_process(leaf: jax.Array) -> dict[int, set[Box]]:
    """The different parts of an array that the devices of each process hold."""
    placed: Mapping[Any, Any] = leaf.sharding.devices_indices_map(leaf.shape)
    boxes: dict[int, set[Box]] = {}
    for device, index in placed.items():
        boxes.setdefault(device.process_index, set()).add(_box(index, leaf.shape))
    return boxes


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _volume(box: Iterable[tuple[int, int]]) -> int:
    return math.prod(max(stop - start, 0) for start, stop in box)


def _holds(boxes: Iterable[Box], shape: Sequence[int], axis: int, start: int, stop: int) -> bool:
    """Whether boxes, no two of which overlap, hold the rows *start*:*stop* whole."""
    held = sum(_volume(_cut(box, axis, start, stop)) for box in boxes)
    return held == _volume(_cut(tuple((0, size) for size in shape), axis, start, stop))


def _cut(box: Box, axis: int, start: int, stop: int) -> Box:
    """A box without the rows outside of *start*:*stop*."""
    first, last = box[axis]
    return (*box[:axis], (max(first, start), min(last, stop)), *box[axis + 1 :])


def _assemble(leaf: jax.Array, axis: int, wanted: Sequence[tuple[int, int]]) -> np.ndarray:
    """Rows that this process's devices hold, in ascending order."""
    shape = list(leaf.shape)
    shape[axis] = sum(stop - start for start, stop in wanted)
    result = np.empty(shape, leaf.dtype)
    held = {_box(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
    parts = jax.device_get(held)
    offset = 0
    for start, stop in wanted:
        for box, data in parts.items():
            rows = _cut(box, axis, start, stop)
            if not _volume(rows):
                continue
            target = [slice(*sides) for sides in rows]
            target[axis] = slice(rows[axis][0] - start + offset, rows[axis][1] - start + offset)
            source = slice(rows[axis][0] - box[axis][0], rows[axis][1] - box[axis][0])
            result[tuple(target)] = data[(*[slice(None)] * axis, source)]
        offset += stop - start
    return result
