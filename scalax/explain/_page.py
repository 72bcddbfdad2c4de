"""Reports as blocks: figures, regexes that decided nothing, and the leaves, in a table of text or a tree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.render.blocks import (
    Block,
    Cell,
    Column,
    Figure,
    Figures,
    Heading,
    HtmlOnly,
    Lines,
    Node,
    Row,
    Section,
    Table,
    TextOnly,
    Tone,
    Tree,
)
from scalax._core.render.tables import array_text, human_bytes, three_figures
from scalax._core.util.folding import MOST_RUNS, count_prefix
from scalax.errors import plural
from scalax.explain._rows import Line, ReportRow, folded_path, lines_of, replicated, spec_text

_COLUMNS = (
    *(Column('path', 'lead'), Column('array', 'code'), Column('spec', 'code')),
    Column('bytes', 'number', human_bytes, html_only=True),
    Column('bytes/device', 'number'),
    Column('rule', 'wide'),
)

_Below = tuple[tuple[str, ...], Line]
"""A line, and the keys of its path that are left below a group."""


def report_blocks(
    title: str,
    rows: Sequence[ReportRow],
    mesh: Mapping[str, int],
    unused: Sequence[str],
    shadowed: Sequence[str],
) -> list[Block]:
    """A report as blocks.

    Args:
        title: plain text.
        rows: one for each leaf.
        mesh: mesh axis name -> size.
        unused: regexes that match nothing.
        shadowed: regexes that never decide.
    """
    lines = lines_of(rows)
    notes = ('regexes that match nothing', unused), ('regexes always shadowed by earlier ones', shadowed)
    table = [(folded_path(line[0]), *_cells(line, 1)) for line in lines]
    return [
        Heading(title, mesh, plural(math.prod(mesh.values()), 'device')),
        Figures([*_figures(rows)]),
        TextOnly([Section('', [Table(_COLUMNS, table, footnotes=True)]), Lines(_totals(rows, mesh))]),
        *(Lines([f'{what}: {", ".join(map(repr, idle))}'], 'warn') for what, idle in notes if idle),
        HtmlOnly([_tree(lines)]),
    ]


def _per_device(line: Line) -> int:
    return line[0].count * line[1].bytes_per_device


def _figures(rows: Sequence[ReportRow]) -> Iterator[Figure]:
    yield Figure(f'{len(rows):,}', 'array' if len(rows) == 1 else 'arrays')
    yield Figure(human_bytes(sum(row.bytes for row in rows)), 'in all')
    yield Figure(human_bytes(sum(row.bytes_per_device for row in rows)), 'on each device')
    whole = replicated(rows)
    many = plural(len(whole.paths), 'array')
    yield Figure(
        human_bytes(whole.bytes), f'replicated on each device, {many}', 'warn' if whole.paths else ''
    )


def _totals(rows: Sequence[ReportRow], mesh: Mapping[str, int]) -> list[str]:
    """The totals of all rows in two lines."""
    whole = replicated(rows)
    return [
        f'{plural(len(rows), "array")}, {human_bytes(sum(row.bytes for row in rows))} in all, '
        f'{human_bytes(sum(row.bytes_per_device for row in rows))} on each device of the mesh '
        f'({axis_sizes_text(mesh)})',
        f'replicated: {plural(len(whole.paths), "array")}, {human_bytes(whole.bytes)} on each device',
    ]


def _tree(lines: Sequence[Line]) -> Tree:
    """The lines as a tree."""
    longest = max(map(_per_device, lines), default=0) or 1
    total = sum(map(_per_device, lines)) or 1

    def nodes(lines: Sequence[_Below]) -> list[Node]:
        """A node for each line, and for each group of those that begin with the same keys."""
        groups: dict[str | int, list[_Below]] = {}
        for number, (keys, line) in enumerate(lines):
            groups.setdefault(keys[0] if len(keys) > 1 else number, []).append((keys, line))
        return [node(members) for members in groups.values()]

    def node(members: Sequence[_Below]) -> Node:
        if len(members) == 1:
            [(keys, line)] = members
            return Node('/'.join(keys) or '(leaf)', _cells(line, longest))
        places = zip(*(keys[:-1] for keys, _ in members), strict=False)
        same = [keys[0] for keys in itertools.takewhile(lambda keys: len({*keys}) == 1, places)]
        inside = nodes([(keys[len(same) :], line) for keys, line in members])
        return Node('/'.join(same), _group_cells([line for _, line in members], total), inside)

    below = [
        (tuple(part if isinstance(part, str) else part.name(MOST_RUNS) for part in line[0].parts), line)
        for line in lines
    ]
    return Tree(_COLUMNS, nodes(below))


def _cells(line: Line, longest: int) -> Row:
    fold, row = line
    size = _per_device(line)
    tone: Tone = 'warn' if row.is_replicated else ''
    return [
        f'{count_prefix(fold.count)}{array_text(row.dtype, row.shape)}',
        Cell(spec_text(row), tone=tone),
        fold.count * row.bytes,
        Cell(human_bytes(size), size, tone, bar=size / longest),
        row.why,
    ]


def _group_cells(lines: Sequence[Line], total: int) -> Row:
    size = sum(map(_per_device, lines))
    return [
        plural(sum(fold.count for fold, _ in lines), 'array'),
        None,
        sum(fold.count * row.bytes for fold, row in lines),
        Cell(f'{human_bytes(size)}, {three_figures(100 * size / total)} %', size),
        None,
    ]
