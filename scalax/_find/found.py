"""What was found: a mesh, a rule, and why; made of the trials, and as it shows itself."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

from scalax._find.blocks import found_blocks
from scalax._find.outcome import Ended, FoundData, FoundGroup, FoundMesh
from scalax._find.readable import readable_rule
from scalax._find.source import program_code
from scalax._find.trial import Trial, Trials, attempt
from scalax._plan.blocks import plan_blocks
from scalax._report import blocks
from scalax._report.tables import human_bytes
from scalax._search.objective import slower


@dataclasses.dataclass(frozen=True)
class Found(FoundData):
    """What `find` returns; ``str()`` of it is a page of text.

    Attributes:
        mesh: mesh axis -> size.
        rule: the rule of all arguments that are not batches.
        batch: where the rows of the batch are.
        plan: the quick plan of the step.
        groups: the groups of leaves, and what their places save.
        meshes: the meshes that were tried, the best first.
        fits: whether it fits in the memory that may be used; None if that is unknown.
        lower_bound: seconds that no layout is faster than: all operations of the steps, divided evenly, at
            the peak for bfloat16; None if the speed of the devices is unknown.
        bound: the seconds that the steps take at least.
        estimate: the seconds if nothing overlaps.
        memory: the bytes on a device, of the step that needs most.
        tried: how many layouts were tried.
        seconds: how long the search took.
        ended: why the search ended early: ``'time'``, ``'stopped'``; empty if nothing got better any more.
        topology: the hardware; None for the devices of this process.
    """

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The result as text.

        Args:
            width: the width in columns; that of the terminal by default.
        """
        return blocks.text(found_blocks(self, ''), width)

    def _repr_html_(self) -> str:
        return blocks.fragment(found_blocks(self, f'A rule for {self.plan.name}'))

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Writes the result, with the plan below it, as a page that loads nothing.

        Args:
            path: the file to write.
            title: the title of the page.
        """
        title = title or f'A rule for {self.plan.name}'
        shown = [*found_blocks(self, title), *plan_blocks(self.plan, 'The plan', level=2)]
        Path(path).write_bytes(blocks.page(title, shown).encode())


def make_found(trials: Trials, best: Trial, topology: str | None, ended: Ended, seconds: float) -> Found:
    """The result of a search: the best of the trials, with its plan."""
    problem, limit = trials.problem, best.limit
    plans = [problem.plan(best.layout, step) for step in problem.steps]
    plan = plans[0]
    if not best.compiled:
        best = attempt(problem, best.layout, None)
    specs = problem.specs(best.layout)
    # Arrays of one element are replicated by any rule, and may have the path of another leaf.
    rule = readable_rule(
        {leaf.path: (leaf.shape, spec) for leaf, spec in specs.items() if math.prod(leaf.shape) > 1}
    )
    roofline = plan.known_roofline
    lower = None if roofline is None else sum(each.flops for each in plans) / roofline.peak
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
