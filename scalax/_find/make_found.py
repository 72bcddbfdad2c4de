"""Makes the result of a search of its trials: the rule of the best, and what other places would cost."""

from __future__ import annotations

import math

from scalax._find.found import Ended, Found, FoundGroup, FoundMesh
from scalax._find.regexes import readable_rule
from scalax._find.source import program_code
from scalax._find.trial import Trial, Trials, attempt
from scalax._report.tables import human_bytes
from scalax._search.objective import slower


def make_found(trials: Trials, best: Trial, topology: str | None, ended: Ended, seconds: float) -> Found:
    """The result of a search: the best of the trials, with its plan."""
    problem, limit = trials.problem, best.limit
    plan = problem.plan(best.layout)
    if not best.compiled:
        best = attempt(problem, best.layout, None)
    specs = problem.specs(best.layout)
    # Arrays of one element are replicated by any rule, and may have the path of another leaf.
    rule = readable_rule(
        {leaf.path: (leaf.shape, spec) for leaf, spec in specs.items() if math.prod(leaf.shape) > 1}
    )
    roofline = plan.known_roofline
    lower = None if roofline is None else plan.flops / roofline.peak
    return Found(
        mesh=best.layout.sizes,
        rule=rule,
        batch=best.layout.batch,
        plan=plan,
        groups=tuple(_explained(trials, best, number) for number in range(len(problem.groups))),
        meshes=_best_of_each_mesh(trials, best),
        fits=None if limit is None else best.memory <= limit,
        lower_bound=lower,
        bound=best.bound,
        estimate=best.estimate,
        memory=best.memory,
        tried=len(trials.known),
        seconds=seconds,
        ended=ended,
        topology=topology,
        _code=program_code(problem, best.layout, topology, rule),
    )


def _explained(trials: Trials, best: Trial, number: int) -> FoundGroup:
    group, axes = trials.problem.groups[number], trials.problem.axes
    spec = best.layout.groups[number].spec(axes)
    others = [
        trial
        for layout, trial in trials.known.items()
        if layout != best.layout and best.layout.moved({number: layout.groups[number]}) == layout
    ]
    if not others:
        return FoundGroup(group.name, spec)
    other = min(others, key=lambda trial: trial.rank)
    moved = {
        name: other.moved.get(name, 0) - best.moved.get(name, 0) for name in {**best.moved, **other.moved}
    }
    return FoundGroup(
        group.name,
        spec,
        other.layout.groups[number].spec(axes),
        other.seconds - best.seconds,
        other.memory - best.memory,
        moved,
        other.fits,
    )


def _best_of_each_mesh(trials: Trials, best: Trial) -> tuple[FoundMesh, ...]:
    """The best trial of each mesh and placement of the batch."""
    found = {(best.layout.mesh, best.layout.batch): best}
    for trial in sorted(trials.known.values(), key=lambda trial: trial.rank):
        found.setdefault((trial.layout.mesh, trial.layout.batch), trial)
    return tuple(
        FoundMesh(
            trial.layout.sizes,
            trial.layout.batch,
            trial.bound if math.isfinite(trial.bound) else None,
            trial.estimate if math.isfinite(trial.estimate) else None,
            trial.memory,
            _why(trial, best),
        )
        for trial in found.values()
    )


def _why(trial: Trial, best: Trial) -> str:
    if trial is best:
        return ''
    if trial.lost:
        return trial.lost
    if not trial.fits:
        assert trial.limit is not None
        return f'does not fit: {human_bytes(trial.memory)}, and {human_bytes(trial.limit)} may be used'
    return slower(trial.seconds, best.seconds)
