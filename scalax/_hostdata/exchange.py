"""The exchange of rows between the processes that bring them and the devices that need them: one program.

Every device starts with a buffer: its tile, with the rows of its own process filled in; the rows that it only
sends (its outbox); and scratch space. Each round of the schedule is one collective permute from buffer to
buffer. At the end the tiles are the global array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._hostdata import collectives
from scalax._hostdata.schedule import Round, schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange on one mesh, for one way of tiling and one number of rows.

    Attributes:
        rounds: the moves of each round.
        between: how many of the rounds, the first ones, go between processes.
        outboxes: for each device, the rows (first, last + 1) that it sends and does not need.
    """

    mesh: Mesh
    tiles: tuple[tuple[int, int], ...]
    rows: int
    rounds: tuple[Round, ...]
    between: int
    outboxes: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def tile(self) -> int:
        """The rows of each device."""
        return self.tiles[0][1] - self.tiles[0][0]

    @functools.cached_property
    def outbox(self) -> int:
        """The rows of the largest outbox."""
        return max(sum(stop - start for start, stop in box) for box in self.outboxes)

    @functools.cached_property
    def length(self) -> int:
        """The rows of a buffer."""
        return self.tile + self.outbox + max(moves[0].stop - moves[0].start for moves in self.rounds)

    @functools.cached_property
    def flat(self) -> Mesh:
        """All devices along one axis, in the order of `Processes`."""
        return Mesh(np.asarray(collectives.processes_of(self.mesh).devices, dtype=object), ('device',))

    def stage(self, host: np.ndarray, axis: int) -> jax.Array:
        """The buffers, filled from this process's part; nothing is communicated.

        Args:
            host: this process's part.
            axis: the axis of its rows.
        """
        processes = collectives.processes_of(self.mesh)
        first = processes.here * self.rows
        shape = list(host.shape)
        shape[axis] = self.length

        def buffer(index: tuple[slice, ...] | None) -> np.ndarray:
            device = (cast(tuple[slice, ...], index)[axis].start or 0) // self.length
            filled = np.zeros(shape, host.dtype)
            start, stop = self.tiles[device]
            mine = max(start, first), min(stop, first + self.rows)
            pieces = [(mine[0] - start, mine)] if mine[0] < mine[1] else []
            offset = self.tile
            for box in self.outboxes[device]:
                pieces.append((offset, box))
                offset += box[1] - box[0]
            for offset, (begin, end) in pieces:
                to = _along(axis, offset, offset + end - begin)
                filled[to] = host[_along(axis, begin - first, end - first)]
            return filled

        whole = [*shape]
        whole[axis] *= len(processes.devices)
        sharding = NamedSharding(self.flat, PartitionSpec(*[None] * axis, 'device'))
        return jax.make_array_from_callback(tuple(whole), sharding, buffer)

    def run(self, buffers: Sequence[jax.Array], axes: Sequence[int]) -> list[list[jax.Array]]:
        """Moves the rows of several arrays; gives the tiles of this process's devices, for each array."""
        moved = collectives.without_context(program_of(self, tuple(axes)), list(buffers))
        return [[part.data for part in array.addressable_shards] for array in moved]

    def table(self, moves: Round) -> np.ndarray:
        """For each device, where in its buffer it reads what it sends and writes what it receives."""
        idle = self.tile + self.outbox
        table = np.full((len(self.tiles), 2), (0, idle), np.int32)
        for move in moves:
            table[move.source, 0] = self._place(move.source, move.start, move.stop)
            table[move.target, 1] = move.start - self.tiles[move.target][0]
        return table

    def _place(self, device: int, start: int, stop: int) -> int:
        """The position, in its buffer, of rows that a device sends."""
        if self.tiles[device][0] <= start and stop <= self.tiles[device][1]:
            return start - self.tiles[device][0]
        offset = self.tile
        for box in self.outboxes[device]:
            if box == (start, stop):
                return offset
            offset += box[1] - box[0]
        raise AssertionError(f'device {device} was not given the rows {start}:{stop}')


@functools.lru_cache(maxsize=64)
def program_of(exchange: Exchange, axes: tuple[int, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The compiled program for arrays whose rows are along *axes*."""
    specs = [PartitionSpec(*[None] * axis, 'device') for axis in axes]
    tables = [exchange.table(moves) for moves in exchange.rounds]

    def on_device(buffers: list[jax.Array]) -> list[jax.Array]:
        me = jax.lax.axis_index('device')
        for moves, table in zip(exchange.rounds, tables, strict=True):
            size = moves[0].stop - moves[0].start
            pairs = [(move.source, move.target) for move in moves]
            send, receive = jnp.asarray(table)[me]
            for number, axis in enumerate(axes):
                rows = jax.lax.dynamic_slice_in_dim(buffers[number], send, size, axis)
                rows = jax.lax.ppermute(rows, 'device', pairs)
                buffers[number] = jax.lax.dynamic_update_slice_in_dim(buffers[number], rows, receive, axis)
        return [
            jax.lax.slice_in_dim(buffer, 0, exchange.tile, axis=axis)
            for buffer, axis in zip(buffers, axes, strict=True)
        ]

    def program(buffers: list[jax.Array]) -> list[jax.Array]:
        return jax.shard_map(on_device, mesh=exchange.flat, in_specs=(specs,), out_specs=specs)(buffers)

    return jax.jit(program)


@functools.lru_cache(maxsize=64)
def exchange_for(mesh: Mesh, tiles: tuple[tuple[int, int], ...], rows: int) -> Exchange | None:
    """The exchange that takes rows to where they are needed; None if they are there already.

    Args:
        mesh: the mesh.
        tiles: for each device, in the order of `Processes`, the rows that it needs.
        rows: how many rows each process brings.
    """
    owners = collectives.processes_of(mesh).owners
    rounds, between = schedule(owners, tiles, rows)
    if not rounds:
        return None
    boxes: list[dict[tuple[int, int], None]] = [{} for _ in tiles]
    for moves in rounds[:between]:
        for move in moves:
            start, stop = tiles[move.source]
            if not (start <= move.start and move.stop <= stop):
                boxes[move.source][move.start, move.stop] = None
    return Exchange(mesh, tiles, rows, rounds, between, tuple(tuple(box) for box in boxes))


def _along(axis: int, start: int, stop: int) -> Any:
    """The index of rows along an axis."""
    return (*[slice(None)] * axis, slice(start, stop))
