"""A trial: the steps compiled with one layout, and what that takes."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scalax._find.layout import Layout, Placement, spec_of
from scalax._find.problem import Problem
from scalax._find.source import spec_code
from scalax._plan.roofline import Seconds
from scalax._report.trial_file import TrialFile
from scalax._search.objective import lost_by, mean, rank, seconds_of
from scalax._trace.threads import ThreadState
from scalax._tree.specs import axis_sizes_text

# What a layout costs that does not fit, times how many times the memory it takes: more than any seconds. Of
# one that was not compiled only its arguments are known.
_TOO_LARGE, _NOT_COMPILED = 1e6, 1e9
# Programs that are compiled at a time, each of which takes up to some gigabytes of memory.
_MOST_THREADS = 8


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a layout takes.

    Attributes:
        layout: the layout.
        bound: the seconds that the steps take at least.
        estimate: the seconds if nothing overlaps.
        memory: the bytes on a device.
        limit: those that it may use; None if unknown.
        moved: the bytes that each device exchanges, mesh axes -> bytes.
        lost: why there is no plan; empty if there is one.
        compiled: whether a compiler has seen it; one whose arguments alone do not fit has not been.
    """

    layout: Layout
    bound: float = math.inf
    estimate: float = math.inf
    memory: int = 0
    limit: int | None = None
    moved: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lost: str = ''
    compiled: bool = True

    @property
    def fits(self) -> bool:
        """Whether it runs in the memory of a device."""
        return not self.lost and (self.limit is None or self.memory <= self.limit)

    @property
    def seconds(self) -> float:
        """What a search makes small (`objective`)."""
        return mean(Seconds(self.bound, self.estimate))

    @property
    def cost(self) -> float:
        """The seconds; the memory, where it does not fit."""
        if self.fits or self.lost or self.limit is None:
            return self.seconds
        return (_TOO_LARGE if self.compiled else _NOT_COMPILED) * self.memory / self.limit

    @property
    def rank(self) -> tuple[float, float]:
        """Sorts trials, the best first."""
        return rank(self.cost, self.memory)


def attempt(problem: Problem, layout: Layout, limit: int | None) -> Trial:
    """Compiles the steps; that the compiler refuses one is the outcome of the trial.

    Raises:
        Exception: another error of the step or of scalax, with a note that names the layout.
    """
    if limit is not None and problem.stored(layout) > limit:
        return Trial(layout, memory=problem.stored(layout), limit=limit, lost='', compiled=False)
    bound = estimate = 0.0
    memory, moved = 0, dict[str, int]()
    for step in problem.steps:
        try:
            plan = problem.plan(layout, step)
        except Exception as error:  # noqa: BLE001 - lost_by raises what is no result of the compiler
            name = f'{axis_sizes_text(layout.sizes)}, batch {spec_code(spec_of(layout.batch))}'
            return Trial(layout, limit=limit, lost=lost_by(error, name))
        seconds = seconds_of(plan)
        if not math.isfinite(seconds.bound):
            return Trial(layout, limit=limit, lost='the seconds of its collectives are not known')
        bound, estimate = bound + seconds.bound, estimate + seconds.estimate
        memory = max(memory, plan.memory.total)
        for axes, kinds in plan.totals.items():
            name = '+'.join(axes)
            moved[name] = moved.get(name, 0) + sum(kinds.values())
    return Trial(layout, bound, estimate, memory, limit, moved)


class OutOfTime(Exception):
    """The budget has been used up."""


class Trials:
    """The trials of a search, on disk as well if it has a file: it goes on from there.

    Args:
        problem: what is searched for.
        limit: the bytes of memory that a device may use.
        file: where the trials are written.
        note: called with each new trial.
    """

    def __init__(
        self,
        problem: Problem,
        limit: int | None,
        file: TrialFile,
        note: Callable[[Trial], None],
    ) -> None:
        self.problem, self._limit, self._file = problem, limit, file
        self._note = note
        self._identity = problem.identity(limit) if file.path else ''
        self.known: dict[Layout, Trial] = {}
        read = (_read(values) for values in file.known(self._identity))
        self._saved = {trial.layout: trial for trial in read if trial is not None}
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS))

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def __call__(self, layouts: Sequence[Layout], ends: float) -> list[Trial]:
        """The trials of some layouts: known ones, or new ones, as many at a time as there are cores.

        Raises:
            OutOfTime: it is later than *ends*, by `time.monotonic`. At least one is made all the same.
        """
        for layout in layouts:
            if layout in self._saved:
                self.known.setdefault(layout, self._saved[layout])
        new = [layout for layout in dict.fromkeys(layouts) if layout not in self.known]
        attempts = [
            self._pool.submit(
                ThreadState().run, functools.partial(attempt, self.problem, layout, self._limit)
            )
            for layout in new
        ]
        try:
            for done in attempts:
                if self.known and time.monotonic() > ends:
                    raise OutOfTime
                self._add(done.result())
        except BaseException:  # also Ctrl-C: what has begun ends, the rest is not tried
            for other in attempts:
                other.cancel()
            raise
        return [self.known[layout] for layout in layouts]

    def _add(self, trial: Trial) -> None:
        self.known[trial.layout] = trial
        self._file.add(self._identity, _written(trial))
        self._note(trial)


def _written(trial: Trial) -> dict[str, Any]:
    """A trial as values of JSON, which has no infinite numbers."""
    values = dataclasses.asdict(trial)
    return {name: None if value == math.inf else value for name, value in values.items()}


def _read(values: dict[str, Any]) -> Trial | None:
    """The trial of which these were written; None if they are of something else."""
    try:
        own = values['layout']
        layout = Layout(
            tuple((name, size) for name, size in own['mesh']),
            _placement(own['batch']),
            tuple(map(_placement, own['groups'])),
        )
        seconds = {name: math.inf if values[name] is None else values[name] for name in ('bound', 'estimate')}
        return Trial(**{**values, **seconds, 'layout': layout})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _placement(value: Any) -> Placement:
    return tuple(tuple(axes) for axes in value)
