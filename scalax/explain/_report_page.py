"""Reports as blocks: figures, unused regexes, and the leaves, as a table (text) or a tree (HTML)."""

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
from scalax.explain._rows import FoldedRow, ReportRow, fold_rows, folded_path, replicated_summary, spec_text

_COLUMNS = (
    *(Column('path', 'lead'), Column('array', 'code'), Column('spec', 'code')),
    Column('bytes', 'number', human_bytes, html_only=True),
    Column('bytes/device', 'number'),
    Column('rule', 'wide'),
)

_Branch = tuple[tuple[str, ...], FoldedRow]
"""The keys of a path below a node of the tree, and the row."""


def report_blocks(
    title: str,
    rows: Sequence[ReportRow],
    mesh: Mapping[str, int],
    unused: Sequence[str],
    shadowed: Sequence[str],
) -> list[Block]:
    """Returns a report as blocks.

    Args:
        title: the title, as plain text.
        rows: one row for each leaf.
        mesh: mesh axis name -> size.
        unused: the regexes that match nothing.
        shadowed: the regexes that never decide.
    """
    folded_rows = fold_rows(rows)
    notes = ('regexes that match nothing', unused), ('regexes always shadowed by earlier ones', shadowed)
    table = [(folded_path(row[0]), *_cells(row, 1)) for row in folded_rows]
    return [
        Heading(title, mesh, plural(math.prod(mesh.values()), 'device')),
        Figures([*_figures(rows)]),
        TextOnly([Section('', [Table(_COLUMNS, table, footnotes=True)]), Lines(_totals(rows, mesh))]),
        *(
            Lines([f'{label}: {", ".join(map(repr, regexes))}'], 'warn')
            for label, regexes in notes
            if regexes
        ),
        HtmlOnly([_tree(folded_rows)]),
    ]


def _bytes_per_device(folded_row: FoldedRow) -> int:
    fold, row = folded_row
    return fold.count * row.bytes_per_device


def _figures(rows: Sequence[ReportRow]) -> Iterator[Figure]:
    yield Figure(f'{len(rows):,}', 'array' if len(rows) == 1 else 'arrays')
    yield Figure(human_bytes(sum(row.bytes for row in rows)), 'in all')
    yield Figure(human_bytes(sum(row.bytes_per_device for row in rows)), 'on each device')
    replicated = replicated_summary(rows)
    count = plural(len(replicated.paths), 'array')
    yield Figure(
        human_bytes(replicated.bytes),
        f'replicated on each device, {count}',
        'warn' if replicated.paths else '',
    )


def _totals(rows: Sequence[ReportRow], mesh: Mapping[str, int]) -> list[str]:
    """Returns the totals of all rows in two lines."""
    replicated = replicated_summary(rows)
    return [
        f'{plural(len(rows), "array")}, {human_bytes(sum(row.bytes for row in rows))} in all, '
        f'{human_bytes(sum(row.bytes_per_device for row in rows))} on each device of the mesh '
        f'({axis_sizes_text(mesh)})',
        f'replicated: {plural(len(replicated.paths), "array")}, {human_bytes(replicated.bytes)} '
        'on each device',
    ]


def _tree(folded_rows: Sequence[FoldedRow]) -> Tree:
    """Returns the rows as a tree, whose inner nodes are common prefixes of their paths."""
    largest = max(map(_bytes_per_device, folded_rows), default=0) or 1
    total = sum(map(_bytes_per_device, folded_rows)) or 1

    def make_nodes(branches: Sequence[_Branch]) -> list[Node]:
        """Returns a node for each leaf key, and one for each group of branches with the same first key."""
        groups: dict[str | int, list[_Branch]] = {}
        for index, branch in enumerate(branches):
            keys, _ = branch
            groups.setdefault(keys[0] if len(keys) > 1 else index, []).append(branch)
        return [make_node(group) for group in groups.values()]

    def make_node(branches: Sequence[_Branch]) -> Node:
        if len(branches) == 1:
            [(keys, folded_row)] = branches
            return Node('/'.join(keys) or '(leaf)', _cells(folded_row, largest))
        keys_by_level = zip(*(keys[:-1] for keys, _ in branches), strict=False)
        prefix = [keys[0] for keys in itertools.takewhile(lambda keys: len({*keys}) == 1, keys_by_level)]
        children = make_nodes([(keys[len(prefix) :], folded_row) for keys, folded_row in branches])
        return Node('/'.join(prefix), _group_cells([row for _, row in branches], total), children)

    branches = []
    for folded_row in folded_rows:
        parts = folded_row[0].parts
        keys = tuple(part if isinstance(part, str) else part.name(MOST_RUNS) for part in parts)
        branches.append((keys, folded_row))
    return Tree(_COLUMNS, make_nodes(branches))


def _cells(folded_row: FoldedRow, largest: int) -> Row:
    """Returns the cells of a leaf; *largest* is the number of bytes that a full bar stands for."""
    fold, row = folded_row
    size = _bytes_per_device(folded_row)
    tone: Tone = 'warn' if row.is_replicated else ''
    return [
        f'{count_prefix(fold.count)}{array_text(row.dtype, row.shape)}',
        Cell(spec_text(row), tone=tone),
        fold.count * row.bytes,
        Cell(human_bytes(size), size, tone, bar=size / largest),
        row.why,
    ]


def _group_cells(folded_rows: Sequence[FoldedRow], total: int) -> Row:
    """Returns the cells of an inner node; *total* is the number of bytes of all leaves on a device."""
    size = sum(map(_bytes_per_device, folded_rows))
    return [
        plural(sum(fold.count for fold, _ in folded_rows), 'array'),
        None,
        sum(fold.count * row.bytes for fold, row in folded_rows),
        Cell(f'{human_bytes(size)}, {three_figures(100 * size / total)} %', size),
        None,
    ]
