"""Partitioning in plans: the batch, what mixes its examples, and what all devices compute alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalax._core.render.tables import human_bytes, human_flops
from scalax._spmd.report.collective_reasons import CollectiveRow
from scalax._spmd.report.explain import PropagationReport, RedundantWork, batch_text, gradient_lines
from scalax.errors import plural

_MOST = 5
_LARGE = 0.01  # of the operations of a device


def partitioned_line(report: PropagationReport | None) -> str:
    """Returns how a step is partitioned along its batch; an empty line if it is not."""
    if report is None or not report.axes:
        return ''
    count = sum(max(1, row.count) for row in report.collectives)
    return f'partitioned along {batch_text(report)}: {plural(count, "collective")} of scalax in one call'


def mixing_lines(report: PropagationReport | None) -> Iterator[str]:
    """Yields why a step is not partitioned; or where examples meet, and what all devices compute alike."""
    if report is None:
        return
    if report.reason:
        yield f'not partitioned along its batch: {report.reason}'
    yield from gradient_lines(report)
    gathered = sorted(report.gathered_examples, key=lambda row: -row.step_bytes)
    yield from _first([*map(_gathered, gathered)])
    alike = [work for work in report.redundant if work.of == 'examples' or work.flops > _LARGE * report.flops]
    yield from _first([*map(_computed_alike, alike)])
    if gathered:
        yield (
            '  if examples need not meet there, map the function over them (jax.vmap), or run it shard by '
            'shard (helper.shard_map); to shard what follows, constrain it (with_sharding_constraint)'
        )


def _first(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_MOST]
    if more := lines[_MOST:]:
        yield f'  ... and at {plural(len(more), "more place")}'


def _gathered(row: CollectiveRow) -> str:
    operation = '' if row.reason.endswith(f' for {row.primitive}') else f' ({row.primitive})'
    at = f' at {row.line}' if row.line else ''
    return f'  {row.reason}{at}{operation}: {row.array}, {human_bytes(row.bytes)}'


def _computed_alike(work: RedundantWork) -> str:
    at = f' at {work.line}' if work.line else ''
    size = human_flops(work.flops) if work.flops else human_bytes(work.bytes)
    return f'  computed alike by all devices: {work.primitive}{at}: {work.array}, {size}'
