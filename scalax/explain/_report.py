"""The report of one resolution: rows, totals, and unused regexes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.render import serialization
from scalax._core.render.blocks import Block
from scalax._core.render.renderable import Renderable
from scalax.explain._diff import diff_lines
from scalax.explain._report_page import report_blocks
from scalax.explain._rows import (
    ReplicatedSummary,
    ReportRow,
    replicated_summary,
)


@dataclasses.dataclass(frozen=True)
class ShardingReport(Renderable):
    """The result of `MeshShardingHelper.explain`; ``str()`` of it is a table.

    Leaves whose paths differ only in numbers share a line, such as ``layers/{0..79}/mlp/kernel``, with their
    count and their total bytes per device.

    Attributes:
        rows: one row for each leaf, in tree order.
        mesh: mesh axis name -> size.
        unused_rules: regexes that match no leaf, except regexes of the tables in `scalax.rules.catalogue`.
        shadowed_rules: regexes that match leaves but never decide, because an earlier one does. (Regexes
            that match only arrays of one element, which are always replicated, are not listed.)
    """

    rows: tuple[ReportRow, ...]
    mesh: Mapping[str, int] = dataclasses.field(hash=False)  # a dict, which has no hash
    unused_rules: tuple[str, ...] = ()
    shadowed_rules: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The total bytes of all leaves, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """The total bytes of all leaves on one device."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def replicated(self) -> ReplicatedSummary:
        """The replicated leaves, and their bytes on each device."""
        return replicated_summary(self.rows)

    def _title(self) -> str:
        return 'Sharding report'

    def _blocks(self, title: str) -> list[Block]:
        return report_blocks(title, self.rows, self.mesh, self.unused_rules, self.shadowed_rules)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report in plain Python values, ready for ``json.dumps``."""
        names = (
            'mesh',
            'bytes',
            'bytes_per_device',
            'replicated',
            'unused_rules',
            'shadowed_rules',
            'rows',
        )
        return {name: serialization.to_plain(getattr(self, name)) for name in names}

    def to_json(self) -> str:
        """Returns the report as JSON: `to_dict` and a version, with a line for each leaf.

        As a golden file of a test, compare it with ``ShardingReport.load(path).diff(report)``.
        """
        return serialization.write(self.to_dict())

    @classmethod
    def load(cls, text_or_path: str | os.PathLike[str]) -> ShardingReport:
        """Reads a report that `to_json` wrote.

        Args:
            text_or_path: the JSON, or the path of a file that contains it.

        Raises:
            DataError: this is not a report, or has another version, or the file cannot be read.
            FileNotFoundError: there is no such file.
            ArgumentError: *text_or_path* is neither text nor a path.
        """
        return serialization.read(cls, text_or_path, 'report')

    def diff(self, other: ShardingReport) -> str:
        """Returns the changes in *other*, a later report, one on each line; empty if nothing changed.

        Rules and reasons are not compared.

        Args:
            other: the report to compare with. Leaves are matched by their paths.
        """
        lines = diff_lines(self.rows, other.rows)
        old_mesh, new_mesh = axis_sizes_text(self.mesh), axis_sizes_text(other.mesh)
        if old_mesh != new_mesh:
            lines.append(f'mesh: ({old_mesh}) -> ({new_mesh})')
        return '\n'.join(lines)
