"""A trial: the step compiled with one layout, and what that takes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from scalax._core.context.thread_state import ThreadState
from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.render.tables import human_bytes, milliseconds
from scalax._core.render.trial_log import TrialFile
from scalax._planning.autoshard.codegen import spec_code
from scalax._planning.autoshard.layout import Layout
from scalax._planning.autoshard.problem import Problem
from scalax._planning.mesh_search.objective import objective_seconds, rank, reason_of_failure, step_time_of
from scalax._planning.time.roofline import StepTime
from scalax.errors import plural

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
        overlapped_seconds: the seconds that the step takes at least.
        serial_seconds: the seconds if nothing overlaps.
        memory: the bytes on a device.
        limit: those that it may use; None if unknown.
        communication: the bytes that each device exchanges, mesh axes -> bytes.
        failure: why there is no plan; empty if there is one.
        compiled: whether a compiler has seen it; one whose arguments alone do not fit has not been.
    """

    layout: Layout
    overlapped_seconds: float = math.inf
    serial_seconds: float = math.inf
    memory: int = 0
    limit: int | None = None
    communication: Mapping[str, int] = dataclasses.field(default_factory=dict)
    failure: str = ''
    compiled: bool = True

    @property
    def fits(self) -> bool:
        """Whether it runs in the memory of a device."""
        return not self.failure and (self.limit is None or self.memory <= self.limit)

    @property
    def seconds(self) -> float:
        """What a search makes small (`objective`)."""
        return objective_seconds(StepTime(self.overlapped_seconds, self.serial_seconds))

    @property
    def cost(self) -> float:
        """The seconds; the memory, where it does not fit."""
        if self.fits or self.failure or self.limit is None:
            return self.seconds
        return (_TOO_LARGE if self.compiled else _NOT_COMPILED) * self.memory / self.limit

    @property
    def rank(self) -> tuple[float, float]:
        """Sorts trials, the best first."""
        return rank(self.cost, self.memory)


def attempt(problem: Problem, layout: Layout, limit: int | None) -> Trial:
    """Compiles the step; that the compiler refuses it is the outcome of the trial.

    Raises:
        Exception: another error of the step or of scalax, with a note that names the layout.
    """
    if limit is not None and (stored := problem.stored(layout)) > limit:
        return Trial(layout, memory=stored, limit=limit, compiled=False)
    try:
        plan = problem.plan(layout)
    except Exception as error:  # noqa: BLE001 - lost_by raises what is no result of the compiler
        name = f'{axis_sizes_text(layout.sizes)}, batch {spec_code(layout.batch)}'
        name += f', {layout.pipeline}' if layout.pipeline else ''
        return Trial(layout, limit=limit, failure=reason_of_failure(error, name))
    bound, estimate = step_time_of(plan)
    if not math.isfinite(bound):
        return Trial(layout, limit=limit, failure='the time of its collectives is unknown')
    communication = {'+'.join(axes): sum(kinds.values()) for axes, kinds in plan.totals.items()}
    return Trial(layout, bound, estimate, plan.memory.total, limit, communication)


class OutOfTime(Exception):
    """The budget has been used up."""


class Trials:
    """The trials of a search; on disk as well, if it has a file.

    Args:
        problem: what is searched for.
        limit: the bytes of memory that a device may use.
        file: the trials of earlier searches, to which new ones are appended.
        note: called with how far the search is.
        ends: when to stop, by `time.monotonic`.
    """

    def __init__(
        self, problem: Problem, limit: int | None, file: TrialFile, note: Callable[[str], None], ends: float
    ) -> None:
        self.problem, self._limit, self._file, self._note, self._ends = problem, limit, file, note, ends
        self._fingerprint = problem.fingerprint(limit) if file.path else ''
        self.known: dict[Layout, Trial] = {}

    def __call__(self, layouts: Iterable[Layout]) -> Sequence[Trial]:
        """The trials of some layouts: known ones, or new ones, as many at a time as there are cores.

        Raises:
            OutOfTime: the time is over. At least one is made all the same.
        """
        layouts = list(dict.fromkeys(layouts))
        for layout in layouts:
            values = self._file.get(f'{self._fingerprint} {layout}')
            if layout not in self.known and values is not None:
                with contextlib.suppress(TypeError):  # somebody has edited the file
                    self.known[layout] = Trial(layout, limit=self._limit, **values)
        new = [layout for layout in layouts if layout not in self.known]
        calls = [functools.partial(attempt, self.problem, layout, self._limit) for layout in new]
        pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS))
        try:
            for trial in pool.map(ThreadState.run, [ThreadState() for _ in new], calls):
                self._add(trial)
                if time.monotonic() > self._ends:
                    raise OutOfTime
        finally:  # also after Ctrl-C: what has begun ends, the rest is not tried
            pool.shutdown(cancel_futures=True)
        return [self.known[layout] for layout in layouts]

    @property
    def best(self) -> Trial | None:
        """The best of all."""
        return min(self.known.values(), key=lambda trial: trial.rank, default=None)

    def _add(self, trial: Trial) -> None:
        self.known[trial.layout] = trial
        names = [field.name for field in dataclasses.fields(trial) if field.name not in ('layout', 'limit')]
        values = {name: getattr(trial, name) for name in names}
        # JSON has no infinite numbers; these are the defaults of a trial.
        finite = {name: value for name, value in values.items() if value != math.inf}
        self._file.add(f'{self._fingerprint} {trial.layout}', finite)
        best = self.best
        assert best is not None
        seconds = milliseconds(best.seconds) if math.isfinite(best.seconds) else 'no program'
        sizes = axis_sizes_text(best.layout.sizes)
        self._note(
            f'{plural(len(self.known), "layout")}; best: {sizes}, {seconds}, {human_bytes(best.memory)}'
        )
