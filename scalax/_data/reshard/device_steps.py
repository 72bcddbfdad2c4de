"""The steps of a move: pieces are cut where they are, carried to other devices, and pasted into blocks there.

Devices of this process do the same at the same time, in one program: each with its own block and positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._data.host.process_collectives import without_context
from scalax._data.reshard.block_schedule import Piece
from scalax._data.reshard.routes import Route

Blocks = dict[Any, jax.Array]
Starts = Mapping[Any, Sequence[int]]
Shape = tuple[int, ...]
_AXIS = 'device'


def is_here(device: Any) -> bool:
    """Whether a device belongs to this process."""
    return bool(device.process_index == jax.process_index())


def cut(blocks: Blocks, starts: Starts, route: Route, size: Shape, donate: bool) -> Blocks:
    """A piece of a size of each block, from a position on, as it is sent: transposed, reshaped and cast."""
    sizes, shape = route.in_source(size), route.in_target(size)
    how = (sizes, route.axes or tuple(range(len(sizes))), shape, route.dtype)
    return _run(_cut, tuple(starts), len(shape), [_of(blocks, starts), _rows(starts)], how, donate)


def _cut(block: Any, start: Any, sizes: Shape, axes: Shape, shape: Shape, dtype: Any) -> jax.Array:
    return lax.transpose(lax.dynamic_slice(block, [*start[0]], sizes), axes).reshape(shape).astype(dtype)


def paste(blocks: Blocks, pieces: Blocks, starts: Starts) -> Blocks:
    """The blocks with a piece at a position of each; the memory of the blocks is used again."""
    columns = [_of(blocks, starts), _of(pieces, starts), _rows(starts)]
    return _run(_paste, tuple(starts), blocks[next(iter(starts))].ndim, columns, donate=True)


def _paste(block: Any, piece: Any, start: Any) -> jax.Array:
    return lax.dynamic_update_slice(block, piece.astype(block.dtype), [*start[0]])


def zeros(devices: tuple[Any, ...], shape: Shape, dtype: Any) -> Blocks:
    """A block of zeros on each device."""
    return _run(jnp.zeros, devices, len(shape), [], (shape, dtype))


def carry(_: int, route: Route, pieces: Sequence[Piece], values: Blocks, shape: Shape) -> Blocks:
    """Brings the pieces of a round from their sources to their targets, of which each has one at most.

    Between devices of one process ``jax.device_put`` copies them. What goes to other processes is permuted
    by one collective program over all devices of the route.

    Args:
        route: of the array.
        pieces: the pieces of a round.
        values: by source, the values of those that are here.
        shape: the shape of each piece.

    Returns:
        By target, the values of those that are here now.
    """
    near = {piece.target: piece.source for piece in pieces if is_here(piece.source) and is_here(piece.target)}
    arrived = dict(zip(near, jax.device_put(_of(values, near.values()), [*near]), strict=True))
    far = [piece for piece in pieces if piece.source.process_index != piece.target.process_index]
    devices = tuple(dict.fromkeys([*route.schedule.source, *route.schedule.target]))
    here = [device for device in devices if is_here(device)]
    if not far or not here:
        return arrived
    idle = tuple(device for device in here if device not in values)
    sent = values | (zeros(idle, shape, route.dtype) if idle else {})
    ways = tuple((devices.index(piece.source), devices.index(piece.target)) for piece in far)
    moved = _run(lax.ppermute, devices, len(shape), [_of(sent, here)], (_AXIS, ways))
    jax.block_until_ready([*moved.values()])  # a process must not queue more programs than its client takes
    return arrived | {piece.target: moved[piece.target] for piece in far if is_here(piece.target)}


def _run(
    function: Any, devices: Any, rank: int, columns: Sequence[Any], how: Any = (), donate: bool = False
) -> Blocks:
    """Runs a function on each device, with its own item of each column; the result has so many dimensions."""
    line = _line(devices)
    arrays = [column if isinstance(column, np.ndarray) else _joined(line, column) for column in columns]
    program = _program(function, line, tuple(array.ndim for array in arrays), rank, how, donate)
    return {shard.device: shard.data for shard in without_context(program, *arrays).addressable_shards}


@functools.lru_cache(maxsize=4096)
def _program(function: Any, line: Mesh, ranks: Shape, rank: int, how: Any, donate: bool) -> Any:
    on_each = lambda *arrays: function(*arrays, *how)  # noqa: E731
    specs = tuple(map(_spec, ranks))
    mapped = jax.shard_map(on_each, mesh=line, in_specs=specs, out_specs=_spec(rank), check_vma=False)
    return jax.jit(mapped, donate_argnums=0 if donate else ())


def _joined(line: Mesh, blocks: Sequence[jax.Array]) -> jax.Array:
    """Blocks one after another; numbers have no dimension for that, and are equal."""
    shape = blocks[0].shape
    whole = (line.size * shape[0], *shape[1:]) if shape else ()
    sharding = NamedSharding(line, _spec(len(shape)))
    return jax.make_array_from_single_device_arrays(whole, sharding, [*blocks])


def _of(blocks: Blocks, devices: Iterable[Any]) -> list[jax.Array]:
    return [blocks[device] for device in devices]


def _rows(starts: Starts) -> np.ndarray:
    return np.asarray([*starts.values()], np.int32)


def _spec(rank: int) -> PartitionSpec:
    return PartitionSpec(_AXIS) if rank else PartitionSpec()


@functools.lru_cache(maxsize=256)
def _line(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.asarray(devices, dtype=object), (_AXIS,))
