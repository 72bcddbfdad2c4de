"""The rows of a report, one for each leaf, and how rows fold into one line of a table."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import text
from scalax._core.render.html_pages import visible
from scalax._core.util.folding import MOST_RUNS, Fold, fold


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """One leaf.

    Attributes:
        path: the leaf path.
        shape: the global shape.
        dtype: the name of the dtype that the array has on the devices.
        spec: the spec of the array; None if the compiler decides.
        rule: the rule that decided.
        reason: the reason, in a few words.
        bytes: the bytes of the global array.
        bytes_per_device: the bytes of the largest shard.
        memory_kind: the requested memory kind; None for the default.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None
    rule: str
    reason: str
    bytes: int
    bytes_per_device: int
    memory_kind: str | None = None

    @property
    def why(self) -> str:
        """The rule and its reason, as tables show them."""
        return ': '.join(part for part in (self.rule, self.reason) if part)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the entire array; False if the compiler decides."""
        return self.spec is not None and self.bytes == self.bytes_per_device and not self.is_unreduced

    @property
    def is_unreduced(self) -> bool:
        """Whether devices hold partial results, such as terms of a sum, that still have to be combined."""
        return self.spec is not None and bool(self.spec.unreduced)


@dataclasses.dataclass(frozen=True)
class ReplicatedSummary:
    """The replicated leaves.

    Attributes:
        paths: the leaf paths.
        bytes: the total bytes of the leaves on each device.
    """

    paths: tuple[str, ...]
    bytes: int


def replicated_summary(rows: Iterable[ReportRow]) -> ReplicatedSummary:
    """Returns the replicated leaves among *rows*, and their bytes on each device."""
    replicated = [row for row in rows if row.is_replicated]
    return ReplicatedSummary(tuple(row.path for row in replicated), sum(row.bytes for row in replicated))


FoldedRow = tuple[Fold, ReportRow]
"""The leaves on one line of a table, and the row of the first of them."""

_all_but_path = operator.attrgetter(*[f.name for f in dataclasses.fields(ReportRow) if f.name != 'path'])


def folded_path(item: Fold) -> str:
    """Returns the path of a line, which may stand for several leaves."""
    return visible(item.short_name(MOST_RUNS)) or '(leaf)'


def spec_text(row: ReportRow) -> str:
    """Returns the spec of a row, and its memory unless that is the default one."""
    # A spec with reduced axes is shown in full.
    is_plain = row.spec is not None and row.is_replicated and not row.spec.reduced
    spec = 'compiler' if row.spec is None else 'replicated' if is_plain else text(row.spec)
    return spec if row.memory_kind is None else f'{spec} in {row.memory_kind}'


def fold_rows(rows: Sequence[ReportRow]) -> list[FoldedRow]:
    """Folds rows that differ only in numbers in their paths, such as the same leaf in many layers."""
    return [(item, rows[item.first]) for item in fold((row.path, _all_but_path(row)) for row in rows)]
