"""Panels of blocks and the texts around them, shared by text and SVG.

At most two dimensions make a panel of rows and columns; a third one makes a row of panels. Dimensions
that are not cut are not drawn. Parts that do not fit are replaced by their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from scalax._util.folding import braces, runs
from scalax.errors import plural
from scalax.visualize._blocks import Blocks, Dimension, Index, range_text

_MOST_CUT = 3  # dimensions that a picture can show
MOST_PANELS = 8


@dataclasses.dataclass(frozen=True)
class Cell:
    """One block: where it is among the blocks, and the devices that hold it."""

    index: Index
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Blocks in rows and columns.

    Attributes:
        title: which part of the first dimension this is, if there are several panels.
        rows: a label for each row; the empty string for none.
        columns: a label for each column, likewise.
        cells: row by row; None where blocks are left out.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]


def picked(count: int, most: int) -> list[int | None]:
    """The indices of the things to show, at most *most* (at least 3); None stands for those left out.

    Example:
        >>> picked(4, 4), picked(100, 5)
        ([0, 1, 2, 3], [0, 1, 2, None, 99])
    """
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def can_draw(blocks: Blocks) -> bool:
    """Whether a picture can show all cut dimensions."""
    return len(blocks.cut) <= _MOST_CUT


def panels(blocks: Blocks, most_rows: int, most_columns: int, *, upright: bool = False) -> list[Panel | str]:
    """The panels of a picture; a text stands for those that are left out.

    Args:
        blocks: the blocks to draw; see `can_draw`.
        most_rows: the most rows of a panel, including one for those left out.
        most_columns: likewise.
        upright: whether a single dimension is drawn as a column.
    """
    across, down, through = _directions(blocks, upright)
    rows, columns = _side(blocks, down, most_rows), _side(blocks, across, most_columns)

    def cell(*parts: int | None) -> Cell | None:
        if None in parts:
            return None
        at = dict(zip((down, across, through), parts, strict=True))
        index = tuple(at.get(dim) or 0 for dim in range(len(blocks.dimensions)))
        return Cell(index, blocks.at(index))

    found: list[Panel | str] = []
    for part, label in _side(blocks, through, MOST_PANELS):
        if part is None:
            found.append(f'... {label} ...')
            continue
        found.append(
            Panel(
                '' if through is None else f'dim {through} = {label}',
                tuple(label for _, label in rows),
                tuple(label for _, label in columns),
                tuple(tuple(cell(row, column, part) for column, _ in columns) for row, _ in rows),
            )
        )
    return found


def cells_of(drawn: Iterable[Panel | str]) -> list[Cell]:
    """All blocks that are drawn."""
    found = [panel for panel in drawn if isinstance(panel, Panel)]
    return [cell for panel in found for row in panel.cells for cell in row if cell]


def _directions(blocks: Blocks, upright: bool) -> tuple[int | None, int | None, int | None]:
    """The dimensions of the columns, of the rows, and of the panels."""
    cut = blocks.cut
    if len(cut) == 1:
        return (None, cut[0], None) if upright else (cut[0], None, None)
    last = [None, None, None, *cut]
    return last[-1], last[-2], last[-3]


def _side(blocks: Blocks, dim: int | None, most: int) -> list[tuple[int | None, str]]:
    """The parts of a dimension that are shown, with their labels; one without label if there is none."""
    if dim is None:
        return [(0, '')]
    ranges = blocks.dimensions[dim].ranges
    return [
        (part, f'{len(ranges) - most + 1} more' if part is None else range_text(ranges[part]))
        for part in picked(len(ranges), most)
    ]


# --- Texts ----------------------------------------------------------------------------------------


def dimension_texts(blocks: Blocks, *, upright: bool = False, drawn: bool = True) -> list[str]:
    """How each dimension is cut, and its direction in the picture: ``dim 0 ↓ 8 over fsdp=4``.

    Args:
        blocks: the blocks of one array.
        upright: as for `panels`.
        drawn: whether there is a picture rather than a list.
    """
    none = None, None, None
    across, down, through = _directions(blocks, upright) if drawn and can_draw(blocks) else none
    words = {across: ' →', down: ' ↓', through: ':'}
    texts = []
    for number, dimension in enumerate(blocks.dimensions):
        if not dimension.is_cut:
            texts.append(f'dim {number}: {dimension.size}, whole')
            continue
        each = ', a panel for each part' if number == through else ''
        texts.append(f'dim {number}{words.get(number, ":")} {dimension.size} {_cut_text(dimension)}{each}')
    return texts


def _cut_text(dimension: Dimension) -> str:
    return f'over {dimension.axes}' if dimension.axes else f'in {len(dimension.ranges)} parts'


def blocks_text(blocks: Blocks) -> str:
    """The number of blocks, their shape, and the number of devices that hold each."""
    largest = ','.join(
        str(max((stop - start for start, stop in dimension.ranges), default=0))
        for dimension in blocks.dimensions
    )
    uneven = any(dimension.size % len(dimension.ranges) for dimension in blocks.dimensions)
    copies = sorted({len(devices) for devices in blocks.holders.values()})
    on = plural(copies[-1], 'device')
    if len(copies) > 1:
        on = f'{copies[0]} to {on}'
    if len(blocks.holders) > 1:
        on = f'each on {on}'
    elif copies[0] == len(blocks.devices) > 1:
        on = f'on all {on}'
    else:
        on = f'on {on}'
    return f'{plural(len(blocks.holders), "block")} of [{largest}]{" at most" if uneven else ""}, {on}'


def writings(
    blocks: Blocks, cells: Iterable[Cell], *, counted: bool = True
) -> list[dict[tuple[int, ...], str]]:
    """Ways to write the devices of all *cells*, from the longest and most exact; see `devices_text`."""
    groups = list(dict.fromkeys(cell.devices for cell in cells))
    if len(blocks.holders) == 1:
        [group] = groups
        one = f'device {group[0]}' if len(group) == 1 else f'devices {devices_text(group)}'
        return [{group: f'all {len(group)} devices' if len(group) == len(blocks.devices) > 1 else one}]
    return [
        {group: devices_text(group, most, counted=counted) for group in groups} for most in (None, 3, 2, 1)
    ]


def devices_text(devices: Sequence[int], most: int | None = None, *, counted: bool = True) -> str:
    """Numbers of devices in their order, with runs as ``0..3``.

    Args:
        devices: the numbers.
        most: the number of runs to write; others become ``...``. With 1, the first device and the number
            of others are written.
        counted: whether to add the number of devices if some are not written.

    Example:
        >>> devices_text([0, 1, 2, 3, 8, 12]), devices_text(range(0, 64, 8), 3), devices_text([5, 7], 1)
        ('0..3,8,12', '0,8,...,56 (8)', '5 +1')
    """
    elided = most is not None and len(runs(devices)) > most
    if elided and most == 1:
        return f'{devices[0]} +{len(devices) - 1}'
    written = braces(devices, most).strip('{}') or 'none'
    return f'{written} ({len(devices)})' if elided and counted else written


def legend(written: Iterable[str]) -> list[str]:
    """Explains the shortest notation of devices if it is used."""
    short = next((text for text in written if ' +' in text), None)
    if short is None:
        return []
    first, others = short.split(' +')
    return [f'{short!r} is device {first} and {plural(int(others), "other")}.']


def packed(widths: Sequence[float], room: float, gap: float) -> list[list[int]]:
    """Arranges things side by side in lines no wider than *room*, if possible; returns their indices.

    Example:
        >>> packed([4, 4, 4], 10, 1)
        [[0, 1], [2]]
    """
    lines: list[list[int]] = []
    used = room
    for number, width in enumerate(widths):
        if lines and used + gap + width <= room:
            lines[-1].append(number)
            used += gap + width
        else:
            lines.append([number])
            used = width
    return lines
