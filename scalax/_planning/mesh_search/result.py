"""The result of a mesh search, and how it renders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from scalax._core.render import serialization
from scalax._core.render.blocks import (
    Block,
    Cell,
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
)
from scalax._core.render.renderable import Renderable
from scalax._core.render.tables import human_bytes, milliseconds, three_figures
from scalax._planning.hardware.specs import network_text
from scalax._planning.mesh_search.candidate import Candidate
from scalax._planning.mesh_search.objective import objective_seconds, step_time_of
from scalax._planning.report.plan import Plan
from scalax._planning.report.plan_page import headline, plan_blocks
from scalax.errors import PlanError, plural

_QUICK = 'Ranked by quick plans. search(..., full=3) compiles the best three in full.'
_COLUMNS = (
    *(Column('rank', 'number'), Column('mesh', 'lead'), Column('seconds', 'number')),
    *(Column('at least', 'number'), Column('bound by', 'code'), Column('memory', 'number')),
    Column('outcome', 'wide'),
)


@dataclasses.dataclass(frozen=True)
class SearchResult(Renderable):
    """The result of `search`. ``str()`` renders it as a table.

    Attributes:
        candidates: the candidates, best first; those that do not fit, or could not be planned, come last.
        topology: the hardware.
        interrupted: whether Ctrl-C ended the search early.
        num_untried: the number of candidates that were not reached.
        num_quick_plans: the number of quick plans that were compiled.
        num_full_plans: the number of full plans that were compiled.
        num_cached_plans: the number of plans that were read from the file of an earlier search.
        search_seconds: the duration of the search.
    """

    candidates: tuple[Candidate, ...]
    topology: str
    interrupted: bool = False
    num_untried: int = 0
    num_quick_plans: int = 0
    num_full_plans: int = 0
    num_cached_plans: int = 0
    search_seconds: float = 0.0

    def _title(self) -> str:
        step = next((candidate.plan.name for candidate in self.candidates if candidate.plan), 'a step')
        return f'Meshes for {step} on {self.topology}'

    def _blocks(self, title: str) -> list[Block]:
        return search_blocks(self, title)

    def _page_blocks(self, title: str) -> list[Block]:
        return [*search_blocks(self, title), *_plans(self)]

    @property
    def fits(self) -> bool:
        """Whether the step fits on at least one mesh that was planned."""
        return bool(self.candidates) and not self.candidates[0].reason

    @property
    def best(self) -> Plan:
        """The plan of the best candidate.

        Raises:
            PlanError: no candidate fits. The message lists the reason for each.
        """
        first = self.candidates[0] if self.fits else None
        if first is None or first.plan is None:
            reasons = ''.join(f'\n- {candidate.name}: {candidate.reason}' for candidate in self.candidates)
            if not self.candidates:
                raise PlanError(f'the search on {self.topology} was stopped before any mesh was planned')
            raise PlanError(f'the step fits on no mesh of {self.topology}:{reasons}')
        return first.plan

    @property
    def head(self) -> str:
        """The number of meshes, and how they were planned."""
        meshes = plural(len(self.candidates), 'mesh', 'meshes')
        ruled_out = sum(candidate.ruled_out for candidate in self.candidates)
        any_quick = any(candidate.plan and candidate.plan.quick for candidate in self.candidates)
        counts_by_kind = {
            'planned quickly' if any_quick else 'planned': self.num_quick_plans,
            'in full': self.num_full_plans,
            'read from the file': self.num_cached_plans,
            'ruled out before compiling': ruled_out,
        }
        counts = ', '.join(f'{count} {kind}' for kind, count in counts_by_kind.items() if count)
        stopped = f'; stopped early, {self.num_untried} not reached' if self.interrupted else ''
        return f'{meshes} on {self.topology}{": " if counts else ""}{counts}{stopped}'

    def to_dict(self) -> dict[str, Any]:
        """Returns the result in plain Python values, ready for ``json.dumps``; plans as by `Plan.to_dict`."""
        return {
            field.name: serialization.to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }


def search_blocks(search: SearchResult, title: str) -> list[Block]:
    """Returns the blocks of a search result, without the plans."""
    best = search.candidates[0] if search.fits else None
    of = f'best of {plural(len(search.candidates), "mesh", "meshes")}' if best else ''
    took = f'{search.head}; it took {three_figures(search.search_seconds)} s'
    rows = [_row(rank, candidate) for rank, candidate in enumerate(search.candidates, 1)]
    table = (
        Table(_COLUMNS, rows, best=0 if best else None) if rows else Lines(['No mesh was planned.'], 'warn')
    )
    any_quick = any(candidate.plan and candidate.plan.quick for candidate in search.candidates)
    hint = [Lines([_QUICK])] if any_quick else []
    about = 'Seconds: the mean of the fully overlapped step time (at least) and of the serial one.'
    return [
        Heading(title, best.mesh if best else {}, of),
        Figures([*_figures(search, best)]),
        HtmlOnly([Lines([took])]),
        Section('', [TextOnly([Lines([search.head])])]),
        Section('Meshes', [HtmlOnly([Lines([about])]), table, *hint]),
    ]


def _figures(search: SearchResult, best: Candidate | None) -> Iterable[Figure]:
    if best is not None and best.plan is not None:
        return headline(best.plan, best.plan.known_roofline)
    any_planned = any(candidate.plan or candidate.ruled_out for candidate in search.candidates)
    verdict = 'no mesh fits' if any_planned else 'nothing planned'
    return [Figure(verdict, 'the memory of a device', 'bad', is_badge=True)]


def _row(rank: int, candidate: Candidate) -> Row:
    plan = candidate.plan
    outcome = candidate.reason or 'best'
    if plan is None:
        least = candidate.argument_bytes
        memory = Cell(f'>{human_bytes(least)}', least) if candidate.ruled_out else None
        return [rank, candidate.name, None, None, None, memory, outcome]
    seconds, roofline, peak = objective_seconds(step_time_of(plan)), plan.known_roofline, plan.memory.peak
    overlapped = roofline.step_seconds.overlapped if roofline else None
    in_full = '' if plan.quick or plan.platform != 'tpu' else ' (in full)'
    return [
        rank,
        candidate.name,
        Cell(milliseconds(seconds), seconds),
        None if overlapped is None else Cell(milliseconds(overlapped), overlapped),
        network_text(roofline.bottleneck, roofline.hardware) if roofline else None,
        Cell(human_bytes(peak), peak),
        f'{outcome}{in_full}',
    ]


def _plans(search: SearchResult) -> list[Block]:
    """Returns the plan of each mesh, collapsed."""
    plans = [
        Collapsible(
            f'{rank}. {candidate.name}: {candidate.reason or "best"}',
            plan_blocks(candidate.plan, candidate.name, level=2),
        )
        for rank, candidate in enumerate(search.candidates, 1)
        if candidate.plan
    ]
    return [Section('Plans', plans)]
