"""A search as a page: the best mesh, all meshes in a table that sorts, and the plan of each."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Sequence

from scalax._plan.page import headline, plan_blocks
from scalax._plan.text import shown_fits
from scalax._report import blocks
from scalax._report.blocks import Cell, Column, Figure, Tone
from scalax._report.tables import human_bytes, milliseconds, three_figures
from scalax._search.objective import mean, seconds_of
from scalax._search.outcome import Candidate, SearchData
from scalax._search.ranking import surely_fits
from scalax.errors import plural

MOST_PLANS = 50
_MOST_AXES = 4  # columns of bytes
_MESHES = 'meshes'


def render_page(search: SearchData, title: str | None) -> str:
    """The page, with the plans of the best."""
    title = title or f'Meshes for {_step_name(search)} on {search.topology}'
    planned = [(place, each) for place, each in enumerate(search.candidates, 1) if each.plan]
    shown = dict(planned[:MOST_PLANS])
    parts = [
        _head(search, title),
        blocks.target(_MESHES, _section_of_meshes(search, shown)),
        blocks.section('Plans', ''.join(_plan(place, each) for place, each in shown.items()), _rest(planned)),
    ]
    return blocks.page(title, ''.join(parts))


def render_fragment(search: SearchData) -> str:
    """The search for a notebook: without the plans, each of which the notebook can show itself."""
    title = f'Meshes for {_step_name(search)} on {search.topology}'
    note = 'The plan of each: search.candidates[i].plan' if any(c.plan for c in search.candidates) else ''
    body = [
        _head(search, title),
        _section_of_meshes(search, (), note),
    ]
    return blocks.fragment(''.join(body))


def _step_name(search: SearchData) -> str:
    return next((each.plan.name for each in search.candidates if each.plan), 'a step')


def _head(search: SearchData, title: str) -> str:
    best = search.candidates[0] if search.fits else None
    mesh = best.mesh if best else {}
    of = f'best of {plural(len(search.candidates), "mesh", "meshes")}' if best else ''
    return (
        blocks.heading(title, mesh, of)
        + blocks.figures(_figures(search, best))
        + blocks.notes([f'{search.head}; it took {three_figures(search.seconds)} s'])
        + ''.join(_callouts(search, best))
    )


def _figures(search: SearchData, best: Candidate | None) -> Iterable[Figure]:
    plan = best.plan if best else None
    if plan is None:
        planned = any(each.plan or each.ruled_out for each in search.candidates)
        verdict = 'no mesh fits' if planned else 'nothing planned'
        yield Figure(verdict, 'the memory of a device', 'bad', is_badge=True)
        return
    yield from headline(plan, plan.known_roofline)


def _callouts(search: SearchData, best: Candidate | None) -> Iterable[str]:
    if search.interrupted:
        left = plural(search.not_tried, 'mesh was', 'meshes were')
        yield blocks.callout(
            [f'Stopped before the end: {left} not reached. A search with a file=... goes on from there.'],
            'warn',
        )
    if search.not_compiled_for:
        yield blocks.callout([search.not_compiled_for], 'warn')
    if best and not surely_fits(best):
        yield blocks.callout(
            [
                'The quick plan of the best mesh is so near to the limit of memory that only a full plan '
                'says whether it fits: search(..., full=1).'
            ],
            'warn',
        )
    if search.candidates and best is None:
        yield blocks.callout(['The step fits on none of these meshes. The table says why of each.'], 'bad')


def _verdict(candidate: Candidate) -> tuple[str, Tone]:
    """Whether a candidate fits, in two words and a colour."""
    if candidate.plan is not None:
        return shown_fits(candidate.plan)
    return ('does not fit', 'bad') if candidate.ruled_out else ('not compiled', '')


def _section_of_meshes(search: SearchData, shown: Container[int], note: str = '') -> str:
    """The table of all candidates."""
    if not search.candidates:
        return blocks.section('Meshes', blocks.callout(['There are none.'], 'warn'))
    axes = _axes(search.candidates)
    columns = [
        Column('rank', 'number'),
        Column('mesh', 'lead'),
        Column('fits'),
        Column('seconds', 'number'),
        Column('at least', 'number'),
        Column('if nothing overlaps', 'number'),
        Column('bound by', 'code'),
        Column('memory', 'number'),
        *(Column(f'bytes {"+".join(names) or "of other axes"}', 'number') for names in axes),
        Column('outcome', 'wide'),
    ]
    rows = [_row(place, each, axes, place in shown) for place, each in enumerate(search.candidates, 1)]
    about = (
        'Seconds: the mean of the least ones (at least) and of those if nothing overlaps. Bytes: those '
        f'of the whole array of one group, of all collectives along these axes. {note}'
    )
    return blocks.section('Meshes', blocks.table(columns, rows, 0 if search.fits else None), about.strip())


def _axes(candidates: Sequence[Candidate]) -> list[tuple[str, ...]]:
    """The sets of mesh axes that get a column: those that carry most bytes, and () for all others."""
    moved: collections.Counter[tuple[str, ...]] = collections.Counter()
    for each in candidates:
        moved.update(_moved(each))
    first = [axes for axes, _ in moved.most_common()]
    return first if len(first) <= _MOST_AXES else [*first[: _MOST_AXES - 1], ()]


def _moved(candidate: Candidate) -> dict[tuple[str, ...], int]:
    totals = candidate.plan.totals if candidate.plan else {}
    return {axes: sum(kinds.values()) for axes, kinds in totals.items()}


def _row(place: int, candidate: Candidate, axes: Sequence[tuple[str, ...]], is_link: bool) -> list[Cell]:
    plan = candidate.plan
    roofline = plan.known_roofline if plan else None
    bound, estimate = roofline.step_seconds if roofline else (None, None)
    name, seconds, least, bounds, memory, outcome = candidate.cells
    verdict, tone = _verdict(candidate)
    moved = _moved(candidate)
    others = sum(size for those, size in moved.items() if those not in axes)
    sizes = [moved.get(those, 0) if those else others for those in axes]
    peak = plan.memory.peak if plan else candidate.least_memory if candidate.ruled_out else None
    return [
        Cell(str(place), place),
        Cell(name, html=blocks.link(name, _name(place)) if is_link else ''),
        Cell(html=blocks.badge(verdict, tone)),
        Cell(seconds, mean(seconds_of(plan)) if plan else None),
        Cell(least, bound),
        Cell('' if estimate is None else milliseconds(estimate), estimate),
        Cell(bounds),
        Cell(memory, peak),
        *(Cell(human_bytes(size) if size else '0', size) if plan else Cell() for size in sizes),
        Cell(outcome),
    ]


def _name(place: int) -> str:
    return f'plan-{place}'


def _plan(place: int, candidate: Candidate) -> str:
    """The plan of a candidate, folded."""
    assert candidate.plan is not None
    back = f'<p>{blocks.link("Back to all meshes", _MESHES)}</p>'
    summary = f'{place}. {candidate.name}: {candidate.lost or "best"}'
    return blocks.target(
        _name(place),
        blocks.fold(summary, f'{back}{plan_blocks(candidate.plan, candidate.name, level=2)}{back}'),
    )


def _rest(planned: Sequence[object]) -> str:
    left_out = len(planned) - MOST_PLANS
    return f'Those of the best {MOST_PLANS}; {left_out} more are not on this page.' if left_out > 0 else ''
