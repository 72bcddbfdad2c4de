"""Reports as blocks of a page: figures, regexes that decided nothing, and the tree of the leaves."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from scalax._report import blocks
from scalax._report.blocks import Cell, Column, Figure, Node, Part
from scalax._report.tables import array_text, human_bytes, three_figures
from scalax._util.folding import MOST_RUNS, times
from scalax.errors import plural
from scalax.explain._rows import Line, ReportRow, lines_of, replicated, spec_text, unreduced

_COLUMNS = (
    Column('path'),
    Column('array', 'code'),
    Column('spec', 'code'),
    Column('bytes', 'number'),
    Column('bytes per device', 'number'),
    Column('rule and reason', 'wide'),
)
_MOST_LINES = 1000
_DEEPEST = 50  # groups inside of one another; the names of deeper ones stay joined

_Below = tuple[tuple[str, ...], Line]
"""A line, and the keys of its path that are left below a group."""


def report_blocks(
    title: str, rows: Sequence[ReportRow], mesh: Mapping[str, int], notes: Sequence[str] = ()
) -> str:
    """A report as blocks; of many lines those with the most bytes on a device are in the tree.

    Args:
        title: plain text.
        rows: one for each leaf.
        mesh: mesh axis name -> size.
        notes: what the reader should not miss.
    """
    lines = lines_of(rows, folded=True)
    largest = sorted(range(len(lines)), key=lambda i: -_per_device(lines[i]))[:_MOST_LINES]
    shown = [lines[i] for i in sorted(largest)]
    longest = max(map(_per_device, shown), default=0)
    total = sum(map(_per_device, lines))
    return ''.join(
        [
            blocks.heading(title, mesh, plural(math.prod(mesh.values()), 'device')),
            blocks.figures(_figures(rows)),
            *(blocks.callout([note], 'warn') for note in notes),
            _Tree(mesh, longest or 1, total or 1).html(shown),
            blocks.notes(_left_out(lines, shown)),
        ]
    )


def _per_device(line: Line) -> int:
    return line[0].count * line[1].bytes_per_device


def _figures(rows: Sequence[ReportRow]) -> Iterator[Figure]:
    yield Figure(f'{len(rows):,}', 'array' if len(rows) == 1 else 'arrays')
    yield Figure(human_bytes(sum(row.bytes for row in rows)), 'in all')
    yield Figure(human_bytes(sum(row.bytes_per_device for row in rows)), 'on each device')
    count, size = unreduced(rows)
    if count:
        yield Figure(human_bytes(size), f'unreduced on each device, {plural(count, "array")}')
    whole = replicated(rows)
    many = plural(len(whole.paths), 'array')
    yield Figure(
        human_bytes(whole.bytes), f'replicated on each device, {many}', 'warn' if whole.paths else ''
    )


def _left_out(lines: Sequence[Line], shown: Sequence[Line]) -> Iterator[str]:
    if len(lines) > len(shown):
        count = sum(fold.count for fold, _ in lines) - sum(fold.count for fold, _ in shown)
        size = sum(map(_per_device, lines)) - sum(map(_per_device, shown))
        yield f'smaller ones, not shown: {plural(count, "array")}, {human_bytes(size)} on each device'


class _Tree:
    """The tree of the lines of a report.

    Args:
        mesh: mesh axis name -> size.
        longest: the bytes of a line on a device for which a bar is full.
        total: the bytes of all lines on a device.
    """

    def __init__(self, mesh: Mapping[str, int], longest: int, total: int) -> None:
        self.mesh, self.longest, self.total = mesh, longest, total

    def html(self, lines: Sequence[Line]) -> str:
        """The tree; nothing without lines."""
        below = []
        for line in lines:
            keys = [part if isinstance(part, str) else part.name(MOST_RUNS) for part in line[0].parts]
            below.append(((*keys[:_DEEPEST], *filter(None, ['/'.join(keys[_DEEPEST:])])), line))
        return blocks.tree(_COLUMNS, self._nodes(below)) if lines else ''

    def _nodes(self, lines: Sequence[_Below]) -> list[Node]:
        """A node for each line, and for each group of those that begin with the same keys."""
        groups: dict[str | int, list[_Below]] = {}
        for number, (keys, line) in enumerate(lines):
            groups.setdefault(keys[0] if len(keys) > 1 else number, []).append((keys, line))
        return [self._node(members) for members in groups.values()]

    def _node(self, members: Sequence[_Below]) -> Node:
        if len(members) == 1:
            [(keys, line)] = members
            return Node('/'.join(keys) or '(leaf)', self._cells(line))
        places = zip(*(keys[:-1] for keys, _ in members), strict=False)
        same = [keys[0] for keys in itertools.takewhile(lambda keys: len({*keys}) == 1, places)]
        inside = self._nodes([(keys[len(same) :], line) for keys, line in members])
        return Node('/'.join(same), self._sums([line for _, line in members]), inside)

    def _cells(self, line: Line) -> list[Cell]:
        fold, row = line
        size = _per_device(line)
        part = Part('', size, human_bytes(size), 'warn' if row.is_replicated else '')
        return [
            Cell(f'{times(fold.count)}{array_text(row.dtype, row.shape)}'),
            self._spec(row),
            Cell(human_bytes(fold.count * row.bytes), fold.count * row.bytes),
            Cell(key=size, html=f'{human_bytes(size)}{blocks.bar([part], self.longest)}'),
            Cell(row.why),
        ]

    def _spec(self, row: ReportRow) -> Cell:
        text = spec_text(row)
        if row.is_replicated:
            return Cell(html=blocks.badge(text, 'warn'))
        # Every other part is the name of a mesh axis, in quotes.
        parts = re.split("('[^']*')", text)
        named = [blocks.axis_name(part.strip("'"), self.mesh, part) for part in parts]
        return Cell(html=''.join(named))

    def _sums(self, lines: Sequence[Line]) -> list[Cell]:
        count, size = sum(fold.count for fold, _ in lines), sum(map(_per_device, lines))
        whole = sum(fold.count * row.bytes for fold, row in lines)
        share = f'{human_bytes(size)}<br/>{three_figures(100 * size / self.total)} %'
        return [
            Cell(plural(count, 'array')),
            Cell(),
            Cell(human_bytes(whole), whole),
            Cell(key=size, html=share),
            Cell(),
        ]
