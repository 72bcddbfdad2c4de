"""Tables of a plan, for its text and its page: what parts and modules take, and the collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalax._plan.collectives import Collective
from scalax._plan.figure_data import Sums
from scalax._plan.formulas import Counted
from scalax._plan.plan_data import PlanData
from scalax._plan.roofline import Roofline
from scalax._report import blocks
from scalax._report.blocks import Cell, Column
from scalax._report.tables import human_bytes, human_flops, milliseconds, three_figures

SIGNS = {Counted.EXACTLY: '', Counted.AT_LEAST: '>=', Counted.AT_MOST: '<=', Counted.UNKNOWN: '~'}
_WHY = {
    'halo': 'halo exchange',
    'ring': 'ring beside a product',
    'padding': 'padding',
    'compiler': 'added by the compiler',
}


def sums_columns(plan: PlanData, roofline: Roofline | None) -> list[Column]:
    """The columns of `sums_cells`."""
    network = bool(plan.collectives)
    heads = ['FLOPs', 'HBM bytes', *['collectives'] * network]
    heads += [] if roofline is None else ['compute', 'hbm', *['network'] * network]
    return [Column(head, 'number') for head in heads]


def sums_cells(each: Sums, plan: PlanData, roofline: Roofline | None) -> list[Cell]:
    """What a part of a step or a module computes and moves; blank for nothing."""
    amounts: list[tuple[float, Callable[[Any], str]]] = [(each.flops, human_flops), (each.bytes, human_bytes)]
    times: list[float] = [] if roofline is None else [each.compute.total(), each.hbm]
    if plan.collectives:
        amounts.append((each.moved, human_bytes))
        times += [] if roofline is None else [each.network]
    amounts += [(time, milliseconds) for time in times]
    return [Cell(text(amount) if amount else '', amount) for amount, text in amounts]


def collective_table(plan: PlanData, most: int) -> tuple[list[Column], list[list[Cell]]]:
    """The columns and the rows of the first collectives; with seconds where these are known."""
    roofline = plan.known_roofline
    has_phases = any(row.phase != 'other' for row in plan.collectives)
    columns = [Column('collective', 'lead'), Column('axes', 'code')]
    columns += [Column(head, 'number') for head in ('times', 'bytes', 'total')]
    columns += [] if roofline is None else [Column('ms', 'number')]
    columns += [Column('phase')] if has_phases else []
    rows = []
    for place, row in enumerate(plan.collectives[:most]):
        total = row.count * row.bytes
        networks = f' ({" and ".join(row.networks)})' if row.networks else ''
        axes = f'{blocks.axis_names(row.axes, plan.mesh)}{networks}'
        cells = [
            Cell(f'{row.kind}, scattered' if row.scattered else row.kind),
            Cell(f'{" x ".join(row.axes)}{networks}', html=axes),
            Cell(f'{SIGNS[row.counted]}{row.count:,}', row.count),
            Cell(human_bytes(row.bytes), row.bytes),
            Cell(human_bytes(total), total),
        ]
        if roofline is not None:
            seconds = roofline.collectives[place][1]
            cells.append(Cell(three_figures(1e3 * seconds), seconds))
        if has_phases:
            cells.append(Cell(row.phase, html=f'{blocks.swatch(row.phase)}{row.phase}'))
        rows.append([*cells, Cell(because(row))])
    return [*columns, Column('because of', 'wide')], rows


def because(row: Collective) -> str:
    """Why it is there: ``'halo exchange: model.py:12 forward'``."""
    why = _WHY.get(row.cause, '')
    if not why and row.partitioned_as and row.kind != 'reduce-scatter':
        why = f'for an {row.partitioned_as}'
    return f'{why}: {row.source}' if why else str(row.source)


def notes_on_collectives(plan: PlanData, shown: int) -> list[str]:
    """The collectives that a table of *shown* rows leaves out, and the share of bytes without an origin."""
    notes = []
    if rest := plan.collectives[shown:]:
        moved = human_bytes(sum(row.count * row.bytes for row in rest))
        notes.append(f'... and {len(rest)} more, {moved} together')
    if plan.explained < 1:
        notes.append(
            f'{1 - plan.explained:.1%} of the bytes have no origin in the program after partitioning'
        )
    return notes
