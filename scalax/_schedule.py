"""In which order do rows move, where devices need rows of other processes? Integers only; no device.

Each process brings an equal part of the rows, in process order; each device needs one tile of them. What a
process needs and has not crosses the network once, to one of the devices that need it; where several of its
devices do, they pass it on among themselves. Rows travel in rounds: in each, a device sends at most one
segment and receives at most one, all of one size, which is what a collective permute does.
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
class _Wish:
    """A move of which the source may be any of several devices."""

    sources: tuple[int, ...]
    target: int
    start: int
    stop: int
    shift: int  # how many processes on the source is: moves with equal shifts never meet


Round = tuple[Move, ...]


def schedule(
    owners: Sequence[int], tiles: Sequence[tuple[int, int]], rows: int
) -> tuple[tuple[Round, ...], int]:
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
    between: list[_Wish] = []
    inside: list[_Wish] = []
    for process, mine in devices.items():
        for tile in dict.fromkeys(tiles[device] for device in mine):
            needing = [device for device in mine if tiles[device] == tile]
            for start, stop in _foreign(tile, process, rows):
                source = start // rows
                for (first, last), target in zip(_split(start, stop, len(needing)), needing, strict=False):
                    shift = (source - process) % len(devices)
                    between.append(_Wish(tuple(devices[source]), target, first, last, shift))
                    inside += [
                        _Wish((target,), other, first, last, 0) for other in needing if other != target
                    ]
    first_rounds = _rounds(between, tiles)
    return (*first_rounds, *_rounds(inside, tiles)), len(first_rounds)


def _foreign(tile: tuple[int, int], process: int, rows: int) -> list[tuple[int, int]]:
    """The parts of a tile that other processes bring, one for each of them."""
    start, stop = tile
    if start == stop:
        return []
    brought = range(start // rows, (stop - 1) // rows + 1)
    return [
        (max(start, source * rows), min(stop, (source + 1) * rows)) for source in brought if source != process
    ]


def _split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Rows in equal parts, one for each device that needs them; in one part where they do not divide."""
    if (stop - start) % parts:
        return [(start, stop)]
    size = (stop - start) // parts
    return [(first, first + size) for first in range(start, stop, size)]


def _rounds(wishes: list[_Wish], tiles: Sequence[tuple[int, int]]) -> tuple[Round, ...]:
    """Each wish goes into the first round of its size in which its target and one of its sources are free."""
    rounds: list[list[Move]] = []
    sizes: list[int] = []
    sending: list[set[int]] = []
    receiving: list[set[int]] = []
    for wish in sorted(
        wishes, key=lambda wish: (wish.start - wish.stop, wish.shift, wish.start, wish.target)
    ):
        size = wish.stop - wish.start
        # A device that needs the rows itself has them at hand; any other must be given them to send.
        ready = [d for d in wish.sources if tiles[d][0] <= wish.start and wish.stop <= tiles[d][1]]
        sources = [*ready, *(d for d in wish.sources if d not in ready)]
        for number in [*range(len(rounds)), None]:
            if number is None:
                rounds.append([])
                sizes.append(size)
                sending.append(set())
                receiving.append(set())
                number = len(rounds) - 1
            free = [device for device in sources if device not in sending[number]]
            if sizes[number] == size and free and wish.target not in receiving[number]:
                rounds[number].append(Move(free[0], wish.target, wish.start, wish.stop))
                sending[number].add(free[0])
                receiving[number].add(wish.target)
                break
    return tuple(tuple(moves) for moves in rounds)
