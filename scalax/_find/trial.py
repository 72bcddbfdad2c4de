"""A trial: the steps compiled with one layout, and what that takes."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax.sharding import PartitionSpec

from scalax._find.groups import Group, Leaf
from scalax._find.layout import Layout, Placement, fitted, spec_of
from scalax._find.step import Key, Step
from scalax._helper import MeshShardingHelper
from scalax._plan.make import make_plan
from scalax._plan.plan import Plan
from scalax._report.trial_file import TrialFile
from scalax._trace.threads import ThreadState
from scalax._tree.specs import entries, entry_axes, spec_axes
from scalax.errors import IndivisibleWarning, ScalaxError

# For devices of unknown speed, such as simulated ones: a chip of 400 Tflop/s, with links of 100 GB/s.
_FLOPS, _LINK = 4e14, 1e11
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
        bound: the seconds of the steps if all overlaps.
        estimate: the seconds if nothing does.
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
        """Half of what the bound and the estimate are together: some of it overlaps."""
        return (self.bound + self.estimate) / 2

    @property
    def cost(self) -> float:
        """What a search makes small: the seconds; the memory, where it does not fit."""
        if self.fits or self.lost or self.limit is None:
            return self.seconds
        return (_TOO_LARGE if self.compiled else _NOT_COMPILED) * self.memory / self.limit


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """What is searched for.

    Attributes:
        steps: the steps, the first one being that whose plan is shown.
        leaves: the leaves of their arguments.
        groups: those of them that are searched.
        fixed: the placements of others that the user has said.
        devices: the devices.
        slices: how many slices these are.
        axis_of_slices: the mesh axis from slice to slice; empty for one slice.
        zero1: mesh axes that do not shard parameters, but the states of their optimizer.
    """

    steps: tuple[Step, ...]
    leaves: Mapping[Key, Leaf]
    groups: tuple[Group, ...]
    fixed: Mapping[Key, Any]
    devices: Sequence[Any]
    slices: int
    axis_of_slices: str
    zero1: frozenset[str] = frozenset()

    def specs(self, layout: Layout) -> dict[Key, Any]:
        """The spec of each leaf."""
        keys, found = list(self.leaves), dict(self.fixed)
        for group, placement in zip(self.groups, layout.groups, strict=True):
            for i in group.leaves:
                own = _without(placement, self.zero1) if i in group.parameters else placement
                found[keys[i]] = spec_of(fitted(own, keys[i][1], layout.sizes))
        return {key: _over(found.get(key, spec_of(())), layout.sizes) for key in keys}

    def helper(self, layout: Layout) -> MeshShardingHelper:
        """The helper of the mesh of a layout."""
        sizes = layout.sizes
        dcn = None
        if self.slices > 1:
            dcn = [self.slices if name == self.axis_of_slices else 1 for name in sizes]
        return MeshShardingHelper(
            list(sizes.values()), list(sizes), True, dcn_axis_dims=dcn, devices=self.devices
        )

    def of_batch(self, layout: Layout) -> Callable[[tuple[int, ...]], Any]:
        """Gives the spec of an array of a batch, from its shape."""
        return lambda shape: spec_of(fitted(layout.batch, shape, layout.sizes))

    def plan(self, layout: Layout, step: Step, *, quick: bool = True) -> Plan:
        """The plan of a step."""
        helper, specs = self.helper(layout), self.specs(layout)
        given, returned = step.shardings(lambda leaf: specs[leaf.path, leaf.shape], self.of_batch(layout))
        function = helper.sjit(
            step.function,
            in_shardings=given,
            out_shardings=returned,
            donate_argnums=tuple(step.donated),
            batch_argnums=tuple(step.batch) if any(layout.batch) else (),
        )
        with warnings.catch_warnings():
            warnings.simplefilter('error', IndivisibleWarning)
            return make_plan(helper, function, step.args, {}, quick=quick)

    def stored(self, layout: Layout) -> int:
        """The bytes of the leaves on each device, those of the step that has most."""
        sizes, specs = layout.sizes, self.specs(layout)

        def size(leaf: Leaf) -> int:
            axes = spec_axes(specs[leaf.path, leaf.shape])
            return leaf.bytes // math.prod(sizes[axis] for axis in axes)

        return max(sum(map(size, filter(None, step.leaves))) for step in self.steps)

    def attempt(self, layout: Layout, limit: int | None) -> Trial:
        """Compiles the steps; errors of the compiler are the outcome of the trial."""
        if limit is not None and self.stored(layout) > limit:
            return Trial(layout, memory=self.stored(layout), limit=limit, lost='', compiled=False)
        bound = estimate = 0.0
        memory, moved = 0, dict[str, int]()
        for step in self.steps:
            try:
                plan = self.plan(layout, step)
            except Exception as error:  # of the compiler, or of the user's function on this mesh
                return Trial(layout, limit=limit, lost=_short(error))
            seconds = seconds_of(plan)
            bound, estimate = bound + seconds[0], estimate + seconds[1]
            memory = max(memory, plan.memory.total)
            for axes, kinds in plan.totals.items():
                name = '+'.join(axes)
                moved[name] = moved.get(name, 0) + sum(kinds.values())
        return Trial(layout, bound, estimate, memory, limit, moved)


def seconds_of(plan: Plan) -> tuple[float, float]:
    """The seconds of a step, if all overlaps and if nothing does; by counting where speeds are unknown."""
    roofline = plan.known_roofline
    if roofline is not None:
        return roofline.step_seconds
    parts = [plan.work.flops / _FLOPS, sum(row.count * row.bytes for row in plan.collectives) / _LINK]
    return max(parts), sum(parts)


def _over(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """A spec without mesh axes that a mesh does not have."""
    kept = [tuple(axis for axis in entry_axes(entry) if axis in axes) for entry in entries(spec)]
    return spec_of(tuple(kept))


def _without(placement: Placement, axes: frozenset[str]) -> Placement:
    return tuple(tuple(axis for axis in each if axis not in axes) for each in placement)


def _short(error: Exception) -> str:
    kind = '' if isinstance(error, ScalaxError) else f'{type(error).__name__}: '
    return kind + ' '.join(line.strip() for line in str(error).splitlines()[:2])


class OutOfTime(Exception):
    """The budget has been used up."""


class Trials:
    """The trials of a search, on disk as well if it has a file: it goes on from there.

    Args:
        problem: what is searched for.
        limit: the bytes of memory that a device may use.
        file: where the trials are written.
        identity: what a search has to have in common with those in the file.
        note: called with each new trial.
    """

    def __init__(
        self,
        problem: Problem,
        limit: int | None,
        file: TrialFile,
        identity: str,
        note: Callable[[Trial], None],
    ) -> None:
        self.problem, self._limit, self._file, self._identity = problem, limit, file, identity
        self._note = note
        self.known: dict[Layout, Trial] = {}
        read = (_read(values) for values in file.known(identity))
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
        attempt = self.problem.attempt
        attempts = [
            self._pool.submit(ThreadState().run, functools.partial(attempt, layout, self._limit))
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
