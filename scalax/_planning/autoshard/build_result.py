"""Makes the result of a search of its trials: the rule of the best, and what other places would cost."""

from __future__ import annotations

import math
from typing import Any

from scalax._core.render.tables import human_bytes
from scalax._planning.autoshard.codegen import program_code
from scalax._planning.autoshard.regex_rules import readable_rule
from scalax._planning.autoshard.result import AutoShardingResult, GroupChoice, MeshChoice, StopReason
from scalax._planning.autoshard.trial import Trial, Trials, attempt
from scalax._planning.mesh_search.objective import slowdown_text


def build_result(
    trials: Trials, best: Trial, topology: str | None, stop_reason: StopReason, seconds: float
) -> AutoShardingResult:
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
    return AutoShardingResult(
        mesh=best.layout.sizes,
        rule=rule,
        batch_spec=best.layout.batch,
        pipeline=best.layout.pipeline,
        plan=plan,
        groups=tuple(_explained(trials, best, number) for number in range(len(problem.groups))),
        meshes=_best_of_each_mesh(trials, best),
        fits=None if limit is None else best.memory <= limit,
        ideal_seconds=None if roofline is None else plan.flops / roofline.peak,
        overlapped_seconds=best.overlapped_seconds,
        serial_seconds=best.serial_seconds,
        memory=best.memory,
        num_trials=len(trials.known),
        search_seconds=seconds,
        stop_reason=stop_reason,
        topology=topology,
        _code=program_code(problem, best.layout, topology, rule),
    )


def _explained(trials: Trials, best: Trial, number: int) -> GroupChoice:
    problem = trials.problem
    name, spec = problem.groups[number].name, problem.group_spec(number, best.layout)
    others = [
        trial
        for layout, trial in trials.known.items()
        if layout != best.layout and best.layout.moved({number: layout.groups[number]}) == layout
    ]
    if not others:
        return GroupChoice(name, spec)
    other = min(others, key=lambda trial: trial.rank)
    extra_communication = {
        axes: other.communication.get(axes, 0) - best.communication.get(axes, 0)
        for axes in {**best.communication, **other.communication}
    }
    return GroupChoice(
        name,
        spec,
        problem.group_spec(number, other.layout),
        other.seconds - best.seconds,
        other.memory - best.memory,
        extra_communication,
        other.fits,
    )


def _best_of_each_mesh(trials: Trials, best: Trial) -> tuple[MeshChoice, ...]:
    """The best trial of each mesh and placement of the batch, with a pipeline and without one."""
    found: dict[tuple[Any, ...], Trial] = {}
    for trial in [best, *sorted(trials.known.values(), key=lambda trial: trial.rank)]:
        layout = trial.layout
        found.setdefault((layout.mesh, layout.batch, layout.pipeline is None), trial)
    return tuple(
        MeshChoice(
            trial.layout.sizes,
            trial.layout.batch,
            trial.layout.pipeline,
            trial.overlapped_seconds if math.isfinite(trial.overlapped_seconds) else None,
            trial.serial_seconds if math.isfinite(trial.serial_seconds) else None,
            trial.memory,
            _why(trial, best),
        )
        for trial in found.values()
    )


def _why(trial: Trial, best: Trial) -> str:
    if trial is best:
        return ''
    if trial.failure:
        return trial.failure
    if not trial.fits:
        assert trial.limit is not None
        return f'does not fit: {human_bytes(trial.memory)}, {human_bytes(trial.limit)} usable'
    return slowdown_text(trial.seconds, best.seconds)
