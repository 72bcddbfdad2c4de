"""The schedule of one array: which pieces move between which devices, and in which rounds.

Devices are any hashable values, and nothing is computed on them, so that a schedule can be made for devices
that are not attached. Boxes are positions in the entire array.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

Box = tuple[tuple[int, int], ...]
Index = tuple[slice, ...]
_Wants = list[tuple[Box, Sequence[Any]]]  # boxes, each with the devices that may send it


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array that one device has and another needs.

    Attributes:
        source: the device that has it.
        target: the device that needs it; the same as *source* if nothing has to be sent.
        box: the first position and the one after the last, along each dimension of the entire array.
    """

    source: Any
    target: Any
    box: Box


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How an array gets from one set of blocks to another.

    Attributes:
        source: the block of each device that has the array.
        target: the block of each device that shall have it.
        local_rounds: the pieces that stay on their device, in rounds of at most one piece per device.
        transfer_rounds: the pieces to send, one round after another. In a round each device sends at most one
            piece and receives at most one. All pieces of a round have the same shape, as in `local_rounds`.
    """

    source: Mapping[Any, Box]
    target: Mapping[Any, Box]
    local_rounds: Sequence[Sequence[Piece]]
    transfer_rounds: Sequence[Sequence[Piece]]


def schedule_of(
    source: Mapping[Any, Box],
    target: Mapping[Any, Box],
    most: int | None = None,
    near: Callable[[Any], Hashable] = lambda device: None,
) -> Schedule:
    """The schedule of an array; every block of the target is covered, each element by one piece.

    Args:
        source: by device, the block that it has; equal to that of another device, or apart from it.
        target: by device, the block that it shall have.
        most: the most elements of a piece; larger ones are split.
        near: devices for which this is equal are close to one another, and receive from one another what they
            have.

    Raises:
        ValueError: the blocks of the source overlap, or do not cover those of the target.

    Example:
        >>> schedule = schedule_of({0: ((0, 2),), 1: ((2, 4),)}, {1: ((0, 4),)})
        >>> schedule.local_rounds, schedule.transfer_rounds
        ([[Piece(source=1, target=1, box=((2, 4),))]], [[Piece(source=0, target=1, box=((0, 2),))]])
    """
    holders: dict[Box, dict[Any, None]] = {}
    for device, box in source.items():
        holders.setdefault(box, {})[device] = None
    grid = [sorted(set(cells)) for cells in zip(*holders, strict=True)]
    for cells in grid:
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(cells)):
            raise ValueError(f'the blocks of the source overlap: {cells}')
    order = {device: i for i, device in enumerate(source)}
    kept: dict[Any, _Wants] = {}
    wanted: dict[Any, _Wants] = {}
    for turn, (device, block) in enumerate(target.items()):
        kept[device], wanted[device], covered = [], [], 0
        for cell in itertools.product(*(_overlapping(*pair) for pair in zip(grid, block, strict=True))):
            if cell in holders:
                part, having = common(cell, block), holders[cell]
                covered += volume(part)
                here = device in having
                close = [device] if here else [one for one in having if near(one) == near(device)]
                senders = close or [*having]
                (kept if here else wanted)[device] += [(box, senders) for box in _split(part, most)]
        if covered != (size := volume(block)):
            raise ValueError(f'the blocks of the source have {covered} of the {size} elements of {block}')
        # Each device begins with another sender, so that they do not all wait for the first.
        wanted[device].sort(key=lambda want: (order[want[1][0]] - turn) % len(order))
    return Schedule(source, target, [*_rounds(kept)], [*_rounds(wanted)])


def _rounds(wanted: Mapping[Any, _Wants]) -> Iterator[list[Piece]]:
    """Pieces by rounds: greedily, each from the device that has sent least of those that are free."""
    sent: Counter[Any] = Counter()
    while any(wanted.values()):
        pieces: list[Piece] = []
        busy = set()
        for device, wants in wanted.items():
            for i, (box, holders) in enumerate(wants):
                free = [one for one in holders if one not in busy]
                if free and (not pieces or extent(box) == extent(pieces[0].box)):
                    source = min(free, key=sent.__getitem__)
                    pieces.append(Piece(source, device, box))
                    busy.add(source)
                    sent[source] += volume(box)
                    del wants[i]
                    break
        yield pieces


def _overlapping(cells: Sequence[tuple[int, int]], span: tuple[int, int]) -> list[tuple[int, int]]:
    return [cell for cell in cells if max(cell[0], span[0]) < min(cell[1], span[1])]


def boxes_of(shape: Sequence[int], indices: Mapping[Any, Index]) -> dict[Any, Box]:
    """The blocks of devices as boxes.

    Example:
        >>> boxes_of((4, 3), {'a': (slice(None), slice(1, 3))})
        {'a': ((0, 4), (1, 3))}
    """
    return {
        device: tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
        for device, index in indices.items()
    }


def extent(box: Box) -> tuple[int, ...]:
    """The shape of what is in a box."""
    return tuple(end - begin for begin, end in box)


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(extent(box))


def common(a: Box, b: Box) -> Box:
    """What two boxes have in common; a box without elements if that is nothing."""
    pairs = zip(a, b, strict=True)
    return tuple((start := max(a0, b0), max(start, min(a1, b1))) for (a0, a1), (b0, b1) in pairs)


def _split(box: Box, most: int | None) -> Iterator[Box]:
    """A box in parts of at most so many elements, as equal as possible."""
    if most is None or volume(box) <= most:
        yield box
        return
    dimension = next(i for i, (begin, end) in enumerate(box) if end - begin > 1)
    begin, end = box[dimension]
    across = volume(box) // (end - begin)
    parts = math.ceil((end - begin) / max(most // across, 1))
    edges = [begin + (end - begin) * i // parts for i in range(parts + 1)]
    for edge in itertools.pairwise(edges):
        yield from _split((*box[:dimension], edge, *box[dimension + 1 :]), most)
