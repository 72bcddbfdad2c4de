"""Trials: the step compiled with one layout each, with its time and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from scalax._core.context.thread_state import ThreadState
from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.render.tables import human_bytes, milliseconds
from scalax._core.render.trial_log import TrialLog
from scalax._core.util.progress import UpdateProgress
from scalax._planning.autoshard.codegen import spec_code
from scalax._planning.autoshard.layout import Layout
from scalax._planning.autoshard.problem import Problem
from scalax._planning.mesh_search.objective import objective_seconds, rank, reason_of_failure, step_time_of
from scalax._planning.time.roofline import StepTime
from scalax.errors import plural

# The cost of a layout that does not fit, times the ratio of its memory to the limit: more than any step time.
# The second factor is for layouts that were not compiled: only the size of their arguments is known.
_TOO_LARGE, _NOT_COMPILED = 1e6, 1e9
# Programs to compile at a time. Each may take some gigabytes of memory.
_MAX_THREADS = 8


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outcome of one layout.

    Attributes:
        layout: the layout.
        overlapped_seconds: the fully overlapped step time.
        serial_seconds: the serial step time.
        memory: the bytes on a device.
        limit: the usable bytes of a device; None if unknown.
        communication: the bytes that each device exchanges, by mesh axes.
        failure: why there is no plan; empty if there is one.
        compiled: whether the step was compiled; not if its arguments alone do not fit.
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
        """Whether the step fits into the memory of a device."""
        return not self.failure and (self.limit is None or self.memory <= self.limit)

    @property
    def seconds(self) -> float:
        """The objective of the search (`objective`)."""
        return objective_seconds(StepTime(self.overlapped_seconds, self.serial_seconds))

    @property
    def cost(self) -> float:
        """The objective; for a layout that does not fit, a larger number that grows with its memory."""
        if self.fits or self.failure or self.limit is None:
            return self.seconds
        return (_TOO_LARGE if self.compiled else _NOT_COMPILED) * self.memory / self.limit

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key for trials, best first."""
        return rank(self.cost, self.memory)


def run_trial(problem: Problem, layout: Layout, limit: int | None) -> Trial:
    """Compiles the step with one layout. An error of the compiler is an outcome, too.

    Raises:
        Exception: another error of the step or of scalax, with a note that names the layout.
    """
    if limit is not None and (stored_bytes := problem.stored_bytes(layout)) > limit:
        return Trial(layout, memory=stored_bytes, limit=limit, compiled=False)
    try:
        plan = problem.plan(layout)
    except Exception as error:  # noqa: BLE001 - reason_of_failure raises errors that are not an outcome
        name = f'{axis_sizes_text(layout.sizes)}, batch {spec_code(layout.batch_spec)}'
        name += f', {layout.pipeline}' if layout.pipeline else ''
        return Trial(layout, limit=limit, failure=reason_of_failure(error, name))
    overlapped_seconds, serial_seconds = step_time_of(plan)
    if not math.isfinite(overlapped_seconds):
        return Trial(layout, limit=limit, failure='the time of its collectives is unknown')
    communication = {'+'.join(axes): sum(kinds.values()) for axes, kinds in plan.totals.items()}
    return Trial(layout, overlapped_seconds, serial_seconds, plan.memory.total, limit, communication)


class OutOfTime(Exception):
    """The budget has been used up."""


class Trials:
    """Runs and stores the trials of a search, in a file as well if there is one.

    Args:
        problem: the problem.
        limit: the usable bytes of memory of a device.
        file: the trials of earlier searches, to which new trials are appended.
        update_progress: called with the progress of the search.
        deadline: when to stop, by `time.monotonic`.

    Attributes:
        problem: the problem.
        results: the outcome of each layout that was tried.
    """

    def __init__(
        self,
        problem: Problem,
        limit: int | None,
        file: TrialLog,
        update_progress: UpdateProgress,
        deadline: float,
    ) -> None:
        self.problem, self._limit, self._file = problem, limit, file
        self._update_progress, self._deadline = update_progress, deadline
        self._fingerprint = problem.fingerprint(limit) if file.path else ''
        self.results: dict[Layout, Trial] = {}

    def __call__(self, layouts: Iterable[Layout]) -> Sequence[Trial]:
        """Returns the trials of some layouts. Runs new ones in parallel.

        Raises:
            OutOfTime: the deadline has passed. At least one trial is run nevertheless.
        """
        layouts = list(dict.fromkeys(layouts))
        for layout in layouts:
            values = self._file.get(f'{self._fingerprint} {layout}')
            if layout not in self.results and values is not None:
                with contextlib.suppress(TypeError):  # the file was edited, or written by another version
                    self.results[layout] = Trial(layout, limit=self._limit, **values)
        new_layouts = [layout for layout in layouts if layout not in self.results]
        calls = [functools.partial(run_trial, self.problem, layout, self._limit) for layout in new_layouts]
        pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS))
        try:
            for trial in pool.map(ThreadState.run, [ThreadState() for _ in new_layouts], calls):
                self._add(trial)
                if time.monotonic() > self._deadline:
                    raise OutOfTime
        finally:  # also after Ctrl-C: trials that have started end, the others are not started
            pool.shutdown(cancel_futures=True)
        return [self.results[layout] for layout in layouts]

    @property
    def best(self) -> Trial | None:
        """The best trial so far; None if there is none."""
        return min(self.results.values(), key=lambda trial: trial.rank, default=None)

    def _add(self, trial: Trial) -> None:
        self.results[trial.layout] = trial
        names = [field.name for field in dataclasses.fields(trial) if field.name not in ('layout', 'limit')]
        values = {name: getattr(trial, name) for name in names}
        # JSON has no infinity, which is the default of these fields.
        finite = {name: value for name, value in values.items() if value != math.inf}
        self._file.add(f'{self._fingerprint} {trial.layout}', finite)
        best = self.best
        assert best is not None
        seconds = milliseconds(best.seconds) if math.isfinite(best.seconds) else 'no program'
        sizes = axis_sizes_text(best.layout.sizes)
        self._update_progress(
            f'{plural(len(self.results), "layout")}; best: {sizes}, {seconds}, {human_bytes(best.memory)}'
        )
