"""``--only published``: published GPU steps, compared with their plans (table.md)."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterator, Mapping

from benchmarks.published.steps import PUBLISHED, WINNERS, Step


@dataclasses.dataclass(frozen=True)
class Judged:
    """A step and the times by its plan.

    Attributes:
        step: the step.
        bound: fully overlapped seconds.
        estimate: serial seconds.
        scheduled: seconds along the compiler's schedule, if it has one.
    """

    step: Step
    bound: float
    estimate: float
    scheduled: float | None

    @classmethod
    def of(cls, step: Step) -> Judged:
        """Compiles a step, and returns its times."""
        plan = step.plan()
        return cls(step, *plan.roofline(step.numbers).step_seconds, step.scheduled(plan))

    @property
    def objective(self) -> float:
        """The objective of searches."""
        return (self.bound + self.estimate) / 2


def lines(judged: Mapping[str, Judged]) -> Iterator[str]:
    """Yields both tables in Markdown: the steps, and the pairs of layouts of which both were planned."""
    yield '| step | overlapped | schedule | published | serial |'
    yield '|---|---|---|---|---|'
    for name, judgement in judged.items():
        seconds = (judgement.bound, judgement.scheduled, judgement.step.seconds, judgement.estimate)
        yield f'| {name} | {" | ".join(map(_number, seconds))} |'
    errors = [
        abs(judgement.scheduled / judgement.step.seconds - 1)
        for judgement in judged.values()
        if judgement.scheduled
    ]
    if errors:
        yield f'\nmedian error of {len(errors)} schedules: {statistics.median(errors):.0%}'
    yield '\n| steps | faster | slower | published | planned | schedule |'
    yield '|---|---|---|---|---|---|'
    for names in WINNERS:
        if all(name in judged for name in names):
            first, second = (judged[name] for name in names)
            tokens = first.step.tokens / second.step.tokens
            scheduled = second.scheduled / first.scheduled if first.scheduled and second.scheduled else None
            ratios = (second.step.seconds / first.step.seconds, second.objective / first.objective, scheduled)
            of_tokens = [None if ratio is None else ratio * tokens for ratio in ratios]
            layouts = [name.rpartition(', ')[2] for name in names]
            cells = [names[0].rpartition(', ')[0], *layouts, *map(_number, of_tokens)]
            yield f'| {" | ".join(cells)} |'


def _number(value: float | None) -> str:
    return '-' if value is None else f'{value:#.3g}'


def show(model: str) -> None:
    """Prints the tables of the steps whose names contain *model*."""
    judged = {}
    for name, step in PUBLISHED.items():
        if model in name:
            judged[name] = Judged.of(step)
            print(f'{name}: {judged[name].bound:.3g} s at least', file=sys.stderr, flush=True)
    print('\n'.join(lines(judged)))
