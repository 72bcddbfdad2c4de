"""What a plan says of the batch: what is followed of it, and where more activations than weights move."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

from scalax._follow.followed_batch import FollowedBatch, LostRows, nothing_followed
from scalax._plan.collective_seconds import received_bytes
from scalax._plan.plan_data import PlanData
from scalax._report.tables import human_bytes
from scalax.errors import plural

_MOST_LOST = 5
_NAMES = 'name the values behind it (with_sharding_annotation)'
_BLOCKS = 'helper.shard_map'


class Received(NamedTuple):
    """What each device receives along a mesh axis that shards the batch.

    Attributes:
        axis: the mesh axis.
        rows: the bytes of rows of the batch: activations.
        others: those of anything else: weights, their gradients, and what is not known.
        line: the line of the user's program that moves the most rows.
    """

    axis: str
    rows: float
    others: float
    line: str


def more_rows_than_weights(plan: PlanData) -> Received | None:
    """The mesh axis along which the most rows move, if there they are more than the weights.

    What the program itself asks for (collectives of `shard_map`, constraints, values with a name) counts for
    neither.
    """
    found = []
    for axis in plan.batch_axes:
        rows, others = 0.0, 0.0
        lines: collections.Counter[str] = collections.Counter()
        for row in plan.collectives:
            if axis in row.axes and row.cause != 'program':
                kind = 'reduce-scatter' if row.scattered else row.kind
                received = row.count * received_bytes(kind, row.bytes, row.group)
                if not row.rows:
                    others += received
                elif row.rows == 'moved' and not row.source.annotation:
                    rows += received
                    lines[str(row.source)] += round(received)
        if rows > others:
            found.append(Received(axis, rows, others, lines.most_common(1)[0][0]))
    return max(found, key=lambda moved: moved.rows, default=None)


def advice(plan: PlanData) -> str:
    """Where more activations than weights move, and what would mend it; empty if they do not."""
    moved = more_rows_than_weights(plan)
    if moved is None or plan.followed is None:
        return ''
    rows, others = (human_bytes(round(size)) for size in (moved.rows, moved.others))
    return (
        f'along {moved.axis} more activations than weights move: each device receives {rows} of activations, '
        f'most at {moved.line}, and {others} of anything else; {_remedy(plan.followed)}'
    )


def _remedy(batch: FollowedBatch) -> str:
    if not batch.axes:
        return nothing_followed(batch)
    if not batch.lost:
        return f'no rows are lost before: if that line needs only those of its own device, {_BLOCKS} says so'
    lost = batch.lost[0]
    remedies = _NAMES if lost.primitive == 'shard_map' else f'{_NAMES}, or run it on blocks ({_BLOCKS})'
    return f'rows are lost {_place(lost)}: {remedies}'


def kept(plan: PlanData) -> str:
    """What is followed; empty if nothing looks like a batch, or `advice` says it."""
    batch = plan.followed
    if batch is None or not batch.axes:
        return nothing_followed(batch) if batch and batch.reason and not advice(plan) else ''
    lines = plural(len({value.line for value in batch.kept if value.line}), 'line')
    values = f'{plural(batch.count, "value")} on {lines}' if batch.kept else 'no values'
    return f'{values} stay with the rows of the batch ({", ".join(batch.axes)})'


def lost_lines(plan: PlanData) -> Iterable[str]:
    """Where rows are lost, the largest values first."""
    lost = plan.followed.lost if plan.followed else ()
    for each in lost[:_MOST_LOST]:
        yield f'  lost {_place(each)}: {each.array}, {human_bytes(each.bytes)}'
    if more := lost[_MOST_LOST:]:
        yield f'  ... and at {plural(len(more), "more place")}'


def _place(lost: LostRows) -> str:
    return f'at {lost.line} ({lost.primitive})' if lost.line else f'by {lost.primitive}'


def followed_text(batch: FollowedBatch | None) -> str:
    """What is followed, in a few words."""
    if batch is None or not batch.axes:
        return 'not followed'
    lost = f', lost at {plural(len(batch.lost), "place")}' if batch.lost else ''
    return f'{plural(batch.count, "value")} kept over {", ".join(batch.axes)}{lost}'
