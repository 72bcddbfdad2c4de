"""Makes the report of a resolve: one row for each leaf, and the regexes that decided nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import dtype_on_devices, element_bits
from scalax.explain._report import ShardingReport
from scalax.explain._rows import ReportRow
from scalax.rules._answer import Decision
from scalax.rules._resolve import Resolution
from scalax.rules._rule import is_rule
from scalax.rules._rule_tree import RuleLike
from scalax.rules._unused_rules import clause_text, find_unused_clauses


def make_report(rules: RuleLike, resolution: Resolution, mesh: Mapping[str, int]) -> ShardingReport:
    """Makes the report of a resolution of *rules*."""
    tree = resolution.tree

    def row(
        path: str, leaf: Any, shape: tuple[int, ...], answer: Decision, spec: PartitionSpec | None
    ) -> ReportRow:
        # Without jax_enable_x64, a float64 array of numpy takes half its bytes on a device.
        dtype = dtype_on_devices(leaf)
        bits = element_bits(dtype)
        local = list(shape)
        for dim, entry in enumerate(() if spec is None else partition_specs.entries(spec)):
            local[dim] = -(-shape[dim] // math.prod(mesh[axis] for axis in partition_specs.entry_axes(entry)))
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
    every = jax.tree.leaves(rules, is_leaf=is_rule)
    unused, shadowed = (
        tuple(map(clause_text, found))
        for found in find_unused_clauses(every, resolution.rule_paths, resolution.decisions)
    )
    return ShardingReport(rows, dict(mesh), unused, shadowed)


def _reason(answer: Decision, spec: PartitionSpec | None) -> str:
    if spec is None:
        return 'left to the compiler'
    parts = [answer.reason]
    if answer.spec is not None and answer.spec != spec and partition_specs.canonical(answer.spec) != spec:
        parts.append(f'asked for {partition_specs.text(answer.spec)}, which does not divide')
    return '; '.join(part for part in (*parts, *answer.notes) if part)
