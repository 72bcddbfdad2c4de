"""Collectives that exchange host data between the processes of a mesh.

They run on the devices of the mesh, because only these are known to be connected. Every process has to call
them in the same order, and from the thread that runs its compiled functions: if two processes start two
collectives in different orders, both wait forever.
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

_CALLS_PER_WAIT = 8  # each may queue several programs, and XLA queues at most 32
_queue_calls = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that have devices in a mesh, in ascending order.

    Attributes:
        indices: the process indices.
        devices: all devices of the mesh, by process and then by id: the same order on every process.
        owners: for each of these devices, the position of its process in *indices*.
        order: a digest of the positions of the devices in the mesh.
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
    def position(self) -> int:
        """The position of this process in *indices*.

        Raises:
            DataError: it has no device in the mesh.
        """
        index = jax.process_index()
        if index not in self.indices:
            listed = ', '.join(map(str, self.indices))
            raise DataError(
                f'process {index} has no devices in this mesh (its devices belong to processes {listed}). '
                'Call this on those processes only, or make the mesh from devices of all processes'
            )
        return self.indices.index(index)


@functools.lru_cache(maxsize=64)
def processes_of(mesh: Mesh) -> Processes:
    """Returns the processes of a mesh. If there are several, the exit of the program waits for transfers."""
    devices = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
    indices = sorted({device.process_index for device in devices})
    owners = tuple(indices.index(device.process_index) for device in devices)
    if len(indices) > 1:
        exit_handler.wait_at_exit(devices[0].platform)
    ids = [(device.process_index, device.id) for device in mesh.devices.flat]
    order = hashlib.blake2b(repr((mesh.devices.shape, ids)).encode(), digest_size=8).hexdigest()
    return Processes(tuple(indices), tuple(devices), owners, order)


def all_processes() -> Mesh:
    """Returns a mesh of all devices."""
    return Mesh(np.asarray(jax.devices(), dtype=object), ('device',))


def require_this_process(mesh: Mesh) -> None:
    """Raises DataError if this process has no device in the mesh."""
    _ = processes_of(mesh).position


def gather(mesh: Mesh, array: np.ndarray) -> np.ndarray:
    """Stacks the arrays of all processes, in their order, with one all-gather.

    Args:
        mesh: the mesh of the processes.
        array: an array of the same shape and dtype (of 32 bits) on every process.
    """
    grid = _grid(mesh)
    stacked = _stack_processes(grid, array, PartitionSpec('process'))
    gathered = without_mesh_context(identity(NamedSharding(grid, PartitionSpec())), stacked)
    return np.asarray(gathered.addressable_data(0))


def gather_bytes(mesh: Mesh, data: bytes) -> list[bytes]:
    """Returns the bytes of each process, with two all-gathers, the first of their lengths."""
    lengths = gather(mesh, np.asarray([len(data)], np.int32))[:, 0]
    words = gather(mesh, _as_words(np.frombuffer(data, np.uint8), int(lengths.max())))
    return [row.view(np.uint8)[:length].tobytes() for row, length in zip(words, lengths, strict=True)]


def gather_json(mesh: Mesh, value: Any) -> list[Any]:
    """Returns the values of all processes, converted to JSON and back.

    A single process communicates nothing, and its value is not converted.
    """
    if not processes_of(mesh).is_multiprocess:
        return [value]
    return [json.loads(data) for data in gather_bytes(mesh, json.dumps(value).encode())]


def broadcast(mesh: Mesh, position: int, data: np.ndarray) -> np.ndarray:
    """Returns the bytes of one process on every process, with one all-reduce.

    Args:
        mesh: the mesh of the processes.
        position: the position of the process whose bytes to return.
        data: its bytes (uint8); on other processes any bytes of the same size.
    """
    grid = _grid(mesh)
    devices = grid.shape['device']
    words = _as_words(data, -(-data.size // (4 * devices)) * 4 * devices)
    if processes_of(mesh).position != position:
        words = np.zeros_like(words)
    # The devices of a process share its bytes.
    stacked = _stack_processes(grid, words, PartitionSpec('process', 'device'))
    # The integers of all other processes are zero, so the sum is exact.
    shards = without_mesh_context(_sum_over_processes(grid), stacked).addressable_shards
    ordered = sorted(shards, key=lambda shard: shard.index[0].indices(words.size)[0])
    return np.concatenate(jax.device_get([shard.data for shard in ordered])).view(np.uint8)[: data.size]


def broadcast_bytes(mesh: Mesh, position: int, data: bytes) -> bytes:
    """Broadcasts bytes whose length only their process knows."""
    length = int(gather(mesh, np.asarray([len(data)], np.int32))[position, 0])
    resized = np.resize(np.frombuffer(data, np.uint8), length)  # on other processes only the size matters
    return broadcast(mesh, position, resized).tobytes()


def concat_by_process(mesh: Mesh, local: np.ndarray, axis: int) -> Any:
    """Joins the arrays of all processes to one global array, sharded by process; communicates nothing.

    ``jax.device_put`` reshards the result. It cannot do that between meshes whose processes have different
    numbers of devices. For such a mesh this returns a copy of the local array, for `allgather_and_shard`.

    Args:
        mesh: the mesh of the processes.
        local: the array of this process, of the same shape on every process.
        axis: the axis along which the arrays are joined.
    """
    grid = _grid(mesh)
    if grid.size < mesh.size:
        return local.copy()  # a loader may overwrite its memory
    processes, devices = grid.devices.shape
    axes = grid.axis_names if local.shape[axis] % devices == 0 else grid.axis_names[:1]
    sharding = NamedSharding(grid, PartitionSpec(*[None] * axis, axes))
    shape = (*local.shape[:axis], processes * local.shape[axis], *local.shape[axis + 1 :])
    return jax.make_array_from_process_local_data(sharding, local, shape)


def allgather_and_shard(mesh: Mesh, local: np.ndarray, axis: int, sharding: NamedSharding) -> jax.Array:
    """Joins the arrays of all processes to one global array with a sharding; every process gathers all."""
    gathered = gather_bytes(mesh, local.tobytes())
    arrays = [np.frombuffer(data, local.dtype).reshape(local.shape) for data in gathered]
    joined = np.concatenate(arrays, axis)
    return jax.make_array_from_callback(joined.shape, sharding, lambda index: joined[index])


def bound_queue(mesh: Mesh) -> None:
    """Waits at every eighth call until simulated devices have run their queued programs.

    Call it once for each batch, and for each array whose examples move.

    XLA's CPU client queues 32 programs after the running one. With a full queue, a host blocks inside the
    launch of the next program, which some of its devices have received and others have not. Collectives on
    the former then wait for the latter: a deadlock. Other devices do not need this. Nothing is communicated.
    """
    if mesh.devices.flat[0].platform == 'cpu' and next(_queue_calls) % _CALLS_PER_WAIT == 0:
        local = tuple(
            device for device in processes_of(mesh).devices if device.process_index == jax.process_index()
        )
        jax.block_until_ready(without_mesh_context(fence_program(local)))


def without_mesh_context(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a compiled function as if no mesh were set by ``jax.set_mesh``.

    A mesh that is set determines the devices of every compiled function. Contexts belong to threads, so if a
    mesh is set, another thread makes the call.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function(*args)
    return run_in_thread('scalax-without-context', lambda: function(*args))


@functools.lru_cache(maxsize=64)
def _grid(mesh: Mesh) -> Mesh:
    """Returns a mesh of processes x devices, with as many devices of each process as every process has."""
    groups = itertools.groupby(processes_of(mesh).devices, lambda device: device.process_index)
    devices_by_process = [[*devices] for _, devices in groups]
    count = min(map(len, devices_by_process))
    grid = np.asarray([devices[:count] for devices in devices_by_process], dtype=object)
    return Mesh(grid, ('process', 'device'))


def _stack_processes(grid: Mesh, local: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """Stacks the arrays of all processes to one global array; communicates nothing."""
    shape = (grid.shape['process'], *local.shape)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        return local[cast(tuple[slice, ...], index)[1:]][None]

    return jax.make_array_from_callback(shape, NamedSharding(grid, spec), shard)


@functools.lru_cache(maxsize=64)
def _sum_over_processes(grid: Mesh) -> Callable[[jax.Array], jax.Array]:
    sharding = NamedSharding(grid, PartitionSpec('device'))
    return jax.jit(lambda stacked: jnp.sum(stacked, 0, dtype=stacked.dtype), out_shardings=sharding)


def _as_words(data: np.ndarray, size: int) -> np.ndarray:
    """Pads bytes to at least *size*, and views them as 32-bit words, which every backend can sum."""
    padded = np.zeros(-(-max(size, 1) // 4) * 4, np.uint8)
    padded[: data.size] = data
    return padded.view(np.uint32)
