"""Operations on blocks: extract pieces, send them to other devices, insert them there.

The devices of this process run each operation at the same time, as one program, with different positions.
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

from scalax._data.host.process_collectives import without_mesh_context
from scalax._data.reshard.block_schedule import Piece
from scalax._data.reshard.leaf_transfer import LeafTransfer

Blocks = dict[Any, jax.Array]
"""Device -> its array."""
Starts = Mapping[Any, Sequence[int]]
"""Device -> the start of a piece in its block."""
Shape = tuple[int, ...]
_AXIS = 'device'


def is_here(device: Any) -> bool:
    """Returns whether a device belongs to this process."""
    return bool(device.process_index == jax.process_index())


def extract(blocks: Blocks, starts: Starts, transfer: LeafTransfer, shape: Shape, donate: bool) -> Blocks:
    """Extracts a piece of each block, in the form in which it is sent: transposed, reshaped and cast.

    Args:
        blocks: the blocks of the source.
        starts: the start of each piece.
        transfer: the transfer of the leaf.
        shape: the shape of the box of a piece.
        donate: whether the blocks are donated.
    """
    sizes, sent_shape = transfer.in_source(shape), transfer.in_target(shape)
    static = (sizes, transfer.axes or tuple(range(len(sizes))), sent_shape, transfer.sent_dtype)
    operands = [_arrays_on(starts, blocks), _as_array(starts)]
    return _run(_extract_block, tuple(starts), len(sent_shape), operands, static, donate)


def _extract_block(block: Any, start: Any, sizes: Shape, axes: Shape, shape: Shape, dtype: Any) -> jax.Array:
    return lax.transpose(lax.dynamic_slice(block, [*start[0]], sizes), axes).reshape(shape).astype(dtype)


def insert(blocks: Blocks, pieces: Blocks, starts: Starts) -> Blocks:
    """Writes a piece into each block; the blocks are donated."""
    operands = [_arrays_on(starts, blocks), _arrays_on(starts, pieces), _as_array(starts)]
    return _run(_insert_block, tuple(starts), blocks[next(iter(starts))].ndim, operands, donate=True)


def _insert_block(block: Any, piece: Any, start: Any) -> jax.Array:
    return lax.dynamic_update_slice(block, piece.astype(block.dtype), [*start[0]])


def zeros(devices: tuple[Any, ...], shape: Shape, dtype: Any) -> Blocks:
    """Makes a block of zeros on each device."""
    return _run(jnp.zeros, devices, len(shape), [], (shape, dtype))


def send(_: int, transfer: LeafTransfer, pieces: Sequence[Piece], values: Blocks, shape: Shape) -> Blocks:
    """Sends the pieces of a round from their sources to their targets; see `run.Transport`.

    Between devices of one process, ``jax.device_put`` copies the pieces. One collective permute over all
    devices of the transfer sends the others.
    """
    local = {
        piece.target: piece.source for piece in pieces if is_here(piece.source) and is_here(piece.target)
    }
    received = dict(zip(local, jax.device_put(_arrays_on(local.values(), values), [*local]), strict=True))
    remote = [piece for piece in pieces if piece.source.process_index != piece.target.process_index]
    devices = tuple(dict.fromkeys([*transfer.schedule.source, *transfer.schedule.target]))
    here = [device for device in devices if is_here(device)]
    if not remote or not here:
        return received
    idle = tuple(device for device in here if device not in values)
    operands = values | (zeros(idle, shape, transfer.sent_dtype) if idle else {})
    pairs = tuple((devices.index(piece.source), devices.index(piece.target)) for piece in remote)
    results = _run(lax.ppermute, devices, len(shape), [_arrays_on(here, operands)], (_AXIS, pairs))
    jax.block_until_ready([*results.values()])  # a process must not queue more programs than its client takes
    return received | {piece.target: results[piece.target] for piece in remote if is_here(piece.target)}


def _run(
    function: Any, devices: Any, rank: int, operands: Sequence[Any], static: Any = (), donate: bool = False
) -> Blocks:
    """Runs a function on each device of this process.

    Args:
        function: takes one array of each operand, and then the static arguments.
        devices: the devices.
        rank: the number of dimensions of the result.
        operands: for each argument, an array per device in the order of *devices*: a list of blocks, or a
            NumPy array with one row per device.
        static: the static arguments.
        donate: whether the first operand is donated.
    """
    mesh = _mesh(devices)
    arrays = [x if isinstance(x, np.ndarray) else _concatenated(mesh, x) for x in operands]
    program = _program(function, mesh, tuple(array.ndim for array in arrays), rank, static, donate)
    return {shard.device: shard.data for shard in without_mesh_context(program, *arrays).addressable_shards}


@functools.lru_cache(maxsize=4096)
def _program(function: Any, mesh: Mesh, ranks: Shape, rank: int, static: Any, donate: bool) -> Any:
    def on_device(*arrays: Any) -> Any:
        return function(*arrays, *static)

    specs = tuple(map(_spec, ranks))
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=_spec(rank), check_vma=False)
    return jax.jit(mapped, donate_argnums=0 if donate else ())


def _concatenated(mesh: Mesh, blocks: Sequence[jax.Array]) -> jax.Array:
    """Joins blocks along their first dimension. Scalars have none, and are equal."""
    shape = blocks[0].shape
    global_shape = (mesh.size * shape[0], *shape[1:]) if shape else ()
    sharding = NamedSharding(mesh, _spec(len(shape)))
    return jax.make_array_from_single_device_arrays(global_shape, sharding, [*blocks])


def _arrays_on(devices: Iterable[Any], blocks: Blocks) -> list[jax.Array]:
    return [blocks[device] for device in devices]


def _as_array(starts: Starts) -> np.ndarray:
    return np.asarray([*starts.values()], np.int32)


def _spec(rank: int) -> PartitionSpec:
    return PartitionSpec(_AXIS) if rank else PartitionSpec()


@functools.lru_cache(maxsize=256)
def _mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.asarray(devices, dtype=object), (_AXIS,))
