"""Plans as HTML: headline figures, memory, seconds, modules, collectives, and the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalax._follow.followed_batch import kept_cells, lost_cells
from scalax._plan.batch import kept, largest_loss
from scalax._plan.figure_data import (
    STEP,
    Scope,
    Sums,
    bound_texts,
    memory_parts,
    scopes,
    sums_by_part,
    time_parts,
)
from scalax._plan.formulas import Counted
from scalax._plan.plan_data import PlanData
from scalax._plan.plan_tables import SIGNS, collective_table, notes_on_collectives, sums_cells, sums_columns
from scalax._plan.roofline import Roofline
from scalax._plan.text import (
    excess,
    held_heading,
    held_text,
    how_known,
    moved_to_host,
    no_seconds,
    runs_on,
    shown_buffers,
    shown_fits,
)
from scalax._plan.torus import line_text
from scalax._report import blocks
from scalax._report.blocks import Cell, Column, Figure, Kind, Node, Part
from scalax._report.pages import escape
from scalax._report.tables import human_bytes, human_flops, milliseconds, three_figures
from scalax.errors import plural

MOST_ROWS = 100


def render_fragment(plan: PlanData) -> str:
    """A plan for the output of a notebook."""
    return blocks.fragment(plan_blocks(plan, f'Plan of {plan.name}'))


def render_page(plan: PlanData, title: str) -> str:
    """A plan as a page of HTML that loads nothing."""
    return blocks.page(title, plan_blocks(plan, title))


def plan_blocks(plan: PlanData, title: str, level: int = 1) -> str:
    """A plan as blocks; a title below the first *level* is that of a part of a page that shows more."""
    roofline = plan.known_roofline
    return ''.join(
        [
            blocks.heading(title, plan.mesh, runs_on(plan), level),
            blocks.figures(headline(plan, roofline)),
            *_callouts(plan),
            blocks.section('Memory of each device', _memory(plan)),
            blocks.section('Seconds of one call', _times(plan, roofline)),
            blocks.section('Forward, backward, update', _parts(plan, roofline)),
            blocks.section(*_scopes(plan, roofline)),
            blocks.section('Collectives of one call', _collectives(plan, roofline)),
            blocks.section('Rows of the batch', _batch(plan)),
        ]
    )


def headline(plan: PlanData, roofline: Roofline | None) -> Iterator[Figure]:
    """The headline figures of a plan."""
    said, tone = shown_fits(plan)
    of = 'of the memory of a device' if plan.fits is None else 'the memory of a device'
    of += ', by an estimate' if plan.memory.estimated and plan.fits is not None else ''
    yield Figure(said, of, tone, is_badge=True)
    memory = plan.memory
    of = '; no limit is known' if memory.limit is None else f' of {human_bytes(memory.limit)}'
    part = '' if not memory.limit else f', {three_figures(100 * memory.peak / memory.limit)} %'
    yield Figure(human_bytes(memory.peak), f'peak of memory{of}{part}')
    if roofline is not None:
        for label, value in bound_texts(roofline).items():
            yield Figure(value, label)
    if plan.flops:
        needs = plan.model_flops and f'the model needs {human_flops(plan.model_flops)}'
        more = excess(plan) and f'; {excess(plan)}'
        yield Figure(
            f'{SIGNS[plan.flops_counted]}{human_flops(plan.flops)}', f'{needs or "on all devices"}{more}'
        )


def _callouts(plan: PlanData) -> Iterator[str]:
    if plan.not_compiled_for:
        yield blocks.callout([plan.not_compiled_for], 'warn')
    if plan.refusal:
        yield blocks.callout([plan.refusal], 'bad')
    if said := largest_loss(plan.followed):
        yield blocks.callout([said], 'warn')
    lines, code = no_seconds(plan)
    if lines:
        yield blocks.callout(lines, code='\n'.join(code))


def _memory(plan: PlanData) -> str:
    parts, memory = memory_parts(plan.memory), plan.memory
    body = blocks.bar(parts, memory.limit or 0, memory.limit, is_tall=True) + blocks.legend(parts)
    known = how_known(plan).strip(' ()')
    notes = [f'{known[:1].upper()}{known[1:]}.'] if known else []
    if memory.limit is not None and memory.peak <= memory.limit < memory.total:
        notes.append(f'With the gaps between arrays it takes {human_bytes(memory.total)}.')
    if memory.donated:
        notes.append(f'{human_bytes(memory.donated)} of the arguments are reused for outputs.')
    if moved := moved_to_host(plan):
        notes.append(f'on the host: {human_bytes(memory.host)}, {moved}')
    body += blocks.notes(notes)
    if plan.buffers:
        largest, rest = shown_buffers(plan)
        rows = [
            [Cell(human_bytes(row.bytes), row.bytes), Cell(held_text(row)), Cell(str(row.source))]
            for row in largest
        ]
        rows += [[Cell(human_bytes(rest), rest), Cell('smaller ones'), Cell('')]] if rest > 0 else []
        columns = [Column('bytes', 'number'), Column('array', 'code'), Column('what it is', 'wide')]
        body += blocks.fold(held_heading(plan), blocks.table(columns, rows))
    return body


def _times(plan: PlanData, roofline: Roofline | None) -> str:
    if roofline is None:
        return ''
    shown = time_parts(plan, roofline)
    rows = [
        (_unit(name, plan, roofline), parts, milliseconds(roofline.parts[name]), name == roofline.bound)
        for name, parts in shown.items()
    ]
    kinds = {part.kind for parts in shown.values() for part in parts}
    legend = (
        blocks.legend(Part(kind, 0, '', kind) for kind in STEP if kind in kinds) if kinds - {'other'} else ''
    )
    ways = [
        f'{row.name}: {" and ".join(map(line_text, row.lines))}'
        for row in roofline.communication
        if row.lines
    ]
    known = '' if roofline.counted is Counted.EXACTLY else f'Seconds are {roofline.counted.value} these. '
    note = (
        f'{known}A call takes at least the longest of these, or the phases one after the other; if nothing '
        'overlaps, their sum.'
    )
    return (
        legend
        + blocks.bars(rows, max(roofline.parts.values(), default=0) or 1)
        + blocks.notes([*filter(None, [note, '; '.join(ways), roofline.unknown_text])])
    )


def _unit(name: str, plan: PlanData, roofline: Roofline) -> str:
    """The name of a part of a roofline, mesh axes in their colours."""
    for row in roofline.communication:
        if row.name == name:
            axes = '+'.join(blocks.axis_name(axis, plan.mesh) for axis in row.axes)
            return f'{escape(row.network)}:{axes}'
    return escape(name)


def _parts(plan: PlanData, roofline: Roofline | None) -> str:
    found = sums_by_part(plan, roofline)
    if set(found) <= {'other'}:
        return ''
    total = Sums()
    for each in found.values():
        total.add(each)
    rows = [
        [Cell(part, html=f'{blocks.swatch(part)}{part}'), *sums_cells(each, plan, roofline)]
        for part, each in found.items()
    ]
    rows += [[Cell('all'), *sums_cells(total, plan, roofline)]] if len(rows) > 1 else []
    columns = [Column('part', 'lead'), *sums_columns(plan, roofline)]
    return blocks.table(columns, rows, best=len(rows) - 1 if len(rows) > 1 else None) + blocks.notes(
        ['On each device. Bytes of collectives are those of the whole array of a group.']
    )


def _scopes(plan: PlanData, roofline: Roofline | None) -> tuple[str, str]:
    """The tree of modules or functions, and what it is called."""
    top = scopes(plan, roofline)
    if len(top.inside) == 0:
        return '', ''
    whole = top.sums.compute.total() if roofline is not None else 0.0
    columns = [Column('function' if top.is_of_functions else 'module or scope')]
    columns += [*sums_columns(plan, roofline), *([Column('share of compute', 'number')] if whole else [])]
    body = blocks.tree(columns, [_node(each, plan, roofline, whole) for each in top.inside.values()])
    return ('By function' if top.is_of_functions else 'By module and named scope'), body


def _node(scope: Scope, plan: PlanData, roofline: Roofline | None, whole: float) -> Node:
    cells = sums_cells(scope.sums, plan, roofline)
    if whole:
        compute = scope.sums.compute
        parts = [
            Part(part, compute[part], milliseconds(compute[part]), part) for part in STEP if compute[part]
        ]
        share = f'<span class="plain">{three_figures(100 * compute.total() / whole)} %</span>'
        cells.append(
            Cell(key=compute.total(), html=f'{share}{blocks.bar(parts, whole)}') if parts else Cell()
        )
    return Node(scope.name, cells, [_node(each, plan, roofline, whole) for each in scope.inside.values()])


def _collectives(plan: PlanData, roofline: Roofline | None) -> str:
    if not plan.collectives:
        return blocks.notes(['none'])
    notes = [
        f'{plural(len(plan.collectives), "row")}. Bytes are those of the whole array of one group, '
        'each time; the total is that of all times.',
        *(['Milliseconds are those of all times, one after the other.'] if roofline is not None else []),
        *notes_on_collectives(plan, MOST_ROWS),
    ]
    table = blocks.table(*collective_table(plan, MOST_ROWS))
    return _along(plan, roofline) + blocks.scrolled(table) + blocks.notes(notes)


def _along(plan: PlanData, roofline: Roofline | None) -> str:
    """A card for each set of mesh axes that collectives run along."""
    cards = []
    for axes, kinds in plan.totals.items():
        networks = ' and '.join(plan.networks[axes])
        moved = ''.join(f'<li>{human_bytes(size)} in {escape(kind)}s</li>' for kind, size in kinds.items())
        head = f'{blocks.axis_names(axes, plan.mesh)}{f" ({networks})" if networks else ""}'
        times = [] if roofline is None else [s for row, s in roofline.collectives if row.axes == axes]
        seconds = f'{milliseconds(sum(times))}, ' if times else ''
        summary = f'<p><b>{seconds}{human_bytes(sum(kinds.values()))}</b></p>'
        cards.append(f'<h3>{head}</h3>{summary}<ul class="lines">{moved}</ul>')
    return blocks.cards(cards)


def _batch(plan: PlanData) -> str:
    """What is followed of the batch: the places where rows are lost, and the values that are kept."""
    body = blocks.notes(filter(None, [kept(plan.followed)]))
    if plan.followed is not None and plan.followed.lost:
        kinds: list[Kind] = ['lead', '', '', 'number', 'code']
        keys: list[float] = [each.bytes for each in plan.followed.lost]
        body += blocks.callout(['Rows of the batch are lost at:'], 'warn')
        body += _first_rows(lost_cells(plan.followed), kinds, keys)
    if plan.followed is not None and plan.followed.kept:
        kinds = ['lead', '', 'number', 'code', 'code']
        keys = [each.count for each in plan.followed.kept]
        many = f'The {plural(len(keys), "kind")} of values that are kept with their rows'
        body += blocks.fold(many, _first_rows(kept_cells(plan.followed), kinds, keys))
    return body


def _first_rows(cells: Sequence[Sequence[str]], kinds: Sequence[Kind], keys: Sequence[float]) -> str:
    """A table of texts, and how many rows it leaves out; *keys* are those of its column of numbers."""
    heads, *rows = cells
    columns = [Column(head, kind) for head, kind in zip(heads, kinds, strict=True)]
    shown = [
        [Cell(text, key if kind == 'number' else None) for text, kind in zip(row, kinds, strict=True)]
        for row, key in zip(rows[:MOST_ROWS], keys, strict=False)
    ]
    rest = len(rows) - MOST_ROWS
    return blocks.table(columns, shown) + blocks.notes([f'... and {rest} more'] if rest > 0 else [])
