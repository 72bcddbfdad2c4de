"""The blocks of one array as SVG, in the colours of their devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from scalax._report.pages import escape
from scalax.errors import plural
from scalax.visualize._blocks import Blocks
from scalax.visualize._drawn import CHAR, LINE, Drawn, below, beside, number, text_lines, told_apart
from scalax.visualize._panels import (
    Cell,
    Panel,
    can_draw,
    cells_of,
    devices_text,
    legend,
    packed,
    panels,
    writings,
)
from scalax.visualize._text import listed

MOST_LINE = 110  # characters of a line of text
_MOST_ROWS, _MOST_COLUMNS = 16, 16
_STRIP_LINES = 8
_MOST_CELL = 18  # the characters for the devices of a block, before some are left out
_LEAST_CELL = 64
_ROOM = 1100
_PANEL_GAP = 28
_SEAM = 3  # between blocks
_INK = '#000000'  # on every colour of blocks
_ON_ALL = '#DDDDDD'  # blocks that every device holds


def draw(blocks: Blocks) -> Drawn:
    """The blocks of one array."""
    if not can_draw(blocks):
        return text_lines(listed(blocks, MOST_LINE))
    strip_lines = _STRIP_LINES if len(blocks.cut) == 1 else 1
    drawer = _Drawer(blocks, panels(blocks, _MOST_ROWS, _MOST_COLUMNS * strip_lines))
    columns = min(_MOST_COLUMNS, max(3, int((_ROOM - drawer.left) // (drawer.width + _SEAM))))
    items = panels(blocks, _MOST_ROWS, columns * strip_lines)
    if strip_lines > 1:
        items = [line for item in items if isinstance(item, Panel) for line in _strip(item, columns)]
    whole = _arranged(items, drawer)
    explained = legend(drawer.way[cell.devices] for cell in cells_of(items))
    return below([whole, text_lines(explained)], 12) if explained else whole


def _strip(panel: Panel, columns: int) -> list[Panel]:
    """A strip of blocks, broken into several lines."""
    return [
        dataclasses.replace(
            panel,
            columns=panel.columns[start : start + columns],
            cells=(panel.cells[0][start : start + columns],),
        )
        for start in range(0, len(panel.columns), columns)
    ]


def _arranged(items: Sequence[Panel | str], drawer: _Drawer) -> Drawn:
    """Panels side by side as far as they fit; the text for panels left out has a line of its own."""
    colors = colors_of(drawer.blocks, [cell.devices for cell in cells_of(items)])
    drawn = [drawer.item(item, colors) for item in items]
    widths = [_ROOM if isinstance(item, str) else part.width for item, part in zip(items, drawn, strict=True)]
    lines = [
        beside([drawn[i] for i in together], _PANEL_GAP) for together in packed(widths, _ROOM, _PANEL_GAP)
    ]
    return below(lines, 16)


class _Drawer:
    """Draws the panels of one picture, all with blocks of one size."""

    def __init__(self, blocks: Blocks, items: Sequence[Panel | str]) -> None:
        found = [item for item in items if isinstance(item, Panel)]
        groups = list(blocks.holders.values())
        # Each block shows its number of replicas, unless its text does.
        self.counts = len(groups) > 1 and any(len(group) > 1 for group in groups)
        ways = writings(blocks, cells_of(found), counted=not self.counts)
        self.way = next((way for way in ways if max(map(len, way.values())) <= _MOST_CELL), ways[-1])
        self.blocks = blocks
        longest = max(map(len, [*self.way.values(), *found[0].columns]))
        self.width = max(longest * CHAR + 14, _LEAST_CELL)
        self.height = 44 if self.counts else 34
        labels = max(map(len, found[0].rows))
        self.left = labels * CHAR + 10 if labels else 0

    def item(self, item: Panel | str, colors: Mapping[tuple[int, ...], str]) -> Drawn:
        """A panel, or the text for panels that are left out."""
        if isinstance(item, str):
            return text_lines([item])
        body, top = [], 0
        if item.title:
            body.append(_label(self.left, 14, item.title, 'start', 'bold'))
            top += LINE + 2
        if any(item.columns):
            for column, label in enumerate(item.columns):
                body.append(_label(self._x(column) + self.width / 2, top + 13, label, 'middle'))
            top += LINE
        for label, row in zip(item.rows, item.cells, strict=True):
            if label:
                body.append(_label(self.left - 10, top + self.height / 2 + 4, label, 'end'))
            for column, cell in enumerate(row):
                color = colors[cell.devices] if cell and cell.devices else 'none'
                body.append(self._cell(cell, color, self._x(column), top))
            top += self.height + _SEAM
        return Drawn(''.join(body), self._x(len(item.columns)) - _SEAM, top - _SEAM)

    def _x(self, column: int) -> float:
        return self.left + column * (self.width + _SEAM)

    def _cell(self, cell: Cell | None, color: str, x: float, y: float) -> str:
        left, middle, base = number(x), number(x + self.width / 2), y + self.height / 2 + 4
        size = f'width="{number(self.width)}" height="{self.height}"'
        rect = f'<rect x="{left}" y="{number(y)}" {size} rx="4" '
        if cell is None:
            return (
                f'{rect}fill="none" stroke="currentColor" stroke-opacity="0.35" stroke-dasharray="3 3"/>'
                f'<text x="{middle}" y="{number(base)}" text-anchor="middle" fill="currentColor">...</text>'
            )
        text_color = _INK if cell.devices else 'currentColor'
        if self.counts:
            base -= 7
        words = [f'<text x="{middle}" y="{number(base)}">{escape(self.way[cell.devices])}</text>']
        if self.counts:
            words.append(f'<text x="{middle}" y="{number(base + 15)}" font-size="10">{_many(cell)}</text>')
        where = devices_text(cell.devices, 9)
        title = f'{self.blocks.slices(cell.index)} on {_many(cell)}: {where}'
        return (
            f'<g fill="{text_color}" text-anchor="middle"><title>{escape(title)}</title>'
            f'{rect}fill="{color}"/>{"".join(words)}</g>'
        )


def _many(cell: Cell) -> str:
    return plural(len(cell.devices), 'device')


def _label(x: float, y: float, text: str, anchor: str, weight: str = 'normal') -> str:
    return (
        f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" fill="currentColor" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def colors_of(blocks: Blocks, groups: Iterable[tuple[int, ...]]) -> Mapping[tuple[int, ...], str]:
    """A colour for each group of devices.

    Groups take colours in the order of their first devices in the mesh, so that on one mesh a device
    has the same colour however arrays are cut. Many groups share a scale.

    Args:
        blocks: the blocks of one array.
        groups: the groups of devices that hold the blocks to draw.
    """
    place = {device: i for i, device in enumerate(blocks.devices)}
    distinct = dict.fromkeys(groups)
    parts = [group for group in distinct if len(group) < len(place)]
    ordered = sorted(parts, key=lambda group: [place[device] for device in group])
    colors = dict(zip(ordered, told_apart(len(ordered)), strict=True))
    return {**dict.fromkeys(distinct, _ON_ALL), **colors}
