"""Resharding of a tree, leaf by leaf."""

from __future__ import annotations

import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from scalax._core.mesh import meshes
from scalax._core.pytree.partition_specs import MeshAxes
from scalax._core.pytree.paths import is_prng_key
from scalax._core.render.tables import human_bytes
from scalax._core.util.progress import progress
from scalax._data.host import agreement, transfer
from scalax._data.host.boxes import box_shape
from scalax._data.reshard import device_ops
from scalax._data.reshard.block_schedule import Piece
from scalax._data.reshard.device_ops import Blocks, is_here
from scalax._data.reshard.leaf_mapping import TargetLeaf
from scalax._data.reshard.leaf_transfer import LeafTransfer
from scalax._data.reshard.request import ReshardOptions, ReshardRequest

Transport = Callable[[int, LeafTransfer, Sequence[Piece], Blocks, tuple[int, ...]], Blocks]
"""Sends the pieces of one round to their targets.

Its arguments are the index of the source leaf, the transfer, the pieces, the values of the pieces on devices
of this process (by source), and the shape of a piece as it is sent. It returns the values of the pieces that
devices of this process receive (by target)."""

_LOG = logging.getLogger('scalax.reshard')
_ADVICE = (
    'What to do: call it on every process of the program, with trees of one structure, shape, dtype and '
    'sharding; where a process holds no shard of an array, pass '
    'jax.ShapeDtypeStruct(shape, dtype, sharding=...) in its place.'
)


def reshard(helper: Any, pytree: Any, rules: Any, *options: Any) -> Any:
    """Implements `MeshShardingHelper.reshard`."""
    mesh = helper.mesh
    meshes.require_devices(mesh, 'reshard')
    transfer.reject_tracers(jax.tree.leaves(pytree), 'reshard')
    all_devices = Mesh(np.asarray(jax.devices(mesh.devices.flat[0].platform), dtype=object), ('device',))

    def prepare() -> tuple[Iterable[tuple[str, str]], ReshardRequest]:
        request = ReshardRequest.of(helper, pytree, rules, ReshardOptions.of(*options))
        return request.agreement_texts(), request

    call = f'mesh ({MeshAxes.of(mesh)})'
    request = agreement.prepare_and_agree(all_devices, 'reshard', call, _ADVICE, prepare)
    with progress(f'resharding, {human_bytes(request.bytes)}', _LOG):
        return transfer_leaves(request, device_ops.send)


def transfer_leaves(request: ReshardRequest, transport: Transport) -> Any:
    """Transfers the leaves of a request and returns the target tree."""
    leaves = request.tree.leaves
    # An array, or its memory, may be in the tree several times.
    memory = [_memory_address(leaf) for leaf in leaves]
    leaves_by_address: dict[Any, list[Any]] = defaultdict(list)
    for address, leaf in zip(memory, leaves, strict=True):
        leaves_by_address[address].append(leaf)
    remaining_uses = Counter(memory[source.index] for target in request.targets for source in target.sources)
    arrays = []
    for target in request.targets:
        blocks: Blocks = {}
        for source in target.sources:
            i = source.index
            remaining_uses[memory[i]] -= 1
            donate = request.options.donate and not remaining_uses[memory[i]]
            leaf_transfer = request.transfer(source, target)
            send = functools.partial(transport, i, leaf_transfer)
            _transfer_pieces(leaf_transfer, send, _local_blocks(leaves[i]), blocks, donate)
            for leaf in leaves_by_address[memory[i]] if donate else ():
                if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                    leaf.delete()
        arrays.append(_make_array(target, blocks))
    return jax.tree.unflatten(request.treedef, arrays)


def _memory_address(leaf: Any) -> Any:
    """Returns a value that is equal for leaves that share memory."""
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) and leaf.size else ()
    if not shards:
        return id(leaf)
    data = shards[0].data
    if is_prng_key(leaf):  # which shares the memory of its data
        data = jax.random.key_data(data)
    return shards[0].device, data.unsafe_buffer_pointer()


def _local_blocks(leaf: Any) -> Blocks:
    """Returns the local shards of an array; of keys, the shards of their data."""
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
    return {
        shard.device: jax.random.key_data(shard.data) if is_prng_key(leaf) else shard.data for shard in shards
    }


def _transfer_pieces(
    leaf_transfer: LeafTransfer,
    send: Callable[[Sequence[Piece], Blocks, tuple[int, ...]], Blocks],
    source_blocks: Blocks,
    target_blocks: Blocks,
    donate: bool,
) -> None:
    """Transfers all pieces of a leaf into the target blocks, and makes the blocks that do not exist yet."""
    schedule = leaf_transfer.schedule
    block_shape = leaf_transfer.in_target(box_shape(next(iter(schedule.target.values()))))

    def ensure_blocks(devices: Iterable[Any]) -> None:
        if missing := tuple(device for device in devices if device not in target_blocks):
            target_blocks.update(device_ops.zeros(missing, block_shape, leaf_transfer.target_dtype))

    # Pieces that stay may donate their blocks, so they come last.
    for pieces in [*schedule.transfer_rounds, *schedule.local_rounds]:
        shape = box_shape(pieces[0].box)
        sent_shape = leaf_transfer.in_target(shape)
        stays = pieces[0].source == pieces[0].target
        source_starts = {
            piece.source: leaf_transfer.in_source(start_in(piece, schedule.source[piece.source]))
            for piece in pieces
            if is_here(piece.source)
        }
        values = {device: source_blocks[device] for device in source_starts}
        has_sent_form = all(
            (block.shape, block.dtype) == (sent_shape, leaf_transfer.sent_dtype) for block in values.values()
        )
        is_block = has_sent_form and leaf_transfer.axes is None
        if source_starts and (stays or not is_block):
            values = device_ops.extract(values, source_starts, leaf_transfer, shape, is_block and donate)
        if not stays:
            values = send(pieces, values, sent_shape)
        target_starts = {
            piece.target: leaf_transfer.in_target(start_in(piece, schedule.target[piece.target]))
            for piece in pieces
            if is_here(piece.target)
        }
        if sent_shape == block_shape and leaf_transfer.sent_dtype == leaf_transfer.target_dtype:
            target_blocks.update({device: values[device] for device in target_starts})
        elif target_starts:
            ensure_blocks(target_starts)
            target_blocks.update(device_ops.insert(target_blocks, values, target_starts))
        jax.block_until_ready([*target_blocks.values()])  # so that only one round of pieces is alive
    ensure_blocks(device for device in schedule.target if is_here(device))  # for arrays without elements


def start_in(piece: Piece, block: Any) -> tuple[int, ...]:
    """Returns the start of a piece, relative to a block."""
    return tuple(start - block_start for (start, _), (block_start, _) in zip(piece.box, block, strict=True))


def _make_array(target: TargetLeaf, blocks: Blocks) -> jax.Array:
    """Makes the global array of a target leaf from its local blocks."""
    shape, dtype, sharding = target.shape, target.dtype, target.sharding
    shards = [blocks[device] for device in sharding.devices_indices_map(shape) if device in blocks]
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        impls: list[Any] = []  # JAX returns the implementation of keys, also of traced ones, not of a dtype
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
        shards = [jax.random.wrap_key_data(shard, impl=impls[0]) for shard in shards]
    array = jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)
    return transfer.weakly_typed(array) if target.weak and shards else array
