"""What a plan says of pipelines: ticks, the bubble, what each stage holds and sends, and the schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from scalax._core.render.blocks import Block, Column, Figure, Lines, Row, Table
from scalax._core.render.tables import human_bytes, human_flops, milliseconds
from scalax._planning.cost.flops import count_flops_of
from scalax._planning.report.plan_data import PlanData
from scalax._planning.time.roofline import Roofline
from scalax._spmd.pipelines.summary import PipelinedLoop, PipelinedLoops
from scalax.errors import plural

_MOST_CELLS = 4000  # of a picture
_IDLE = '\u00b7'


def with_flops(loops: PipelinedLoops) -> tuple[PipelinedLoop, ...]:
    """Loops over layers with the operations of their layers: those of the equations that they were."""
    return tuple(
        [
            dataclasses.replace(told, flops=told.executions * count_flops_of(equation))
            for told, equation in loops
        ]
    )


def bubble_figure(plan: PlanData, roofline: Roofline | None) -> Iterator[Figure]:
    """The bubble, as a headline figure; nothing without pipelines."""
    if plan.pipelines:
        seconds = f', {milliseconds(plan.idle_flops / roofline.peak)}' if roofline is not None else ''
        each = ', '.join(dict.fromkeys(f'{loop.bubble:.1%}' for loop in plan.pipelines))
        yield Figure(each, f'bubble: the fraction of its ticks in which a stage is idle{seconds}')


def pipelines_lead(plan: PlanData) -> str:
    """What the pipelines are."""
    ways = dict.fromkeys(
        f'{plural(loop.num_microbatches, "microbatch", "microbatches")} pass through '
        f'{plural(loop.stages, "stage")} along {loop.axis}'
        f'{f", {loop.num_repeats} times" if loop.num_repeats > 1 else ""}'
        for loop in plan.pipelines
    )
    return f'{"; ".join(ways)} (layers and bytes: those of one stage, in one call, on all of its devices)'


def pipeline_blocks(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    """The pipelines of a step; nothing without."""
    if not plan.pipelines:
        return []
    columns = [
        Column('loop', 'lead'),
        Column('pass'),
        *(Column(head, 'number') for head in ('layers', 'ticks', 'bubble')),
        *(Column(head, 'number', human_bytes) for head in ('weights', 'saved', 'sent', 'in/out')),
        *(Column(head, 'number', milliseconds) for head in ('compute', 'idle') if roofline is not None),
    ]
    rows = [_row(loop, roofline) for loop in plan.pipelines]
    return [Table(columns, rows), Ticks(plan.pipelines), Lines([*_notes(plan, roofline)])]


def _row(loop: PipelinedLoop, roofline: Roofline | None) -> Row:
    stages = loop.stages
    return [
        loop.line if loop.executions == 1 else f'{loop.line}, {loop.executions} times',
        _way(loop),
        loop.layers // stages,
        loop.ticks,
        f'{loop.bubble:.1%}',
        *(size // stages or None for size in (loop.weights, loop.saved_activation_bytes)),
        loop.executions * loop.ticks * loop.send_bytes,
        loop.executions * loop.num_microbatches * loop.io_bytes,
        *((each / roofline.peak for each in (loop.flops, loop.idle_flops)) if roofline is not None else ()),
    ]


def _notes(plan: PlanData, roofline: Roofline | None) -> Iterator[str]:
    axis = plan.pipelines[0].axis
    sent = sum(
        row.count * row.bytes / row.group
        for row in plan.collectives
        if row.kind == 'collective-permute' and row.axes == (axis,)
    )
    yield f'each device sends {human_bytes(round(sent))} along {axis}: between stages, and in and out of them'
    if plan.idle_flops:
        share = '' if roofline is None else f', {milliseconds(plan.idle_flops / roofline.peak)} of computing'
        yield f"idle stages compute {human_flops(plan.idle_flops)}{share}, not counted as the model's"


@dataclasses.dataclass(frozen=True)
class Ticks(Block):
    """The schedule of pipelines, on pages: which microbatch each stage computes in each tick."""

    loops: Sequence[PipelinedLoop]

    def html(self, mesh: Any) -> str:
        stages = max(loop.stages for loop in self.loops)
        if stages * sum(loop.ticks for loop in self.loops) > _MOST_CELLS:
            return ''
        heads = ''.join(
            f' <span class="head" style="--ticks: {loop.ticks}">{_way(loop)}</span>' for loop in self.loops
        )
        rows = ''.join(
            f'<div><b>stage {stage}</b>{"".join(_cells(loop, stage) for loop in self.loops)}</div>\n'
            for stage in range(stages)
        )
        return f'<div class="ticks">\n<div><b></b>{heads}</div>\n{rows}</div>'


def _way(loop: PipelinedLoop) -> str:
    return 'backward' if loop.is_backward else 'forward'


def _cells(loop: PipelinedLoop, stage: int) -> str:
    """The cells of a stage: the number of the microbatch that it computes in each tick, or a point."""
    cells = ''
    for tick in range(loop.ticks):
        at = loop.at(stage, tick)
        shade = '' if at is None else f' class="{_way(loop)}" style="--round: {at[1]}"'
        cells += f' <span{shade}>{_IDLE if at is None else at[0]}</span>'
    return f'{cells} <span class="gap"></span>'
