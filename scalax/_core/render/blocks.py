"""Blocks: what results say and show, as text and as HTML.

A result is one list of blocks: `text` renders it for a terminal, `page` and `fragment` as HTML. Figures and
trees are on pages only; what differs beyond that is inside of `TextOnly` and `HtmlOnly`.

Pages are whole without scripts: trees fold, because they are ``<details>``, and tables hold their rows in a
useful order. Where scripts run, tables and trees sort by each column, and trees are filtered. Where styles
are dropped, as in a notebook that is not trusted, text and tables remain. Nothing has an id: a page may
hold several plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from scalax._core.render import html_pages, tables
from scalax._core.render.html_pages import escape

Tone = Literal['', 'good', 'warn', 'bad']
Kind = Literal['', 'number', 'code', 'lead', 'wide']
MeshAxes = Mapping[str, int]
NO_BREAK = '\u00a0'
MOST_ROWS = 2000
"""The rows of a table or a tree that a page shows: it is read by people, and has to load."""
_AXIS_COLORS = 6  # in palette.css
_OPEN_AT_FIRST = 40  # rows of a tree
_WIDTHS = {'code': 'minmax(100px, 1.7fr)', 'wide': 'var(--wide, minmax(150px, 2.2fr))'}


class Block:
    """Part of a result. What a class does not override is not there in that form."""

    def text(self, width: int) -> list[str]:
        """The lines of text, tables no wider than *width*."""
        return []

    def html(self, mesh: MeshAxes) -> str:
        """The HTML, well-formed as XML is, the axes of *mesh* in their colours."""
        return ''


def text(blocks: Iterable[Block], width: int | None) -> str:
    """Blocks as text, *width* columns wide (default: as the terminal)."""
    return '\n'.join(_lines(blocks, tables.terminal_width(width))).rstrip('\n')


def _lines(blocks: Iterable[Block], width: int) -> list[str]:
    return [line for block in blocks for line in block.text(width)]


def fragment(blocks: Iterable[Block]) -> str:
    """Blocks as part of a notebook, in which they keep their own styles."""
    return html_pages.notebook_part(html(blocks), _style(), html_pages.asset('blocks.js'))


def page(title: str, blocks: Iterable[Block]) -> str:
    """Blocks as a whole document that loads nothing, and runs only the script that sorts and filters."""
    return html_pages.document(
        title,
        f'<main class="blocks">\n{html(blocks)}\n</main>',
        _style(),
        f'{html_pages.asset("blocks.js")}\nenliven(document);',
    )


def html(blocks: Iterable[Block], mesh: MeshAxes | None = None) -> str:
    """Blocks as HTML; the axes of a mesh have their colours from the heading on that names it."""
    parts = []
    for block in blocks:
        mesh = block.axes if isinstance(block, Heading) else mesh
        parts.append(block.html(mesh or {}))
    return ''.join(parts)


def _style() -> str:
    return html_pages.asset('head.css') + html_pages.asset('blocks.css')


# --- What holds other blocks ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TextOnly(Block):
    """Blocks that a page says in another way."""

    body: Sequence[Block]

    def text(self, width: int) -> list[str]:
        return _lines(self.body, width)


@dataclasses.dataclass(frozen=True)
class HtmlOnly(Block):
    """Blocks that text leaves out, or says in another way."""

    body: Sequence[Block]

    def html(self, mesh: MeshAxes) -> str:
        return html(self.body, mesh)


@dataclasses.dataclass(frozen=True)
class Section(Block):
    """A part of a result, with a blank line below it in text; nothing where all of its blocks are empty.

    Attributes:
        title: the title on a page; none if it is empty.
        body: its blocks.
        lead: what the blocks are, above them in both forms.
    """

    title: str
    body: Sequence[Block]
    lead: str = ''

    def text(self, width: int) -> list[str]:
        lines = _lines(self.body, width)
        lead = tables.wrap_lines([f'{self.lead}:'], width) if self.lead else []
        return [*lead, *lines, ''] if lines else []

    def html(self, mesh: MeshAxes) -> str:
        body = html(self.body, mesh)
        if not body:
            return ''
        title = f'<h2>{escape(self.title)}</h2>\n' if self.title else ''
        lead = _note(f'{self.lead[:1].upper()}{self.lead[1:]}.') if self.lead else ''
        return f'<section>\n{title}{lead}{body}\n</section>\n'


@dataclasses.dataclass(frozen=True)
class Collapsible(Block):
    """A part of a result that opens and closes on a page.

    Attributes:
        summary: what is always shown.
        body: its blocks.
    """

    summary: str
    body: Sequence[Block]

    def text(self, width: int) -> list[str]:
        return [*tables.wrap_lines([f'{self.summary}:'], width), *_lines(self.body, width)]

    def html(self, mesh: MeshAxes) -> str:
        summary = f'<summary>{escape(self.summary)}</summary>'
        return f'<details class="fold">{summary}{html(self.body, mesh)}</details>'


# --- Words ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Heading(Block):
    """The title of a page, or of a part of it, with the axes of a mesh in their colours."""

    title: str
    axes: MeshAxes
    note: str = ''
    level: int = 1

    def html(self, mesh: MeshAxes) -> str:
        chips = ''.join(f'<li>{_colored(name, self.axes)} {size:,}</li>' for name, size in self.axes.items())
        more = f'<li class="product">{escape(self.note)}</li>' if self.note else ''
        title = f'<h{self.level}>{escape(self.title)}</h{self.level}>'
        return f'<header>{title}<ul class="mesh">{chips}{more}</ul></header>'


@dataclasses.dataclass(frozen=True)
class Lines(Block):
    """Lines of words; empty ones are left out.

    Attributes:
        lines: the lines.
        tone: the colour of a box around them on a page, if they are not to be missed.
    """

    lines: Sequence[str]
    tone: Tone = ''

    def text(self, width: int) -> list[str]:
        return tables.wrap_lines(self.lines, width)

    def html(self, mesh: MeshAxes) -> str:
        lines = [line.strip() for line in self.lines if line]
        if not self.tone:
            return ''.join(map(_note, lines))
        paragraphs = ''.join(f'<p>{escape(line)}</p>' for line in lines)
        return f'<div{_class("callout", self.tone)}>{paragraphs}</div>' if lines else ''


def _note(line: str) -> str:
    return f'<p class="note">{escape(line)}</p>'


@dataclasses.dataclass(frozen=True)
class Code(Block):
    """Code to copy."""

    code: str

    def text(self, width: int) -> list[str]:
        return [*map(html_pages.visible, self.code.splitlines())]

    def html(self, mesh: MeshAxes) -> str:
        return f'<pre>{"<br/>".join(map(escape, self.code.splitlines()))}</pre>' if self.code else ''


def _colored(words: str, mesh: MeshAxes) -> str:
    """A text with the names of mesh axes in their colours; an axis has the same one wherever it is named."""
    if not mesh:
        return escape(words)
    names = '|'.join(map(re.escape, sorted(mesh, key=len, reverse=True)))
    places = {name: place % _AXIS_COLORS for place, name in enumerate(mesh)}
    parts = re.split(rf'(?<!\w)({names})(?!\w)', words)
    return ''.join(
        f'<span class="axis axis-{places[part]}">{escape(part)}</span>' if number % 2 else escape(part)
        for number, part in enumerate(parts)
    )


# --- Figures --------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A headline figure.

    Attributes:
        value: the figure, with its unit.
        label: what it is.
        tone: its colour.
        is_badge: whether it is a verdict, such as ``'fits'``, and no number.
    """

    value: str
    label: str
    tone: Tone = ''
    is_badge: bool = False


@dataclasses.dataclass(frozen=True)
class Figures(Block):
    """Headline figures side by side."""

    figures: Sequence[Figure]

    def html(self, mesh: MeshAxes) -> str:
        rows = ''.join(
            f'<div{_class(each.tone)}><dt>{escape(each.label)}</dt>'
            f'<dd>{_badge(each.value, each.tone) if each.is_badge else escape(each.value)}</dd></div>\n'
            for each in self.figures
        )
        return f'<dl class="totals">\n{rows}</dl>'


def _badge(words: str, tone: Tone) -> str:
    return f'<span{_class("badge", tone)}>{escape(words)}</span>'


# --- Tables and trees -----------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table or a tree.

    Attributes:
        head: its head.
        kind: ``'number'``: aligned to the right, and sorted from the largest down; ``'code'``: names, those
            of mesh axes in their colours; ``'lead'``: the name of the row, which is the title of its card on
            a narrow screen; ``'wide'``: text that has a line of its own there.
        show: the text of a number.
        on_page: whether text leaves it out.
    """

    head: str
    kind: Kind = ''
    show: Callable[[Any], str] = str
    on_page: bool = False


class Cell(NamedTuple):
    """A cell that is more than a text, or a number that its column shows.

    Attributes:
        text: its text.
        key: the number by which its column is sorted; by its text if there is none.
        tone: its colour, as a badge; or that of its bar.
        bar: the length of a bar below the text, from 0 to 1.
    """

    text: str
    key: float | None = None
    tone: Tone = ''
    bar: float | None = None


Value = str | float | Cell | None
"""A cell: a text, a number that its column shows, nothing, or more than these."""
Row = Sequence[Value]


def _cell(column: Column, value: Value) -> Cell:
    if isinstance(value, Cell):
        return value
    return Cell(value or '') if value is None or isinstance(value, str) else Cell(column.show(value), value)


@dataclasses.dataclass(frozen=True)
class Table(Block):
    """A table. On a page it sorts by each column where scripts run.

    The column that is wide takes lines of its own in text where there is no room, else the leading one.

    Attributes:
        columns: its columns.
        rows: the values of each row.
        best: the row to set in bold on a page.
        most_lines: the rows that text shows.
        footnotes: whether the last column becomes numbers of footnotes in text that is too narrow for it.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    best: int | None = None
    most_lines: int | None = None
    footnotes: bool = False

    def text(self, width: int) -> list[str]:
        shown = [number for number, column in enumerate(self.columns) if not column.on_page]
        columns = [self.columns[number] for number in shown]
        kinds = [column.kind for column in columns]
        longest = 'wide' if 'wide' in kinds and not self.footnotes else 'lead'
        path = kinds.index(longest) if longest in kinds else 0
        numbers = [number for number, kind in enumerate(kinds) if kind == 'number']
        cells = [[column.head for column in columns]]
        for row in self.rows[: self.most_lines]:
            cells.append([_cell(self.columns[number], row[number]).text for number in shown])
        notes: list[str] = []
        if self.footnotes and not tables.fits(cells, width):
            cells, notes = tables.with_footnotes(cells)
        below = ['', *tables.wrap_lines(notes, width)] if notes else []
        return [*tables.table(cells, width, path, numbers), *self._rest(self.most_lines), *below]

    def html(self, mesh: MeshAxes) -> str:
        heads = ''.join(
            f'<th scope="col"{_class(each.kind)}>{escape(each.head)}</th>' for each in self.columns
        )
        body = '\n'.join(
            f'<tr{_class("best" if place == self.best else "")}>'
            + ''.join(
                self._td(column, _cell(column, value), mesh)
                for column, value in zip(self.columns, row, strict=True)
            )
            + '</tr>'
            for place, row in enumerate(self.rows[:MOST_ROWS])
        )
        return (
            f'<div class="scroll"><table class="sortable">\n<thead><tr>{heads}</tr></thead>\n'
            f'<tbody>\n{body}\n</tbody>\n</table></div>{"".join(map(_note, self._rest(MOST_ROWS)))}'
        )

    def _td(self, column: Column, cell: Cell, mesh: MeshAxes) -> str:
        attributes = f'{_class(column.kind)} data-label="{escape(column.head)}"{_sort_key(column, cell)}'
        return f'<td{attributes}>{_content(column, cell, mesh)}</td>'

    def _rest(self, shown: int | None) -> list[str]:
        if shown is None or len(self.rows) <= shown:
            return []
        return [f'... and {len(self.rows) - shown:,} more']


def _content(column: Column, cell: Cell, mesh: MeshAxes) -> str:
    words = _colored(cell.text, mesh) if column.kind == 'code' else escape(cell.text)
    if cell.bar is not None:
        part = f'<i{_class(cell.tone)} style="width: {100 * cell.bar:.2f}%"></i>' if cell.bar else ''
        return f'{words}<div class="bar">{part}</div>'
    return _badge(cell.text, cell.tone) if cell.tone else words


def _sort_key(column: Column, cell: Cell) -> str:
    """The number that a cell is sorted by; empty in a column of numbers if it has none."""
    if cell.key is None and column.kind != 'number':
        return ''
    return f' data-key="{"" if cell.key is None else repr(cell.key)}"'


@dataclasses.dataclass(frozen=True)
class Node:
    """A row of a tree: its name, its other cells, and the rows below it."""

    name: str
    cells: Row = ()
    children: Sequence[Node] = ()


@dataclasses.dataclass(frozen=True)
class Tree(Block):
    """A tree of rows that folds; where scripts run, it sorts by each column and is filtered.

    As many levels are open at first as have few rows.

    Attributes:
        columns: its columns; that of the names first.
        nodes: the rows of the top level.
    """

    columns: Sequence[Column]
    nodes: Sequence[Node]

    def html(self, mesh: MeshAxes) -> str:
        if not self.nodes:
            return ''
        name, *others = self.columns
        heads = ''.join(f' <span{_class("cell", each.kind)}>{escape(each.head)}</span>' for each in others)
        levels = _levels(self.nodes)
        opened = sum(total <= _OPEN_AT_FIRST for total in itertools.accumulate(levels)) - 1
        left = iter(range(MOST_ROWS))
        body = ''.join(_node(node, others, mesh, 0, opened, left) for node in self.nodes)
        style = '--columns: ' + ' '.join(_WIDTHS.get(each.kind, 'minmax(62px, 1fr)') for each in others)
        rest = _note(f'The first {MOST_ROWS:,} rows are shown.') if sum(levels) > MOST_ROWS else ''
        return (
            f'<div class="tree" style="{style}">\n<div class="row heads" style="--level: 0">'
            f'<span class="name">{escape(name.head)}</span>{heads}</div>\n{body}</div>{rest}'
        )


def _levels(nodes: Sequence[Node]) -> list[int]:
    """The number of rows of each level of a tree."""
    counts = []
    while nodes:
        counts.append(len(nodes))
        nodes = [child for node in nodes for child in node.children]
    return counts


def _node(
    node: Node, columns: Sequence[Column], mesh: MeshAxes, level: int, opened: int, left: Iterator[int]
) -> str:
    """A row and those below it; *left* has an item for each row that may still be shown."""
    if next(left, None) is None:
        return ''
    cells = ''
    for column, value in zip(columns, node.cells, strict=True):
        cell = _cell(column, value)
        label = f'<span class="label">{escape(column.head)} </span>' if cell.text else ''
        attributes = f'{_class("cell", column.kind)}{_sort_key(column, cell)}'
        cells += f' <span{attributes}>{label}{_content(column, cell, mesh)}</span>'
    # Without styles, spaces are what tells the levels apart.
    indent = f'<span class="indent">{level * 4 * NO_BREAK}</span>' if level else ''
    row = f'{indent}<span class="name">{escape(node.name)}</span>{cells}'
    style = f'style="--level: {level}"'
    if not node.children:
        return f'<div class="row" {style}>{row}</div>\n'
    below = ''.join(_node(child, columns, mesh, level + 1, opened, left) for child in node.children)
    is_open = ' open="open"' if level < opened else ''
    return f'<details{is_open}><summary class="row" {style}>{row}</summary>\n{below}</details>\n'


def _class(*names: str) -> str:
    found = ' '.join(filter(None, names))
    return f' class="{found}"' if found else ''
