"""Plan section on partitioning: the batch, operations that mix examples, and redundant computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalax._core.render.tables import human_bytes, human_flops
from scalax._spmd.report.collective_reasons import CollectiveRow
from scalax._spmd.report.explain import PropagationReport, RedundantWork, batch_text, gradient_lines
from scalax.errors import plural

_MAX_LINES = 5
_MIN_SHARE = 0.01  # of the FLOPs of a device


def partitioned_line(report: PropagationReport | None) -> str:
    """Describes how a step is partitioned along its batch; empty if it is not."""
    if report is None or not report.axes:
        return ''
    count = sum(max(1, row.count) for row in report.collectives)
    return f'partitioned along {batch_text(report)}: {plural(count, "collective")} of scalax in one call'


def mixing_lines(report: PropagationReport | None) -> Iterator[str]:
    """Yields why a step is not partitioned, which operations mix examples, and the redundant computation."""
    if report is None:
        return
    if report.reason:
        yield f'not partitioned along its batch: {report.reason}'
    yield from gradient_lines(report)
    gathered = sorted(report.gathered_examples, key=lambda row: -row.step_bytes)
    yield from _limited([*map(_gather_line, gathered)])
    redundant = [
        work
        for work in report.redundant
        if work.operand_kind == 'examples' or work.flops > _MIN_SHARE * report.flops
    ]
    yield from _limited([*map(_redundant_line, redundant)])
    if gathered:
        yield (
            '  if these operations need not mix examples, map them over the examples (jax.vmap), or run them '
            'on local shards (helper.shard_map); to shard their results, constrain them '
            '(with_sharding_constraint)'
        )


def _limited(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_MAX_LINES]
    if more := lines[_MAX_LINES:]:
        yield f'  ... and {plural(len(more), "more operation")}'


def _gather_line(row: CollectiveRow) -> str:
    operation = '' if row.reason.endswith(f' for {row.primitive}') else f' ({row.primitive})'
    at = f' at {row.line}' if row.line else ''
    return f'  {row.reason}{at}{operation}: {row.array}, {human_bytes(row.bytes)}'


def _redundant_line(work: RedundantWork) -> str:
    at = f' at {work.line}' if work.line else ''
    size = human_flops(work.flops) if work.flops else human_bytes(work.bytes)
    return f'  computed redundantly by all devices: {work.primitive}{at}: {work.array}, {size}'
