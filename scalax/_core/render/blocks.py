"""Blocks of output, which are rendered as text and as HTML.

A result is one list of blocks: `text` renders it for a terminal, `page` and `fragment` as HTML. Only pages
show figures and trees. Other differences between the two forms are inside of `TextOnly` and `HtmlOnly`.

Pages are complete without scripts: trees fold, because they are ``<details>``, and the rows of tables are in
a useful order. Scripts add sorting of tables and trees by each column, and filtering of trees. Where styles
are dropped, as in a notebook that is not trusted, text and tables remain. No element has an id, because a
page may hold several plans.
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
MAX_ROWS = 2000
"""The largest number of rows of a table or a tree that a page shows."""
_AXIS_COLORS = 6  # in palette.css
_MAX_OPEN_ROWS = 40  # expanded rows of a tree when a page is opened
_WIDTHS = {'code': 'minmax(100px, 1.7fr)', 'wide': 'var(--wide, minmax(150px, 2.2fr))'}


class Block:
    """A part of a result. By default it is empty in both forms."""

    def text(self, width: int) -> list[str]:
        """Returns the lines of text, with tables no wider than *width*."""
        return []

    def html(self, mesh: MeshAxes) -> str:
        """Returns HTML that is also well-formed XML, with the axes of *mesh* in their colours."""
        return ''


def text(blocks: Iterable[Block], width: int | None) -> str:
    """Renders blocks as text, *width* columns wide (default: the width of the terminal)."""
    return '\n'.join(_lines(blocks, tables.terminal_width(width))).rstrip('\n')


def _lines(blocks: Iterable[Block], width: int) -> list[str]:
    return [line for block in blocks for line in block.text(width)]


def fragment(blocks: Iterable[Block]) -> str:
    """Renders blocks as notebook output, with their own styles."""
    return html_pages.notebook_part(html(blocks), _style(), html_pages.asset('blocks.js'))


def page(title: str, blocks: Iterable[Block]) -> str:
    """Renders blocks as a document that loads nothing, and runs only the script that sorts and filters."""
    return html_pages.document(
        title,
        f'<main class="blocks">\n{html(blocks)}\n</main>',
        _style(),
        f'{html_pages.asset("blocks.js")}\nenhance(document);',
    )


def html(blocks: Iterable[Block], mesh: MeshAxes | None = None) -> str:
    """Renders blocks as HTML. Mesh axes have colours after the heading that names the mesh."""
    parts = []
    for block in blocks:
        mesh = block.axes if isinstance(block, Heading) else mesh
        parts.append(block.html(mesh or {}))
    return ''.join(parts)


def _style() -> str:
    return html_pages.asset('head.css') + html_pages.asset('blocks.css')


# --- Containers of blocks --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TextOnly(Block):
    """Blocks that are left out of HTML, which shows their contents in another way."""

    body: Sequence[Block]

    def text(self, width: int) -> list[str]:
        return _lines(self.body, width)


@dataclasses.dataclass(frozen=True)
class HtmlOnly(Block):
    """Blocks that are left out of text, which may show their contents in another way."""

    body: Sequence[Block]

    def html(self, mesh: MeshAxes) -> str:
        return html(self.body, mesh)


@dataclasses.dataclass(frozen=True)
class Section(Block):
    """A titled group of blocks, followed by a blank line in text. It is empty if all of its blocks are.

    Attributes:
        title: the title on a page; '' for no title.
        body: the blocks.
        lead: a description above the blocks, in both forms.
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
    """A group of blocks that opens and closes on a page.

    Attributes:
        summary: the text that is always visible.
        body: the blocks.
    """

    summary: str
    body: Sequence[Block]

    def text(self, width: int) -> list[str]:
        return [*tables.wrap_lines([f'{self.summary}:'], width), *_lines(self.body, width)]

    def html(self, mesh: MeshAxes) -> str:
        summary = f'<summary>{escape(self.summary)}</summary>'
        return f'<details class="fold">{summary}{html(self.body, mesh)}</details>'


# --- Text -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Heading(Block):
    """The title of a page or of a part of it, with the axes of a mesh in their colours."""

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
    """Lines of text; empty ones are left out.

    Attributes:
        lines: the lines.
        tone: the colour of the box around the lines on a page; '' for no box.
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
    """Renders text with the names of mesh axes in their colours."""
    if not mesh:
        return escape(words)
    names = '|'.join(map(re.escape, sorted(mesh, key=len, reverse=True)))
    colors = {name: index % _AXIS_COLORS for index, name in enumerate(mesh)}
    parts = re.split(rf'(?<!\w)({names})(?!\w)', words)
    return ''.join(
        f'<span class="axis axis-{colors[part]}">{escape(part)}</span>' if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )


# --- Figures --------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A headline figure.

    Attributes:
        value: the figure, with its unit.
        label: the description of the figure.
        tone: the colour.
        is_badge: whether the value is a verdict, such as ``'fits'``, rather than a number.
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
            f'<div{_class(tone)}><dt>{escape(label)}</dt>'
            f'<dd>{_badge(value, tone) if is_badge else escape(value)}</dd></div>\n'
            for value, label, tone, is_badge in self.figures
        )
        return f'<dl class="totals">\n{rows}</dl>'


def _badge(words: str, tone: Tone) -> str:
    return f'<span{_class("badge", tone)}>{escape(words)}</span>'


# --- Tables and trees -----------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table or a tree.

    Attributes:
        head: the heading.
        kind: ``'number'``: aligned to the right, and sorted in descending order; ``'code'``: names, with mesh
            axes in their colours; ``'lead'``: the name of the row, which is the title of its card on a narrow
            screen; ``'wide'``: text that has its own line there.
        show: converts a number to text.
        html_only: whether text leaves out the column.
    """

    head: str
    kind: Kind = ''
    show: Callable[[Any], str] = str
    html_only: bool = False


class Cell(NamedTuple):
    """A cell with more than a text or a number.

    Attributes:
        text: the text.
        key: the number by which its column is sorted. Without it the column is sorted by text.
        tone: the colour of the text, as a badge, or of the bar.
        bar: the length of a bar below the text, from 0 to 1.
    """

    text: str
    key: float | None = None
    tone: Tone = ''
    bar: float | None = None


Value = str | float | Cell | None
"""The contents of a cell. Numbers are converted to text by their column; None is empty."""
Row = Sequence[Value]


def _cell(column: Column, value: Value) -> Cell:
    if isinstance(value, Cell):
        return value
    return Cell(value or '') if value is None or isinstance(value, str) else Cell(column.show(value), value)


@dataclasses.dataclass(frozen=True)
class Table(Block):
    """A table. On a page, scripts sort it by each column.

    Where text is too narrow, the wide column, or else the leading one, takes lines of its own.

    Attributes:
        columns: the columns.
        rows: the values of each row.
        best: the index of the row that is bold on a page.
        max_text_rows: the largest number of rows in text; None for all.
        footnotes: whether the last column becomes footnotes in text that is too narrow for it.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    best: int | None = None
    max_text_rows: int | None = None
    footnotes: bool = False

    def text(self, width: int) -> list[str]:
        indices = [i for i, column in enumerate(self.columns) if not column.html_only]
        columns = [self.columns[i] for i in indices]
        kinds = [column.kind for column in columns]
        longest = 'wide' if 'wide' in kinds and not self.footnotes else 'lead'
        path_column = kinds.index(longest) if longest in kinds else 0
        number_columns = [i for i, kind in enumerate(kinds) if kind == 'number']
        cells = [[column.head for column in columns]]
        for row in self.rows[: self.max_text_rows]:
            cells.append([_cell(self.columns[i], row[i]).text for i in indices])
        notes: list[str] = []
        if self.footnotes and not tables.fits(cells, width):
            cells, notes = tables.with_footnotes(cells)
        lines = tables.table(cells, width, path_column, number_columns)
        footnotes = ['', *tables.wrap_lines(notes, width)] if notes else []
        return [*lines, *self._count_omitted(self.max_text_rows), *footnotes]

    def html(self, mesh: MeshAxes) -> str:
        heads = ''.join(
            f'<th scope="col"{_class(column.kind)}>{escape(column.head)}</th>' for column in self.columns
        )
        body = '\n'.join(
            f'<tr{_class("best" if index == self.best else "")}>'
            + ''.join(
                self._td(column, _cell(column, value), mesh)
                for column, value in zip(self.columns, row, strict=True)
            )
            + '</tr>'
            for index, row in enumerate(self.rows[:MAX_ROWS])
        )
        return (
            f'<div class="scroll"><table class="sortable">\n<thead><tr>{heads}</tr></thead>\n'
            f'<tbody>\n{body}\n</tbody>\n</table></div>{"".join(map(_note, self._count_omitted(MAX_ROWS)))}'
        )

    def _td(self, column: Column, cell: Cell, mesh: MeshAxes) -> str:
        attributes = f'{_class(column.kind)} data-label="{escape(column.head)}"{_sort_key(column, cell)}'
        return f'<td{attributes}>{_content(column, cell, mesh)}</td>'

    def _count_omitted(self, limit: int | None) -> list[str]:
        if limit is None or len(self.rows) <= limit:
            return []
        return [f'... and {len(self.rows) - limit:,} more']


def _content(column: Column, cell: Cell, mesh: MeshAxes) -> str:
    words = _colored(cell.text, mesh) if column.kind == 'code' else escape(cell.text)
    if cell.bar is not None:
        part = f'<i{_class(cell.tone)} style="width: {100 * cell.bar:.2f}%"></i>' if cell.bar else ''
        return f'{words}<div class="bar">{part}</div>'
    return _badge(cell.text, cell.tone) if cell.tone else words


def _sort_key(column: Column, cell: Cell) -> str:
    """Returns the attribute with the sort key of a cell. In a column of numbers the key may be empty."""
    if cell.key is None and column.kind != 'number':
        return ''
    return f' data-key="{"" if cell.key is None else repr(cell.key)}"'


@dataclasses.dataclass(frozen=True)
class Node:
    """A row of a tree: its name, its other cells, and its children."""

    name: str
    cells: Row = ()
    children: Sequence[Node] = ()


@dataclasses.dataclass(frozen=True)
class Tree(Block):
    """A tree of rows. On a page its nodes open and close, and scripts sort and filter it.

    Levels are open initially while they have few rows in total.

    Attributes:
        columns: the columns; the column of names is the first.
        nodes: the rows of the top level.
    """

    columns: Sequence[Column]
    nodes: Sequence[Node]

    def html(self, mesh: MeshAxes) -> str:
        if not self.nodes:
            return ''
        name, *others = self.columns
        heads = ''.join(
            f' <span{_class("cell", column.kind)}>{escape(column.head)}</span>' for column in others
        )
        levels = _levels(self.nodes)
        open_levels = sum(total <= _MAX_OPEN_ROWS for total in itertools.accumulate(levels)) - 1
        budget = iter(range(MAX_ROWS))
        body = ''.join(_node(node, others, mesh, 0, open_levels, budget) for node in self.nodes)
        style = '--columns: ' + ' '.join(_WIDTHS.get(column.kind, 'minmax(62px, 1fr)') for column in others)
        omitted = _note(f'The first {MAX_ROWS:,} rows are shown.') if sum(levels) > MAX_ROWS else ''
        return (
            f'<div class="tree" style="{style}">\n<div class="row heads" style="--level: 0">'
            f'<span class="name">{escape(name.head)}</span>{heads}</div>\n{body}</div>{omitted}'
        )


def _levels(nodes: Sequence[Node]) -> list[int]:
    """Returns the number of rows in each level of a tree."""
    counts = []
    while nodes:
        counts.append(len(nodes))
        nodes = [child for node in nodes for child in node.children]
    return counts


def _node(
    node: Node, columns: Sequence[Column], mesh: MeshAxes, level: int, open_levels: int, budget: Iterator[int]
) -> str:
    """Renders a row and its children. *budget* has one item for each row that may still be shown."""
    if next(budget, None) is None:
        return ''
    cells = ''
    for column, value in zip(columns, node.cells, strict=True):
        cell = _cell(column, value)
        label = f'<span class="label">{escape(column.head)} </span>' if cell.text else ''
        attributes = f'{_class("cell", column.kind)}{_sort_key(column, cell)}'
        cells += f' <span{attributes}>{label}{_content(column, cell, mesh)}</span>'
    # Without styles, only spaces distinguish the levels.
    indent = f'<span class="indent">{level * 4 * NO_BREAK}</span>' if level else ''
    row = f'{indent}<span class="name">{escape(node.name)}</span>{cells}'
    style = f'style="--level: {level}"'
    if not node.children:
        return f'<div class="row" {style}>{row}</div>\n'
    children = ''.join(_node(child, columns, mesh, level + 1, open_levels, budget) for child in node.children)
    is_open = ' open="open"' if level < open_levels else ''
    return f'<details{is_open}><summary class="row" {style}>{row}</summary>\n{children}</details>\n'


def _class(*names: str) -> str:
    text = ' '.join(filter(None, names))
    return f' class="{text}"' if text else ''
