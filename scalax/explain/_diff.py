"""The difference of two reports, as a value and as text."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from scalax._report.pages import visible
from scalax._report.tables import array_text, human_bytes
from scalax._tree.specs import axis_sizes_text
from scalax._util.folding import fold, times
from scalax.explain._rows import ReportRow, folded_path, spec_text


@dataclasses.dataclass(frozen=True)
class ReportDiff:
    """What `ShardingReport.diff` returns: false when nothing changed; ``str()`` of it has a line a change.

    Rules and reasons are not compared.

    Attributes:
        added: the rows of leaves that only the second report has.
        removed: the rows of leaves that only the first report has.
        changed: the rows of leaves whose shape, dtype, spec, memory or bytes differ, before and after.
        mesh_before: mesh axis name -> size of the first report.
        mesh_after: mesh axis name -> size of the second report.
    """

    added: tuple[ReportRow, ...]
    removed: tuple[ReportRow, ...]
    changed: tuple[tuple[ReportRow, ReportRow], ...]
    mesh_before: Mapping[str, int] = dataclasses.field(hash=False)
    mesh_after: Mapping[str, int] = dataclasses.field(hash=False)

    def __bool__(self) -> bool:
        changed_mesh = list(self.mesh_before.items()) != list(self.mesh_after.items())
        return bool(self.added or self.removed or self.changed or changed_mesh)

    def __str__(self) -> str:
        leaves = [
            *[(row.path, f'{_text(row)} -> {_text(new)}') for row, new in self.changed],
            *[(row.path, f'{_text(row)}, added') for row in self.added],
            *[(row.path, f'{_text(row)}, removed') for row in self.removed],
        ]
        lines = [
            f'{folded_path(item)}: {times(item.count)}{visible(leaves[item.first][1])}'
            for item in fold(leaves)
        ]
        old, new = axis_sizes_text(self.mesh_before), axis_sizes_text(self.mesh_after)
        if old != new:
            lines.append(f'mesh: ({old}) -> ({new})')
        return '\n'.join(lines) or 'no array changed'


def _text(row: ReportRow) -> str:
    size = human_bytes(row.bytes_per_device)
    return f'{array_text(row.dtype, row.shape)} {spec_text(row)} ({size} on a device)'


def diff_rows(
    before: Sequence[ReportRow],
    after: Sequence[ReportRow],
    mesh_before: Mapping[str, int],
    mesh_after: Mapping[str, int],
) -> ReportDiff:
    """Compares the rows of two reports by leaf path."""
    old, new = _by_path(before), _by_path(after)
    pairs = [(row, new[path]) for path, row in old.items() if path in new]
    return ReportDiff(
        added=tuple(row for path, row in new.items() if path not in old),
        removed=tuple(row for path, row in old.items() if path not in new),
        changed=tuple((row, now) for row, now in pairs if _layout(row) != _layout(now)),
        mesh_before=dict(mesh_before),
        mesh_after=dict(mesh_after),
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
