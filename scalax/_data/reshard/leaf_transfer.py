"""Transfer of one leaf, or of one layer of a stack: its schedule, and its pieces in source and target.

A leaf of the source may become one layer of a stack in the target, or one layer of a source stack may become
a leaf. Boxes are then positions in the stack; otherwise they are positions in the source, transposed as in
the target. The memory limit of a move becomes the size of the pieces here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from scalax._core.pytree.paths import element_bits
from scalax._data.host.boxes import boxes_of, intersection
from scalax._data.reshard.block_schedule import TransferSchedule, make_schedule
from scalax._jax.devices import slice_of

ShardedType = tuple[tuple[int, ...], Any, Any]
"""Shape, dtype and sharding of an array."""


@dataclasses.dataclass(frozen=True)
class LeafTransfer:
    """The pieces of a leaf, and how a position in a box maps to the source and to the target.

    Attributes:
        schedule: which device sends which piece to which. Its target blocks are the blocks of the target
            leaf, of which other transfers may fill other layers.
        axes: the transpose of each piece; None if there is none.
        target_is_stack: whether the leaf becomes one layer of the target.
        source_is_stack: whether one layer of the source becomes the leaf.
        sent_dtype: the dtype in which pieces are sent: the smaller of both.
        target_dtype: the dtype of the target; of keys, the dtype of their data.
    """

    schedule: TransferSchedule
    axes: tuple[int, ...] | None
    target_is_stack: bool
    source_is_stack: bool
    sent_dtype: Any
    target_dtype: Any

    def in_source(self, values: Sequence[int]) -> tuple[int, ...]:
        """Converts one value per dimension of a box to one value per dimension of the source."""
        values = values[1:] if self.target_is_stack else values
        if self.axes is None:
            return tuple(values)
        return tuple(values[self.axes.index(i)] for i in range(len(values)))

    def in_target(self, values: Sequence[int]) -> tuple[int, ...]:
        """Converts one value per dimension of a box to one value per dimension of the target."""
        return tuple(values[1:] if self.source_is_stack else values)


@functools.lru_cache(maxsize=4096)
def plan_leaf_transfer(
    source: ShardedType,
    target: ShardedType,
    memory: int | None,
    axes: tuple[int, ...] | None,
    layer: int | None,
    source_is_stack: bool,
) -> LeafTransfer:
    """Plans the transfer of a leaf. It depends on shapes, dtypes and shardings only, so it is cached.

    Args:
        source: the leaf of the source.
        target: the leaf of the target.
        memory: the maximum number of bytes of pieces on a device, which holds two pieces at a time: one that
            it sends, and one that it receives.
        axes: as in `LeafSource`.
        layer: as in `LeafSource`.
        source_is_stack: as in `LeafSource`.
    """
    (sources, source_dtype), (targets, target_dtype) = map(_blocks, (source, target))
    if axes is not None:
        sources = {device: tuple(box[axis] for axis in axes) for device, box in sources.items()}
    leading = () if layer is None else ((layer, layer + 1),)
    if source_is_stack:
        targets = {device: (*leading, *box) for device, box in targets.items()}
    else:
        sources = {device: (*leading, *box) for device, box in sources.items()}
    needed = {device: intersection(box, (*leading, *box[len(leading) :])) for device, box in targets.items()}
    small, large = sorted((target_dtype, source_dtype), key=element_bits)
    max_elements = None if memory is None else max(memory * 8 // (2 * element_bits(large)), 1)
    schedule = make_schedule(sources, needed, max_elements, slice_of)
    schedule = dataclasses.replace(schedule, target=targets)
    target_is_stack = layer is not None and not source_is_stack
    return LeafTransfer(schedule, axes, target_is_stack, source_is_stack, small, target_dtype)


def _blocks(array: ShardedType) -> tuple[dict[Any, Any], Any]:
    """Returns device -> its block of an array, or of the data of keys; and the dtype of the blocks."""
    shape, dtype, sharding = array
    struct = jax.ShapeDtypeStruct(shape, dtype)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        struct = jax.eval_shape(jax.random.key_data, struct)
    return boxes_of(struct.shape, sharding.devices_indices_map(struct.shape)), struct.dtype
