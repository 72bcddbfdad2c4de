"""Plans as text: memory, seconds, modules, and the collectives with their mesh axes and sources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from scalax._plan.batch import kept, lost_lines
from scalax._plan.buffers import Buffer
from scalax._plan.figure_data import Scope, scopes, sums_by_part
from scalax._plan.formulas import Counted
from scalax._plan.plan_data import PlanData
from scalax._plan.plan_tables import SIGNS, collective_table, notes_on_collectives, sums_cells, sums_columns
from scalax._plan.provenance import Source
from scalax._report.blocks import Cell, Column, Tone, text_table
from scalax._report.pages import visible
from scalax._report.tables import (
    human_bytes,
    human_flops,
    terminal_width,
    wrapped,
)
from scalax._tree.specs import axis_sizes_text
from scalax.errors import PlanError

_SHOWN = 15
_LITTLE_FLOPS = 0.005  # of all
_TORUS_AXES = 3  # of the torus of a v5p
_MOST_BUFFERS = 20
_LITTLE_LEFT = 0.1  # of the peak
_LITTLE = 2**31  # bytes: quick plans of smaller programs, such as a product of 1.5 GiB, are over 8 % off


def render(plan: PlanData, width: int | None) -> str:
    """The plan as text, no line of its tables wider than *width* columns (default: the terminal's)."""
    width = terminal_width(width)
    caveat = wrapped(filter(None, [plan.not_compiled_for]), width)
    lines = [
        *(head(plan), *caveat, _flops(plan), *wrapped(filter(None, [excess(plan)]), width)),
        *(*memory_lines(plan), ''),
        *_times(plan, width),
        *_parts(plan, width),
        *_scopes(plan, width),
        *_collectives(plan, width),
    ]
    return '\n'.join([*map(visible, lines), *_batch(plan, width)])


def head(plan: PlanData) -> str:
    """The name of the step, and what it runs on."""
    return f'{plan.name} on {runs_on(plan)} ({axis_sizes_text(plan.mesh)})'


def runs_on(plan: PlanData) -> str:
    """The devices: ``'64 devices of v5p'``."""
    size = math.prod(plan.mesh.values())
    many = f'{size}' if plan.devices == size else f'{plan.devices} of {size}'
    if plan.hardware is None or plan.simulates:
        kind = f'{plan.platform} devices'
        return f'{many} {kind} for {plan.simulates}' if plan.simulates else f'{many} {kind}'
    return f'{many} devices of {plan.hardware.name}'


def verdict(plan: PlanData) -> str:
    """The memory needed and available, whether the program fits, and how well that is known."""
    return f'{_verdict(plan)}{how_known(plan)}'


def shown_fits(plan: PlanData) -> tuple[str, Tone]:
    """Whether the program fits, for a badge, and the tone of that."""
    if plan.fits is None:
        return 'no limit known', ''
    return ('fits', 'good') if plan.fits else ('does not fit', 'bad')


def _flops(plan: PlanData) -> str:
    """One line; blank without any flops."""
    if not plan.flops and plan.flops_counted is Counted.EXACTLY:
        return ''
    return f'{SIGNS[plan.flops_counted]}{human_flops(plan.flops)} in one call, on all devices together'


def excess(plan: PlanData) -> str:
    """How much more the devices compute than the function needs; empty if it is nothing, or not known."""
    exact = plan.flops_counted is plan.work.counted is Counted.EXACTLY and not plan.work.kernels
    times = plan.devices * plan.work.flops / plan.flops if exact and plan.flops else 0.0
    return (
        f'the devices compute {times:.3g} times that: halos, or what is not divided' if times >= 1.01 else ''
    )


def _times(plan: PlanData, width: int) -> Iterable[str]:
    """The roofline, or why there is none and what to do."""
    roofline = plan.known_roofline
    if roofline is not None:
        # What it was not compiled for is above.
        yield from (line for line in str(roofline).splitlines() if line != plan.not_compiled_for)
    lines, code = no_seconds(plan)
    yield from wrapped(lines, width)
    yield from (f'  {line}' for line in code)
    yield ''


def no_seconds(plan: PlanData) -> tuple[list[str], list[str]]:
    """Why there are no seconds, and what to do; and code for it. Nothing if there are."""
    if plan.known_roofline is not None:
        return [], []
    if plan.hardware is None:
        axes = {name: size for name, size in plan.mesh.items() if size > 1}
        torus = dict(list(axes.items())[:_TORUS_AXES])
        line = (
            f'No seconds for {plan.device_kind or plan.platform!r} devices. Make the mesh with '
            'MeshShardingHelper.from_topology, or time this program on chips that you name:'
        )
        return [line], [f"plan.roofline('v5p', torus={torus})"]
    try:
        plan.roofline()
    except PlanError as error:
        return [f'No seconds: {error}'], []
    return [], []


def _parts(plan: PlanData, width: int) -> Iterable[str]:
    """What each part of the step computes and moves; nothing without a gradient."""
    roofline = plan.known_roofline
    found = sums_by_part(plan, roofline)
    if set(found) <= {'other'}:
        return
    rows = [[Cell(part), *sums_cells(each, plan, roofline)] for part, each in found.items()]
    yield 'on each device:'
    yield from text_table([Column('part'), *sums_columns(plan, roofline)], rows, width)
    yield ''


def _scopes(plan: PlanData, width: int) -> Iterable[str]:
    """The modules that take the most, each below the one that it is in."""
    roofline = plan.known_roofline
    top = scopes(plan, roofline)
    rows = []
    for level, name, scope in _largest_scopes(top):
        rows.append([Cell(f'{"  " * level}{name}'), *sums_cells(scope.sums, plan, roofline)])
    if len(rows) < 2:
        return
    head = Column('function' if top.is_of_functions else 'module')
    yield from text_table([head, *sums_columns(plan, roofline)], rows, width)
    yield ''


def _largest_scopes(top: Scope) -> list[tuple[int, str, Scope]]:
    """The scopes with the most flops, each with its level and name, in the order of the tree."""
    every = [*_walk(top, 0, '')]
    most = sorted(every, key=lambda found: (-found[2].sums.flops, -found[2].sums.moved, found[0]))
    least = top.sums.flops * _LITTLE_FLOPS
    kept = [id(scope) for *_, scope in most[:_SHOWN] if scope.sums.flops > least or not top.sums.flops]
    return [found for found in every if id(found[2]) in kept]


def _walk(scope: Scope, level: int, outside: str) -> Iterator[tuple[int, str, Scope]]:
    """All scopes inside of one; one of which another has all flops shares its line."""
    for each in scope.inside.values():
        name = f'{outside}{each.name}'
        if any(inner.sums.flops == each.sums.flops > 0 for inner in each.inside.values()):
            yield from _walk(each, level, f'{name}/')
        else:
            yield level, name, each
            yield from _walk(each, level + 1, '')


def memory_lines(plan: PlanData) -> Iterable[str]:
    """The memory of each device: its parts, and the largest arrays at the peak if they are known."""
    memory = plan.memory
    yield f'memory of each device{how_known(plan)}: {_verdict(plan)}'
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


def moved_to_host(plan: PlanData) -> str:
    """What a device and its host exchange; empty if the program does not use the memory of the host."""
    moves = plan.host_moves
    if not (plan.memory.host or moves.to_host or moves.from_host):
        return ''
    sign = SIGNS[moves.counted]
    return (
        f'{sign}{human_bytes(moves.to_host)} are written there and {sign}{human_bytes(moves.from_host)} '
        'read in one call'
    )


def _held(plan: PlanData) -> Iterable[str]:
    """The largest arrays at the peak and the sum of the rest: the lines add up to the peak."""
    shown, rest = shown_buffers(plan)
    yield f'  {held_heading(plan)}:'
    yield from (f'    {human_bytes(row.bytes):>10}  {held_text(row)}  {row.source}' for row in shown)
    if rest > 0:
        yield f'    {human_bytes(rest):>10}  smaller ones'


def held_heading(plan: PlanData) -> str:
    """The bytes of the peak, and how much of it is traced to a line or an argument."""
    peak = plan.memory.peak
    named = sum(row.bytes for row in plan.buffers if row.source[1:] != Source()[1:])
    return f'held at the peak: {human_bytes(peak)}, {100 * named // max(peak, 1)} % of it with a source'


def shown_buffers(plan: PlanData) -> tuple[Sequence[Buffer], int]:
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


def how_known(plan: PlanData) -> str:
    """How well the memory is known, in brackets; empty if a compiler has made the program."""
    if plan.memory.estimated:
        return f' (as XLA for {plan.platform} counts: an estimate)'
    if not plan.quick:
        return ''
    guide = '; only a guide for so little' if plan.memory.peak < _LITTLE else ''
    return f' (quick, as laid out before code is made{guide})'


def memory_taken(plan: PlanData) -> str:
    """The memory needed and available; with the gaps between arrays if only these make it too much."""
    memory = plan.memory
    taken, limit = human_bytes(memory.peak), memory.limit
    if limit is not None and memory.peak <= limit < memory.total:
        taken += f', and {human_bytes(memory.total)} with gaps between arrays,'
    return taken if limit is None else f'{taken} of {human_bytes(limit)}'


def _verdict(plan: PlanData) -> str:
    fits = '' if plan.fits is None else ': it fits' if plan.fits else ': it does NOT fit'
    return f'{memory_taken(plan)}{fits}'


def _collectives(plan: PlanData, width: int) -> Iterable[str]:
    if not plan.collectives:
        yield 'collectives in one call: none'
        return
    ms = '' if plan.known_roofline is None else '; ms: all of them, one after the other'
    yield f'collectives in one call (bytes: the whole array of one group, each time{ms}):'
    yield from text_table(*collective_table(plan, _SHOWN), width, -1)
    yield from notes_on_collectives(plan, _SHOWN)
    yield ''
    networks = plan.networks
    for axes, kinds in plan.totals.items():
        each = ', '.join(f'{human_bytes(moved)} in {kind}s' for kind, moved in kinds.items())
        over = f' ({" and ".join(networks[axes])})' if networks[axes] else ''
        yield f'along {" x ".join(axes)}{over}: {each}'


def _batch(plan: PlanData, width: int) -> Iterable[str]:
    """What is followed of the batch, after a blank line."""
    lines = wrapped(filter(None, [kept(plan.followed), *lost_lines(plan.followed)]), width)
    return ['', *lines] if lines else []
