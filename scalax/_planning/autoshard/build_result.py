"""Builds the result of auto-sharding from its trials."""

from __future__ import annotations

import math
from typing import Any

from scalax._core.render.tables import human_bytes
from scalax._planning.autoshard.codegen import program_code
from scalax._planning.autoshard.regex_rules import readable_rule
from scalax._planning.autoshard.result import AutoShardingResult, GroupChoice, MeshChoice, StopReason
from scalax._planning.autoshard.trial import Trial, Trials, run_trial
from scalax._planning.mesh_search.objective import slowdown_text


def build_result(
    trials: Trials, best: Trial, topology: str | None, stop_reason: StopReason, seconds: float
) -> AutoShardingResult:
    """Returns the result of a search: the best trial, its rule, and the costs of other choices."""
    problem, limit = trials.problem, best.limit
    plan = problem.plan(best.layout)
    if not best.compiled:
        best = run_trial(problem, best.layout, None)
    specs = problem.specs(best.layout)
    # Any rule replicates arrays of one element, whose path may be that of another leaf.
    rule = readable_rule(
        {leaf.path: (leaf.shape, spec) for leaf, spec in specs.items() if math.prod(leaf.shape) > 1}
    )
    roofline = plan.known_roofline
    return AutoShardingResult(
        mesh=best.layout.sizes,
        rule=rule,
        batch_spec=best.layout.batch_spec,
        pipeline=best.layout.pipeline,
        plan=plan,
        groups=tuple(_group_choice(trials, best, i) for i in range(len(problem.groups))),
        meshes=_best_of_each_mesh(trials, best),
        fits=None if limit is None else best.memory <= limit,
        ideal_seconds=None if roofline is None else plan.flops / roofline.peak,
        overlapped_seconds=best.overlapped_seconds,
        serial_seconds=best.serial_seconds,
        memory=best.memory,
        num_trials=len(trials.results),
        search_seconds=seconds,
        stop_reason=stop_reason,
        topology=topology,
        _code=program_code(problem, best.layout, topology, rule),
    )


def _group_choice(trials: Trials, best: Trial, i: int) -> GroupChoice:
    """Compares the best layout with the best trial that differs in one group only."""
    problem = trials.problem
    name, spec = problem.groups[i].name, problem.group_spec(i, best.layout)
    others = [
        trial
        for layout, trial in trials.results.items()
        if layout != best.layout and best.layout.with_placements({i: layout.placements[i]}) == layout
    ]
    if not others:
        return GroupChoice(name, spec)
    other = min(others, key=lambda trial: trial.rank)
    return GroupChoice(
        name,
        spec,
        next_spec=problem.group_spec(i, other.layout),
        extra_seconds=other.seconds - best.seconds,
        extra_memory=other.memory - best.memory,
        extra_communication={
            axes: other.communication.get(axes, 0) - best.communication.get(axes, 0)
            for axes in {**best.communication, **other.communication}
        },
        next_fits=other.fits,
    )


def _best_of_each_mesh(trials: Trials, best: Trial) -> tuple[MeshChoice, ...]:
    """Returns the best trial of each mesh and sharding of the batch, with and without a pipeline."""
    best_trials: dict[tuple[Any, ...], Trial] = {}
    for trial in [best, *sorted(trials.results.values(), key=lambda trial: trial.rank)]:
        layout = trial.layout
        best_trials.setdefault((layout.mesh, layout.batch_spec, layout.pipeline is None), trial)
    return tuple(
        MeshChoice(
            trial.layout.sizes,
            trial.layout.batch_spec,
            trial.layout.pipeline,
            trial.overlapped_seconds if math.isfinite(trial.overlapped_seconds) else None,
            trial.serial_seconds if math.isfinite(trial.serial_seconds) else None,
            trial.memory,
            _reason(trial, best),
        )
        for trial in best_trials.values()
    )


def _reason(trial: Trial, best: Trial) -> str:
    """Returns why a trial is not the best; empty for the best."""
    if trial is best:
        return ''
    if trial.failure:
        return trial.failure
    if not trial.fits:
        assert trial.limit is not None
        return f'does not fit: {human_bytes(trial.memory)}, {human_bytes(trial.limit)} usable'
    return slowdown_text(trial.seconds, best.seconds)
