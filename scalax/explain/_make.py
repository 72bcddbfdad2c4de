"""Makes the report of a resolve: one row for each leaf, and the regexes that decided nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from scalax._tree import specs
from scalax._tree.paths import bits_of, dtype_on_devices
from scalax.explain._report import ShardingReport
from scalax.explain._rows import ReportRow
from scalax.rules import LogicalAxisShardingRule, OptimizerStateShardingRule, TreePathShardingRule, catalogue
from scalax.rules._answer import ONE_ELEMENT, Decision
from scalax.rules._prefix import RuleLike
from scalax.rules._resolve import Resolution
from scalax.rules._rule import ShardingRule, is_rule


def make_report(rules: RuleLike, resolution: Resolution, mesh: Mapping[str, int]) -> ShardingReport:
    """Makes the report of a resolution of *rules*."""
    tree = resolution.tree

    def row(
        path: str, leaf: Any, shape: tuple[int, ...], answer: Decision, spec: PartitionSpec | None
    ) -> ReportRow:
        # Without jax_enable_x64, a float64 array of numpy takes half its bytes on a device.
        dtype = dtype_on_devices(leaf)
        bits = bits_of(dtype)
        local = list(shape)
        for dim, entry in enumerate(() if spec is None else specs.entries(spec)):
            local[dim] = -(-shape[dim] // math.prod(mesh[axis] for axis in specs.entry_axes(entry)))
        return ReportRow(
            path,
            shape,
            str(dtype),
            spec,
            answer.origin,
            _reason(answer, spec),
            # Whole bytes: two int4 share one.
            -(-math.prod(shape) * bits // 8),
            -(-math.prod(local) * bits // 8),
            answer.memory_kind,
        )

    placed = [None if sharding is None else sharding.spec for sharding in resolution.shardings]
    rows = tuple(map(row, tree.paths, tree.leaves, tree.shapes, resolution.decisions, placed))
    unused, shadowed = _idle_clauses(rules, resolution)
    return ShardingReport(rows, dict(mesh), tuple(unused), tuple(shadowed))


def _reason(answer: Decision, spec: PartitionSpec | None) -> str:
    if spec is None:
        return 'left to the compiler'
    parts = [answer.reason]
    if answer.spec is not None and answer.spec != spec and specs.canonical(answer.spec) != spec:
        parts.append(f'asked for {specs.text(answer.spec)}, which does not divide')
    return '; '.join(part for part in (*parts, *answer.notes) if part)


def _idle_clauses(rules: RuleLike, resolution: Resolution) -> tuple[list[str], list[str]]:
    """The regexes that decide about no leaf: those that match none, and those always shadowed."""
    distinct = {id(answer): answer for answer in resolution.decisions}.values()
    used = {(_key(rule), number) for answer in distinct for rule, number in answer.clauses}
    unused: list[str] = []
    shadowed: list[str] = []
    tables: dict[Any, list[_Table]] = {}
    for table in _tables(jax.tree.leaves(rules, is_leaf=is_rule)):
        tables.setdefault(_key(table.rule), []).append(table)
    for key, uses in tables.items():
        rule, patterns, _ = uses[0]
        params = [path for use in uses for path in use.parameters or ()]
        outside = any(use.parameters is None for use in uses)
        rows = [
            (path, answer)
            for path, answer in zip(resolution.seen, resolution.decisions, strict=True)
            # A rule used for both params and optimizer state does not see the paths of the state.
            if outside and not (params and OptimizerStateShardingRule.__name__ in answer.origin)
        ]
        for number, pattern in enumerate(patterns):
            text = str(getattr(pattern, 'pattern', pattern))
            # The tables of the catalogue are for many models: most of their rows are idle in each.
            if (key, number) in used or text in catalogue.REGEXES:
                continue
            # The paths of a state do not show which parameter a leaf belongs to, and may lack parameters.
            mine = [path for path in params if re.search(pattern, path)]
            if any(not any(re.search(earlier, path) for earlier in patterns[:number]) for path in mine):
                continue
            hits = [answer for path, answer in rows if re.search(pattern, path)]
            if not hits and not mine:
                unused.append(text)
                continue
            nested = isinstance(rule, TreePathShardingRule) and isinstance(
                rule.rules[number][1], ShardingRule
            )
            # No rule decides about arrays of one element. A nested rule may have had no answer.
            others = [
                answer
                for answer in hits
                if answer.reason != ONE_ELEMENT
                and (not nested or any(owner == rule and clause < number for owner, clause in answer.clauses))
            ]
            if others or mine:
                shadowed.append(text)
    return unused, shadowed


def _key(rule: ShardingRule) -> Any:
    """The rule as a key of a dict; one that holds a user's rule may have no hash, and is told by its id."""
    try:
        hash(rule)
    except TypeError:
        return id(rule)
    return rule


class _Table(NamedTuple):
    """A rule with a table of regexes.

    Attributes:
        rule: the rule.
        patterns: its regexes.
        parameters: the paths of those that it decides about; None outside of optimizer states.
    """

    rule: ShardingRule
    patterns: tuple[Any, ...]
    parameters: list[str] | None


def _tables(rules: Iterable[Any], params: list[str] | None = None) -> Iterator[_Table]:
    """Every rule with a table of regexes, including nested ones."""
    for rule in rules:
        if isinstance(rule, OptimizerStateShardingRule):
            for section in rule.sections:
                # No rule decides about arrays of one element.
                leaves = zip(section.paths, section.shapes, strict=True)
                yield from _tables([section.rule], [path for path, shape in leaves if math.prod(shape) != 1])
            continue
        if isinstance(rule, TreePathShardingRule):
            yield _Table(rule, tuple(pattern for pattern, _ in rule.rules), params)
        elif isinstance(rule, LogicalAxisShardingRule):
            yield _Table(rule, tuple(pattern for pattern, _ in rule.axis_names or ()), params)
        if isinstance(rule, ShardingRule):
            yield from _tables(rule.parts, params)
