"""The schedule of one array: which pieces move between which devices, and in which rounds.

Devices are any hashable values, and nothing is computed on them, so that a schedule can be made for devices
that are not attached. Boxes are positions in the entire array.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

Box = tuple[tuple[int, int], ...]
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array that one device has and another needs.

    Attributes:
        source: the device that has it.
        target: the device that needs it; the same as *source* if nothing has to be sent.
        box: the first position and the one after the last, along each dimension of the entire array.
        relayed: whether *source* has it as part of its block of the target, where an earlier round brought
            it, and not as part of its block of the source.
    """

    source: Any
    target: Any
    box: Box
    relayed: bool = False


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How an array gets from one set of blocks to another.

    Attributes:
        source: the block of each device that has the array.
        target: the block of each device that shall have it.
        kept: pieces that are on their device already, in rounds of at most one for each device.
        rounds: pieces to send, one round after another. In a round each device sends at most one piece, and
            receives at most one. The pieces of a round, here and above, have the same shape.
    """

    source: Mapping[Any, Box]
    target: Mapping[Any, Box]
    kept: Sequence[Sequence[Piece]]
    rounds: Sequence[Sequence[Piece]]


def make_schedule(
    shape: Sequence[int],
    source: Mapping[Any, Index],
    target: Mapping[Any, Index],
    *,
    most: int | None = None,
    near: Callable[[Any], Hashable] = lambda device: None,
    relay: bool = True,
) -> Schedule:
    """The schedule of an array; every block of the target is covered, each element by one piece.

    Args:
        shape: the shape of the entire array.
        source: by device, the block that it has, as ``sharding.devices_indices_map(shape)`` gives it.
        target: by device, the block that it shall have.
        most: the most elements of a piece; larger ones are split.
        near: devices for which this is equal are close to one another. What several close devices need is
            sent to one of them, which sends it to the others.
        relay: whether devices of the target may send what they have received; without it, only devices of
            the source send.

    Raises:
        ValueError: the blocks of the source overlap, or do not cover those of the target.

    Example:
        >>> halves = {0: (slice(0, 2),), 1: (slice(2, 4),)}
        >>> schedule = make_schedule((4,), halves, {1: (slice(0, 4),)})
        >>> schedule.kept, schedule.rounds
        ([[Piece(source=1, target=1, box=((2, 4),), relayed=False)]],
         [[Piece(source=0, target=1, box=((0, 2),), relayed=False)]])
    """
    return schedule_of(boxes_of(shape, source), boxes_of(shape, target), most, near, relay)


def schedule_of(
    sources: Mapping[Any, Box],
    targets: Mapping[Any, Box],
    most: int | None = None,
    near: Callable[[Any], Hashable] = lambda device: None,
    relay: bool = True,
) -> Schedule:
    """`make_schedule` of boxes."""
    grid = _Grid(sources)
    order = {device: i for i, device in enumerate(sources)}
    kept: dict[Any, list[Piece]] = {}
    wanted: dict[Any, list[Box]] = {}
    first: dict[Box, Sequence[Any]] = {}
    for turn, (device, block) in enumerate(targets.items()):
        wanted[device], covered = [], 0
        there: Counter[tuple[int, ...]] = Counter()
        for having, part in grid.parts_of(block):
            covered += volume(part)
            for box in _split(part, most):
                if device in having:
                    there[shape := extent(box)] += 1
                    kept.setdefault((shape, there[shape]), []).append(Piece(device, device, box))
                else:
                    wanted[device].append(box)
                    first[box] = [*having]
        if covered != volume(block):
            raise ValueError(
                f'the blocks of the source have {covered} of the {volume(block)} elements of {block}'
            )
        # Each device begins with another sender, so that they do not all wait for the first.
        wanted[device].sort(key=lambda box: (order[first[box][0]] - turn) % len(order))
    places = {device: near(device) for device in [*sources, *targets]}
    return Schedule(sources, targets, [*kept.values()], [*_rounds(wanted, first, places, relay)])


def _rounds(
    wanted: Mapping[Any, list[Box]],
    first: Mapping[Box, Sequence[Any]],
    places: Mapping[Any, Hashable],
    relay: bool,
) -> Iterator[list[Piece]]:
    """Pieces by rounds: greedily, each from the device that has sent least of those that are free."""
    having: dict[Box, dict[Hashable, list[Any]]] = {box: {} for box in first}  # by place
    for box, devices in first.items():
        for device in devices:
            having[box].setdefault(places[device], []).append(device)
    sent = dict.fromkeys(places, 0)
    while any(wanted.values()):
        pieces: list[Piece] = []
        free = dict.fromkeys(places, True)
        coming: set[tuple[Box, Hashable]] = set()
        for device, boxes in wanted.items():
            here = places[device]
            for i, box in enumerate(boxes):
                if pieces and extent(box) != extent(pieces[0].box):
                    continue
                close = having[box].get(here)
                if close is None and (box, here) in coming:
                    continue  # from the next round on, a close device has it
                candidates = close or itertools.chain(*having[box].values())
                if not (candidates := [one for one in candidates if free[one]]):
                    continue
                source = min(candidates, key=sent.__getitem__)
                pieces.append(Piece(source, device, box, source not in first[box]))
                free[source] = False
                sent[source] += volume(box)
                del boxes[i]
                if relay:
                    coming.add((box, here))
                break
        if relay:
            for piece in pieces:
                having[piece.box].setdefault(places[piece.target], []).append(piece.target)
        yield pieces


class _Grid:
    """The distinct blocks of a source: cells of a grid, of which each is on some devices."""

    def __init__(self, blocks: Mapping[Any, Box]) -> None:
        self._having: dict[Box, dict[Any, None]] = {}
        for device, box in blocks.items():
            self._having.setdefault(box, {})[device] = None
        self._cells = [sorted(set(cells)) for cells in zip(*self._having, strict=True)]
        for cells in self._cells:
            if any(end > begin for (_, end), (begin, _) in itertools.pairwise(cells)):
                raise ValueError(f'the blocks of the source overlap: {cells}')

    def parts_of(self, block: Box) -> Iterator[tuple[Mapping[Any, None], Box]]:
        """The parts of a block that are in one cell each, with the devices that have it."""
        if not volume(block):
            return
        along = [
            cells[bisect_right(cells, begin, key=_end) : bisect_left(cells, end, key=_begin)]
            for cells, (begin, end) in zip(self._cells, block, strict=True)
        ]
        for cell in filter(self._having.__contains__, itertools.product(*along)):
            yield self._having[cell], common(cell, block)


_begin, _end = operator.itemgetter(0), operator.itemgetter(1)


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
    starts = [max(first, second) for (first, _), (second, _) in zip(a, b, strict=True)]
    ends = [min(first, second) for (_, first), (_, second) in zip(a, b, strict=True)]
    return tuple((start, max(start, end)) for start, end in zip(starts, ends, strict=True))


def slices_in(box: Box, block: Box) -> Index:
    """Where a box is within a block that contains it.

    Example:
        >>> slices_in(((2, 3),), ((2, 4),))
        (slice(0, 1, None),)
    """
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, block, strict=True))


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
