"""What a plan reports of batch sharding: what keeps it, where it is lost, and where examples move."""

from __future__ import annotations

from collections.abc import Iterable

from scalax._follow.followed_batch import FollowedBatch, LostRows, nothing_followed
from scalax._report.tables import human_bytes
from scalax._spmd.explained import PropagationReport
from scalax._transforms.sjit.batch import NO_BATCH
from scalax.errors import plural

_MOST = 5


def partitioned(report: PropagationReport | None) -> str:
    """How a step is partitioned along its batch; empty if it is not."""
    if report is None or not report.axes:
        return ''
    count = sum(max(1, row.count) for row in report.collectives)
    along = ' and '.join(report.axes)
    return f'partitioned along {along}: {plural(count, "collective")} of scalax in one call'


def mixing_lines(report: PropagationReport | None) -> Iterable[str]:
    """Where examples are gathered, the largest first; or why a step is not partitioned."""
    if report is None:
        return
    if report.reason:
        yield f'not partitioned along its batch: {report.reason}'
    places = sorted(report.gathered_examples, key=lambda row: -row.step_bytes)
    for row in places[:_MOST]:
        at = f'at {row.line} ({row.primitive})' if row.line else f'by {row.primitive}'
        yield f'  {row.reason} {at}: {row.array}, {human_bytes(row.bytes)}'
    if more := places[_MOST:]:
        yield f'  ... and at {plural(len(more), "more place")}'


def kept(batch: FollowedBatch | None) -> str:
    """What stays sharded along the batch dimension; empty if nothing looks like a batch."""
    if batch is None or not batch.axes:
        return nothing_followed(batch) if batch and batch.reason not in ('', NO_BATCH) else ''
    lines = plural(len({value.line for value in batch.kept if value.line}), 'line')
    values = f'{plural(batch.count, "value")} on {lines}' if batch.kept else 'no values'
    return f'{values} stay sharded along the batch dimension ({", ".join(batch.axes)})'


def lost_lines(batch: FollowedBatch | None) -> Iterable[str]:
    """Where the sharding is lost, and where examples move, the largest values first."""
    if batch is None:
        return
    for what, places in (('sharding lost', batch.lost), ('examples moved', batch.moved)):
        for each in places[:_MOST]:
            yield f'  {what} {_place(each)}: {each.array}, {human_bytes(each.bytes)}'
        if more := places[_MOST:]:
            yield f'  ... and at {plural(len(more), "more place")}'
    if batch.lost:
        by_shard = ', or run it shard by shard (helper.shard_map)'
        other = '' if batch.lost[0].primitive == 'shard_map' else by_shard
        yield f'  to restore it, annotate the values after it (with_sharding_annotation){other}'


def _place(lost: LostRows) -> str:
    return f'at {lost.line} ({lost.primitive})' if lost.line else f'by {lost.primitive}'
