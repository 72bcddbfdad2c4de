"""The difference of two reports, as a value and a table."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from scalax._report import blocks
from scalax._report.blocks import Cell, Column, Lines, Row, Section, Table
from scalax._report.tables import array_text, human_bytes, more_bytes
from scalax._tree.specs import axis_sizes_text
from scalax._util.folding import fold
from scalax.errors import plural
from scalax.explain._rows import ReportRow, folded_path, spec_text

_COLUMNS = (
    *(Column('leaves'), Column('path', 'lead'), Column('before', 'code'), Column('after', 'code')),
    Column('bytes/device', 'number'),
)


@dataclasses.dataclass(frozen=True)
class ReportDiff:
    """What `ShardingReport.diff` returns: false when nothing changed; ``str()`` of it is a table.

    Rules and reasons are not compared.

    Attributes:
        added: the rows of leaves that only the second report has.
        removed: the rows of leaves that only the first report has.
        changed: the rows of leaves whose shape, dtype, spec, memory or bytes differ, before and after.
        bytes_per_device_before: the bytes of all leaves of the first report on one device.
        bytes_per_device_after: the bytes of all leaves of the second report on one device.
        mesh_before: mesh axis name -> size of the first report.
        mesh_after: mesh axis name -> size of the second report.
    """

    added: tuple[ReportRow, ...]
    removed: tuple[ReportRow, ...]
    changed: tuple[tuple[ReportRow, ReportRow], ...]
    bytes_per_device_before: int
    bytes_per_device_after: int
    mesh_before: Mapping[str, int] = dataclasses.field(hash=False)
    mesh_after: Mapping[str, int] = dataclasses.field(hash=False)

    def __bool__(self) -> bool:
        changed_mesh = list(self.mesh_before.items()) != list(self.mesh_after.items())
        return bool(self.added or self.removed or self.changed or changed_mesh)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The difference as a table.

        Args:
            width: the width in columns; that of the terminal by default.
        """
        rows = _rows(self)
        table = [Section('', [Table(_COLUMNS, rows)])] if rows else []
        return blocks.text([*table, Lines(_summary(self))], width)


def diff_rows(
    before: Sequence[ReportRow],
    after: Sequence[ReportRow],
    mesh_before: Mapping[str, int],
    mesh_after: Mapping[str, int],
) -> ReportDiff:
    """Compares the rows of two reports by leaf path."""
    old, new = _by_path(before), _by_path(after)
    return ReportDiff(
        tuple(row for path, row in new.items() if path not in old),
        tuple(row for path, row in old.items() if path not in new),
        tuple(
            (row, new[path])
            for path, row in old.items()
            if path in new and _layout(row) != _layout(new[path])
        ),
        sum(row.bytes_per_device for row in before),
        sum(row.bytes_per_device for row in after),
        dict(mesh_before),
        dict(mesh_after),
    )


def _by_path(rows: Sequence[ReportRow]) -> dict[tuple[str, int], ReportRow]:
    """Rows by path and its occurrence: with slashes in keys, two leaves can have the same path."""
    repeats: collections.Counter[str] = collections.Counter()
    found = {}
    for row in rows:
        found[row.path, repeats[row.path]] = row
        repeats[row.path] += 1
    return found


def _layout(row: ReportRow) -> ReportRow:
    return dataclasses.replace(row, rule='', reason='')


def _summary(diff: ReportDiff) -> list[str]:
    counts = [(len(diff.changed), 'changed'), (len(diff.added), 'added'), (len(diff.removed), 'removed')]
    changes = ', '.join(f'{plural(count, "array")} {what}' for count, what in counts if count)
    lines = [changes or 'no array changed']
    old, new = axis_sizes_text(diff.mesh_before), axis_sizes_text(diff.mesh_after)
    if old != new:
        lines.append(f'mesh: ({old}) before, ({new}) after')
    total = f'{human_bytes(diff.bytes_per_device_before)} before'
    change = diff.bytes_per_device_after - diff.bytes_per_device_before
    lines.append(
        f'bytes/device of all arrays: {total}, {human_bytes(diff.bytes_per_device_after)} after '
        f'({more_bytes(change)})'
    )
    return lines


def _rows(diff: ReportDiff) -> list[Row]:
    changes: list[tuple[str, ReportRow | None, ReportRow | None]] = [
        *[('changed', *rows) for rows in diff.changed],
        *[('added', None, row) for row in diff.added],
        *[('removed', row, None) for row in diff.removed],
    ]
    leaves = []
    for kind, *rows in changes:
        layouts = [row and dataclasses.replace(_layout(row), path='') for row in rows]
        path = next(row.path for row in rows if row)
        leaves.append((path, (kind, *layouts)))
    cells: list[Row] = []
    for item in fold(leaves):
        kind, before, after = changes[item.first]
        sizes = [row.bytes_per_device * item.count for row in (before, after) if row]
        size = Cell(' -> '.join(dict.fromkeys(map(human_bytes, sizes))), sizes[-1])
        cells.append((f'{item.count} {kind}', folded_path(item), *_sides(before, after), size))
    return cells


def _sides(before: ReportRow | None, after: ReportRow | None) -> list[str]:
    """A leaf before and after: its spec, with its array if that changed."""
    changed = len({(row.dtype, row.shape) for row in (before, after) if row}) > 1
    texts = []
    for row in (before, after):
        array = f'{array_text(row.dtype, row.shape)} ' if row and changed else ''
        texts.append(f'{array}{spec_text(row)}' if row else '')
    return texts
