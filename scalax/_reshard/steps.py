"""The steps of a move: pieces are cut where they are, carried to other devices, and pasted into blocks there.

Devices of this process do the same at the same time, in one program: each with its own block and positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._hostdata.collectives import without_context
from scalax._reshard.blocks import Piece

Blocks = dict[Any, jax.Array]
Starts = Mapping[Any, Sequence[int]]
Shape = tuple[int, ...]
_AXIS = 'device'


def is_here(device: Any) -> bool:
    """Whether a device belongs to this process."""
    return bool(device.process_index == jax.process_index())


def cut(
    blocks: Blocks, starts: Starts, sizes: Shape, axes: Shape | None, shape: Shape, dtype: Any, donate: bool
) -> Blocks:
    """A part of each block: of so many elements from a position on, transposed, reshaped and cast."""
    program = _cutter(sizes, axes, shape, dtype)
    return _on_each(program, starts, ([blocks[one] for one in starts],), len(shape), donate)


@functools.lru_cache(maxsize=1024)
def _cutter(sizes: Any, axes: Any, shape: Any, dtype: Any) -> Callable[..., jax.Array]:
    def cut(block: jax.Array, start: jax.Array) -> jax.Array:
        piece = lax.dynamic_slice(block, [*start[0]], sizes)
        return lax.transpose(piece, axes or range(len(sizes))).reshape(shape).astype(dtype)

    return cut


def paste(blocks: Blocks, pieces: Blocks, starts: Starts) -> Blocks:
    """The blocks with a piece at a position of each; the memory of the blocks is used again."""
    columns = ([blocks[one] for one in starts], [pieces[one] for one in starts])
    return _on_each(_paste, starts, columns, columns[0][0].ndim, True)


def _paste(block: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(block, piece.astype(block.dtype), [*start[0]])


def zeros(devices: Iterable[Any], shape: Shape, dtype: Any) -> Blocks:
    """A block of zeros on each device."""
    line = _line(tuple(devices))
    return _by_device(without_context(_zeros(line, shape, dtype)))


@functools.lru_cache(maxsize=1024)
def _zeros(line: Mesh, shape: Shape, dtype: Any) -> Callable[[], jax.Array]:
    whole, sharding = _whole(line, shape)
    return jax.jit(lambda: jnp.zeros(whole, dtype), out_shardings=sharding)


def carry(
    pieces: Sequence[Piece], values: Blocks, devices: tuple[Any, ...], shape: Shape, dtype: Any
) -> Blocks:
    """Brings pieces from their sources to their targets, of which each has one at most.

    Between devices of one process ``jax.device_put`` copies them. What goes to other processes is permuted
    by one collective program.

    Args:
        pieces: the pieces of a round.
        values: by source, the values of those that are here.
        devices: all devices of this move, the same on every process.
        shape: the shape of each piece.
        dtype: its dtype.

    Returns:
        By target, the values of those that are here now.
    """
    pairs = [(piece.source, piece.target) for piece in pieces]
    near = [(a, b) for a, b in pairs if is_here(a) and is_here(b)]
    arrived = dict(
        zip(
            [b for _, b in near],
            jax.device_put([values[a] for a, _ in near], [b for _, b in near]),
            strict=True,
        )
    )
    far = {a: b for a, b in pairs if a.process_index != b.process_index}
    here = [device for device in devices if is_here(device)]
    if not far or not here:
        return arrived
    sent = {a: values[a] for a in far if is_here(a)}
    idle = [device for device in here if device not in sent]
    sent |= zeros(idle, shape, dtype) if idle else {}
    line = _line(devices)
    ways = tuple((devices.index(a), devices.index(b)) for a, b in far.items())
    moved = without_context(_permutation(line, ways, len(shape)), _joined(line, [sent[one] for one in here]))
    moved = jax.block_until_ready(moved)  # a process must not queue more programs than its client takes
    return arrived | {b: block for b, block in _by_device(moved).items() if b in far.values()}


@functools.lru_cache(maxsize=4096)
def _permutation(line: Mesh, ways: tuple[tuple[int, int], ...], rank: int) -> Callable[..., jax.Array]:
    spec = _spec(rank)
    move = lambda block: lax.ppermute(block, _AXIS, ways)  # noqa: E731
    return jax.jit(jax.shard_map(move, mesh=line, in_specs=spec, out_specs=spec, check_vma=False))


def _on_each(
    function: Callable[..., jax.Array],
    starts: Starts,
    columns: Sequence[Sequence[Any]],
    rank: int,
    donate: bool,
) -> Blocks:
    """Runs a function on each device, with its own arguments; the result has so many dimensions."""
    line = _line(tuple(starts))
    ranks = tuple(column[0].ndim for column in columns)
    rows = np.asarray([*starts.values()], np.int32).reshape(line.size, -1)
    program = _program(function, line, ranks, rank, donate)
    return _by_device(without_context(program, *(_joined(line, column) for column in columns), rows))


@functools.lru_cache(maxsize=4096)
def _program(
    function: Callable[..., jax.Array], line: Mesh, ranks: tuple[int, ...], rank: int, donate: bool
) -> Callable[..., Any]:
    specs = (*map(_spec, ranks), PartitionSpec(_AXIS))
    mapped = jax.shard_map(function, mesh=line, in_specs=specs, out_specs=_spec(rank), check_vma=False)
    return jax.jit(mapped, donate_argnums=0 if donate else ())


def _joined(line: Mesh, blocks: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(*_whole(line, blocks[0].shape), [*blocks])


def _whole(line: Mesh, shape: Shape) -> tuple[Shape, NamedSharding]:
    """Shape and sharding of blocks one after another; numbers have no dimension for that, and are equal."""
    whole = (line.size * shape[0], *shape[1:]) if shape else ()
    return whole, NamedSharding(line, _spec(len(shape)))


def _by_device(array: jax.Array) -> Blocks:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _spec(rank: int) -> PartitionSpec:
    return PartitionSpec(_AXIS) if rank else PartitionSpec()


@functools.lru_cache(maxsize=256)
def _line(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.asarray(devices, dtype=object), (_AXIS,))
