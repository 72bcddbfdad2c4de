"""The words of pictures, and blocks drawn as boxes of text."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence

from scalax.errors import plural
from scalax.visualize._blocks import Blocks
from scalax.visualize._panels import (
    Panel,
    blocks_text,
    can_draw,
    cells_of,
    devices_text,
    dimension_texts,
    legend,
    packed,
    panels,
    picked,
    writings,
)
from scalax.visualize._pictures import Picture, member_text

MOST_PICTURES = 50
_MOST_MEMBERS = 8


def arrays_texts(picture: Picture) -> list[str]:
    """The arrays of a picture, a line for each kind."""
    lines = [member_text(picture, member) for member in picture.members[:_MOST_MEMBERS]]
    rest = sum(member.count for member in picture.members[_MOST_MEMBERS:])
    if rest:
        lines.append(f'... and {plural(rest, "more array", "more arrays")} with this sharding')
    return lines


def placement_text(picture: Picture) -> str:
    """The placement of those arrays, and the blocks that it makes."""
    return f'{picture.blocks.placement}: {blocks_text(picture.blocks)}'


def notes(picture: Picture, pictures: Sequence[Picture]) -> list[str]:
    """Notes on one picture; they explain its numbers if pictures differ in their meaning."""
    differ = len(_numberings(pictures)) > 1
    return [*picture.blocks.notes, *([picture.blocks.numbering] if differ else [])]


def closing(pictures: Sequence[Picture]) -> list[str]:
    """The lines below all pictures: which are not drawn, and the meaning of the numbers."""
    if not pictures:
        return ['There are no arrays in the tree.']
    rest = pictures[MOST_PICTURES:]
    arrays = plural(sum(picture.count for picture in rest), 'array')
    shardings = plural(len(rest), 'other sharding')
    lines = [f'Not drawn: {arrays} with {shardings}. Visualize a part of the tree.'] if rest else []
    numberings = _numberings(pictures)
    return [*lines, *(numberings if len(numberings) == 1 else [])]


def _numberings(pictures: Sequence[Picture]) -> list[str]:
    return list(dict.fromkeys(picture.blocks.numbering for picture in pictures))


_MOST_ROWS = 24
_RULED_ROWS = 8  # with more rows, lines between them take too much space
_MOST_LISTED = 16
_CELL = 16  # the characters for the devices of a block, if some blocks are left out
_NARROWEST = 4  # a block and one border
_GAP = 3

_Way = Mapping[tuple[int, ...], str]


def drawing(blocks: Blocks, width: int) -> tuple[str, list[str]]:
    """The text of the dimensions of a picture, and its lines.

    Args:
        blocks: the blocks of one array.
        width: the width in columns.
    """
    if can_draw(blocks):
        # A strip that is too wide is drawn upright, because terminals do not scroll sideways.
        for upright in (False, True) if len(blocks.cut) == 1 else (False,):
            drawn = _fitted(blocks, width, upright)
            if drawn:
                return '; '.join(dimension_texts(blocks, upright=upright)), drawn
    return '; '.join(dimension_texts(blocks, drawn=False)), listed(blocks, width)


def _fitted(blocks: Blocks, width: int, upright: bool) -> list[str] | None:
    """The lines of a picture; None if there is room for too few columns."""
    columns = len(blocks.dimensions[blocks.cut[-1]].ranges) if blocks.cut and not upright else 1
    fewest = columns if len(blocks.cut) == 1 else min(columns, 3)

    def make(most: int) -> list[Panel | str]:
        return panels(blocks, _MOST_ROWS, most, upright=upright)

    widest = make(max(width // _NARROWEST, 3))
    rooms = [(way, _columns_in(width, widest, way)) for way in writings(blocks, cells_of(widest))]
    for way, room in rooms:
        if room >= columns:
            return _arranged(make(columns), way, width)
    for way, room in rooms:
        if room >= fewest and max(map(len, way.values())) <= _CELL:
            return _arranged(make(room), way, width)
    return None


def _columns_in(width: int, drawn: Sequence[Panel | str], way: _Way) -> int:
    """The number of columns of blocks that fit."""
    found = [panel for panel in drawn if isinstance(panel, Panel)]
    return min((width - _margin(panel) - 1) // (_cell_width(panel, way) + 1) for panel in found)


def _margin(panel: Panel) -> int:
    longest = max(map(len, panel.rows))
    return longest + 1 if longest else 0


def _cell_width(panel: Panel, way: _Way) -> int:
    """The width of a block inside its borders; one for all, so that equal blocks look equal."""
    texts = [way[cell.devices] for row in panel.cells for cell in row if cell]
    return max(map(len, [*texts, *panel.columns])) + 2


def _arranged(drawn: Sequence[Panel | str], way: _Way, width: int) -> list[str]:
    """Panels side by side as far as they fit; texts for panels left out stand between them."""
    pieces = [_panel(item, way) if isinstance(item, Panel) else [item] for item in drawn]
    widths = [max(map(len, piece)) for piece in pieces]
    # The text for panels that are left out has a line of its own.
    rooms = [width if isinstance(item, str) else widths[number] for number, item in enumerate(drawn)]
    lines = []
    for together in packed(rooms, width, _GAP):
        padded = [[line.ljust(widths[number]) for line in pieces[number]] for number in together]
        gap = ' ' * _GAP
        blank = [' ' * widths[number] for number in together]
        rows = itertools.zip_longest(*padded)
        lines += [
            gap.join(text if text is not None else blank[n] for n, text in enumerate(row)).rstrip()
            for row in rows
        ]
    return [*lines, *legend(way[cell.devices] for cell in cells_of(drawn))]


def _panel(panel: Panel, way: _Way) -> list[str]:
    margin, width = _margin(panel), _cell_width(panel, way)
    left = ' ' * margin

    def rule(start: str, middle: str, end: str) -> str:
        return left + start + middle.join(['─' * width] * len(panel.columns)) + end

    lines = [left + panel.title] if panel.title else []
    if any(panel.columns):
        lines.append(left + ' ' + ' '.join(label.center(width) for label in panel.columns).rstrip())
    lines.append(rule('┌', '┬', '┐'))
    for number, (label, row) in enumerate(zip(panel.rows, panel.cells, strict=True)):
        if number and len(panel.rows) <= _RULED_ROWS:
            lines.append(rule('├', '┼', '┤'))
        texts = [('...' if cell is None else way[cell.devices]).center(width) for cell in row]
        lines.append(f'{f"{label} ".rjust(margin) if margin else ""}│{"│".join(texts)}│')
    return [*lines, rule('└', '┴', '┘')]


def listed(blocks: Blocks, width: int) -> list[str]:
    """The blocks as a list, for pictures with too many dimensions or too little room."""
    indices = list(itertools.product(*(range(len(dimension.ranges)) for dimension in blocks.dimensions)))
    lines = []
    for number in picked(len(indices), _MOST_LISTED):
        if number is None:
            lines.append(f'  ... {len(indices) - _MOST_LISTED + 1} more ...')
            continue
        index = indices[number]
        line = f'{blocks.slices(index)}  {devices_text(blocks.at(index), 3)}'
        lines += textwrap.wrap(line, width, initial_indent='  ', subsequent_indent='      ')
    return lines
