"""What was found, as text: the rule, what each place saves, and the meshes that were tried."""

from __future__ import annotations

from collections.abc import Sequence

from scalax._find.outcome import FoundData
from scalax._find.source import rule_code, spec_code
from scalax._report.blocks import Cell, Column, text_table
from scalax._report.tables import human_bytes, milliseconds, terminal_width, wrapped
from scalax._search.objective import EQUAL
from scalax._tree.specs import axis_sizes_text
from scalax.errors import plural

_GROUPS = (
    *(Column('group', 'lead'), Column('spec', 'code'), Column('next best', 'code')),
    *(Column('seconds', 'number'), Column('memory', 'number'), Column('bytes', 'wide')),
)
_NUMBERS = ('seconds', 'at least', 'at most', 'memory')
_MESHES = (
    *(Column('mesh', 'lead'), Column('batch', 'code')),
    *(Column(head, 'number') for head in _NUMBERS),
    Column('outcome', 'wide'),
)
SAVED = 'What moving one group to its next best place costs'
TRIED = 'The best layout of each mesh and placement of the batch'


def render(found: FoundData, width: int | None) -> str:
    """The text, as wide as the terminal by default."""
    width = terminal_width(width)
    parts = [
        '\n'.join(wrapped(head(found), width)),
        rule_code(found.rule),
        f'{SAVED}:',
        '\n'.join(text_table(*group_table(found), width)),
        f'{TRIED}:',
        '\n'.join(text_table(*mesh_table(found), width, -1)),
    ]
    return '\n\n'.join(part.rstrip('\n') for part in parts)


def head(found: FoundData) -> list[str]:
    """What was found, in a few lines."""
    where = found.topology or f'{found.plan.devices} {found.plan.platform} devices'
    fits = {True: 'fits', False: 'does not fit', None: 'memory limit unknown'}[found.fits]
    peak = human_bytes(found.memory)
    lines = [
        f'{axis_sizes_text(found.mesh)} on {where}, batch {spec_code(found.batch)}: {fits} '
        f'({peak} a device), at least {milliseconds(found.bound)}, '
        f'{milliseconds(found.estimate)} if nothing overlaps',
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


def group_table(found: FoundData) -> tuple[Sequence[Column], list[list[Cell]]]:
    """The columns, and a row for each group: its place, the next best one, and what that costs more."""
    rows = []
    for group in found.groups:
        cells = [Cell(group.name), Cell(spec_code(group.spec))]
        if group.next_spec is None:
            rows.append([*cells, *[Cell()] * 4])
            continue
        if not group.fits:  # it may have no program, and no seconds
            seconds = 'does not fit'
        elif abs(group.seconds) < EQUAL * (found.bound + found.estimate) / 2:
            seconds = 'nearly equal'
        else:
            seconds = f'{_sign(group.seconds)}{milliseconds(abs(group.seconds))}'
        moved = ', '.join(f'{axes} {_more(size)}' for axes, size in group.moved.items() if size)
        costs = [Cell(seconds, group.seconds), Cell(_more(group.memory), group.memory), Cell(moved)]
        rows.append([*cells, Cell(spec_code(group.next_spec)), *costs])
    return _GROUPS, rows


def mesh_table(found: FoundData) -> tuple[Sequence[Column], list[list[Cell]]]:
    """The columns, and a row for each mesh and placement of the batch."""
    rows = []
    for row in found.meshes:
        times = (row.mean, row.bound, row.estimate)
        cells = [Cell(axis_sizes_text(row.mesh)), Cell(spec_code(row.batch))]
        cells += [Cell('' if time is None else milliseconds(time), time) for time in times]
        rows.append([*cells, Cell(human_bytes(row.memory), row.memory), Cell(row.lost or 'best')])
    return _MESHES, rows


def _more(size: int) -> str:
    return f'{_sign(size)}{human_bytes(abs(size))}'


def _sign(change: float) -> str:
    return '-' if change < 0 else '+'
