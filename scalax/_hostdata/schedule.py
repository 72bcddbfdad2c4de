"""The schedule of an exchange: which rows go from which device to which, in rounds. Integers only.

Each process brings an equal part of the rows, in process order; each device needs one tile of them. A row
that a process lacks crosses the network once, to one of the devices that need it; devices of one process
pass it on among themselves. In each round a device sends at most one segment and receives at most one, all
of one size: a collective permute.

XLA, asked for the same by ``jax.device_put`` across processes, sends up to four times as many rows between
them (JAX 0.10 to 0.12), and takes no meshes with an unequal number of devices in each process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Move:
    """Rows *start*:*stop* go from the device at position *source* to that at *target*."""

    source: int
    target: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """A move whose source may be any of several devices."""

    sources: tuple[int, ...]
    target: int
    start: int
    stop: int
    shift: int  # how far away the source is: moves with equal shifts never meet


Round = tuple[Move, ...]
Rows = tuple[int, int]


def schedule(owners: Sequence[int], tiles: Sequence[Rows], rows: int) -> tuple[tuple[Round, ...], int]:
    """The rounds in which rows move, and how many of them go between processes; the others come after.

    Args:
        owners: for each device, the position of its process.
        tiles: for each device, the first row that it needs and the one after the last. Two tiles are
            equal or do not meet.
        rows: how many rows each process brings.
    """
    devices: dict[int, list[int]] = {}
    for device, owner in enumerate(owners):
        devices.setdefault(owner, []).append(device)
    between: list[_Transfer] = []
    inside: list[_Transfer] = []
    for process, mine in devices.items():
        for tile in dict.fromkeys(tiles[device] for device in mine):
            needing = [device for device in mine if tiles[device] == tile]
            for target, pieces in zip(
                needing, _shared(_foreign(tile, process, rows), len(needing)), strict=True
            ):
                for start, stop in pieces:
                    source = start // rows
                    shift = (source - process) % len(devices)
                    between.append(_Transfer(tuple(devices[source]), target, start, stop, shift))
                for start, stop in _joined(pieces):
                    inside += [
                        _Transfer((target,), other, start, stop, (other - target) % len(owners))
                        for other in needing
                        if other != target
                    ]
    first_rounds = _rounds(between, tiles)
    return (*first_rounds, *_rounds(inside, tiles)), len(first_rounds)


def _foreign(tile: Rows, process: int, rows: int) -> list[Rows]:
    """The parts of a tile that other processes bring, one for each of them."""
    start, stop = tile
    if start == stop:
        return []
    brought = range(start // rows, (stop - 1) // rows + 1)
    return [
        (max(start, source * rows), min(stop, (source + 1) * rows)) for source in brought if source != process
    ]


def _shared(parts: list[Rows], count: int) -> list[list[Rows]]:
    """Which of the devices that need the same rows receives which of them.

    Many parts are dealt out whole, neighbours together, so that each device passes on few ranges. Few parts
    are cut, so that no device waits while another receives.
    """
    if len(parts) >= count:
        each = -(-len(parts) // count)
        return [parts[i * each : (i + 1) * each] for i in range(count)]
    shares: list[list[Rows]] = [[] for _ in range(count)]
    for start, stop in parts:
        size = (stop - start) // count
        if (stop - start) % count:
            shares[0].append((start, stop))
        else:
            for i, share in enumerate(shares):
                share.append((start + i * size, start + (i + 1) * size))
    return shares


def _joined(parts: list[Rows]) -> list[Rows]:
    """Ascending ranges, with neighbours made one."""
    joined: list[Rows] = []
    for start, stop in parts:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _rounds(transfers: list[_Transfer], tiles: Sequence[Rows]) -> tuple[Round, ...]:
    """Puts each transfer in the first round of its size whose target and one of its sources are free."""
    rounds: list[list[Move]] = []
    sizes: list[int] = []
    sending: list[set[int]] = []
    receiving: list[set[int]] = []
    for item in sorted(
        transfers, key=lambda item: (item.start - item.stop, item.shift, item.start, item.target)
    ):
        size = item.stop - item.start
        # A device that needs the rows itself has them at hand; any other must be given them to send.
        ready = [d for d in item.sources if tiles[d][0] <= item.start and item.stop <= tiles[d][1]]
        sources = [*ready, *(d for d in item.sources if d not in ready)]
        for number in [*range(len(rounds)), None]:
            if number is None:
                rounds.append([])
                sizes.append(size)
                sending.append(set())
                receiving.append(set())
                number = len(rounds) - 1
            free = [device for device in sources if device not in sending[number]]
            if sizes[number] == size and free and item.target not in receiving[number]:
                rounds[number].append(Move(free[0], item.target, item.start, item.stop))
                sending[number].add(free[0])
                receiving[number].add(item.target)
                break
    return tuple(tuple(moves) for moves in rounds)
