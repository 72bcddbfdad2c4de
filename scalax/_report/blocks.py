"""Building blocks of pages: headline figures, badges, bars, tables that sort, trees that fold, cards.

Each function takes plain text and returns HTML; what takes HTML says so. Blocks are whole without scripts:
trees fold, because they are ``<details>``, and tables hold their rows in a useful order. Where scripts run,
tables and trees sort by each column, and trees are filtered. Where styles are dropped, as in a notebook that
is not trusted, text and tables remain. No block but `target` has an id: a page may hold several plans.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from scalax._report import pages, tables
from scalax._report.pages import escape

Tone = Literal['', 'good', 'warn', 'bad']
Kind = Literal['', 'number', 'code', 'lead', 'wide']
NO_BREAK = '\u00a0'
_AXIS_COLORS = 6  # in palette.css


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


class Cell(NamedTuple):
    """A cell of a table or a tree.

    Attributes:
        text: its text.
        key: the number by which its column is sorted; by its text if there is none.
        html: HTML in place of the text.
        tone: its colour.
    """

    text: str = ''
    key: float | None = None
    html: str = ''
    tone: Tone = ''


class Column(NamedTuple):
    """A column of a table or a tree.

    Attributes:
        head: its head.
        kind: ``'number'``: aligned to the right, and sorted from the largest down; ``'code'``: names;
            ``'lead'``: the name of the row, which is the title of its card on a narrow screen; ``'wide'``:
            text that has a line of its own there.
    """

    head: str
    kind: Kind = ''


class Part(NamedTuple):
    """A part of a bar.

    Attributes:
        label: what it is.
        value: its length, in the unit of the whole bar.
        text: the value with its unit.
        kind: its colour: a class of ``blocks.css``, such as ``'temporaries'`` or ``'forward'``.
    """

    label: str
    value: float
    text: str
    kind: str = ''


@dataclasses.dataclass(frozen=True)
class Node:
    """A row of a tree.

    Attributes:
        name: its name.
        cells: its cells, one for each column but the first.
        children: the rows below it.
    """

    name: str
    cells: Sequence[Cell] = ()
    children: Sequence[Node] = ()


def fragment(body: str) -> str:
    """Blocks as part of a notebook, in which they keep their own styles.

    Args:
        body: HTML.
    """
    return pages.notebook_part(body, _style(), pages.asset('blocks.js'))


def page(title: str, body: str) -> str:
    """Blocks as a whole document that loads nothing, and runs only the script that sorts and filters.

    Args:
        title: plain text.
        body: HTML, well-formed as XML is.
    """
    return pages.document(
        title,
        f'<main class="blocks">\n{body}\n</main>',
        _style(),
        f'{pages.asset("blocks.js")}\nenliven(document);\nfollowLinks(document);',
    )


def _style() -> str:
    return pages.asset('head.css') + pages.asset('blocks.css')


def heading(title: str, mesh: Mapping[str, int], note: str = '', level: int = 1) -> str:
    """The title of a page, or of a part of it, with the axes of a mesh in their colours."""
    chips = ''.join(f'<li>{axis_name(name, mesh)} {size:,}</li>' for name, size in mesh.items())
    more = f'<li class="product">{escape(note)}</li>' if note else ''
    return f'<header><h{level}>{escape(title)}</h{level}><ul class="mesh">{chips}{more}</ul></header>'


def axis_name(name: str, mesh: Mapping[str, int], text: str = '') -> str:
    """A mesh axis, or a text that names it, in its colour; it has the same one wherever it is named."""
    if name not in mesh:
        return escape(text or name)
    return f'<span class="axis axis-{list(mesh).index(name) % _AXIS_COLORS}">{escape(text or name)}</span>'


def axis_names(names: Iterable[str], mesh: Mapping[str, int]) -> str:
    """Several mesh axes, each in its colour."""
    return ' x '.join(axis_name(name, mesh) for name in names)


def figures(shown: Iterable[Figure]) -> str:
    """Headline figures side by side."""
    rows = ''.join(
        f'<div{_class(each.tone)}><dt>{escape(each.label)}</dt>'
        f'<dd>{badge(each.value, each.tone) if each.is_badge else escape(each.value)}</dd></div>\n'
        for each in shown
    )
    return f'<dl class="totals">\n{rows}</dl>'


def badge(text: str, tone: Tone = '') -> str:
    """A few words that are a verdict."""
    return f'<span{_class("badge", tone)}>{escape(text)}</span>'


def callout(lines: Iterable[str], tone: Tone = '', code: str = '') -> str:
    """Lines that the reader should not miss, and perhaps code to copy."""
    below = code_block(code) if code else ''
    return f'<div{_class("callout", tone)}>{pages.paragraphs(lines)}{below}</div>'


def code_block(text: str) -> str:
    """Code to copy."""
    return f'<pre>{"<br/>".join(map(escape, text.splitlines()))}</pre>'


def section(title: str, body: str, note: str = '') -> str:
    """A part of a page; nothing if it is empty.

    Args:
        title: plain text.
        body: HTML.
        note: plain text below the title.
    """
    if not body:
        return ''
    return f'<section>\n<h2>{escape(title)}</h2>\n{notes([note] if note else [])}{body}\n</section>\n'


def notes(lines: Iterable[str]) -> str:
    """Lines in a quiet colour."""
    return ''.join(f'<p class="note">{escape(line)}</p>' for line in lines)


def fold(summary: str, body: str, is_open: bool = False) -> str:
    """A part that opens and closes.

    Args:
        summary: plain text that is always shown.
        body: HTML.
        is_open: whether it is shown at first.
    """
    return f'<details class="fold"{_open(is_open)}><summary>{escape(summary)}</summary>{body}</details>'


def target(name: str, body: str) -> str:
    """A part of a page that `link` leads to; where scripts run, a fold at its start opens then.

    Args:
        name: its name, which no other part of the page has.
        body: HTML.
    """
    return f'<div id="{escape(name)}" class="target">{body}</div>'


def link(text: str, name: str) -> str:
    """A link to a `target` of the page, by its name."""
    return f'<a href="#{escape(name)}">{escape(text)}</a>'


def cards(bodies: Iterable[str]) -> str:
    """Boxes side by side; *bodies* are HTML."""
    return f'<div class="cards">{"".join(f"""<div class="card">{body}</div>""" for body in bodies)}</div>'


def table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], best: int | None = None) -> str:
    """A table that sorts by each column where scripts run.

    Args:
        columns: its columns.
        rows: the cells of each row.
        best: the row to set in bold.
    """
    heads = ''.join(f'<th scope="col"{_class(each.kind)}>{escape(each.head)}</th>' for each in columns)
    body = '\n'.join(
        f'<tr{_class("best" if place == best else "")}>'
        + ''.join(_cell(column, cell) for column, cell in zip(columns, row, strict=True))
        + '</tr>'
        for place, row in enumerate(rows)
    )
    return f'<table class="sortable">\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'


def text_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], width: int, path: int = 0
) -> list[str]:
    """The lines of such a table as text, with numbers to the right.

    Args:
        columns: its columns.
        rows: the cells of each row.
        width: the largest width of a line.
        path: the column that may take lines of its own.
    """
    texts = [[column.head for column in columns], *([cell.text for cell in row] for row in rows)]
    numbers = [place for place, column in enumerate(columns) if column.kind == 'number']
    return tables.table(texts, width, path % len(columns), numbers)


def scrolled(body: str) -> str:
    """A long table (HTML) in a box that scrolls, where there is room for one beside the rest of the page."""
    return f'<div class="scroll">{body}</div>'


def _cell(column: Column, cell: Cell) -> str:
    return (
        f'<td{_class(column.kind, cell.tone)} data-label="{escape(column.head)}"{_sort_key(column, cell)}>'
        f'{cell.html or escape(cell.text)}</td>'
    )


def _sort_key(column: Column, cell: Cell) -> str:
    """The number that a cell is sorted by; empty in a column of numbers if it has none."""
    if cell.key is None and column.kind != 'number':
        return ''
    return f' data-key="{"" if cell.key is None else repr(cell.key)}"'


MOST_ROWS = 2000
"""The rows of a tree that a page shows: it is read by people, and has to load."""
_OPEN_AT_FIRST = 40  # rows of a tree
_WIDTHS = {'code': 'minmax(100px, 1.7fr)', 'wide': 'minmax(150px, 2.2fr)'}


def tree(columns: Sequence[Column], nodes: Sequence[Node]) -> str:
    """A tree of rows that folds; where scripts run, it sorts by each column and is filtered.

    As many levels are open at first as have few rows.

    Args:
        columns: its columns; that of the names first.
        nodes: the rows of the top level.
    """
    name, *others = columns
    heads = ''.join(f' <span{_class("cell", each.kind)}>{escape(each.head)}</span>' for each in others)
    levels = _levels(nodes)
    opened = sum(total <= _OPEN_AT_FIRST for total in itertools.accumulate(levels)) - 1
    left = iter(range(MOST_ROWS))
    body = ''.join(_node(node, others, 0, opened, left) for node in nodes)
    style = '--columns: ' + ' '.join(_WIDTHS.get(each.kind, 'minmax(62px, 1fr)') for each in others)
    return (
        f'<div class="tree" style="{style}">\n<div class="row heads" style="--level: 0">'
        f'<span class="name">{escape(name.head)}</span>{heads}</div>\n{body}</div>'
    ) + notes([f'The first {MOST_ROWS:,} rows are shown.'] if sum(levels) > MOST_ROWS else [])


def _levels(nodes: Sequence[Node]) -> list[int]:
    """The number of rows of each level of a tree."""
    counts = []
    while nodes:
        counts.append(len(nodes))
        nodes = [child for node in nodes for child in node.children]
    return counts


def _node(node: Node, columns: Sequence[Column], level: int, opened: int, left: Iterator[int]) -> str:
    """A row and those below it; *left* has an item for each row that may still be shown."""
    if next(left, None) is None:
        return ''
    cells = ''.join(
        f' <span{_class("cell", column.kind, cell.tone)}{_sort_key(column, cell)}>'
        + (f'<span class="label">{escape(column.head)} </span>{text}' if text else '')
        + '</span>'
        for column, cell in zip(columns, node.cells, strict=True)
        for text in [cell.html or escape(cell.text)]
    )
    # Without styles, spaces are what tells the levels apart.
    indent = f'<span class="indent">{level * 4 * NO_BREAK}</span>' if level else ''
    row = f'{indent}<span class="name">{escape(node.name)}</span>{cells}'
    style = f'style="--level: {level}"'
    if not node.children:
        return f'<div class="row" {style}>{row}</div>\n'
    below = ''.join(_node(child, columns, level + 1, opened, left) for child in node.children)
    return (
        f'<details{_open(level < opened)}><summary class="row" {style}>{row}</summary>\n{below}</details>\n'
    )


def bar(parts: Sequence[Part], whole: float, limit: float | None = None, is_tall: bool = False) -> str:
    """A bar of parts from the left.

    Args:
        parts: its parts.
        whole: the value at its right end; 0 if nothing says how long it could be: then it is open there.
        limit: a value to draw a line at, if it is inside.
        is_tall: whether the bar is the main thing to be seen.
    """
    taken = sum(part.value for part in parts)
    longest = max(whole, taken) or 1
    if not whole:
        longest *= OPEN
    filled = ''.join(
        f'<i{_class(part.kind)} style="width: {percent(part.value, longest)}" '
        f'title="{escape(f"{part.label} {part.text}")}"></i>'
        for part in parts
        if part.value > 0
    )
    line = (
        f'<b style="left: {percent(limit, longest)}" title="limit"></b>'
        if limit is not None and limit < longest
        else ''
    )
    kind = _class('bar', 'tall' if is_tall else '', '' if whole else 'open')
    return f'<div{kind}>{filled}{line}</div>'


OPEN = 1.5
"""How much room a bar without an end has, in its own lengths: a full bar would read as 100 %."""


def legend(parts: Iterable[Part]) -> str:
    """The colours of bars."""
    return (
        '<ul class="legend">'
        + ''.join(
            f'<li><i{_class(part.kind)}></i>{escape(f"{part.label} {part.text}".strip())}</li>'
            for part in parts
        )
        + '</ul>'
    )


def swatch(kind: str) -> str:
    """The colour of a part of a bar, in front of its name elsewhere."""
    return f'<i{_class("swatch", kind)}></i>'


def bars(rows: Iterable[tuple[str, Sequence[Part], str, bool]], longest: float) -> str:
    """Bars one below the other.

    Args:
        rows: of each its name (HTML), its parts, its value as text, and whether it is marked.
        longest: the value of a bar over the whole width.
    """
    shown = ''.join(
        f'<dt{_class("marked" if is_marked else "")}>{name}</dt>'
        f'<dd{_class("number", "marked" if is_marked else "")}>{escape(text)}</dd>'
        f'<dd class="track">{bar(parts, longest)}</dd>\n'
        for name, parts, text, is_marked in rows
    )
    return f'<dl class="bars">\n{shown}</dl>'


def percent(part: float, whole: float) -> str:
    """A width.

    Example:
        >>> percent(1, 3)
        '33.33%'
    """
    return f'{100 * part / whole:.2f}%'


def _class(*names: str) -> str:
    found = ' '.join(filter(None, names))
    return f' class="{found}"' if found else ''


def _open(is_open: bool) -> str:
    return ' open="open"' if is_open else ''
