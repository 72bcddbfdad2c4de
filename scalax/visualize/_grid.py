"""Blocks in rows and columns, and the texts about them, for pictures as text and as HTML.

The last sharded dimension is along the columns, all others along the rows. Parts that do not fit are counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from scalax._core.util.folding import braces, runs
from scalax.errors import plural
from scalax.visualize._blocks import Blocks, Index, range_text

_MAX_ROWS = 24
_MAX_RUNS = 3  # ranges of device numbers listed in one block


class Grid(NamedTuple):
    """Some of the blocks of an array in rows and columns.

    Attributes:
        columns: the label of each column; empty strings if no dimension is along the columns.
        rows: the label of each row, and the indices of its blocks; None for blocks that are left out.
        dimensions: how each dimension of the array is sharded, and its direction in the grid.
    """

    columns: list[str]
    rows: list[tuple[str, list[Index | None]]]
    dimensions: str


def grid_of(blocks: Blocks, max_columns: int) -> Grid:
    """Returns the blocks to show, in at most *max_columns* columns.

    If the columns do not fit, or leave no room for the labels of the rows, all dimensions are along the rows.
    """
    sharded_dims = blocks.sharded_dims
    count = len(blocks.dimensions[sharded_dims[-1]].ranges) if sharded_dims else 1
    fits = count <= max_columns or (len(sharded_dims) > 1 and max_columns >= 3)
    across, down = (sharded_dims[-1:], sharded_dims[:-1]) if fits else ((), sharded_dims)
    columns, rows = _labelled_parts(blocks, across, max_columns), _labelled_parts(blocks, down, _MAX_ROWS)

    def block_index(row: Index | None, column: Index | None) -> Index | None:
        if row is None or column is None:
            return None
        part_of_dim = dict(zip((*down, *across), (*row, *column), strict=True))
        return tuple(part_of_dim.get(dim, 0) for dim in range(len(blocks.dimensions)))

    grid_rows = [(label, [block_index(row, column) for _, column in columns]) for label, row in rows]
    return Grid([label for label, _ in columns], grid_rows, _dimensions_text(blocks, across))


def _labelled_parts(blocks: Blocks, dims: Sequence[int], max_parts: int) -> list[tuple[str, Index | None]]:
    """Returns the label and index of each part along some dimensions; the index is None for omitted parts."""
    part_indices = [range(len(blocks.dimensions[dim].ranges)) for dim in dims]
    parts: list[tuple[str, Index | None]] = []
    for index in itertools.product(*part_indices):
        ranges = (blocks.dimensions[dim].ranges[part] for dim, part in zip(dims, index, strict=True))
        parts.append((', '.join(map(range_text, ranges)), index))
    if len(parts) <= max_parts:
        return parts
    return [*parts[: max_parts - 2], (f'{len(parts) - max_parts + 1} more', None), parts[-1]]


def _dimensions_text(blocks: Blocks, across: Sequence[int]) -> str:
    """Returns how each dimension is sharded: ``dim 0 ↓ 8 over fsdp=4; dim 1: 4, unsharded``."""
    texts = []
    for dim, dimension in enumerate(blocks.dimensions):
        arrow = '→' if dim in across else '↓'
        if dimension.is_sharded:
            texts.append(f'dim {dim} {arrow} {dimension.size} over {dimension.axes}')
        else:
            texts.append(f'dim {dim}: {dimension.size}, unsharded')
    return '; '.join(texts)


def blocks_text(blocks: Blocks) -> str:
    """Returns the number of blocks, their shape, and the number of devices that hold each block."""
    shape = ','.join(
        str(max((stop - start for start, stop in dimension.ranges), default=0))
        for dimension in blocks.dimensions
    )
    is_uneven = any(dimension.size % len(dimension.ranges) for dimension in blocks.dimensions)
    count = len(blocks.holders)
    on = 'each on' if count > 1 else 'on all' if len(blocks.devices) > 1 else 'on'
    devices = plural(len(blocks.devices) // count, 'device')
    return f'{plural(count, "block")} of [{shape}]{" at most" if is_uneven else ""}, {on} {devices}'


def devices_text(devices: Sequence[int]) -> str:
    """Returns device numbers in order, with runs as ``0..3``; of many runs, the first ones and the last.

    Example:
        >>> devices_text([0, 1, 2, 3, 8, 12]), devices_text(range(0, 64, 8)), devices_text([])
        ('0..3,8,12', '0,8,...,56 (8)', 'none')
    """
    has_many_runs = len(runs(devices)) > _MAX_RUNS + 1
    text = braces(devices, _MAX_RUNS if has_many_runs else None).strip('{}') or 'none'
    return f'{text} ({len(devices)})' if has_many_runs else text
