"""What does a report say of one leaf? The rows that reports, tables and comparisons are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """One leaf.

    Attributes:
        path: the leaf path.
        shape: the global shape.
        dtype: the name of the dtype that the array has on the devices.
        spec: the spec it got; None where the compiler decides.
        rule: the rule that said so.
        reason: why, in a few words.
        bytes: the bytes of the global array.
        bytes_per_device: the bytes of one device's shard (the largest one).
        memory_kind: the memory asked for, or None for the default one.
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
        """Whether every device holds the whole array, as far as scalax decides."""
        return self.spec is not None and self.bytes == self.bytes_per_device and not self.is_unreduced

    @property
    def is_unreduced(self) -> bool:
        """Whether devices hold parts of a sum, or of what else they are still to be combined by."""
        return self.spec is not None and bool(self.spec.unreduced)


@dataclasses.dataclass(frozen=True)
class ReplicatedSummary:
    """The leaves that every device holds whole, and what one device holds of them.

    Attributes:
        paths: their leaf paths.
        bytes: their bytes together, on each device.
    """

    paths: tuple[str, ...]
    bytes: int


def replicated(rows: Iterable[ReportRow]) -> ReplicatedSummary:
    """What is replicated of *rows*, and what that costs each device."""
    whole = [row for row in rows if row.is_replicated]
    return ReplicatedSummary(tuple(row.path for row in whole), sum(row.bytes for row in whole))


def unreduced(rows: Iterable[ReportRow]) -> tuple[int, int]:
    """How many of *rows* are unreduced, and the bytes that each device holds of them."""
    sizes = [row.bytes_per_device for row in rows if row.is_unreduced]
    return len(sizes), sum(sizes)
