"""Plan section on pipelines: ticks, the bubble, the memory and sends of each stage, and the schedule."""

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

_MAX_CELLS = 4000  # cells of a picture
_IDLE = '\u00b7'


def with_flops(loops: PipelinedLoops) -> tuple[PipelinedLoop, ...]:
    """Returns the loops with the FLOPs of their layers, counted in the original equations."""
    return tuple(
        dataclasses.replace(loop, flops=loop.executions * count_flops_of(equation))
        for loop, equation in loops
    )


def bubble_figure(plan: PlanData, roofline: Roofline | None) -> Iterator[Figure]:
    """Yields the bubble as a headline figure; nothing without pipelines."""
    if plan.pipelines:
        seconds = f', {milliseconds(plan.idle_flops / roofline.peak)}' if roofline is not None else ''
        bubbles = ', '.join(dict.fromkeys(f'{loop.bubble:.1%}' for loop in plan.pipelines))
        yield Figure(bubbles, f'bubble: the fraction of its ticks in which a stage is idle{seconds}')


def pipelines_lead(plan: PlanData) -> str:
    """Describes the pipelines."""
    descriptions = dict.fromkeys(
        f'{plural(loop.num_microbatches, "microbatch", "microbatches")} pass through '
        f'{plural(loop.stages, "stage")} along {loop.axis}'
        f'{f", {loop.num_repeats} times" if loop.num_repeats > 1 else ""}'
        for loop in plan.pipelines
    )
    return f'{"; ".join(descriptions)} (layers and bytes: per stage and call, summed over its devices)'


def pipeline_blocks(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    """Returns the pipelines of a step; nothing without pipelines."""
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
        _direction(loop),
        loop.layers // stages,
        loop.ticks,
        f'{loop.bubble:.1%}',
        *(size // stages or None for size in (loop.weights, loop.saved_activation_bytes)),
        loop.executions * loop.ticks * loop.send_bytes,
        loop.executions * loop.num_microbatches * loop.io_bytes,
        *((flops / roofline.peak for flops in (loop.flops, loop.idle_flops)) if roofline is not None else ()),
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
    """A picture of the schedule: the microbatch that each stage computes in each tick."""

    loops: Sequence[PipelinedLoop]

    def html(self, mesh: Any) -> str:
        stages = max(loop.stages for loop in self.loops)
        if stages * sum(loop.ticks for loop in self.loops) > _MAX_CELLS:
            return ''
        heads = ''.join(
            f' <span class="head" style="--ticks: {loop.ticks}">{_direction(loop)}</span>'
            for loop in self.loops
        )
        rows = ''.join(
            f'<div><b>stage {stage}</b>{"".join(_cells(loop, stage) for loop in self.loops)}</div>\n'
            for stage in range(stages)
        )
        return f'<div class="ticks">\n<div><b></b>{heads}</div>\n{rows}</div>'


def _direction(loop: PipelinedLoop) -> str:
    return 'backward' if loop.is_backward else 'forward'


def _cells(loop: PipelinedLoop, stage: int) -> str:
    """Returns the cells of a stage: the index of the microbatch that it computes in each tick, or a dot."""
    cells = ''
    for tick in range(loop.ticks):
        assignment = loop.at(stage, tick)
        if assignment is None:
            cells += f' <span>{_IDLE}</span>'
        else:
            microbatch, repeat = assignment
            cells += f' <span class="{_direction(loop)}" style="--round: {repeat}">{microbatch}</span>'
    return f'{cells} <span class="gap"></span>'
