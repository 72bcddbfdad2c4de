"""How does a resolve become a report? One row a leaf, and the regexes that did nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from scalax import _spec
from scalax._paths import canonical_dtype
from scalax._prefix import RuleLike, is_rule
from scalax._resolve import Resolution
from scalax.explain._report import ShardingReport
from scalax.explain._rows import ReportRow
from scalax.rules import LogicalAxisShardingRule, TreePathShardingRule
from scalax.rules._base import ONE_ELEMENT, Answer, ShardingRule


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
        _bytes(shape, dtype),
        _bytes(local, dtype),
        answer.memory_kind,
    )


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    """The bytes of an array on a device, where two int4 share one; whole bytes."""
    extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)  # of PRNG keys
    bits = 8 * dtype.itemsize if extended else jax.dtypes.itemsize_bits(dtype)
    return -(-math.prod(shape) * bits // 8)


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
