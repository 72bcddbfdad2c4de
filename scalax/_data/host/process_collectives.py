"""Collectives that carry host data between the processes of a mesh.

They run on the devices of the mesh, because only these are known to be connected. Every process has to call
them in the same order, and from the thread that runs its compiled functions: two collectives that processes
start in different orders wait for one another for ever.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._core.context.resharding import identity
from scalax._core.context.thread_state import run_in_thread
from scalax._data.host import exit_handler
from scalax._jax.device_queue import fence_program
from scalax.errors import DataError

_LONGEST_QUEUE = 8  # batches: a step may be several programs, of which XLA takes 32
_given = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that hold devices of a mesh, in ascending order.

    Attributes:
        indices: their process indices.
        devices: all devices of the mesh, by process and then by id: an order that all processes share,
            however each of them came by the mesh.
        owners: for each of these devices, the position of its process in *indices*.
        order: a digest of where in the mesh each device is.
    """

    indices: tuple[int, ...]
    devices: tuple[Any, ...]
    owners: tuple[int, ...]
    order: str

    @property
    def is_multiprocess(self) -> bool:
        """Whether there is more than one process."""
        return len(self.indices) > 1

    @property
    def here(self) -> int:
        """The position of this process.

        Raises:
            DataError: it holds no device of the mesh.
        """
        me = jax.process_index()
        if me not in self.indices:
            listed = ', '.join(map(str, self.indices))
            raise DataError(
                f'this is process {me}, and the mesh has devices of these processes only: {listed}. Call '
                'this on those processes, or make the mesh of devices of all'
            )
        return self.indices.index(me)


@functools.lru_cache(maxsize=64)
def processes_of(mesh: Mesh) -> Processes:
    """The processes of a mesh; if there are several, the program's exit waits for what moves between them."""
    devices = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
    indices = sorted({device.process_index for device in devices})
    owners = tuple(indices.index(device.process_index) for device in devices)
    if len(indices) > 1:
        exit_handler.wait_at_exit(devices[0].platform)
    placed = [(device.process_index, device.id) for device in mesh.devices.flat]
    order = hashlib.blake2b(repr((mesh.devices.shape, placed)).encode(), digest_size=8).hexdigest()
    return Processes(tuple(indices), tuple(devices), owners, order)


def all_processes() -> Mesh:
    """A mesh of all devices."""
    return Mesh(np.asarray(jax.devices(), dtype=object), ('device',))


def require_this_process(mesh: Mesh) -> None:
    """Raises DataError if this process holds no device of the mesh."""
    _ = processes_of(mesh).here


def gather(mesh: Mesh, row: np.ndarray) -> np.ndarray:
    """The rows of all processes, stacked in their order; one all-gather.

    Args:
        mesh: where.
        row: of one shape and dtype (32 bits) on every process.
    """
    grid = _grid(mesh)
    whole = _stack_processes(grid, row, PartitionSpec('process'))
    gathered = without_mesh_context(identity(NamedSharding(grid, PartitionSpec())), whole)
    return np.asarray(gathered.addressable_data(0))


def gather_bytes(mesh: Mesh, data: bytes) -> list[bytes]:
    """The bytes of each process, in their order; two all-gathers, the first of the lengths."""
    lengths = gather(mesh, np.asarray([len(data)], np.int32))[:, 0]
    rows = gather(mesh, _words(np.frombuffer(data, np.uint8), int(lengths.max())))
    return [row.view(np.uint8)[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def gather_json(mesh: Mesh, value: Any) -> list[Any]:
    """The values of all processes, in their order, as JSON keeps them; one process communicates nothing."""
    if not processes_of(mesh).is_multiprocess:
        return [value]
    return [json.loads(data) for data in gather_bytes(mesh, json.dumps(value).encode())]


def broadcast(mesh: Mesh, position: int, data: np.ndarray) -> np.ndarray:
    """The bytes that one process has, on every process; one all-reduce, split over each one's devices.

    Args:
        mesh: where.
        position: of the process whose bytes count.
        data: its bytes (uint8); elsewhere anything of the same size.
    """
    grid = _grid(mesh)
    devices = grid.shape['device']
    words = _words(data, -(-data.size // (4 * devices)) * 4 * devices)
    if processes_of(mesh).here != position:
        words = np.zeros_like(words)
    whole = _stack_processes(grid, words, PartitionSpec('process', 'device'))
    # Integers, all but one of them zero: their sum has every bit as it was.
    parts = without_mesh_context(_sum_over_processes(grid), whole).addressable_shards
    ordered = sorted(parts, key=lambda part: part.index[0].indices(words.size)[0])
    return np.concatenate(jax.device_get([part.data for part in ordered])).view(np.uint8)[: data.size]


def broadcast_bytes(mesh: Mesh, position: int, data: bytes) -> bytes:
    """`broadcast` of bytes whose number only their process knows."""
    length = int(gather(mesh, np.asarray([len(data)], np.int32))[position, 0])
    mine = np.resize(np.frombuffer(data, np.uint8), length)  # elsewhere only the size counts
    return broadcast(mesh, position, mine).tobytes()


def concat_by_process(mesh: Mesh, rows: np.ndarray, axis: int) -> Any:
    """The rows that processes bring as one array, each part on the devices of its process.

    ``jax.device_put`` moves the rows on from there. It does not between meshes whose processes hold different
    numbers of devices: there this is a copy of the rows, for `allgather_and_shard`. Nothing is communicated.

    Args:
        mesh: whose devices.
        rows: this process's rows, as many as every process brings.
        axis: the axis along which they are joined.
    """
    grid = _grid(mesh)
    if grid.size < mesh.size:
        return rows.copy()  # a loader may fill their memory anew
    processes, devices = grid.devices.shape
    over = grid.axis_names if rows.shape[axis] % devices == 0 else grid.axis_names[:1]
    sharding = NamedSharding(grid, PartitionSpec(*[None] * axis, over))
    shape = (*rows.shape[:axis], processes * rows.shape[axis], *rows.shape[axis + 1 :])
    return jax.make_array_from_process_local_data(sharding, rows, shape)


def allgather_and_shard(mesh: Mesh, rows: np.ndarray, axis: int, sharding: NamedSharding) -> jax.Array:
    """The rows that processes bring as one array with a sharding. Every process gathers all of them."""
    gathered = gather_bytes(mesh, rows.tobytes())
    parts = [np.frombuffer(data, rows.dtype).reshape(rows.shape) for data in gathered]
    whole = np.concatenate(parts, axis)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def bound_queue(mesh: Mesh) -> None:
    """Waits now and then until simulated devices have run their programs.

    Called once for each batch, and for each array whose rows move.

    XLA's CPU client queues 32 programs behind the one that runs. With a full queue, a host waits inside the
    launch of the next program, which some of its devices have received and others have not. Collectives on
    the former then wait for the latter: a deadlock. Other devices do not need this. Nothing is communicated.
    """
    if mesh.devices.flat[0].platform == 'cpu' and next(_given) % _LONGEST_QUEUE == 0:
        here = tuple(one for one in processes_of(mesh).devices if one.process_index == jax.process_index())
        jax.block_until_ready(without_mesh_context(fence_program(here)))


def without_mesh_context(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a compiled function as if no mesh were set.

    ``jax.set_mesh`` tells every compiled function which devices to use. Contexts belong to threads, so
    where one is set the call is made in another thread, and waited for.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function(*args)
    return run_in_thread('scalax-without-context', lambda: function(*args))


@functools.lru_cache(maxsize=64)
def _grid(mesh: Mesh) -> Mesh:
    """As many devices of each process as the one with the fewest has, as processes x devices."""
    by_process = itertools.groupby(processes_of(mesh).devices, lambda device: device.process_index)
    each = [[*devices] for _, devices in by_process]
    count = min(map(len, each))
    return Mesh(np.asarray([row[:count] for row in each], dtype=object), ('process', 'device'))


def _stack_processes(grid: Mesh, row: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """An array with one row for each process, made of this process's own; nothing is communicated."""
    shape = (grid.shape['process'], *row.shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return row[cast(tuple[slice, ...], index)[1:]][None]

    return jax.make_array_from_callback(shape, NamedSharding(grid, spec), part)


@functools.lru_cache(maxsize=64)
def _sum_over_processes(grid: Mesh) -> Callable[[jax.Array], jax.Array]:
    out = NamedSharding(grid, PartitionSpec('device'))
    return jax.jit(lambda rows: jnp.sum(rows, 0, dtype=rows.dtype), out_shardings=out)


def _words(data: np.ndarray, size: int) -> np.ndarray:
    """Bytes, padded to at least *size*, as words: what every backend can add and gather."""
    padded = np.zeros(-(-max(size, 1) // 4) * 4, np.uint8)
    padded[: data.size] = data
    return padded.view(np.uint32)
