"""The way of one leaf, or of one layer: its schedule, and where pieces are in the blocks of both sides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from scalax._core.pytree.paths import element_bits
from scalax._data.reshard.block_schedule import Schedule, boxes_of, common, schedule_of
from scalax._jax.devices import slice_of

Side = tuple[tuple[int, ...], Any, Any]
"""Shape, dtype and sharding of an array, before or after."""


@dataclasses.dataclass(frozen=True)
class Route:
    """How a leaf, or a layer of one, gets from one side to the other.

    Boxes are positions in the array of the side that holds the stack, if one does, and else in that of
    either, transposed as in the target.

    Attributes:
        schedule: which pieces go where; of the target it has the blocks that all of its moves make.
        axes: how pieces are transposed; None if they are not.
        stacks: whether the array becomes a layer of the target.
        splits: whether a layer of the source becomes the array.
        dtype: in which pieces are sent: the smaller of both.
        made: the dtype of the target; of keys, that of their data.
    """

    schedule: Schedule
    axes: tuple[int, ...] | None
    stacks: bool
    splits: bool
    dtype: Any
    made: Any

    def in_source(self, row: Sequence[int]) -> tuple[int, ...]:
        """A number for each dimension, in the dimensions of the source."""
        row = row[1:] if self.stacks else row
        return tuple(row) if self.axes is None else tuple(row[self.axes.index(i)] for i in range(len(row)))

    def in_target(self, row: Sequence[int]) -> tuple[int, ...]:
        """A number for each dimension, in the dimensions of the target."""
        return tuple(row[1:] if self.splits else row)


@functools.lru_cache(maxsize=4096)
def route_of(before: Side, after: Side, memory: int | None, axes: Any, layer: Any, splits: bool) -> Route:
    """The route of a move, computed once for shapes, dtypes and shardings.

    Args:
        before: the source.
        after: the target.
        memory: the most bytes of pieces that are alive on a device, which holds two at a time: one that it
            sends, and one that it receives.
        axes: as in `Move`, as are the next two.
        layer: see there.
        splits: see there.
    """
    (sources, has), (targets, made) = map(_blocks, (before, after))
    if axes is not None:
        sources = {device: tuple(box[axis] for axis in axes) for device, box in sources.items()}
    one = () if layer is None else ((layer, layer + 1),)
    if splits:
        targets = {device: (*one, *box) for device, box in targets.items()}
    else:
        sources = {device: (*one, *box) for device, box in sources.items()}
    wanted = {device: common(box, (*one, *box[len(one) :])) for device, box in targets.items()}
    small, large = sorted((made, has), key=element_bits)
    most = None if memory is None else max(memory * 8 // (2 * element_bits(large)), 1)
    schedule = dataclasses.replace(schedule_of(sources, wanted, most, slice_of), target=targets)
    return Route(schedule, axes, layer is not None and not splits, splits, small, made)


def _blocks(side: Side) -> tuple[dict[Any, Any], Any]:
    """By device, the block of an array, or of the data of keys; and its dtype."""
    shape, dtype, sharding = side
    struct = jax.ShapeDtypeStruct(shape, dtype)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        struct = jax.eval_shape(jax.random.key_data, struct)
    return boxes_of(struct.shape, sharding.devices_indices_map(struct.shape)), struct.dtype
