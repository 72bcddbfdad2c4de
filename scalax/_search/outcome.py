"""The outcome of a search: the candidates in order, each with the reason why it lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from scalax._plan.plan import Plan
from scalax._report import saved
from scalax._report.pages import paragraphs
from scalax._report.pages import table as html_table
from scalax._report.tables import human_bytes, table, terminal_width, wrapped
from scalax._tree.specs import axis_sizes_text
from scalax.errors import PlanError, plural

_HEADS = ('', 'mesh', 'at least', 'memory', 'outcome')
_OUTCOME = 4


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh of a search, possibly with a set of rules.

    Attributes:
        mesh: mesh axis name -> size.
        rules: the name of the set of rules; empty if the search was given none.
        plan: the plan of the step on it; None if it could not be planned.
        lost: why it is not the best; empty for the best.
    """

    mesh: Mapping[str, int]
    rules: str = ''
    plan: Plan | None = None
    lost: str = ''

    @property
    def name(self) -> str:
        """The sizes, such as ``'fsdp=16, tp=4'``, and the name of the rules."""
        sizes = axis_sizes_text(self.mesh)
        return f'{sizes}; {self.rules}' if self.rules else sizes

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of a table: its name, seconds, memory, and the outcome."""
        roofline = self.plan.known_roofline if self.plan else None
        time = '' if roofline is None else f'{1e3 * roofline.step_seconds.bound:,.1f} ms'
        peak = '' if self.plan is None else human_bytes(self.plan.memory.peak)
        how = '' if self.plan is None or self.plan.quick or self.plan.simulates else ' (in full)'
        return self.name, time, peak, f'{self.lost or "best"}{how}'


@dataclasses.dataclass(frozen=True)
class Search:
    """What `search` returns; ``str()`` of it is a table.

    Attributes:
        candidates: the best first; after those that fit, those that do not, or could not be planned.
        topology: the hardware.
        interrupted: whether it was stopped before all candidates were planned.
    """

    candidates: tuple[Candidate, ...]
    topology: str
    interrupted: bool = False

    @property
    def fits(self) -> bool:
        """Whether the step fits on any mesh that was planned."""
        return bool(self.candidates) and not self.candidates[0].lost

    @property
    def best(self) -> Plan:
        """The plan of the best candidate.

        Raises:
            PlanError: none fits; says why of each.
        """
        first = self.candidates[0] if self.fits else None
        if first is None or first.plan is None:
            reasons = ''.join(f'\n- {candidate.name}: {candidate.lost}' for candidate in self.candidates)
            raise PlanError(f'no mesh was found on {self.topology} that the step fits on{reasons}')
        return first.plan

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The candidates as a table of text.

        Args:
            width: the width in columns; that of the terminal by default.
        """
        width = terminal_width(width)
        rows = table([_HEADS, *self._cells()], width, _OUTCOME, 3)
        return '\n'.join([*wrapped(self._heads, width), '', *rows])

    def _repr_html_(self) -> str:
        return f'{paragraphs(self._heads)}{html_table(_HEADS, self._cells(), right=[0, 2, 3])}'

    @property
    def not_compiled_for(self) -> str:
        """`Plan.not_compiled_for` of the plans: empty if they were compiled for the topology."""
        return next((each.plan.not_compiled_for for each in self.candidates if each.plan), '')

    @property
    def _heads(self) -> list[str]:
        planned = sum(candidate.plan is not None for candidate in self.candidates)
        stopped = '; stopped before its end' if self.interrupted else ''
        meshes = plural(len(self.candidates), 'mesh', 'meshes')
        first = f'{meshes} on {self.topology}, {planned} of them planned{stopped}'
        return [first, *filter(None, [self.not_compiled_for])]

    def _cells(self) -> list[tuple[str, ...]]:
        return [(str(place), *candidate.cells) for place, candidate in enumerate(self.candidates, 1)]

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain Python values, ready for ``json.dumps``; plans as `Plan.to_dict` has them."""
        return {
            'topology': self.topology,
            'interrupted': self.interrupted,
            'candidates': saved.plain(self.candidates),
        }
