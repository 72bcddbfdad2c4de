"""The way of one leaf, or of one layer: its schedule, and where pieces are in the blocks of both sides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from scalax._jax.devices import slice_of
from scalax._reshard.blocks import Box, Schedule, boxes_of, common, schedule_of
from scalax._tree.paths import bits_of


@dataclasses.dataclass(frozen=True)
class Side:
    """An array on devices, before or after; keys are their data.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        sharding: its sharding.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Side:
        """The side of an array, which may be of typed keys."""
        struct = jax.ShapeDtypeStruct(shape, dtype)
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            struct = jax.eval_shape(jax.random.key_data, struct)
        return cls(struct.shape, struct.dtype, sharding)

    @property
    def boxes(self) -> dict[Any, Box]:
        """The block of each device."""
        return boxes_of(self.shape, self.sharding.devices_indices_map(self.shape))

    @functools.cached_property
    def block(self) -> tuple[int, ...]:
        """The shape of each block."""
        return tuple(self.sharding.shard_shape(self.shape))

    @property
    def bits(self) -> int:
        """The bits of an element."""
        return bits_of(self.dtype)


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
        devices: all devices, the same on every process.
    """

    schedule: Schedule
    axes: tuple[int, ...] | None
    stacks: bool
    splits: bool
    dtype: Any

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        return tuple(dict.fromkeys([*self.schedule.source, *self.schedule.target]))

    def in_source(self, row: Sequence[int]) -> tuple[int, ...]:
        """A number for each dimension, in the dimensions of the source."""
        row = row[1:] if self.stacks else row
        return tuple(row) if self.axes is None else tuple(row[self.axes.index(i)] for i in range(len(row)))

    def in_target(self, row: Sequence[int]) -> tuple[int, ...]:
        """A number for each dimension, in the dimensions of the target."""
        return tuple(row[1:] if self.splits else row)


@functools.lru_cache(maxsize=4096)
def route_of(
    before: Side,
    after: Side,
    axes: tuple[int, ...] | None = None,
    layer: int | None = None,
    splits: bool = False,
    memory: int | None = None,
    relay: bool = True,
) -> Route:
    """The route of a move, computed once for shapes, dtypes and shardings.

    Args:
        before: the source.
        after: the target.
        axes: as in `Move`, as are the next two.
        layer: see there.
        splits: see there.
        memory: the most bytes of pieces that are alive on a device, which holds two at a time: one that it
            sends, and one that it receives.
        relay: whether devices send what they have received.
    """
    sources, targets = before.boxes, after.boxes
    if axes is not None:
        sources = {device: tuple(box[axis] for axis in axes) for device, box in sources.items()}
    one = () if layer is None else ((layer, layer + 1),)
    if splits:
        targets = {device: (*one, *box) for device, box in targets.items()}
    else:
        sources = {device: (*one, *box) for device, box in sources.items()}
    layers = {device: (*one, *box[len(one) :]) for device, box in targets.items()}
    wanted = {device: common(box, layers[device]) for device, box in targets.items()}
    most = None if memory is None else max(memory * 8 // (2 * max(before.bits, after.bits)), 1)
    schedule = schedule_of(sources, wanted, most, slice_of, relay)
    return Route(
        dataclasses.replace(schedule, target=targets),
        axes,
        layer is not None and not splits,
        splits,
        after.dtype if after.bits <= before.bits else before.dtype,
    )
