"""What a search knows: the candidates in order, each with the reason why it lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from scalax._plan.plan import Plan
from scalax._report import saved
from scalax._report.tables import human_bytes, milliseconds
from scalax._search.objective import mean, seconds_of
from scalax._tree.specs import axis_sizes_text
from scalax.errors import PlanError, plural


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh of a search, possibly with a set of rules.

    Attributes:
        mesh: mesh axis name -> size.
        rules: the name of the set of rules; empty if the search was given none.
        plan: the plan of the step on it; None if it could not be planned.
        lost: why it is not the best; empty for the best.
        ruled_out: whether it lost before it was compiled, as its arguments alone do not fit.
        least_memory: bytes of a device that any program needs: those of the arguments.
    """

    mesh: Mapping[str, int]
    rules: str = ''
    plan: Plan | None = None
    lost: str = ''
    ruled_out: bool = False
    least_memory: int = 0

    @property
    def name(self) -> str:
        """The sizes, such as ``'fsdp=16, tp=4'``, and the name of the rules."""
        sizes = axis_sizes_text(self.mesh)
        return f'{sizes}; {self.rules}' if self.rules else sizes

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of a table: its name, seconds, the least, what bounds them, memory, and the outcome."""
        roofline = self.plan.known_roofline if self.plan else None
        least = milliseconds(roofline.step_seconds.bound) if roofline else ''
        time = '' if self.plan is None else milliseconds(mean(seconds_of(self.plan)))
        peak = '' if self.plan is None else human_bytes(self.plan.memory.peak)
        if self.ruled_out:
            peak = f'>{human_bytes(self.least_memory)}'
        how = '' if self.plan is None or self.plan.quick or self.plan.simulates else ' (in full)'
        bound = roofline.bound if roofline else ''
        return self.name, time, least, bound, peak, f'{self.lost or "best"}{how}'


@dataclasses.dataclass(frozen=True)
class SearchData:
    """The attributes of a `Search`, which says what each is, and what follows from them."""

    candidates: tuple[Candidate, ...]
    topology: str
    interrupted: bool = False
    not_tried: int = 0
    compiled: int = 0
    compiled_in_full: int = 0
    seconds: float = 0.0

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
            if not self.candidates:
                raise PlanError(f'the search on {self.topology} was stopped before any mesh was planned')
            raise PlanError(f'no mesh was found on {self.topology} that the step fits on{reasons}')
        return first.plan

    @property
    def not_compiled_for(self) -> str:
        """`Plan.not_compiled_for` of the plans: empty if they were compiled for the topology."""
        return next((each.plan.not_compiled_for for each in self.candidates if each.plan), '')

    @property
    def head(self) -> str:
        """How many meshes there are, and how they were planned."""
        meshes = plural(len(self.candidates), 'mesh', 'meshes')
        ruled_out = sum(candidate.ruled_out for candidate in self.candidates)
        how = {
            'planned quickly': self.compiled,
            'in full': self.compiled_in_full,
            'ruled out by a bound': ruled_out,
        }
        counts = ', '.join(f'{count} {what}' for what, count in how.items() if count)
        stopped = f'; stopped before its end, {self.not_tried} not reached' if self.interrupted else ''
        return f'{meshes} on {self.topology}{": " if counts else ""}{counts}{stopped}'

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain Python values, ready for ``json.dumps``; plans as `Plan.to_dict` has them."""
        return {
            field.name: saved.plain(getattr(self, field.name)) for field in dataclasses.fields(SearchData)
        }
