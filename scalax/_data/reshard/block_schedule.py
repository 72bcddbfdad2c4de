"""Schedule of the pieces of one array that devices send to one another, in rounds.

Devices are any hashable values, and no arrays are needed, so a schedule can be made for devices that are not
attached.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from scalax._data.host.boxes import Box, box_shape, intersection, volume

_Requests = list[tuple[Box, Sequence[Any]]]  # boxes, each with the devices that may send it


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array that one device sends to another, or keeps.

    Attributes:
        source: the device that holds the piece.
        target: the device that needs the piece; equal to *source* if nothing has to be sent.
        box: the position of the piece in the global array.
    """

    source: Any
    target: Any
    box: Box


@dataclasses.dataclass(frozen=True)
class TransferSchedule:
    """The pieces that turn the blocks of one sharding into the blocks of another.

    Attributes:
        source: device -> the block that it holds.
        target: device -> the block that it needs.
        local_rounds: the pieces that stay on their device, in rounds of at most one piece per device.
        transfer_rounds: the pieces to send, one round after another. In a round each device sends at most one
            piece and receives at most one. All pieces of a round have the same shape, as in `local_rounds`.
    """

    source: Mapping[Any, Box]
    target: Mapping[Any, Box]
    local_rounds: Sequence[Sequence[Piece]]
    transfer_rounds: Sequence[Sequence[Piece]]


def make_schedule(
    source: Mapping[Any, Box],
    target: Mapping[Any, Box],
    max_elements: int | None = None,
    locality: Callable[[Any], Hashable] = lambda device: None,
) -> TransferSchedule:
    """Returns the schedule of an array, in which one piece covers each element of every target block.

    Args:
        source: device -> the block that it holds. Two blocks are equal or do not overlap.
        target: device -> the block that it needs.
        max_elements: the maximum size of a piece; larger pieces are split.
        locality: device -> its group, such as its slice. Devices receive from their own group if they can.

    Raises:
        ValueError: the blocks of the source overlap, or do not cover the blocks of the target.

    Example:
        >>> schedule = make_schedule({0: ((0, 2),), 1: ((2, 4),)}, {1: ((0, 4),)})
        >>> schedule.local_rounds, schedule.transfer_rounds
        ([[Piece(source=1, target=1, box=((2, 4),))]], [[Piece(source=0, target=1, box=((0, 2),))]])
    """
    holders: dict[Box, dict[Any, None]] = {}
    for device, box in source.items():
        holders.setdefault(box, {})[device] = None
    grid = [sorted(set(cells)) for cells in zip(*holders, strict=True)]
    for cells in grid:
        if any(end > start for (_, end), (start, _) in itertools.pairwise(cells)):
            raise ValueError(f'the blocks of the source overlap: {cells}')
    order = {device: i for i, device in enumerate(source)}
    local: dict[Any, _Requests] = {}
    remote: dict[Any, _Requests] = {}
    for index, (device, block) in enumerate(target.items()):
        local[device], remote[device], covered = [], [], 0
        for cell in itertools.product(*(_overlapping(*pair) for pair in zip(grid, block, strict=True))):
            if cell in holders:
                part, devices = intersection(cell, block), holders[cell]
                covered += volume(part)
                boxes = [*_split(part, max_elements)]
                if device in devices:
                    local[device] += [(box, [device]) for box in boxes]
                else:
                    near = [other for other in devices if locality(other) == locality(device)]
                    remote[device] += [(box, near or [*devices]) for box in boxes]
        if covered != (size := volume(block)):
            raise ValueError(f'the blocks of the source have {covered} of the {size} elements of {block}')
        # Each device begins with another sender, so that they do not all wait for the first.
        remote[device].sort(key=lambda request: (order[request[1][0]] - index) % len(order))
    return TransferSchedule(source, target, [*_rounds(local)], [*_rounds(remote)])


def _rounds(requests: Mapping[Any, _Requests]) -> Iterator[list[Piece]]:
    """Groups requests into rounds, greedily: the free device that has sent the least sends next."""
    sent: Counter[Any] = Counter()
    while any(requests.values()):
        pieces: list[Piece] = []
        busy = set()
        for device, pending in requests.items():
            for i, (box, senders) in enumerate(pending):
                free = [sender for sender in senders if sender not in busy]
                if free and (not pieces or box_shape(box) == box_shape(pieces[0].box)):
                    source = min(free, key=sent.__getitem__)
                    pieces.append(Piece(source, device, box))
                    busy.add(source)
                    sent[source] += volume(box)
                    del pending[i]
                    break
        yield pieces


def _overlapping(cells: Sequence[tuple[int, int]], span: tuple[int, int]) -> list[tuple[int, int]]:
    return [cell for cell in cells if max(cell[0], span[0]) < min(cell[1], span[1])]


def _split(box: Box, max_elements: int | None) -> Iterator[Box]:
    """Splits a box into parts of nearly equal size, each with at most *max_elements* elements."""
    if max_elements is None or volume(box) <= max_elements:
        yield box
        return
    dim = next(i for i, (start, end) in enumerate(box) if end - start > 1)
    start, end = box[dim]
    slice_size = volume(box) // (end - start)
    count = math.ceil((end - start) / max(max_elements // slice_size, 1))
    edges = [start + (end - start) * i // count for i in range(count + 1)]
    for edge in itertools.pairwise(edges):
        yield from _split((*box[:dim], edge, *box[dim + 1 :]), max_elements)
