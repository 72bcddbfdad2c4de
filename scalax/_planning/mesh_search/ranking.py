"""Ranking of the candidates of a mesh search, with the reason why each but the best is not the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from scalax._planning.mesh_search.candidate import Candidate
from scalax._planning.mesh_search.objective import objective_seconds, rank, slowdown_text, step_time_of

MEMORY_MARGIN = 1.08
"""The largest factor between the memory of a full and of a quick plan (docs/estimates.md, "Quick plans")."""


def _seconds(candidate: Candidate) -> float:
    return math.inf if candidate.plan is None else objective_seconds(step_time_of(candidate.plan))


def rank_key(candidate: Candidate) -> tuple[float, float]:
    """Returns a sort key for candidates, best first (see `objective`)."""
    return rank(_seconds(candidate), candidate.plan.memory.total if candidate.plan else math.inf)


def may_fit(candidate: Candidate) -> bool:
    """Whether a full plan may fit, judging by a quick one."""
    memory = candidate.plan.memory if candidate.plan else None
    return memory is not None and (memory.limit is None or memory.total <= MEMORY_MARGIN * memory.limit)


def surely_fits(candidate: Candidate) -> bool:
    """Whether a full plan fits for certain."""
    if candidate.plan is None or candidate.reason:
        return False
    memory = candidate.plan.memory
    return not candidate.plan.quick or memory.limit is None or MEMORY_MARGIN * memory.total <= memory.limit


def ranked(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Sorts candidates: first those that fit, then those that do not, then those without a plan.

    Among candidates that fit, full plans come before quick ones.
    """
    ordered = sorted(
        candidates,
        key=lambda c: (
            c.plan is None,
            c.plan is not None and c.plan.quick,
            rank_key(c),
            not c.ruled_out,
            c.argument_bytes,
        ),
    )
    fitting = [c for c in ordered if not c.reason]
    others = [
        dataclasses.replace(c, reason=slowdown_text(_seconds(c), _seconds(fitting[0]))) for c in fitting[1:]
    ]
    return (*fitting[:1], *others, *(c for c in ordered if c.reason))
