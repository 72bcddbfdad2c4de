"""Plans as text: memory, seconds, and the collectives with their mesh axes and sources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from scalax._plan.batch import advice, kept, lost_lines
from scalax._plan.buffers import Buffer
from scalax._plan.collectives import Collective
from scalax._plan.formulas import Counted
from scalax._plan.provenance import Source
from scalax._report.pages import visible
from scalax._report.tables import human_bytes, table, terminal_width, wrapped
from scalax._tree.specs import axis_sizes_text
from scalax.errors import PlanError

if TYPE_CHECKING:
    from scalax._plan.plan import Plan

_SHOWN = 15
_WHY = {
    'halo': 'halo exchange',
    'ring': 'ring beside a product',
    'padding': 'padding',
    'compiler': 'added by the compiler',
}
_MOST_BUFFERS = 20
_LITTLE_LEFT = 0.1  # of the peak
_LITTLE = 2**31  # bytes: quick plans of smaller programs, such as a product of 1.5 GiB, are over 8 % off
_SIGNS = {Counted.EXACTLY: '', Counted.AT_LEAST: '>=', Counted.AT_MOST: '<=', Counted.UNKNOWN: '~'}


def render(plan: Plan, width: int | None) -> str:
    """The plan as text, no line of its tables wider than *width* columns (default: the terminal's)."""
    width = terminal_width(width)
    caveat = wrapped(filter(None, [plan.not_compiled_for]), width)
    lines = [head(plan), *caveat, _flops(plan), *memory_lines(plan), '', *_times(plan)]
    lines += _collectives(plan, width)
    return '\n'.join([*map(visible, lines), *_batch(plan, width)])


def head(plan: Plan) -> str:
    """The name of the step, and what it runs on."""
    size = math.prod(plan.mesh.values())
    kind = f'{plan.platform} devices for {plan.simulates}' if plan.simulates else f'{plan.platform} devices'
    on = f'{size} {kind}' if plan.devices == size else f'{plan.devices} of {size} devices'
    return f'{plan.name} on {on} ({axis_sizes_text(plan.mesh)})'


def verdict(plan: Plan) -> str:
    """The memory needed and available, whether the program fits, and how well that is known."""
    return f'{_verdict(plan)}{_how_known(plan)}'


def _flops(plan: Plan) -> str:
    """One line; blank without any flops."""
    if not plan.flops and plan.flops_counted is Counted.EXACTLY:
        return ''
    return f'{_SIGNS[plan.flops_counted]}{plan.flops:.4g} flops in one call, on all devices together'


def _times(plan: Plan) -> Iterable[str]:
    """The roofline, or why there is none; nothing for simulated devices."""
    if plan.platform != 'cpu' or plan.simulates:
        try:
            roofline = str(plan.roofline()).splitlines()
            yield from (line for line in roofline if line != plan.not_compiled_for)  # it is above
        except PlanError as error:
            yield f'no roofline: {error}'
        yield ''


def memory_lines(plan: Plan) -> Iterable[str]:
    """The memory of each device: its parts, and the largest arrays at the peak if they are known."""
    memory = plan.memory
    yield f'memory of each device{_how_known(plan)}: {_verdict(plan)}'
    donated = f', of which {human_bytes(memory.donated)} are reused for outputs' if memory.donated else ''
    yield f'  arguments    {human_bytes(memory.arguments):>10}{donated}'
    yield f'  outputs      {human_bytes(memory.outputs):>10}'
    gaps = memory.total - memory.peak
    of_which = f', of which {human_bytes(gaps)} are gaps when most is held'
    unused = '' if gaps <= 0 else of_which if plan.buffers else ', not all at a time'
    unused += '; a full plan may have more' if plan.quick else ''
    yield f'  temporaries  {human_bytes(memory.temporaries):>10}{unused}'
    if moved := moved_to_host(plan):
        yield f'  on the host  {human_bytes(memory.host):>10}, {moved}'
    if plan.buffers:
        yield from _held(plan)


def moved_to_host(plan: Plan) -> str:
    """What a device and its host exchange; empty if the program does not use the memory of the host."""
    moves = plan.host_moves
    if not (plan.memory.host or moves.to_host or moves.from_host):
        return ''
    sign = _SIGNS[moves.counted]
    return (
        f'{sign}{human_bytes(moves.to_host)} are written there and {sign}{human_bytes(moves.from_host)} '
        'read in one call'
    )


def _held(plan: Plan) -> Iterable[str]:
    """The largest arrays at the peak and the sum of the rest: the lines add up to the peak."""
    shown, rest = shown_buffers(plan)
    yield f'  {held_heading(plan)}:'
    yield from (f'    {human_bytes(row.bytes):>10}  {held_text(row)}  {row.source}' for row in shown)
    if rest > 0:
        yield f'    {human_bytes(rest):>10}  smaller ones'


def held_heading(plan: Plan) -> str:
    """The bytes of the peak, and how much of it is traced to a line or an argument."""
    peak = plan.memory.peak
    named = sum(row.bytes for row in plan.buffers if row.source[1:] != Source()[1:])
    return f'held at the peak: {human_bytes(peak)}, {100 * named // max(peak, 1)} % of it with a source'


def shown_buffers(plan: Plan) -> tuple[Sequence[Buffer], int]:
    """The largest arrays at the peak, up to most of it, and the bytes of the others."""
    shown, rest = 0, plan.memory.peak
    for row in plan.buffers[:_MOST_BUFFERS]:
        if rest <= _LITTLE_LEFT * plan.memory.peak:
            break
        shown, rest = shown + 1, rest - row.bytes
    return plan.buffers[:shown], rest


def held_text(row: Buffer) -> str:
    """The arrays of a row: ``'2 x bf16[4096,1024]'``."""
    array = row.array or 'addresses'
    return array if row.count == 1 else f'{row.count} x {array}'


def _how_known(plan: Plan) -> str:
    if plan.memory.estimated:
        return f' (as XLA for {plan.platform} counts: an estimate)'
    if not plan.quick:
        return ''
    guide = '; only a guide for so little' if plan.memory.peak < _LITTLE else ''
    return f' (quick, as laid out before code is made{guide})'


def memory_taken(plan: Plan) -> str:
    """The memory needed and available; with the gaps between arrays if only these make it too much."""
    memory = plan.memory
    taken, limit = human_bytes(memory.peak), memory.limit
    if limit is not None and memory.peak <= limit < memory.total:
        taken += f', and {human_bytes(memory.total)} with gaps between arrays,'
    return taken if limit is None else f'{taken} of {human_bytes(limit)}'


def _verdict(plan: Plan) -> str:
    fits = '' if plan.fits is None else ': it fits' if plan.fits else ': it does NOT fit'
    return f'{memory_taken(plan)}{fits}'


def _collectives(plan: Plan, width: int) -> Iterable[str]:
    if not plan.collectives:
        yield 'collectives in one call: none'
        return
    ms = '' if plan.known_roofline is None else '; ms: all of them, one after the other'
    yield f'collectives in one call (bytes: the whole array of one group, each time{ms}):'
    heads, rows = collective_cells(plan, _SHOWN)
    yield from table([heads, *rows], width, len(heads) - 1, 3)
    yield from notes_on_collectives(plan, _SHOWN)
    yield ''
    networks = plan.networks
    for axes, kinds in plan.totals.items():
        each = ', '.join(f'{human_bytes(moved)} in {kind}s' for kind, moved in kinds.items())
        yield f'along {_along(axes, networks[axes])}: {each}'


def _batch(plan: Plan, width: int) -> Iterable[str]:
    """What is followed of the batch, after a blank line."""
    lines = wrapped(filter(None, [kept(plan), *lost_lines(plan), advice(plan)]), width)
    return ['', *lines] if lines else []


def notes_on_collectives(plan: Plan, shown: int) -> list[str]:
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


def collective_cells(plan: Plan, shown: int) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of a table of the first collectives; with seconds where these are known."""
    heads, rows = ['collective', 'axes', 'times', 'bytes'], [_cells(row) for row in plan.collectives[:shown]]
    roofline = plan.known_roofline
    if roofline is not None:
        heads.append('ms')
        for cells, (_, seconds) in zip(rows, roofline.collectives, strict=False):
            cells.append(f'{1e3 * seconds:.3g}')
    if any(row.phase != 'other' for row in plan.collectives):
        heads.append('phase')
        for cells, row in zip(rows, plan.collectives, strict=False):
            cells.append(row.phase)
    for cells, row in zip(rows, plan.collectives, strict=False):
        cells.append(_because(row))
    return [*heads, 'because of'], rows


def _cells(row: Collective) -> list[str]:
    return [
        f'{row.kind}, scattered' if row.scattered else row.kind,
        _along(row.axes, row.networks),
        f'{_SIGNS[row.counted]}{row.count}',
        human_bytes(row.bytes),
    ]


def _because(row: Collective) -> str:
    """``'halo exchange: model.py:12 forward'``."""
    why = _WHY.get(row.cause, '')
    if not why and row.partitioned_as and row.kind != 'reduce-scatter':
        why = f'for an {row.partitioned_as}'
    return f'{why}: {row.source}' if why else str(row.source)


def _along(axes: Sequence[str], networks: Sequence[str]) -> str:
    """``'data x fsdp (ici and dcn)'``."""
    over = f' ({" and ".join(networks)})' if networks else ''
    return f'{" x ".join(axes)}{over}'
