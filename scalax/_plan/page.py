"""Plans as HTML without scripts: bars of memory and seconds, the collectives, and the torus."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scalax._plan.batch import advice, kept
from scalax._plan.figure_data import NO_DEVICE, AxisOnTorus, Bar, axes_on_torus, memory_bars, time_bars
from scalax._plan.text import (
    collective_cells,
    head,
    held_heading,
    held_text,
    moved_to_host,
    notes_on_collectives,
    shown_buffers,
    verdict,
)
from scalax._report.pages import escape, paragraphs, still_page, table
from scalax._report.svg import Drawn, below, document, text_lines, told_apart
from scalax._report.tables import human_bytes, milliseconds
from scalax._transforms.followed_batch import kept_cells, lost_cells
from scalax.errors import PlanError

if TYPE_CHECKING:
    from scalax._plan.plan import Plan

MOST_ROWS = 100
_MOST_LAYERS = 32
_MOST_SQUARES = 8  # in a row
_PANEL = 132  # pixels: the largest width of a layer of chips
_TRACK = 'background: rgba(128, 128, 128, 0.22); border-radius: 4px; overflow: hidden; display: flex'
_HEADING = 'font-size: 15px; font-weight: 650; margin: 26px 0 8px'
_NUMBER = 'text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums'


def render_fragment(plan: Plan) -> str:
    """A plan as part of a page, in the colours and fonts of that page."""
    parts = [
        _texts([head(plan), *([plan.refusal] if plan.refusal else [])]),
        _section('Memory of each device', _memory(plan)),
        _section('Seconds of one call', _times(plan)),
        _section('Collectives of one call', _collectives(plan)),
        _section('Rows of the batch', _batch(plan)),
        _section('Mesh axes on the torus', _torus(plan)),
    ]
    return f'<div style="font-size: 14px; line-height: 1.5" class="scalax-static">{"".join(parts)}</div>'


def render_page(plan: Plan, title: str) -> str:
    """A plan as a page of HTML that loads nothing and runs no script."""
    return still_page(title, f'<h1 style="font-size: 21px">{escape(title)}</h1>{render_fragment(plan)}')


def _section(heading: str, body: str) -> str:
    return f'<section><h2 style="{_HEADING}">{escape(heading)}</h2>{body}</section>' if body else ''


def _texts(lines: Sequence[str]) -> str:
    return paragraphs(lines, 'overflow-wrap: anywhere')


def _memory(plan: Plan) -> str:
    whole, bars = memory_bars(plan.memory)
    parts = ''.join(
        f'<div title="{escape(bar.label)}" style="width: {_percent(bar.value, whole)}; '
        f'background: {bar.color}"></div>'
        for bar in bars
    )
    shown = ''.join(
        '<span style="white-space: nowrap; margin-right: 18px; display: inline-block">'
        f'<span style="display: inline-block; width: 11px; height: 11px; border-radius: 3px; '
        f'background: {bar.color}; margin-right: 6px"></span>'
        f'{escape(bar.label)} {human_bytes(round(bar.value))}</span>'
        for bar in bars
    )
    largest = ''
    if plan.buffers:
        largest_ones, rest = shown_buffers(plan)
        rows = [(human_bytes(row.bytes), held_text(row), str(row.source)) for row in largest_ones]
        rows += [(human_bytes(rest), 'smaller ones', '')] if rest > 0 else []
        largest = _texts([held_heading(plan)]) + _wide(
            table(('bytes', 'array', 'what it is'), rows, right=[0])
        )
    moved = moved_to_host(plan)
    host = _texts([f'on the host: {human_bytes(plan.memory.host)}, {moved}'] if moved else [])
    return (
        f'{_texts([verdict(plan)])}<div style="{_TRACK}; height: 26px; position: relative">{parts}'
        f'{_limit(plan, whole)}</div><div style="margin: 8px 0 12px">{shown}</div>{host}{largest}'
    )


def _limit(plan: Plan, whole: float) -> str:
    """A line at the limit of the memory, if the program is larger."""
    limit = plan.memory.limit
    if limit is None or limit >= whole:
        return ''
    return (
        f'<div title="limit" style="position: absolute; left: {_percent(limit, whole)}; top: 0; bottom: 0; '
        'border-left: 3px dashed currentColor"></div>'
    )


def _times(plan: Plan) -> str:
    try:
        roofline = plan.roofline()
    except PlanError as error:
        return _texts([f'Not known: {error}'])
    bars = time_bars(roofline)
    longest = max(bar.value for bar in bars) or 1
    rows = ''.join(_time_row(bar, longest) for bar in bars)
    summary = str(roofline).splitlines()[:2]  # without its table, which the bars show
    return (
        f'{_texts(summary)}<div style="display: grid; grid-template-columns: max-content 1fr max-content; '
        f'gap: 5px 12px; align-items: center">{rows}</div>'
    )


def _time_row(bar: Bar, longest: float) -> str:
    weight = 'font-weight: 650' if bar.marked else ''
    return (
        f'<span style="{weight}">{escape(bar.label)}</span><span style="{_TRACK}; height: 16px">'
        f'<span style="width: {_percent(bar.value, longest)}; background: {bar.color}"></span></span>'
        f'<span style="{_NUMBER}; {weight}">{milliseconds(bar.value)}</span>'
    )


def _collectives(plan: Plan) -> str:
    if not plan.collectives:
        return _texts(['none'])
    heads, rows = collective_cells(plan, MOST_ROWS)
    shown = table(heads, rows, right=range(2, len(heads) - 1))
    notes = notes_on_collectives(plan, MOST_ROWS)
    return _wide(shown) + _texts(['Bytes are those of the whole array of one group, each time.', *notes])


def _batch(plan: Plan) -> str:
    """What is followed of the batch, with all values that are kept and all places where rows are lost."""
    body = _texts([*filter(None, [advice(plan)])])
    if plan.followed is not None and plan.followed.lost:
        body += _texts(['Rows are lost at:']) + _first_rows(lost_cells(plan.followed))
    body += _texts([*filter(None, [kept(plan)])])
    if plan.followed is not None and plan.followed.kept:
        body += _first_rows(kept_cells(plan.followed))
    return body


def _first_rows(cells: Sequence[Sequence[str]]) -> str:
    """A table with its third column to the right, and how many rows it leaves out."""
    heads, *rows = cells
    rest = len(rows) - MOST_ROWS
    return _wide(table(heads, rows[:MOST_ROWS], right=[2])) + _texts(
        [f'... and {rest} more'] if rest > 0 else []
    )


def _wide(body: str) -> str:
    """A part that scrolls on a narrow screen."""
    return f'<div style="overflow-x: auto">{body}</div>'


def _torus(plan: Plan) -> str:
    shown = axes_on_torus(plan.mesh, plan.places)
    if not shown:
        return ''
    slices = shown[0].slices
    notes = ['Devices on the torus: columns along x, rows along y, a panel for each z.']
    if slices > 1:
        notes.append(f'This is the first of {slices} slices.')
    return _texts(notes) + ''.join(map(_axis, shown))


def _axis(chips: AxisOnTorus) -> str:
    if chips.across:
        return _texts([f'{chips.axis}={chips.size}: from slice to slice'])
    colors = told_apart(chips.size)
    layers = chips.layers[:_MOST_LAYERS]
    most = max(*layers[0].shape, 4)
    cell = min(24.0, max(4.0, _PANEL / most))
    drawn = [
        below([*([text_lines([f'z={z}'])] if len(layers) > 1 else []), _layer(layer, cell, colors)], 2)
        for z, layer in enumerate(layers)
    ]
    figures = ''.join(
        '<span style="display: inline-block; margin: 0 14px 10px 0">'
        f'{document(part, f"{chips.label}, z={z}", "")}</span>'
        for z, part in enumerate(drawn)
    )
    return (
        f'<figure style="margin: 0 0 16px"><figcaption>{escape(chips.label)}</figcaption>{figures}</figure>'
    )


def _layer(layer: np.ndarray, cell: float, colors: Sequence[str]) -> Drawn:
    """A square for each device; in wide layers, neighbours of one colour form one rectangle."""
    body = []
    high, wide = layer.shape
    for y, row in enumerate(layer):
        joins = wide > _MOST_SQUARES
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1 if joins else range(1, wide)), wide]
        for start, end in itertools.pairwise(starts):
            if row[start] != NO_DEVICE:
                body.append(
                    f'<rect x="{start * cell:.1f}" y="{y * cell:.1f}" width="{(end - start) * cell - 1:.1f}" '
                    f'height="{cell - 1:.1f}" fill="{colors[row[start]]}"/>'
                )
    return Drawn(''.join(body), wide * cell, high * cell)


def _percent(part: float, whole: float) -> str:
    return f'{100 * part / whole:.2f}%'
