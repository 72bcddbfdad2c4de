"""Plans as blocks: headline figures, memory, seconds, modules, collectives, and the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.render.blocks import (
    Block,
    Cell,
    Code,
    Collapsible,
    Column,
    Figure,
    Figures,
    Heading,
    HtmlOnly,
    Lines,
    Row,
    Section,
    Table,
    TextOnly,
    Tone,
    Value,
)
from scalax._core.render.tables import human_bytes, human_flops, milliseconds, three_figures
from scalax._planning.cost.collectives import Collective
from scalax._planning.hardware.specs import network_text
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.provenance import Source
from scalax._planning.report.batch_section import mixing_lines, partitioned_line
from scalax._planning.report.breakdown import NO_SCOPE, CostEntry, costs_by_phase, costs_by_scope
from scalax._planning.report.pipeline_section import bubble_figure, pipeline_blocks, pipelines_lead
from scalax._planning.report.plan_data import PlanData
from scalax._planning.report.timeline import Timeline
from scalax._planning.time.roofline import Roofline
from scalax.errors import PlanError

_SIGNS = {Exactness.EXACT: '', Exactness.AT_LEAST: '>=', Exactness.AT_MOST: '<=', Exactness.APPROXIMATE: '~'}
_WHY = {
    'resharding': 'gathered in full and sliced again',
    'halo': 'halo exchange',
    'ring': 'ring beside a product',
    'padding': 'padding',
    'compiler': 'added by the compiler',
}
_TRY = {
    'resharding': (
        'gathered in full and sliced again: XLA found no direct way between two shardings of the value '
        '(it warns of involuntary full rematerialization). Constrain it to a sharding in between.'
    ),
    'halo': (
        'halo exchange: a sharded dimension is sliced or shifted. Split a fused weight, as of query, key '
        'and value, into an array for each, or give it a dimension for these.'
    ),
}
_SHOWN = 15  # rows of text
_ALIKE = 0.2  # of the bound
_LITTLE_MORE = 0.01  # of what the schedule takes more than the bound
_MOST_BUFFERS = 20
_OF_GPU = 0.75  # https://docs.jax.dev/en/latest/gpu_memory_allocation.html
_LITTLE_LEFT = 0.1  # of the peak
_LITTLE = 2**31  # bytes: quick plans of smaller programs, such as a product of 1.5 GiB, are over 8 % off


def plan_blocks(plan: PlanData, title: str, level: int = 1) -> list[Block]:
    """A plan as blocks; a title below the first *level* is that of a part of a page that shows more."""
    roofline = plan.known_roofline
    flops = f'{_SIGNS[plan.flops_exactness]}{human_flops(plan.flops)} in one call, on all devices together'
    return [
        Heading(title, plan.mesh, runs_on(plan), level),
        TextOnly([Lines([f'{plan.name} on {runs_on(plan)} ({axis_sizes_text(plan.mesh)})'])]),
        Figures([*headline(plan, roofline)]),
        HtmlOnly([Lines([plan.refusal], 'bad')]),
        TextOnly([Lines([flops] if plan.flops or plan.flops_exactness is not Exactness.EXACT else [])]),
        Lines([_excess(plan)]),
        Lines([f'compiled with {" ".join(plan.flags)}'] if plan.flags else []),
        Section('Memory of each device', memory_blocks(plan)),
        Section('Seconds of one call', _seconds(plan, roofline)),
        Section("The compiler's schedule", _schedule(plan, roofline)),
        Section('Pipelines', pipeline_blocks(plan, roofline), pipelines_lead(plan)),
        Section('Forward, backward, update', _parts(plan, roofline), 'on each device'),
        _scopes(plan, roofline),
        *_collectives(plan, roofline),
        Section('Partitioning along the batch', _batch(plan)),
    ]


def runs_on(plan: PlanData) -> str:
    """The devices: ``'64 devices of v5p'``."""
    size = math.prod(plan.mesh.values())
    many = f'{size}' if plan.devices == size else f'{plan.devices} of {size}'
    if plan.hardware is None:
        return f'{many} {plan.platform} devices'
    return f'{many} devices of {plan.hardware.name}'


def headline(plan: PlanData, roofline: Roofline | None) -> Iterator[Figure]:
    """The headline figures of a plan."""
    said = 'no limit known' if plan.fits is None else 'fits' if plan.fits else 'does not fit'
    tone: Tone = '' if plan.fits is None else 'good' if plan.fits else 'bad'
    of = 'of the memory of a device' if plan.fits is None else 'the memory of a device'
    of += ', by an estimate' if plan.memory.estimated and plan.fits is not None else ''
    yield Figure(said, of, tone, is_badge=True)
    memory = plan.memory
    of = '; no limit is known' if memory.limit is None else f' of {human_bytes(memory.limit)}'
    part = '' if not memory.limit else f', {three_figures(100 * memory.peak / memory.limit)} %'
    yield Figure(human_bytes(memory.peak), f'peak of memory{of}{part}')
    if roofline is not None:
        step = roofline.step_seconds
        known = '' if roofline.exactness is Exactness.EXACT else f'{roofline.exactness.value} '
        label = f'one call at least; {milliseconds(step.serial)} if nothing overlaps'
        yield Figure(f'{known}{milliseconds(step.overlapped)}', label)
        yield Figure(network_text(roofline.bottleneck, roofline.hardware), 'bounds it')
        if plan.schedule:
            yield Figure(milliseconds(plan.schedule.seconds), "by the compiler's schedule")
        if roofline.mfu is not None:
            yield Figure(f'{roofline.mfu:.1%}', 'MFU at most')
    yield from bubble_figure(plan, roofline)
    if plan.flops:
        needs = f'the model needs {human_flops(plan.model_flops)}' if plan.model_flops else 'on all devices'
        yield Figure(f'{_SIGNS[plan.flops_exactness]}{human_flops(plan.flops)}', needs)


def _excess(plan: PlanData) -> str:
    """How much more the devices compute than the function needs; empty if it is nothing, or not known."""
    # Loops of unknown length count as one round on both sides.
    at_least = {plan.flops_exactness, plan.device_cost.exactness} == {Exactness.AT_LEAST}
    at_least |= (plan.flops_exactness, plan.device_cost.exactness) == (Exactness.EXACT, Exactness.AT_LEAST)
    exact = plan.flops_exactness is plan.device_cost.exactness is Exactness.EXACT
    written = plan.flops + plan.idle_flops
    if not (exact or at_least) or plan.device_cost.kernels or not written:
        return ''
    times = plan.devices * plan.device_cost.flops / written
    many = f'{Exactness.AT_LEAST.value} {times:.3g}' if at_least else f'{times:.3g}'
    return f'the devices compute {many} times that: halos, or what is not divided' if times >= 1.01 else ''


# --- Memory ---------------------------------------------------------------------------------------


def memory_blocks(plan: PlanData) -> list[Block]:
    """The memory of each device: its parts, and the largest arrays at the peak if they are known."""
    memory, moves = plan.memory, plan.host_transfers
    fits = '' if plan.fits is None else f': it fits{_more_of_gpu(plan)}' if plan.fits else ': it does NOT fit'
    donated = f', of which {human_bytes(memory.donated)} are reused for outputs' if memory.donated else ''
    gaps = memory.total - memory.peak
    of_which = f', of which {human_bytes(gaps)} are gaps when most is held'
    unused = '' if gaps <= 0 else of_which if plan.buffers else ', not all at a time'
    unused += '; a full plan may have more' if plan.quick else ''
    parts = [
        ('arguments', memory.arguments, donated),
        ('outputs', memory.outputs, ''),
        ('temporaries', memory.temporaries, unused),
    ]
    if memory.host or moves.to_host or moves.from_host:
        sign, each_way = _SIGNS[moves.exactness], (moves.to_host, moves.from_host)
        written, read = (f'{sign}{human_bytes(moved)}' for moved in each_way)
        said = f', {written} are written there and {read} read in one call'
        parts.append(('on the host', memory.host, said))
    columns = [Column('part', 'lead'), Column('bytes', 'number'), Column('', 'wide')]
    of = max(memory.limit or 0, memory.peak, 1)
    rows: list[Row] = [
        (name, Cell(human_bytes(size), size, bar=min(size / of, 1)), said.removeprefix(', '))
        for name, size, said in (('peak', memory.peak, ''), *parts)
    ]
    return [
        Lines([f'memory of each device{_how_known(plan)}: {memory_taken(plan)}{fits}']),
        TextOnly([Lines([f'  {name:11}  {human_bytes(size):>10}{said}' for name, size, said in parts])]),
        HtmlOnly([Table(columns, rows)]),
        *([_held(plan)] if plan.buffers else []),
    ]


def _more_of_gpu(plan: PlanData) -> str:
    """What to set for a program that takes more of a GPU than JAX does by default."""
    part = plan.memory.total / plan.memory.limit if plan.platform == 'gpu' and plan.memory.limit else 0.0
    if part <= _OF_GPU:
        return ''
    needed = math.ceil(100 * part) / 100
    return f' with XLA_PYTHON_CLIENT_MEM_FRACTION={needed} (without it JAX takes {_OF_GPU} of a GPU)'


def memory_taken(plan: PlanData) -> str:
    """The memory needed and available; with the gaps between arrays if only these make it too much."""
    memory = plan.memory
    taken, limit = human_bytes(memory.peak), memory.limit
    if limit is not None and memory.peak <= limit < memory.total:
        taken += f', and {human_bytes(memory.total)} with gaps between arrays,'
    return taken if limit is None else f'{taken} of {human_bytes(limit)}'


def _how_known(plan: PlanData) -> str:
    """How well the memory is known, in brackets; empty if a compiler has made the program."""
    if plan.memory.estimated:
        return f' (as XLA for {plan.platform} counts: an estimate)'
    if not plan.quick:
        return ''
    guide = '; only a guide for so little' if plan.memory.peak < _LITTLE else ''
    return f' (quick, as laid out before code is made{guide})'


def _held(plan: PlanData) -> Block:
    """The largest arrays at the peak, up to most of it, and the sum of the rest."""
    rows: list[Row] = []
    peak = rest = plan.memory.peak
    for row in plan.buffers[:_MOST_BUFFERS]:
        if rest <= _LITTLE_LEFT * peak:
            break
        array = row.array or 'addresses'
        rows.append((row.bytes, array if row.count == 1 else f'{row.count} x {array}', str(row.source)))
        rest -= row.bytes
    if rest > 0:
        rows.append((rest, 'smaller ones', None))
    named = sum(row.bytes for row in plan.buffers if row.source[1:] != Source()[1:])
    columns = [Column('bytes', 'number', human_bytes), Column('array', 'code'), Column('what it is', 'wide')]
    share = f'{100 * named // max(peak, 1)} % of it with a source'
    return Collapsible(f'held at the peak: {human_bytes(peak)}, {share}', [Table(columns, rows)])


# --- Seconds --------------------------------------------------------------------------------------


def _seconds(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    """The roofline, or why there is none and what to do."""
    if roofline is not None:
        lines = str(roofline).splitlines()
        return [TextOnly([Lines(lines)]), HtmlOnly([Code('\n'.join(lines))])]
    if plan.hardware is None and plan.platform != 'gpu':
        line = (
            f'No seconds for {plan.device_kind or plan.platform!r} devices. Make the mesh with '
            'MeshShardingHelper.from_topology, or time this program on chips that you name:'
        )
        torus = {name: size for name, size in plan.mesh.items() if size > 1}
        return [Lines([line], 'warn'), Code(f"  plan.roofline('v5p', torus={torus})")]
    try:
        plan.roofline()
    except PlanError as error:
        return [Lines([f'No seconds: {error}'], 'warn')]
    return []


def _schedule(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    """The time along the compiler's schedule, and what makes it so if it is not about the bound."""
    schedule = plan.schedule
    if schedule is None or roofline is None:
        return []
    bound = roofline.step_seconds.overlapped
    waits = f', {milliseconds(schedule.waiting)} of them waiting' if schedule.waiting else ''
    line = f"by the compiler's schedule: {milliseconds(schedule.seconds)}{waits}"
    shown = [Lines([line]), Timeline(schedule.spans, schedule.seconds)]
    if not bound or abs(schedule.seconds / bound - 1) <= _ALIKE:
        return shown
    columns = [
        Column('kernel', 'lead'),
        Column('times', 'number'),
        *(Column(head, 'number', milliseconds) for head in ('schedule', 'at least')),
        Column('phase'),
        Column('because of', 'wide'),
    ]
    little = _LITTLE_MORE * abs(schedule.seconds - bound)
    differ = [row for row in schedule.kernels if abs(row.seconds - row.bound) >= little]
    rows: list[Row] = [
        (row.name, row.count, row.seconds, row.bound or None, row.phase, str(row.source))
        for row in sorted(differ, key=lambda row: -abs(row.seconds - row.bound))
    ]
    times = f'{schedule.seconds / bound:.3g} times the bound'
    return [
        *shown,
        Collapsible(f'{times}: the kernels that differ most', [Table(columns, rows, max_text_rows=_SHOWN)]),
    ]


# --- Parts of the step and modules ----------------------------------------------------------------


_AMOUNTS = (
    Column('FLOPs', 'number', human_flops),
    *(Column(head, 'number', human_bytes) for head in ('HBM bytes', 'collectives')),
    *(Column(head, 'number', milliseconds) for head in ('compute', 'hbm', 'network', 'schedule')),
)  # of CostEntry


def _columns(name: str, plan: PlanData) -> list[Column]:
    """The columns of `_row`."""
    return [Column(name, 'lead'), *(_AMOUNTS[place] for place in _known(plan))]


def _known(plan: PlanData) -> list[int]:
    """The places of the sums that a plan has: those of collectives if there are any, seconds if known."""
    places = [0, 1, 2] if plan.known_roofline is None else [0, 1, 2, 3, 4, 5]
    places += [6] if plan.schedule else []
    return places if plan.collectives else [place for place in places if place % 3 != 2]


def _row(name: str, each: CostEntry, plan: PlanData) -> list[Value]:
    """What a part of a step or a module computes and moves; nothing for 0."""
    return [name, *(each[place] or None for place in _known(plan))]


def _parts(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    """What each part of the step computes and moves; nothing without a gradient."""
    found = costs_by_phase(plan, roofline)
    if set(found) <= {'other'}:
        return []
    rows = [_row(part, each, plan) for part, each in found.items()]
    return [Table(_columns('phase', plan), rows)]


def _scopes(plan: PlanData, roofline: Roofline | None) -> Section:
    """What modules or functions compute and move, those inside of them included."""
    found = costs_by_scope(plan, roofline)
    are_functions = all(name.partition('/')[0].endswith('()') for name, _ in found if name != NO_SCOPE)
    columns = _columns('function' if are_functions else 'module', plan)
    rows = [_row(name, each, plan) for name, each in found]
    title = 'By function' if are_functions else 'By module and named scope'
    several = len({name for name, _ in found} - {NO_SCOPE}) > 1
    return Section(title, [Table(columns, rows, max_text_rows=_SHOWN)] if several else [])


# --- Collectives and the batch --------------------------------------------------------------------


def _collectives(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    title = 'Collectives of one call'
    if not plan.collectives:
        return [Section(title, [Lines(['collectives in one call: none'])])]
    ms = '' if roofline is None else '; ms: all of them, one after the other'
    lead = f'collectives in one call (bytes: the full array of one group, each time{ms})'
    notes = [said for cause, said in _TRY.items() if cause in {row.cause for row in plan.collectives}]
    along = []
    for axes, kinds in plan.totals.items():
        each = ', '.join(f'{human_bytes(moved)} in {kind}s' for kind, moved in kinds.items())
        over = _over(plan, plan.networks[axes])
        along.append(f'along {" x ".join(axes)}{over}: {each}')
    return [Section(title, [collective_table(plan), Lines(notes)], lead), Section('', [Lines(along)])]


def _over(plan: PlanData, networks: Iterable[str]) -> str:
    """The networks, in brackets."""
    names = ' and '.join(network_text(name, plan.hardware) for name in networks)
    return f' ({names})' if names else ''


def collective_table(plan: PlanData) -> Table:
    """The collectives, with seconds where these are known."""
    roofline = plan.known_roofline
    has_phases = any(row.phase != 'other' for row in plan.collectives)
    sizes = [Column(head, 'number', human_bytes) for head in ('bytes', 'total')]
    columns = [Column('collective', 'lead'), Column('axes', 'code'), Column('times', 'number'), *sizes]
    columns += [] if roofline is None else [Column('ms', 'number', lambda time: three_figures(1e3 * time))]
    columns += [Column('phase')] if has_phases else []
    rows: list[Row] = []
    for place, row in enumerate(plan.collectives):
        rows.append(
            [
                f'{row.kind}, scattered' if row.scattered else row.kind,
                f'{" x ".join(row.axes)}{_over(plan, row.networks)}',
                Cell(f'{_SIGNS[row.exactness]}{row.count:,}', row.count),
                row.bytes,
                row.count * row.bytes,
                *([] if roofline is None else [roofline.collectives[place][1]]),
                *([row.phase] if has_phases else []),
                _because(row),
            ]
        )

    return Table([*columns, Column('because of', 'wide')], rows, max_text_rows=_SHOWN)


def _because(row: Collective) -> str:
    """Why it is there: ``'halo exchange: model.py:12 forward'``."""
    why = _WHY.get(row.cause, '')
    if not why and row.partitioned_as and row.kind != 'reduce-scatter':
        why = f'for an {row.partitioned_as}'
    source = str(row.source)
    if row.reason:
        source = f'{row.reason}, {source}' if row.source.file else row.reason
    return f'{why}: {source}' if why else source


def _batch(plan: PlanData) -> list[Block]:
    """Returns how the step is partitioned along its batch, and what mixes examples; or why it is not."""
    mixing = [*mixing_lines(plan.propagation)]
    return [Lines([partitioned_line(plan.propagation)]), Lines(mixing, 'warn' if mixing else '')]
