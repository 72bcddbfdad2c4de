"""Moving a tree: leaf by leaf, each along its route."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from scalax._hostdata import agreement, transfer
from scalax._mesh import meshes
from scalax._report.tables import human_bytes
from scalax._reshard import steps
from scalax._reshard.blocks import Piece, extent
from scalax._reshard.job import Job, Options
from scalax._reshard.names import Arrival
from scalax._reshard.routes import Route, Side
from scalax._reshard.steps import Blocks, is_here
from scalax._tree.paths import is_key
from scalax._util.progress import progress

if TYPE_CHECKING:
    from scalax.rules import RuleLike

Carry = Callable[[int, Route, Sequence[Piece], Blocks, tuple[int, ...]], Blocks]
"""Brings the pieces of a round of a leaf to their targets: from the leaf's number, its route, the pieces, by
source the values of those that are here, and the shape of each; by target, the values of those that are here
then."""

_log = logging.getLogger('scalax.reshard')

_ADVICE = (
    'What to do: call it on every process of the program, with trees of one structure, shape and dtype, '
    'whose arrays are placed alike; where a process holds nothing of an array, '
    'jax.ShapeDtypeStruct(shape, dtype, sharding=...) stands for it.'
)


def reshard(helper: Any, pytree: Any, rules: RuleLike, *options: Any) -> Any:
    """`MeshShardingHelper.reshard`."""
    mesh, checked = helper.mesh, Options.of(*options)
    meshes.require_devices(mesh, 'reshard')
    transfer.reject_tracers(jax.tree.leaves(pytree), 'reshard')
    every = Mesh(np.asarray(jax.devices(mesh.devices.flat[0].platform), dtype=object), ('device',))

    def prepare() -> tuple[Iterable[tuple[str, str]], Job]:
        job = Job.of(helper, pytree, rules, checked)
        job.require_values()
        return job.texts(), job

    job = agreement.together(every, 'reshard', checked.text(mesh), _ADVICE, prepare)
    with progress(f'resharding, {human_bytes(job.bytes)}', _log):
        return moved(job)


def _between_devices(
    _: int, route: Route, pieces: Sequence[Piece], values: Blocks, shape: tuple[int, ...]
) -> Blocks:
    return steps.carry(pieces, values, route.devices, shape, route.dtype)


def moved(job: Job, carry: Carry = _between_devices) -> Any:
    """The tree that a job makes."""
    leaves = list(job.tree.leaves)
    # An array, or its memory, may be in the tree several times.
    memory = [_address(leaf) for leaf in leaves]
    uses = Counter(memory[move.source] for arrival in job.arrivals for move in arrival.moves)
    made = []
    for arrival, after in zip(job.arrivals, job.afters, strict=True):
        blocks: Blocks = {}
        for move in arrival.moves:
            i = move.source
            source = leaves[i]
            if job.is_host[i]:
                source = transfer.put([source], [job.befores[i].sharding])[0]
            uses[memory[i]] -= 1
            ours = job.is_host[i] and not isinstance(leaves[i], jax.Array)
            last = (job.options.donate or ours) and not uses[memory[i]]
            route = job.route(move, after)
            bounded = job.options.memory is not None
            by = functools.partial(carry, i, route)
            _bring(route, by, after, _parts(source), blocks, last, bounded)
            if last and not ours:
                for leaf, address in zip(leaves, memory, strict=True):
                    if address == memory[i] and isinstance(leaf, jax.Array) and not leaf.is_deleted():
                        leaf.delete()
        made.append(_array(arrival, after, blocks))
    return jax.tree.unflatten(job.treedef, made)


def _address(leaf: Any) -> Any:
    """What leaves that share memory have in common."""
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) and leaf.size else ()
    if not shards or is_key(leaf):
        return id(leaf)
    return shards[0].device, shards[0].data.unsafe_buffer_pointer()


def _parts(leaf: Any) -> Blocks:
    """The blocks of an array that are here; those in the memory of a host are copied to their devices."""
    if not isinstance(leaf, jax.Array) or not leaf.addressable_shards:
        return {}
    kind = leaf.addressable_shards[0].device.default_memory().kind
    if leaf.sharding.memory_kind not in (None, kind):
        leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
    parts = {shard.device: shard.data for shard in leaf.addressable_shards}
    return {device: jax.random.key_data(part) for device, part in parts.items()} if is_key(leaf) else parts


def _bring(
    route: Route,
    carry: Callable[[Sequence[Piece], Blocks, tuple[int, ...]], Blocks],
    after: Side,
    parts: Blocks,
    blocks: Blocks,
    last: bool,
    bounded: bool,
) -> None:
    """Moves all pieces of a route; makes the blocks that are not there yet."""
    schedule = route.schedule
    for pieces in [*schedule.rounds, *schedule.kept]:  # kept ones may give up their memory: they come last
        shape = route.in_target(extent(pieces[0].box))
        stays = pieces[0].source == pieces[0].target
        values: Blocks = {}
        for relayed in (False, True):
            mine = [piece for piece in pieces if piece.relayed == relayed and is_here(piece.source)]
            if mine:
                values |= _cut(route, mine, parts, blocks, shape, stays, last)
        if not stays:
            values = carry(pieces, values, shape)
        _paste(route, after, pieces, values, blocks, shape)
        if bounded:
            jax.block_until_ready([*blocks.values()])
    jax.block_until_ready([*blocks.values()])  # the pieces of one leaf at a time are alive


def _cut(
    route: Route, pieces: list[Piece], parts: Blocks, blocks: Blocks, shape: Any, stays: bool, last: bool
) -> Blocks:
    """The values of pieces that are here, by the device that has them."""
    relayed = pieces[0].relayed
    held, side, boxes = (
        (blocks, route.in_target, route.schedule.target)
        if relayed
        else (parts, route.in_source, route.schedule.source)
    )
    sizes = side(extent(pieces[0].box))
    axes = None if relayed else route.axes
    block = held[pieces[0].source]
    is_same = block.shape == sizes == shape and block.dtype == route.dtype and axes is None
    if is_same and not stays:
        return {piece.source: held[piece.source] for piece in pieces}
    starts = {piece.source: side(start_in(piece, boxes[piece.source])) for piece in pieces}
    return steps.cut(held, starts, sizes, axes, shape, route.dtype, donate=is_same and last)


def _paste(
    route: Route, after: Side, pieces: Sequence[Piece], values: Blocks, blocks: Blocks, shape: Any
) -> None:
    mine = [piece for piece in pieces if is_here(piece.target)]
    if not mine:
        return
    whole = after.block
    if shape == whole and route.dtype == after.dtype:
        blocks.update({piece.target: values[piece.target] for piece in mine})
        return
    missing = [piece.target for piece in mine if piece.target not in blocks]
    if missing:
        blocks |= steps.zeros(missing, whole, after.dtype)
    boxes = route.schedule.target
    starts = {piece.target: route.in_target(start_in(piece, boxes[piece.target])) for piece in mine}
    blocks |= steps.paste(blocks, values, starts)


def start_in(piece: Piece, block: Any) -> tuple[int, ...]:
    """Where a piece begins in a block."""
    return tuple(begin - first for (begin, _), (first, _) in zip(piece.box, block, strict=True))


def _array(arrival: Arrival, after: Side, blocks: Blocks) -> jax.Array:
    """The array of the target, of its blocks that are here."""
    here = [device for device in after.boxes if is_here(device)]
    missing = [device for device in here if device not in blocks]
    if missing:  # arrays without elements
        blocks |= steps.zeros(missing, after.block, after.dtype)
    parts = [blocks[device] for device in here]
    if jax.dtypes.issubdtype(arrival.dtype, jax.dtypes.prng_key):
        impl = _impl_of(arrival.dtype)
        parts = [jax.random.wrap_key_data(part, impl=impl) for part in parts]
    kind = after.sharding.memory_kind
    if parts and kind not in (None, here[0].default_memory().kind):
        parts = jax.device_put(parts, [SingleDeviceSharding(one, memory_kind=kind) for one in here])
    return jax.make_array_from_single_device_arrays(arrival.shape, after.sharding, parts, dtype=arrival.dtype)


def _impl_of(dtype: Any) -> Any:
    """The implementation of keys of a dtype, which JAX tells of keys, also of traced ones."""
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return impls[0]
