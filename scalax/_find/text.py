"""What was found, as text: the rule, what each place saves, and the meshes that were tried."""

from __future__ import annotations

from scalax._find.outcome import FoundData
from scalax._find.source import rule_code, spec_code
from scalax._plan.objective import EQUAL
from scalax._report.tables import human_bytes, milliseconds, table, terminal_width, wrapped
from scalax._tree.specs import axis_sizes_text
from scalax.errors import plural

GROUP_HEADS = ('group', 'spec', 'next best', 'seconds', 'memory', 'bytes')
MESH_HEADS = ('mesh', 'batch', 'seconds', 'at least', 'at most', 'memory', 'outcome')
SAVED = 'What moving one group to its next best place costs'
TRIED = 'The best layout of each mesh and placement of the batch'


def render(found: FoundData, width: int | None) -> str:
    """The text, as wide as the terminal by default."""
    width = terminal_width(width)
    parts = [
        '\n'.join(wrapped(head(found), width)),
        rule_code(found.rule),
        f'{SAVED}:',
        '\n'.join(table([GROUP_HEADS, *group_cells(found)], width, 0, 3)),
        f'{TRIED}:',
        '\n'.join(table([MESH_HEADS, *mesh_cells(found)], width, 6, 5)),
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


def group_cells(found: FoundData) -> list[tuple[str, ...]]:
    """A row for each group: its place, the next best one, and what that costs more."""
    rows: list[tuple[str, ...]] = []
    for group in found.groups:
        if group.next_spec is None:
            rows.append((group.name, spec_code(group.spec), '', '', '', ''))
            continue
        if not group.fits:  # it may have no program, and no seconds
            seconds = 'does not fit'
        elif abs(group.seconds) < EQUAL * (found.bound + found.estimate) / 2:
            seconds = 'nearly equal'
        else:
            seconds = f'{_sign(group.seconds)}{milliseconds(abs(group.seconds))}'
        moved = ', '.join(f'{axes} {_more(size)}' for axes, size in group.moved.items() if size)
        rows.append(
            (
                group.name,
                spec_code(group.spec),
                spec_code(group.next_spec),
                seconds,
                _more(group.memory),
                moved,
            )
        )
    return rows


def mesh_cells(found: FoundData) -> list[tuple[str, ...]]:
    """A row for each mesh and placement of the batch."""
    return [
        (
            axis_sizes_text(row.mesh),
            spec_code(row.batch),
            *('' if each is None else milliseconds(each) for each in (row.mean, row.bound, row.estimate)),
            human_bytes(row.memory),
            row.lost or 'best',
        )
        for row in found.meshes
    ]


def _more(size: int) -> str:
    return f'{_sign(size)}{human_bytes(abs(size))}'


def _sign(change: float) -> str:
    return '-' if change < 0 else '+'
