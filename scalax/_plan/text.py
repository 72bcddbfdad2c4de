"""How does a plan print? On one screen: memory, then what is sent, along which mesh axes and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from scalax._plan.collectives import Collective
from scalax._plan.hlo_loops import Counted
from scalax._report.pages import visible
from scalax._report.tables import human_bytes, table, terminal_width
from scalax._tree.specs import axis_sizes_text
from scalax.errors import PlanError

if TYPE_CHECKING:
    from scalax._plan.plan import Plan

HEADS = ('collective', 'axes', 'times', 'bytes', 'because of')
_SHOWN = 15
MOST_BUFFERS = 8
_BECAUSE = 4  # the column of sources
_LITTLE = 2**31  # bytes: of smaller programs quick plans were more than 8 % off, such as a product of 1.5 GiB
_SIGNS = {Counted.EXACTLY: '', Counted.AT_LEAST: '>=', Counted.AT_MOST: '<=', Counted.UNKNOWN: '~'}


def render(plan: Plan, width: int | None) -> str:
    """The plan as text, no line of its tables wider than *width* columns (default: the terminal's)."""
    width = terminal_width(width)
    lines = [head(plan), _flops(plan), *_memory(plan), '', *_times(plan), *_collectives(plan, width)]
    return '\n'.join(map(visible, lines))


def head(plan: Plan) -> str:
    """What the plan is of."""
    size = math.prod(plan.mesh.values())
    on = f'{size} {plan.platform} devices' if plan.devices == size else f'{plan.devices} of {size} devices'
    return f'{plan.name} on {on} ({axis_sizes_text(plan.mesh)})'


def verdict(plan: Plan) -> str:
    """How much memory is taken of how much, whether that fits, and how well it is known."""
    return f'{_taken(plan)}{_how_known(plan)}'


def _flops(plan: Plan) -> str:
    """One line; a blank one where there is nothing to say."""
    if not plan.flops and plan.flops_counted is Counted.EXACTLY:
        return ''
    return f'{_SIGNS[plan.flops_counted]}{plan.flops:.4g} flops in one call, on all devices together'


def _times(plan: Plan) -> Iterable[str]:
    """The roofline, or why there is none; of simulated devices nobody expects one."""
    if plan.platform != 'cpu':
        try:
            yield from str(plan.roofline()).splitlines()
        except PlanError as error:
            yield f'no roofline: {error}'
        yield ''


def _memory(plan: Plan) -> Iterable[str]:
    memory = plan.memory
    yield f'memory of each device{_how_known(plan)}: {_taken(plan)}'
    donated = f', of which {human_bytes(memory.donated)} are reused for outputs' if memory.donated else ''
    yield f'  arguments    {human_bytes(memory.arguments):>10}{donated}'
    yield f'  outputs      {human_bytes(memory.outputs):>10}'
    at_once = ', not all at a time' if memory.peak < memory.total else ''
    yield f'  temporaries  {human_bytes(memory.temporaries):>10}{at_once}'
    if memory.peak > memory.total:
        yield f'  vector memory{human_bytes(memory.peak - memory.total):>10}, at least'
    if plan.buffers:
        yield '  the largest, when most is held:'
        yield from (
            f'    {human_bytes(row.bytes):>10}  {row.array}  {row.source}'
            for row in plan.buffers[:MOST_BUFFERS]
        )


def _how_known(plan: Plan) -> str:
    if plan.memory.estimated:
        return f' (as XLA for {plan.platform} counts: an estimate)'
    if not plan.quick:
        return ''
    guide = '; of so little a guide only' if plan.memory.peak < _LITTLE else ''
    return f' (quick, as laid out before code is made{guide})'


def _taken(plan: Plan) -> str:
    peak, limit = human_bytes(plan.memory.peak), plan.memory.limit
    of = '' if limit is None else f' of {human_bytes(limit)}'
    return f'{peak}{of}' + ('' if plan.fits is None else ': it fits' if plan.fits else ': it does NOT fit')


def _collectives(plan: Plan, width: int) -> Iterable[str]:
    if not plan.collectives:
        yield 'collectives in one call: none'
        return
    yield 'collectives in one call (bytes: the whole array of one group, each time):'
    cells = [HEADS, *map(cells_of, plan.collectives[:_SHOWN])]
    yield from table(cells, width, _BECAUSE, 3)
    if len(plan.collectives) > _SHOWN:
        rest = plan.collectives[_SHOWN:]
        moved = human_bytes(sum(row.count * row.bytes for row in rest))
        yield f'... and {len(rest)} more, {moved} together'
    yield ''
    networks = plan.networks
    for axes, kinds in plan.totals.items():
        each = ', '.join(f'{human_bytes(moved)} in {kind}s' for kind, moved in kinds.items())
        yield f'along {_along(axes, networks[axes])}: {each}'


def cells_of(row: Collective) -> tuple[str, ...]:
    """What a row of the table of collectives says in each column."""
    return (
        f'{row.kind}, scattered' if row.scattered else row.kind,
        _along(row.axes, row.networks),
        f'{_SIGNS[row.counted]}{row.count}',
        human_bytes(row.bytes),
        str(row.source),
    )


def _along(axes: Sequence[str], networks: Sequence[str]) -> str:
    """``'data x fsdp (ici and dcn)'``."""
    over = f' ({" and ".join(networks)})' if networks else ''
    return f'{" x ".join(axes)}{over}'
