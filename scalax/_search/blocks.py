"""A search as blocks: the best mesh, all meshes in a table, and on a page the plan of each."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Iterator, Sequence

from scalax._plan.blocks import headline, plan_blocks, shown_fits
from scalax._report.blocks import (
    Block,
    Cell,
    Column,
    Figure,
    Figures,
    Fold,
    Heading,
    InText,
    Lines,
    Link,
    OnPage,
    Row,
    Section,
    Table,
    Tone,
)
from scalax._report.tables import human_bytes, milliseconds, three_figures
from scalax._search.objective import mean, seconds_of
from scalax._search.outcome import Candidate, SearchData
from scalax._search.ranking import surely_fits
from scalax.errors import plural

MOST_PLANS = 50
_MOST_AXES = 4  # columns of bytes
_MESHES = 'meshes'


def search_title(search: SearchData) -> str:
    """The title of a search: of which step, and on what."""
    step = next((each.plan.name for each in search.candidates if each.plan), 'a step')
    return f'Meshes for {step} on {search.topology}'


def search_blocks(search: SearchData, title: str, *, with_plans: bool = False) -> list[Block]:
    """A search as blocks.

    Args:
        search: the search.
        title: the title of the page.
        with_plans: whether the plans of the best are on the page; a notebook can show each itself.
    """
    best = search.candidates[0] if search.fits else None
    planned = [place for place, each in enumerate(search.candidates, 1) if each.plan]
    shown = planned[:MOST_PLANS] if with_plans else []
    of = f'best of {plural(len(search.candidates), "mesh", "meshes")}' if best else ''
    took = f'{search.head}; it took {three_figures(search.seconds)} s'
    table = _meshes(search, shown) if search.candidates else Lines(['There are none.'], 'warn')
    about = [
        'Seconds: the mean of the least ones (at least) and of those if nothing overlaps. Bytes: those of '
        'the whole array of one group, of all collectives along these axes.',
        'The plan of each: search.candidates[i].plan' if planned and not with_plans else '',
    ]
    plans = [_plan(place, search.candidates[place - 1]) for place in shown]
    left_out = len(planned) - len(shown) if with_plans else 0
    rest = f'Those of the best {MOST_PLANS}; {left_out} more are not on this page.' if left_out else ''
    return [
        Heading(title, best.mesh if best else {}, of),
        Figures([*_figures(search, best)]),
        OnPage([Lines([took])]),
        Section('', [InText([Lines([search.head])]), Lines([search.not_compiled_for], 'warn')]),
        OnPage([Lines([said], tone) for said, tone in _warnings(search, best)]),
        Section('Meshes', [OnPage([Lines(about)]), table], name=_MESHES if shown else ''),
        OnPage([Section('Plans', [Lines([rest]), *plans])]),
    ]


def _figures(search: SearchData, best: Candidate | None) -> Iterable[Figure]:
    if best is not None and best.plan is not None:
        return headline(best.plan, best.plan.known_roofline)
    planned = any(each.plan or each.ruled_out for each in search.candidates)
    said = 'no mesh fits' if planned else 'nothing planned'
    return [Figure(said, 'the memory of a device', 'bad', is_badge=True)]


def _warnings(search: SearchData, best: Candidate | None) -> Iterator[tuple[str, Tone]]:
    """What a reader should not miss."""
    if search.interrupted:
        left = plural(search.not_tried, 'mesh was', 'meshes were')
        yield f'Stopped before the end: {left} not reached.', 'warn'
    if best and not surely_fits(best):
        yield (
            'The quick plan of the best mesh is so near to the limit of memory that only a full plan says '
            'whether it fits: search(..., full=1).',
            'warn',
        )
    if search.candidates and best is None:
        yield 'The step fits on none of these meshes. The table says why of each.', 'bad'


def _meshes(search: SearchData, links: Container[int]) -> Table:
    """A row for each candidate, which leads to its plan if its place is among *links*."""
    axes = _axes(search.candidates)
    columns = [
        Column('rank', 'number'),
        Column('mesh', 'lead'),
        Column('fits', on_page=True),
        Column('seconds', 'number'),
        Column('at least', 'number'),
        Column('if nothing overlaps', 'number', milliseconds, on_page=True),
        Column('bound by', 'code'),
        Column('memory', 'number'),
        *(
            Column(f'bytes {"+".join(names) or "of other axes"}', 'number', human_bytes, True)
            for names in axes
        ),
        Column('outcome', 'wide'),
    ]
    rows = [_row(place, each, axes, place in links) for place, each in enumerate(search.candidates, 1)]
    return Table(columns, rows, best=0 if search.fits else None)


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


def _row(place: int, candidate: Candidate, axes: Sequence[tuple[str, ...]], is_link: bool) -> Row:
    name, seconds, least, bounds, memory, outcome = candidate.cells
    plan = candidate.plan
    roofline = plan.known_roofline if plan else None
    bound, estimate = roofline.step_seconds if roofline else (None, None)
    verdict: tuple[str, Tone] = ('does not fit', 'bad') if candidate.ruled_out else ('not compiled', '')
    moved = _moved(candidate)
    others = sum(size for those, size in moved.items() if those not in axes)
    return [
        place,
        Cell(name, link=_name(place) if is_link else ''),
        _badge(*(shown_fits(plan) if plan else verdict)),
        Cell(seconds, mean(seconds_of(plan)) if plan else None),
        Cell(least, bound),
        estimate,
        bounds,
        Cell(memory, plan.memory.peak if plan else candidate.least_memory if candidate.ruled_out else None),
        *((moved.get(those, 0) if those else others) if plan else None for those in axes),
        outcome,
    ]


def _badge(words: str, tone: Tone) -> Cell:
    return Cell(words, tone=tone)


def _name(place: int) -> str:
    return f'plan-{place}'


def _plan(place: int, candidate: Candidate) -> Fold:
    """The plan of a candidate."""
    assert candidate.plan is not None
    back = Link('Back to all meshes', _MESHES)
    summary = f'{place}. {candidate.name}: {candidate.lost or "best"}'
    return Fold(summary, [back, *plan_blocks(candidate.plan, candidate.name, level=2), back], _name(place))
