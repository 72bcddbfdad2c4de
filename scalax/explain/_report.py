"""The report of one resolve, as a value: rows, totals, and rules that did nothing."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from scalax import _spec
from scalax._paths import canonical_dtype
from scalax._prefix import RuleLike, is_rule
from scalax._resolve import Resolution
from scalax.errors import ShardingError, shown
from scalax.explain._text import render_table
from scalax.rules import LogicalAxisShardingRule, TreePathShardingRule
from scalax.rules._base import ONE_ELEMENT, Answer, ShardingRule


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
        return self.spec is not None and self.bytes == self.bytes_per_device


@dataclasses.dataclass(frozen=True)
class ReplicatedSummary:
    """The leaves that every device holds whole, and what one device holds of them.

    Attributes:
        paths: their leaf paths.
        bytes: their bytes together, on each device.
    """

    paths: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class ShardingReport:
    """What `MeshShardingHelper.explain` returns; ``str()`` of it is a table.

    Attributes:
        rows: one for each leaf, in tree order.
        mesh: mesh axis name -> size.
        unused_rules: regexes that match no leaf.
        shadowed_rules: regexes that match leaves and never decide, because an earlier one does. (Those
            that match nothing but arrays of one element, which are replicated anyhow, are not listed.)
    """

    rows: tuple[ReportRow, ...]
    mesh: Mapping[str, int]
    unused_rules: tuple[str, ...] = ()
    shadowed_rules: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes of all leaves together, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """The bytes that one device holds of all leaves."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def replicated(self) -> ReplicatedSummary:
        """What is replicated, and what that costs each device."""
        rows = [row for row in self.rows if row.is_replicated]
        return ReplicatedSummary(tuple(row.path for row in rows), sum(row.bytes for row in rows))

    def __str__(self) -> str:
        return render_table(self)

    def to_text(self, width: int | None = None) -> str:
        """The report as a table.

        Args:
            width: the columns it may take; those of the terminal by default.
        """
        return render_table(self, width)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain Python values, ready for ``json.dumps``."""
        return {
            'mesh': dict(self.mesh),
            'bytes': self.bytes,
            'bytes_per_device': self.bytes_per_device,
            'replicated': {
                'paths': list(self.replicated.paths),
                'bytes': self.replicated.bytes,
            },
            'unused_rules': list(self.unused_rules),
            'shadowed_rules': list(self.shadowed_rules),
            'rows': [
                {
                    **dataclasses.asdict(row),
                    'shape': list(row.shape),
                    'spec': None if row.spec is None else _plain(row.spec),
                }
                for row in self.rows
            ],
        }

    def check(self, *, max_replicated_bytes: int | None = None, no_unused_rules: bool = False) -> None:
        """Raises if the shardings are not as thrifty as they should be; for tests of your own project.

        Args:
            max_replicated_bytes: how many bytes each device may hold replicated, in total.
            no_unused_rules: whether every regex must decide about some leaf.

        Raises:
            ShardingError: one of these does not hold; names the leaves or rules.
        """
        complaints = []
        replicated = self.replicated
        if max_replicated_bytes is not None and replicated.bytes > max_replicated_bytes:
            largest = sorted((row for row in self.rows if row.is_replicated), key=lambda row: -row.bytes)
            complaints.append(
                f'{replicated.bytes:,} bytes are replicated on every device, allowed are '
                f'{max_replicated_bytes:,}:\n'
                + shown(f'{row.path}: {row.bytes:,} bytes ({row.why})' for row in largest)
            )
        if no_unused_rules and (self.unused_rules or self.shadowed_rules):
            complaints.append(
                'rules that decide about no leaf:\n'
                + shown(
                    [f'{rule!r} matches nothing' for rule in self.unused_rules]
                    + [f'{rule!r} is always shadowed by earlier ones' for rule in self.shadowed_rules]
                )
            )
        if complaints:
            raise ShardingError([], message='\n'.join(complaints))


def make_report(rules: RuleLike, resolution: Resolution, mesh: Mapping[str, int]) -> ShardingReport:
    """Makes the report of a resolution of *rules*."""
    tree = resolution.tree
    rows = tuple(
        _row(tree.paths[i], tree.leaves[i], tree.shapes[i], answer, resolution.shardings[i], mesh)
        for i, answer in enumerate(resolution.answers)
    )
    unused, shadowed = _idle_clauses(rules, resolution)
    return ShardingReport(rows, dict(mesh), tuple(unused), tuple(shadowed))


def _row(
    path: str,
    leaf: Any,
    shape: tuple[int, ...],
    answer: Any,
    sharding: NamedSharding | None,
    mesh: Mapping[str, int],
) -> ReportRow:
    # Without jax_enable_x64, a float64 array of numpy takes half its bytes on a device.
    dtype: Any = canonical_dtype(leaf.dtype if hasattr(leaf, 'dtype') else jax.dtypes.result_type(leaf))
    spec = None if sharding is None else sharding.spec
    entries = () if spec is None else _spec.entries(spec)
    shards = [math.prod(mesh[a] for a in _spec.entry_axes(entry)) for entry in entries]
    local = [-(-n // s) for n, s in zip(shape, [*shards, *[1] * len(shape)], strict=False)]
    reason = answer.reason
    if spec is not None and _spec.canonical(answer.spec) != spec:
        asked = f'asked for {answer.spec}, which does not divide'
        reason = f'{reason}; {asked}' if reason else asked
    return ReportRow(
        path,
        shape,
        str(dtype),
        spec,
        answer.origin,
        'left to the compiler' if spec is None else reason,
        math.prod(shape) * dtype.itemsize,
        math.prod(local) * dtype.itemsize,
        answer.memory_kind,
    )


def _plain(spec: PartitionSpec) -> list[Any]:
    return [
        list(entry)
        if isinstance(entry, tuple)
        else 'UNCONSTRAINED'
        if entry is _spec.UNCONSTRAINED
        else entry
        for entry in _spec.entries(spec)
    ]


def _idle_clauses(rules: RuleLike, resolution: Resolution) -> tuple[list[str], list[str]]:
    """The regexes that decide about no leaf: those that match none, and those always shadowed."""
    distinct = {id(answer): answer for answer in resolution.answers}.values()
    used = {clause for answer in distinct for clause in answer.clauses}
    unused: list[str] = []
    shadowed: list[str] = []
    for rule, patterns in _tables(jax.tree.leaves(rules, is_leaf=is_rule)):
        for number, pattern in enumerate(patterns):
            if (rule, number) in used:
                continue
            text = str(getattr(pattern, 'pattern', pattern))
            hits = [
                answer
                for path, answer in zip(resolution.seen, resolution.answers, strict=True)
                if re.search(pattern, path)
            ]
            if not hits:
                unused.append(text)
                continue
            # Arrays of one element are nobody's to decide about; and a nested rule may have been asked,
            # and have had no answer.
            others = [answer for answer in hits if answer.reason != ONE_ELEMENT]
            if _nests(rule, number):
                others = [answer for answer in others if _decided_before(rule, number, answer)]
            if others:
                shadowed.append(text)
    return unused, shadowed


def _nests(rule: ShardingRule, number: int) -> bool:
    return isinstance(rule, TreePathShardingRule) and isinstance(rule.rules[number][1], ShardingRule)


def _decided_before(rule: ShardingRule, number: int, answer: Answer) -> bool:
    return any(owner == rule and clause < number for owner, clause in answer.clauses)


def _tables(rules: Sequence[Any]) -> Iterable[tuple[ShardingRule, tuple[Any, ...]]]:
    """Every rule that holds a table of regexes, nested ones too, with its regexes."""
    found: dict[ShardingRule, tuple[Any, ...]] = {}
    for rule in rules:
        if isinstance(rule, TreePathShardingRule):
            found[rule] = tuple(pattern for pattern, _ in rule.rules)
        elif isinstance(rule, LogicalAxisShardingRule):
            found[rule] = tuple(pattern for pattern, _ in rule.axis_names or ())
        if isinstance(rule, ShardingRule):
            found.update(_tables(rule.parts))
    return found.items()
