"""The order of the candidates of a search, and why each but the best has lost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from scalax._planning.mesh_search.candidate import Candidate
from scalax._planning.mesh_search.objective import mean, rank, seconds_of, slower

NEAR = 1.08
"""How far the memory of a full plan may be from that of a quick one (docs/estimates.md, "Quick plans")."""


def _seconds(candidate: Candidate) -> float:
    return math.inf if candidate.plan is None else mean(seconds_of(candidate.plan))


def order(candidate: Candidate) -> tuple[float, float]:
    """Sorts candidates, the best first (`objective`)."""
    return rank(_seconds(candidate), candidate.plan.memory.total if candidate.plan else math.inf)


def may_fit(candidate: Candidate) -> bool:
    """Whether a full plan might fit, by a quick one."""
    memory = candidate.plan.memory if candidate.plan else None
    return memory is not None and (memory.limit is None or memory.total <= NEAR * memory.limit)


def surely_fits(candidate: Candidate) -> bool:
    """Whether a full plan would fit, too."""
    if candidate.plan is None or candidate.reason:
        return False
    memory = candidate.plan.memory
    return not candidate.plan.quick or memory.limit is None or NEAR * memory.total <= memory.limit


def ranked(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that fit, then those that do not, then those without a plan; those in full before quick ones."""
    every = sorted(
        candidates,
        key=lambda c: (
            c.plan is None,
            c.plan is not None and c.plan.quick,
            order(c),
            not c.ruled_out,
            c.argument_bytes,
        ),
    )
    fitting = [c for c in every if not c.reason]
    others = [dataclasses.replace(c, reason=slower(_seconds(c), _seconds(fitting[0]))) for c in fitting[1:]]
    return (*fitting[:1], *others, *(c for c in every if c.reason))
