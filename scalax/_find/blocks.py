"""What was found, as blocks: the rule, what each place saves, and the meshes that were tried."""

from __future__ import annotations

from scalax._find.outcome import FoundData
from scalax._find.source import rule_code, spec_code
from scalax._plan.blocks import headline
from scalax._report.blocks import Block, Cell, Code, Column, Figures, Heading, Lines, Row, Section, Table
from scalax._report.tables import human_bytes, milliseconds
from scalax._search.objective import EQUAL
from scalax._tree.specs import axis_sizes_text
from scalax.errors import plural


def found_blocks(found: FoundData, title: str) -> list[Block]:
    """What was found, as blocks, without the plan."""
    return [
        Heading(title, found.mesh, f'on {found.topology}' if found.topology else ''),
        Figures([*headline(found.plan, found.plan.known_roofline)]),
        Section('', [Lines(_head(found))]),
        Section('The rule', [Code(rule_code(found.rule).rstrip('\n'))]),
        Section('Places', [_groups(found)], 'What moving one group to its next best place costs'),
        Section('Meshes', [_meshes(found)], 'The best layout of each mesh and placement of the batch'),
    ]


def _head(found: FoundData) -> list[str]:
    """What was found, in a few lines."""
    where = found.topology or f'{found.plan.devices} {found.plan.platform} devices'
    fits = {True: 'fits', False: 'does not fit', None: 'memory limit unknown'}[found.fits]
    peak = human_bytes(found.memory)
    lines = [
        f'{axis_sizes_text(found.mesh)} on {where}, batch {spec_code(found.batch)}: {fits} '
        f'({peak} a device), at least {milliseconds(found.bound)}, '
        f'{milliseconds(found.estimate)} if nothing overlaps'
    ]
    lines += filter(None, [found.plan.not_compiled_for])
    if found.lower_bound is not None:
        lines.append(
            f'all operations take {milliseconds(found.lower_bound)} if they are divided evenly: no layout '
            f'is faster; this one takes at least {found.bound / found.lower_bound:.2f} times that, '
            f'{found.estimate / found.lower_bound:.2f} times if nothing overlaps'
        )
    if not found.fits and found.plan.buffers:
        first = found.plan.buffers[0]
        lines.append(f'nothing that was tried fits; the largest array at the peak is {first}')
    ends = {
        '': 'until nothing got better',
        'time': 'until the time was up; more may be found with a larger budget_s',
        'stopped': 'until it was stopped',
    }
    lines.append(f'{plural(found.tried, "layout")} in {found.seconds:.0f} s, {ends[found.ended]}')
    return lines


def _groups(found: FoundData) -> Table:
    """A row for each group: its place, the next best one, and what that costs more."""
    rows: list[Row] = []
    for group in found.groups:
        place = group.name, spec_code(group.spec)
        if group.next_spec is None:
            rows.append([*place, None, None, None, None])
            continue
        if not group.fits:  # it may have no program, and no seconds
            seconds = 'does not fit'
        elif abs(group.seconds) < EQUAL * (found.bound + found.estimate) / 2:
            seconds = 'nearly equal'
        else:
            seconds = f'{_sign(group.seconds)}{milliseconds(abs(group.seconds))}'
        moved = ', '.join(f'{axes} {_more(size)}' for axes, size in group.moved.items() if size)
        rows.append([*place, spec_code(group.next_spec), Cell(seconds, group.seconds), group.memory, moved])
    heads = Column('group', 'lead'), Column('spec', 'code'), Column('next best', 'code')
    numbers = Column('seconds', 'number'), Column('memory', 'number', _more)
    return Table([*heads, *numbers, Column('bytes', 'code')], rows)


def _meshes(found: FoundData) -> Table:
    """A row for each mesh and placement of the batch."""
    columns = [
        Column('mesh', 'lead'),
        Column('batch', 'code'),
        *(Column(head, 'number', milliseconds) for head in ('seconds', 'at least', 'at most')),
        Column('memory', 'number', human_bytes),
        Column('outcome', 'wide'),
    ]
    rows = [
        (
            axis_sizes_text(row.mesh),
            spec_code(row.batch),
            *(row.mean, row.bound, row.estimate, row.memory),
            row.lost or 'best',
        )
        for row in found.meshes
    ]
    return Table(columns, rows, best=0)


def _more(size: int) -> str:
    return f'{_sign(size)}{human_bytes(abs(size))}'


def _sign(change: float) -> str:
    return '-' if change < 0 else '+'
