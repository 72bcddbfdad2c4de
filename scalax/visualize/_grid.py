"""Blocks in rows and columns, and their devices in words: what pictures as text and as HTML share.

The last dimension that is cut makes the columns, all others the rows. What does not fit is counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from scalax._core.util.folding import braces, runs
from scalax.errors import plural
from scalax.visualize._blocks import Blocks, Index, range_text

_MOST_ROWS = 24
_MOST_RUNS = 3  # of the devices of a block


class Grid(NamedTuple):
    """Some of the blocks of an array in rows and columns.

    Attributes:
        columns: the label of each column; empty strings if nothing is cut along them.
        rows: of each row its label and the indices of its blocks; None for blocks that are left out.
        dimensions: how each dimension of the array is cut, and its direction here.
    """

    columns: list[str]
    rows: list[tuple[str, list[Index | None]]]
    dimensions: str


def grid_of(blocks: Blocks, most_columns: int) -> Grid:
    """The blocks to show, in at most so many columns.

    A single dimension that is too long stands upright, and so do labels that leave no room.
    """
    cut = blocks.cut
    count = len(blocks.dimensions[cut[-1]].ranges) if cut else 1
    fits = count <= most_columns or (len(cut) > 1 and most_columns >= 3)
    across, down = (cut[-1:], cut[:-1]) if fits else ((), cut)
    columns, rows = _parts(blocks, across, most_columns), _parts(blocks, down, _MOST_ROWS)

    def index(row: Index | None, column: Index | None) -> Index | None:
        if row is None or column is None:
            return None
        at = dict(zip((*down, *across), (*row, *column), strict=True))
        return tuple(at.get(dim, 0) for dim in range(len(blocks.dimensions)))

    shown = [(label, [index(row, column) for _, column in columns]) for label, row in rows]
    return Grid([label for label, _ in columns], shown, _dimensions(blocks, across))


def _parts(blocks: Blocks, dims: Sequence[int], most: int) -> list[tuple[str, Index | None]]:
    """The parts along some dimensions, each with its label; None for those between the first and the last."""
    sizes = [range(len(blocks.dimensions[dim].ranges)) for dim in dims]
    labelled: list[tuple[str, Index | None]] = []
    for part in itertools.product(*sizes):
        bounds = (blocks.dimensions[dim].ranges[at] for dim, at in zip(dims, part, strict=True))
        labelled.append((', '.join(map(range_text, bounds)), part))
    if len(labelled) <= most:
        return labelled
    return [*labelled[: most - 2], (f'{len(labelled) - most + 1} more', None), labelled[-1]]


def _dimensions(blocks: Blocks, across: Sequence[int]) -> str:
    """How each dimension is cut, and its direction: ``dim 0 ↓ 8 over fsdp=4; dim 1: 4, unsharded``."""
    texts = []
    for number, dimension in enumerate(blocks.dimensions):
        arrow = '→' if number in across else '↓'
        cut = f'dim {number} {arrow} {dimension.size} over {dimension.axes}'
        texts.append(cut if dimension.is_cut else f'dim {number}: {dimension.size}, unsharded')
    return '; '.join(texts)


def blocks_text(blocks: Blocks) -> str:
    """The number of blocks, their shape, and the number of devices that hold each."""
    largest = ','.join(
        str(max((stop - start for start, stop in dimension.ranges), default=0))
        for dimension in blocks.dimensions
    )
    uneven = any(dimension.size % len(dimension.ranges) for dimension in blocks.dimensions)
    count = len(blocks.holders)
    each = 'each on' if count > 1 else 'on all' if len(blocks.devices) > 1 else 'on'
    on = plural(len(blocks.devices) // count, 'device')
    return f'{plural(count, "block")} of [{largest}]{" at most" if uneven else ""}, {each} {on}'


def devices_text(devices: Sequence[int]) -> str:
    """Numbers of devices in their order, with runs as ``0..3``; of many runs the first ones and the last.

    Example:
        >>> devices_text([0, 1, 2, 3, 8, 12]), devices_text(range(0, 64, 8)), devices_text([])
        ('0..3,8,12', '0,8,...,56 (8)', 'none')
    """
    many = len(runs(devices)) > _MOST_RUNS + 1
    written = braces(devices, _MOST_RUNS if many else None).strip('{}') or 'none'
    return f'{written} ({len(devices)})' if many else written
