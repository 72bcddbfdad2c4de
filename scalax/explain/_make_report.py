"""Construction of a report from a resolution: one row for each leaf, and the unused regexes."""

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
    """Returns the report of a resolution of *rules*."""
    tree = resolution.tree

    def make_row(
        path: str, leaf: Any, shape: tuple[int, ...], decision: Decision, spec: PartitionSpec | None
    ) -> ReportRow:
        # Without jax_enable_x64, a float64 array of numpy is float32 on a device.
        dtype = dtype_on_devices(leaf)
        bits = element_bits(dtype)
        local_shape = list(shape)
        for dim, entry in enumerate(() if spec is None else partition_specs.entries(spec)):
            shards = math.prod(mesh[axis] for axis in partition_specs.entry_axes(entry))
            local_shape[dim] = -(-shape[dim] // shards)
        return ReportRow(
            path,
            shape,
            str(dtype),
            spec,
            decision.origin,
            _reason(decision, spec),
            # Rounded up, because an int4 element has half a byte.
            -(-math.prod(shape) * bits // 8),
            -(-math.prod(local_shape) * bits // 8),
            decision.memory_kind,
        )

    specs = [None if sharding is None else sharding.spec for sharding in resolution.shardings]
    rows = tuple(map(make_row, tree.paths, tree.leaves, tree.shapes, resolution.decisions, specs))
    flat_rules = jax.tree.leaves(rules, is_leaf=is_rule)
    unused, shadowed = (
        tuple(map(clause_text, clauses))
        for clauses in find_unused_clauses(flat_rules, resolution.rule_paths, resolution.decisions)
    )
    return ShardingReport(rows, dict(mesh), unused, shadowed)


def _reason(decision: Decision, spec: PartitionSpec | None) -> str:
    """Returns the reason for the spec of a leaf, which may be smaller than the decision's."""
    if spec is None:
        return 'left to the compiler'
    reasons = [decision.reason]
    requested = decision.spec
    if requested is not None and requested != spec and partition_specs.canonical(requested) != spec:
        reasons.append(f'asked for {partition_specs.text(requested)}, but a dimension is not divisible')
    return '; '.join(reason for reason in (*reasons, *decision.notes) if reason)
