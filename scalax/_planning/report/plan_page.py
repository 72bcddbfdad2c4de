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
from scalax._planning.report.breakdown import NO_SCOPE, CostEntry, costs_by_phase, costs_by_scope
from scalax._planning.report.partitioning_section import mixing_lines, partitioned_line
from scalax._planning.report.pipeline_section import bubble_figure, pipeline_blocks, pipelines_lead
from scalax._planning.report.plan_data import PlanData
from scalax._planning.report.timeline import Timeline
from scalax._planning.time.roofline import Roofline
from scalax.errors import PlanError

_SIGNS = {Exactness.EXACT: '', Exactness.AT_LEAST: '>=', Exactness.AT_MOST: '<=', Exactness.APPROXIMATE: '~'}
_CAUSES = {
    'resharding': 'gathered in full and sliced again',
    'halo': 'halo exchange',
    'ring': 'ring beside a matmul',
    'padding': 'padding',
    'compiler': 'added by the compiler',
}
_ADVICE = {
    'resharding': (
        'gathered in full and sliced again: XLA found no direct way between two shardings of the value '
        '(it warns of involuntary full rematerialization). Constrain it to an intermediate sharding.'
    ),
    'halo': (
        'halo exchange: a sharded dimension is sliced or shifted. Split a fused weight, such as that of '
        'query, key and value, into separate arrays, or give it a separate dimension for them.'
    ),
}
_MAX_TEXT_ROWS = 15
_CLOSE = 0.2  # as a fraction of the overlapped time
_MIN_DIFFERENCE = 0.01  # of the difference between the schedule and the overlapped time
_MAX_BUFFERS = 20
_DEFAULT_GPU_FRACTION = 0.75  # https://docs.jax.dev/en/latest/gpu_memory_allocation.html
_MAX_REST = 0.1  # as a fraction of the peak
_SMALL_PROGRAM = (
    2**31
)  # bytes; quick plans of smaller programs, such as a matmul of 1.5 GiB, are off by over 8 %


def plan_blocks(plan: PlanData, title: str, level: int = 1) -> list[Block]:
    """Returns a plan as blocks; a *level* above 1 makes it a part of a larger page."""
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
        Section('Forward, backward, update', _phases(plan, roofline), 'on each device'),
        _scopes(plan, roofline),
        *_collectives(plan, roofline),
        Section('Partitioning along the batch', _batch(plan)),
    ]


def runs_on(plan: PlanData) -> str:
    """Describes the devices: ``'64 devices of v5p'``."""
    size = math.prod(plan.mesh.values())
    count = f'{size}' if plan.devices == size else f'{plan.devices} of {size}'
    if plan.hardware is None:
        return f'{count} {plan.platform} devices'
    return f'{count} devices of {plan.hardware.name}'


def headline(plan: PlanData, roofline: Roofline | None) -> Iterator[Figure]:
    """Yields the headline figures of a plan."""
    verdict = 'no limit known' if plan.fits is None else 'fits' if plan.fits else 'does not fit'
    tone: Tone = '' if plan.fits is None else 'good' if plan.fits else 'bad'
    label = 'of the memory of a device' if plan.fits is None else 'the memory of a device'
    label += ', by an estimate' if plan.memory.estimated and plan.fits is not None else ''
    yield Figure(verdict, label, tone, is_badge=True)
    memory = plan.memory
    limit = '; no limit is known' if memory.limit is None else f' of {human_bytes(memory.limit)}'
    share = '' if not memory.limit else f', {three_figures(100 * memory.peak / memory.limit)} %'
    yield Figure(human_bytes(memory.peak), f'peak of memory{limit}{share}')
    if roofline is not None:
        step = roofline.step_seconds
        exactness = '' if roofline.exactness is Exactness.EXACT else f'{roofline.exactness.value} '
        label = f'one call at least; {milliseconds(step.serial)} if nothing overlaps'
        yield Figure(f'{exactness}{milliseconds(step.overlapped)}', label)
        yield Figure(network_text(roofline.bottleneck, roofline.hardware), 'bounds it')
        if plan.schedule:
            yield Figure(milliseconds(plan.schedule.seconds), "by the compiler's schedule")
        if roofline.mfu is not None:
            yield Figure(f'{roofline.mfu:.1%}', 'MFU at most')
    yield from bubble_figure(plan, roofline)
    if plan.flops:
        label = f'the model needs {human_flops(plan.model_flops)}' if plan.model_flops else 'on all devices'
        yield Figure(f'{_SIGNS[plan.flops_exactness]}{human_flops(plan.flops)}', label)


def _excess(plan: PlanData) -> str:
    """Describes how much more the devices compute than the function; empty if it is nothing or unknown."""
    # Loops of unknown length count as one iteration on both sides.
    is_lower_bound = {plan.flops_exactness, plan.device_cost.exactness} == {Exactness.AT_LEAST}
    is_lower_bound |= (plan.flops_exactness, plan.device_cost.exactness) == (
        Exactness.EXACT,
        Exactness.AT_LEAST,
    )
    is_exact = plan.flops_exactness is plan.device_cost.exactness is Exactness.EXACT
    step_flops = plan.flops + plan.idle_flops
    if not (is_exact or is_lower_bound) or plan.device_cost.kernels or not step_flops:
        return ''
    ratio = plan.devices * plan.device_cost.flops / step_flops
    times = f'{Exactness.AT_LEAST.value} {ratio:.3g}' if is_lower_bound else f'{ratio:.3g}'
    return (
        f'the devices compute {times} times that: halos, or work that is not sharded' if ratio >= 1.01 else ''
    )


# --- Memory ---------------------------------------------------------------------------------------


def memory_blocks(plan: PlanData) -> list[Block]:
    """Returns the memory of each device: its parts, and the largest arrays at the peak if they are known."""
    memory, transfers = plan.memory, plan.host_transfers
    verdict = (
        ''
        if plan.fits is None
        else f': it fits{_gpu_fraction_advice(plan)}'
        if plan.fits
        else ': it does NOT fit'
    )
    donated = f', of which {human_bytes(memory.donated)} are reused for outputs' if memory.donated else ''
    gaps = memory.total - memory.peak
    gaps_text = f', of which {human_bytes(gaps)} are gaps at the peak'
    unused = '' if gaps <= 0 else gaps_text if plan.buffers else ', not all live at once'
    unused += '; a full plan may have more' if plan.quick else ''
    parts = [
        ('arguments', memory.arguments, donated),
        ('outputs', memory.outputs, ''),
        ('temporaries', memory.temporaries, unused),
    ]
    if memory.host or transfers.to_host or transfers.from_host:
        sign, sizes = _SIGNS[transfers.exactness], (transfers.to_host, transfers.from_host)
        written, read = (f'{sign}{human_bytes(size)}' for size in sizes)
        traffic = f', {written} are written there and {read} read in one call'
        parts.append(('on the host', memory.host, traffic))
    columns = [Column('part', 'lead'), Column('bytes', 'number'), Column('', 'wide')]
    scale = max(memory.limit or 0, memory.peak, 1)
    rows: list[Row] = [
        (name, Cell(human_bytes(size), size, bar=min(size / scale, 1)), note.removeprefix(', '))
        for name, size, note in (('peak', memory.peak, ''), *parts)
    ]
    return [
        Lines([f'memory of each device{_memory_source(plan)}: {memory_taken(plan)}{verdict}']),
        TextOnly([Lines([f'  {name:11}  {human_bytes(size):>10}{note}' for name, size, note in parts])]),
        HtmlOnly([Table(columns, rows)]),
        *([_largest_buffers(plan)] if plan.buffers else []),
    ]


def _gpu_fraction_advice(plan: PlanData) -> str:
    """Returns advice for a program that needs more of a GPU's memory than JAX allocates by default."""
    fraction = plan.memory.total / plan.memory.limit if plan.platform == 'gpu' and plan.memory.limit else 0.0
    if fraction <= _DEFAULT_GPU_FRACTION:
        return ''
    needed, default = math.ceil(100 * fraction) / 100, _DEFAULT_GPU_FRACTION
    return f' with XLA_PYTHON_CLIENT_MEM_FRACTION={needed} (by default JAX uses {default} of a GPU)'


def memory_taken(plan: PlanData) -> str:
    """Describes the needed and the available memory; with gaps if only these exceed the limit."""
    memory = plan.memory
    needed, limit = human_bytes(memory.peak), memory.limit
    if limit is not None and memory.peak <= limit < memory.total:
        needed += f', and {human_bytes(memory.total)} with gaps between arrays,'
    return needed if limit is None else f'{needed} of {human_bytes(limit)}'


def _memory_source(plan: PlanData) -> str:
    """Describes how the memory was estimated, in parentheses; empty for a complete compilation."""
    if plan.memory.estimated:
        return f' (estimated by XLA for {plan.platform})'
    if not plan.quick:
        return ''
    accuracy = ', a rough guide for small programs' if plan.memory.peak < _SMALL_PROGRAM else ''
    return f' (quick: the layout before code generation{accuracy})'


def _largest_buffers(plan: PlanData) -> Block:
    """Returns a table of the largest arrays at the peak, with the sum of the rest."""
    rows: list[Row] = []
    peak = rest = plan.memory.peak
    for row in plan.buffers[:_MAX_BUFFERS]:
        if rest <= _MAX_REST * peak:
            break
        array = row.array or 'addresses'
        rows.append((row.bytes, array if row.count == 1 else f'{row.count} x {array}', str(row.source)))
        rest -= row.bytes
    if rest > 0:
        rows.append((rest, 'smaller arrays', None))
    attributed = sum(row.bytes for row in plan.buffers if row.source[1:] != Source()[1:])
    columns = [Column('bytes', 'number', human_bytes), Column('array', 'code'), Column('source', 'wide')]
    share = f'{100 * attributed // max(peak, 1)} % with a known source'
    return Collapsible(f'live at the peak: {human_bytes(peak)}, {share}', [Table(columns, rows)])


# --- Seconds --------------------------------------------------------------------------------------


def _seconds(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    """Returns the roofline, or the reason why there is none, with advice."""
    if roofline is not None:
        lines = str(roofline).splitlines()
        return [TextOnly([Lines(lines)]), HtmlOnly([Code('\n'.join(lines))])]
    if plan.hardware is None and plan.platform != 'gpu':
        line = (
            f'No seconds for {plan.device_kind or plan.platform!r} devices. Create the mesh with '
            'MeshShardingHelper.from_topology, or time this program on other hardware:'
        )
        torus = {name: size for name, size in plan.mesh.items() if size > 1}
        return [Lines([line], 'warn'), Code(f"  plan.roofline('v5p', torus={torus})")]
    try:
        plan.roofline()
    except PlanError as error:
        return [Lines([f'No seconds: {error}'], 'warn')]
    return []


def _schedule(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    """Returns the compiler's schedule, and the kernels that make it longer than the roofline if it is."""
    schedule = plan.schedule
    if schedule is None or roofline is None:
        return []
    overlapped = roofline.step_seconds.overlapped
    waits = f', {milliseconds(schedule.waiting)} of them waiting' if schedule.waiting else ''
    line = f"by the compiler's schedule: {milliseconds(schedule.seconds)}{waits}"
    blocks = [Lines([line]), Timeline(schedule.spans, schedule.seconds)]
    if not overlapped or abs(schedule.seconds / overlapped - 1) <= _CLOSE:
        return blocks
    columns = [
        Column('kernel', 'lead'),
        Column('times', 'number'),
        *(Column(head, 'number', milliseconds) for head in ('schedule', 'at least')),
        Column('phase'),
        Column('reason', 'wide'),
    ]
    minimum = _MIN_DIFFERENCE * abs(schedule.seconds - overlapped)
    differing = [row for row in schedule.kernels if abs(row.seconds - row.bound) >= minimum]
    rows: list[Row] = [
        (row.name, row.count, row.seconds, row.bound or None, row.phase, str(row.source))
        for row in sorted(differing, key=lambda row: -abs(row.seconds - row.bound))
    ]
    times = f'{schedule.seconds / overlapped:.3g} times the bound'
    return [
        *blocks,
        Collapsible(
            f'{times}: the kernels that differ most', [Table(columns, rows, max_text_rows=_MAX_TEXT_ROWS)]
        ),
    ]


# --- Phases and modules ---------------------------------------------------------------------------


_AMOUNTS = (
    Column('FLOPs', 'number', human_flops),
    *(Column(head, 'number', human_bytes) for head in ('HBM bytes', 'collectives')),
    *(Column(head, 'number', milliseconds) for head in ('compute', 'hbm', 'network', 'schedule')),
)  # of CostEntry


def _columns(name: str, plan: PlanData) -> list[Column]:
    """Returns the columns of `_row`."""
    return [Column(name, 'lead'), *(_AMOUNTS[i] for i in _known_amounts(plan))]


def _known_amounts(plan: PlanData) -> list[int]:
    """Returns the indices of the fields of `CostEntry` to show: seconds if known, collectives if any."""
    indices = [0, 1, 2] if plan.known_roofline is None else [0, 1, 2, 3, 4, 5]
    indices += [6] if plan.schedule else []
    return indices if plan.collectives else [i for i in indices if i % 3 != 2]


def _row(name: str, entry: CostEntry, plan: PlanData) -> list[Value]:
    """Returns the cost of a phase or a module; None for 0."""
    return [name, *(entry[i] or None for i in _known_amounts(plan))]


def _phases(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    """Returns the cost of each phase of the step; nothing without a gradient."""
    entries = costs_by_phase(plan, roofline)
    if set(entries) <= {'other'}:
        return []
    rows = [_row(phase, entry, plan) for phase, entry in entries.items()]
    return [Table(_columns('phase', plan), rows)]


def _scopes(plan: PlanData, roofline: Roofline | None) -> Section:
    """Returns the cost of modules or functions, including those inside them."""
    entries = costs_by_scope(plan, roofline)
    are_functions = all(name.partition('/')[0].endswith('()') for name, _ in entries if name != NO_SCOPE)
    columns = _columns('function' if are_functions else 'module', plan)
    rows = [_row(name, entry, plan) for name, entry in entries]
    title = 'By function' if are_functions else 'By module and named scope'
    has_several = len({name for name, _ in entries} - {NO_SCOPE}) > 1
    return Section(title, [Table(columns, rows, max_text_rows=_MAX_TEXT_ROWS)] if has_several else [])


# --- Collectives and the batch --------------------------------------------------------------------


def _collectives(plan: PlanData, roofline: Roofline | None) -> list[Block]:
    title = 'Collectives of one call'
    if not plan.collectives:
        return [Section(title, [Lines(['collectives in one call: none'])])]
    ms = '' if roofline is None else '; ms: all executions in sequence'
    lead = f'collectives in one call (bytes: the gathered array of one group, per execution{ms})'
    notes = [advice for cause, advice in _ADVICE.items() if cause in {row.cause for row in plan.collectives}]
    totals = []
    for axes, kinds in plan.totals.items():
        sizes = ', '.join(f'{human_bytes(size)} in {kind}s' for kind, size in kinds.items())
        totals.append(f'along {" x ".join(axes)}{_networks(plan, plan.networks[axes])}: {sizes}')
    return [Section(title, [collective_table(plan), Lines(notes)], lead), Section('', [Lines(totals)])]


def _networks(plan: PlanData, networks: Iterable[str]) -> str:
    """Returns the names of networks, in parentheses."""
    names = ' and '.join(network_text(name, plan.hardware) for name in networks)
    return f' ({names})' if names else ''


def collective_table(plan: PlanData) -> Table:
    """Returns a table of the collectives, with their time if it is known."""
    roofline = plan.known_roofline
    has_phases = any(row.phase != 'other' for row in plan.collectives)
    sizes = [Column(head, 'number', human_bytes) for head in ('bytes', 'total')]
    columns = [Column('collective', 'lead'), Column('axes', 'code'), Column('times', 'number'), *sizes]
    columns += [] if roofline is None else [Column('ms', 'number', lambda time: three_figures(1e3 * time))]
    columns += [Column('phase')] if has_phases else []
    rows: list[Row] = []
    for i, row in enumerate(plan.collectives):
        rows.append(
            [
                f'{row.kind}, scattered' if row.scattered else row.kind,
                f'{" x ".join(row.axes)}{_networks(plan, row.networks)}',
                Cell(f'{_SIGNS[row.exactness]}{row.count:,}', row.count),
                row.bytes,
                row.count * row.bytes,
                *([] if roofline is None else [roofline.collectives[i][1]]),
                *([row.phase] if has_phases else []),
                _reason(row),
            ]
        )

    return Table([*columns, Column('reason', 'wide')], rows, max_text_rows=_MAX_TEXT_ROWS)


def _reason(row: Collective) -> str:
    """Describes why a collective is there: ``'halo exchange: model.py:12 forward'``."""
    cause = _CAUSES.get(row.cause, '')
    if not cause and row.partitioned_as and row.kind != 'reduce-scatter':
        cause = f'for an {row.partitioned_as}'
    source = str(row.source)
    if row.reason:
        source = f'{row.reason}, {source}' if row.source.file else row.reason
    return f'{cause}: {source}' if cause else source


def _batch(plan: PlanData) -> list[Block]:
    """Describes how the step is partitioned along its batch, and which operations mix examples."""
    mixing = [*mixing_lines(plan.propagation)]
    return [Lines([partitioned_line(plan.propagation)]), Lines(mixing, 'warn' if mixing else '')]
