"""Moving a tree: leaf by leaf, each along its route."""

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
from scalax._data.reshard import device_steps
from scalax._data.reshard.block_schedule import Piece, extent
from scalax._data.reshard.device_steps import Blocks, is_here
from scalax._data.reshard.leaf_mapping import Arrival
from scalax._data.reshard.request import Job, Options
from scalax._data.reshard.routes import Route

Carry = Callable[[int, Route, Sequence[Piece], Blocks, tuple[int, ...]], Blocks]
"""Brings the pieces of a round of a leaf to their targets: from the leaf's number, its route, the pieces, by
source the values of those that are here, and the shape of each; by target, the values of those that are here
then."""

_LOG = logging.getLogger('scalax.reshard')
_ADVICE = (
    'What to do: call it on every process of the program, with trees of one structure, shape and dtype, '
    'whose arrays are placed alike; where a process holds nothing of an array, '
    'jax.ShapeDtypeStruct(shape, dtype, sharding=...) stands for it.'
)


def reshard(helper: Any, pytree: Any, rules: Any, *options: Any) -> Any:
    """`MeshShardingHelper.reshard`."""
    mesh = helper.mesh
    meshes.require_devices(mesh, 'reshard')
    transfer.reject_tracers(jax.tree.leaves(pytree), 'reshard')
    every = Mesh(np.asarray(jax.devices(mesh.devices.flat[0].platform), dtype=object), ('device',))

    def prepare() -> tuple[Iterable[tuple[str, str]], Job]:
        job = Job.of(helper, pytree, rules, Options.of(*options))
        return job.texts(), job

    job = agreement.together(every, 'reshard', f'mesh ({MeshAxes.of(mesh)})', _ADVICE, prepare)
    with progress(f'resharding, {human_bytes(job.bytes)}', _LOG):
        return moved(job, device_steps.carry)


def moved(job: Job, carry: Carry) -> Any:
    """The tree that a job makes."""
    leaves = job.tree.leaves
    # An array, or its memory, may be in the tree several times.
    memory = [_address(leaf) for leaf in leaves]
    sharing: dict[Any, list[Any]] = defaultdict(list)
    for address, leaf in zip(memory, leaves, strict=True):
        sharing[address].append(leaf)
    uses = Counter(memory[move.source] for arrival in job.arrivals for move in arrival.moves)
    made = []
    for arrival in job.arrivals:
        blocks: Blocks = {}
        for move in arrival.moves:
            i = move.source
            uses[memory[i]] -= 1
            last = job.options.donate and not uses[memory[i]]
            route = job.route(move, arrival)
            _bring(route, functools.partial(carry, i, route), _parts(leaves[i]), blocks, last)
            for leaf in sharing[memory[i]] if last else ():
                if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                    leaf.delete()
        made.append(_array(arrival, blocks))
    return jax.tree.unflatten(job.treedef, made)


def _address(leaf: Any) -> Any:
    """What leaves that share memory have in common."""
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) and leaf.size else ()
    if not shards:
        return id(leaf)
    data = shards[0].data
    if is_prng_key(leaf):  # which shares the memory of its data
        data = jax.random.key_data(data)
    return shards[0].device, data.unsafe_buffer_pointer()


def _parts(leaf: Any) -> Blocks:
    """The blocks of an array that are here; of keys, their data."""
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
    return {
        each.device: jax.random.key_data(each.data) if is_prng_key(leaf) else each.data for each in shards
    }


def _bring(route: Route, carry: Callable[..., Blocks], parts: Blocks, blocks: Blocks, donate: bool) -> None:
    """Moves all pieces of a route; makes the blocks that are not there yet."""
    old, new = route.schedule.source, route.schedule.target
    whole = route.in_target(extent(next(iter(new.values()))))

    def make(devices: Iterable[Any]) -> None:
        if missing := tuple(device for device in devices if device not in blocks):
            blocks.update(device_steps.zeros(missing, whole, route.made))

    # Pieces that stay may give up their memory: they come last.
    for pieces in [*route.schedule.transfer_rounds, *route.schedule.local_rounds]:
        size = extent(pieces[0].box)
        shape = route.in_target(size)
        stays = pieces[0].source == pieces[0].target
        cuts = {a: route.in_source(start_in(piece, old[a])) for piece in pieces if is_here(a := piece.source)}
        values = {device: parts[device] for device in cuts}
        same = all((part.shape, part.dtype) == (shape, route.dtype) for part in values.values())
        is_block = same and route.axes is None
        if cuts and (stays or not is_block):
            values = device_steps.cut(values, cuts, route, size, is_block and donate)
        if not stays:
            values = carry(pieces, values, shape)
        pastes = {
            b: route.in_target(start_in(piece, new[b])) for piece in pieces if is_here(b := piece.target)
        }
        if shape == whole and route.dtype == route.made:
            blocks.update({device: values[device] for device in pastes})
        elif pastes:
            make(pastes)
            blocks.update(device_steps.paste(blocks, values, pastes))
        jax.block_until_ready([*blocks.values()])  # the pieces of one round at a time are alive
    make(device for device in new if is_here(device))  # of arrays without elements


def start_in(piece: Piece, block: Any) -> tuple[int, ...]:
    """Where a piece begins in a block."""
    return tuple(begin - first for (begin, _), (first, _) in zip(piece.box, block, strict=True))


def _array(arrival: Arrival, blocks: Blocks) -> jax.Array:
    """The array of the target, of its blocks that are here."""
    shape, dtype, sharding = arrival.shape, arrival.dtype, arrival.sharding
    parts = [blocks[device] for device in sharding.devices_indices_map(shape) if device in blocks]
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        impls: list[Any] = []  # JAX tells the implementation of keys, also of traced ones, not of a dtype
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
        parts = [jax.random.wrap_key_data(part, impl=impls[0]) for part in parts]
    array = jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)
    return transfer.weakly_typed(array) if arrival.weak and parts else array
