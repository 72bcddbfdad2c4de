"""Search for the best mesh: plans a step quickly on every mesh, and in full where that decides."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from scalax._compile.call.signature import name_of
from scalax._core.mesh import meshes, topologies
from scalax._core.render.tables import human_bytes
from scalax._core.render.trial_log import TrialLog
from scalax._core.util.progress import UpdateProgress, progress
from scalax._planning.compiler.lowered_step import LoweredStep, lower_step
from scalax._planning.hardware.specs import Hardware
from scalax._planning.mesh_search.candidate import Candidate
from scalax._planning.mesh_search.meshes import (
    AxisSizes,
    Constraints,
    make_helper,
    possible_meshes,
    slices_along,
)
from scalax._planning.mesh_search.objective import reason_of_failure
from scalax._planning.mesh_search.ranking import may_fit, rank_key, ranked, surely_fits
from scalax._planning.mesh_search.result import SearchResult
from scalax._planning.report.make_plan import plan_lowered
from scalax._planning.report.plan import Plan
from scalax._planning.report.plan_page import memory_taken
from scalax._spmd.pipelines.config import Pipeline
from scalax.errors import ArgumentError, DataError, IndivisibleWarning, PipelineWarning, did_you_mean

_log = logging.getLogger('scalax.search')


def search(
    make_step: Callable[..., tuple[Any, Sequence[Any]]],
    topology: str | Sequence[jax.Device],
    axis_names: Sequence[str],
    *,
    constraints: Constraints = None,
    num_slices: int = 1,
    dcn_axis: str | Sequence[str] | None = None,
    pipelines: Pipeline | Sequence[Pipeline] = (),
    hardware: Hardware | None = None,
    full: int | None = None,
    file: str | os.PathLike[str] | None = None,
) -> SearchResult:
    """Plans a step on every mesh of a topology, and ranks the meshes.

    A mesh on which the arguments alone do not fit is ruled out without compiling. On each other mesh, the
    step is planned quickly (`MeshShardingHelper.plan`), which takes seconds. Meshes on which the step fits
    are ranked by the average of the fully overlapped and the serial step time, and by memory if that is
    equal. Meshes on which it does not fit, or a dimension is not divisible, come last. If the best mesh is so
    close to the memory limit that its quick plan cannot tell whether the step fits, the step is compiled in
    full.

    Progress is shown in one line, on stderr in a terminal or in the output of a notebook cell
    (``SCALAX_PROGRESS=0`` turns it off). Elsewhere it is logged (``scalax.search``, level INFO).

    Args:
        make_step: called with a helper; with *pipelines* also with ``pipeline=``, for `sjit`. Returns the
            step, such as one made by `sjit`, and the tuple of its arguments.
        topology: the slice, such as ``'v5p:4x4x4'``, or the GPUs, such as ``'h100:4x8'``, as for
            `MeshShardingHelper.from_topology`; or attached devices, such as ``jax.devices()``.
        axis_names: the mesh axes; every product of sizes that uses all devices is a candidate.
        constraints: mesh axis -> its size, or its possible sizes (``{'tp': [1, 2, 4, 8]}``); or a function of
            the sizes (mesh axis -> size) that returns whether to try them.
        num_slices: the number of slices; for GPUs, of NVLink domains, if *topology* does not include it.
        dcn_axis: the mesh axis across slices, required for several slices. If several axes are given, such as
            ``['stage', 'data']``, the slices are distributed over them in this order, as far as sizes allow.
        pipelines: the pipelines to try on meshes whose stage axis has several devices, such as
            ``[Pipeline('stage', num_microbatches=m) for m in (8, 16, 32)]``. On other meshes *make_step* is
            called with ``pipeline=None``.
        hardware: hardware specifications to use instead of the known ones, for example with a slower network:
            an entry of `HARDWARE` changed by `dataclasses.replace`.
        full: how many of the best meshes to compile in full in any case, which takes minutes for each. Plans
            for GPUs are always full ones.
        file: a file to which each plan is appended. A later search for the same step, with the same compiler
            and flags, continues from it.

    Returns:
        A `SearchResult`. Ctrl-C ends the search early; the result then ranks the meshes planned so far.

    Raises:
        ArgumentError: no mesh satisfies the constraints, *constraints* or *dcn_axis* names an unknown axis,
            or an argument is invalid.
        Exception: an error of *make_step*, of the step, or of scalax, with a note that names the mesh.
        MissingDependencyError: the compiler for TPUs or for GPUs is not installed.
        MeshError: the topology is unknown, or names of axes are invalid.
        DataError: *file* holds something other than plans of a search.

    Example:
        >>> from scalax.plan import search
        >>> result = search(
        ...     make_step, 'v5p:4x4x4', ['fsdp', 'tp'], constraints={'tp': [1, 2, 4, 8]}
        ... )  # doctest: +SKIP
        >>> print(result)  # doctest: +SKIP
        >>> result.best.mesh  # doctest: +SKIP
        {'fsdp': 16, 'tp': 4}
        >>> search(make_step, jax.devices(), ['fsdp', 'tp']).best.mesh  # doctest: +SKIP
    """
    names = list(meshes.checked_axes([1] * len(axis_names), axis_names)[1])
    _check(make_step, names)
    dcn_axes = [] if dcn_axis is None else [dcn_axis] if isinstance(dcn_axis, str) else [*dcn_axis]
    for axis in dcn_axes:
        if axis not in names:
            raise ArgumentError(f'dcn_axis={axis!r} is not a mesh axis ({did_you_mean(axis, names)})')
    pipelines = _as_pipelines(pipelines, names)
    _check_parameters(make_step, bool(pipelines))
    if num_slices > 1 and not dcn_axes:
        raise ArgumentError(f'{num_slices} slices need dcn_axis=..., the mesh axis across slices')
    trial_file = TrialLog(file)
    devices, name = _devices(topology, num_slices)
    if devices[0].platform != 'tpu':  # other plans are always full ones
        full = 0
    mesh_sizes = possible_meshes(len(devices), names, constraints)
    candidates = [candidate for sizes in mesh_sizes for candidate in _candidates(sizes, pipelines)]
    if not candidates:
        raise ArgumentError(
            f'no mesh over {", ".join(names)} with {len(devices)} devices satisfies the constraints'
        )
    planner = _Planner(make_step, devices, (num_slices, dcn_axes), bool(pipelines), hardware, trial_file)
    planned: dict[int, Candidate] = {}
    interrupted = False
    started = time.monotonic()
    with progress('planning', _log) as update_progress:
        try:
            for i, candidate in enumerate(candidates):
                update_progress(f'{i + 1} of {len(candidates)}: {candidate.name}')
                planned[i] = planner.plan(candidate, quick=True)
            _plan_best_in_full(planner, planned, full, update_progress)
        except KeyboardInterrupt:
            interrupted = True
    return SearchResult(
        ranked(planned.values()),
        name,
        interrupted,
        num_untried=len(candidates) - len(planned),
        num_quick_plans=planner.num_quick,
        num_full_plans=planner.num_full,
        num_cached_plans=planner.num_cached,
        search_seconds=time.monotonic() - started,
    )


@dataclasses.dataclass
class _Planner:
    """Plans the step on candidates, and counts the plans.

    Attributes:
        make_step: makes the step and its arguments for a helper.
        devices: the devices.
        slices: the number of slices, and the mesh axes over which they are distributed.
        has_pipelines: whether *make_step* takes ``pipeline=``.
        hardware: hardware specifications in place of the known ones.
        file: the plans of earlier searches, to which new plans are appended.
        num_quick: how many quick plans were compiled.
        num_full: how many full plans were compiled.
        num_cached: how many plans were read from the file.
    """

    make_step: Callable[..., tuple[Any, Sequence[Any]]]
    devices: Sequence[Any]
    slices: tuple[int, Sequence[str]]
    has_pipelines: bool
    hardware: Hardware | None
    file: TrialLog
    num_quick: int = 0
    num_full: int = 0
    num_cached: int = 0

    def plan(self, candidate: Candidate, *, quick: bool) -> Candidate:
        """Returns the candidate with its plan, or with the reason why it has none."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('error', IndivisibleWarning)
                warnings.simplefilter('ignore', PipelineWarning)
                step = self._lower(candidate)
                candidate = dataclasses.replace(candidate, argument_bytes=step.argument_bytes)
                limit = step.hardware.hbm_bytes if step.hardware else None
                if quick and limit is not None and candidate.argument_bytes > limit:
                    argument_bytes, limit_bytes = human_bytes(candidate.argument_bytes), human_bytes(limit)
                    reason = f'cannot fit: its arguments alone take {argument_bytes} of {limit_bytes}'
                    return dataclasses.replace(candidate, reason=reason, ruled_out=True)
                key = f'{step.fingerprint} {"quick" if quick else "in full"}' if self.file.path else ''
                plan = self._load_plan(key) or self._compile(step, key, quick)
        except Exception as error:  # noqa: BLE001 - reason_of_failure raises errors that are not an outcome
            return dataclasses.replace(candidate, reason=reason_of_failure(error, candidate.name))
        reason = f'does not fit: {memory_taken(plan)}' if plan.fits is False else ''
        return dataclasses.replace(candidate, plan=plan, reason=reason)

    def _load_plan(self, key: str) -> Plan | None:
        """Loads a plan from the file of trials. Returns None if it has none, or a damaged one."""
        values = self.file.get(key)
        if values is not None:
            with contextlib.suppress(DataError):
                plan = Plan.load(json.dumps(values.get('plan')))
                self.num_cached += 1
                return plan
        return None

    def _compile(self, step: LoweredStep, key: str, quick: bool) -> Plan:
        plan = plan_lowered(step, quick=quick)
        self.num_quick, self.num_full = self.num_quick + quick, self.num_full + (not quick)
        if self.file.path:
            self.file.add(key, {'plan': json.loads(plan.to_json())})
        return plan

    def _lower(self, candidate: Candidate) -> LoweredStep:
        sizes = dict(candidate.mesh)
        helper = make_helper(sizes, self.devices, slices_along(sizes, *self.slices))
        options = {'pipeline': candidate.pipeline} if self.has_pipelines else {}
        step, arguments = self.make_step(helper, **options)
        return lower_step(helper, step, arguments, {}, self.hardware)


def _devices(topology: Any, num_slices: int) -> tuple[Sequence[Any], str]:
    """Returns the devices, and the name of the hardware."""
    if topology and isinstance(topology, Sequence) and not isinstance(topology, str):
        return topology, f'{len(topology)} x {topology[0].device_kind}'
    return topologies.topology_devices(topology, num_slices), topology


def _check(make_step: Any, names: Sequence[str]) -> None:
    if not callable(make_step):
        raise ArgumentError(
            'search takes a function first, which makes the step and its arguments for a helper, '
            f'got {type(make_step).__name__}'
        )
    if not names:
        raise ArgumentError("a search needs the names of mesh axes, such as ['fsdp', 'tp']")


def _check_parameters(make_step: Callable[..., Any], has_pipelines: bool) -> None:
    try:
        inspect.signature(make_step).bind(None, **({'pipeline': None} if has_pipelines else {}))
    except TypeError as error:
        call = 'helper, pipeline=...' if has_pipelines else 'helper'
        raise ArgumentError(
            f'search calls {name_of(make_step)}({call}), which has the parameters '
            f'{inspect.signature(make_step)}: {error}\n'
            'What to do: give it a function that takes these, compiles the step with the helper, and returns '
            'the step and its arguments. For a step of one device, use autoshard(step, arguments).'
        ) from None


def _candidates(sizes: AxisSizes, pipelines: Iterable[Pipeline]) -> list[Candidate]:
    """Returns a candidate for each pipeline whose axis has several devices; without pipelines, one."""
    runnable: list[Pipeline | None] = [pipeline for pipeline in pipelines if sizes[pipeline.axis] > 1]
    return [Candidate(sizes, pipeline=pipeline) for pipeline in runnable or [None]]


def _as_pipelines(pipelines: Any, names: Sequence[str]) -> list[Pipeline]:
    """Returns the pipelines to try, each over an axis of the mesh."""
    pipelines = [pipelines] if isinstance(pipelines, Pipeline) else [*pipelines]
    for pipeline in pipelines:
        if not isinstance(pipeline, Pipeline):
            raise ArgumentError(
                f"pipelines takes values such as Pipeline('stage', num_microbatches=8), got {pipeline!r}"
            )
        if pipeline.axis not in names:
            raise ArgumentError(f'{pipeline} names no mesh axis ({did_you_mean(pipeline.axis, names)})')
    return pipelines


def _plan_best_in_full(
    planner: _Planner, planned: dict[int, Candidate], full: int | None, update_progress: UpdateProgress
) -> None:
    """Compiles the best candidates in full until *full* of them fit.

    If *full* is None, compiles until the best one fits for certain.
    """
    num_fitting = 0
    may_be_best = [i for i, candidate in planned.items() if may_fit(candidate)]
    for i in sorted(may_be_best, key=lambda i: rank_key(planned[i])):
        if num_fitting >= (1 if full is None else full) or (full is None and surely_fits(planned[i])):
            return
        update_progress(f'in full: {planned[i].name}')
        planned[i] = planner.plan(dataclasses.replace(planned[i], reason=''), quick=False)
        num_fitting += not planned[i].reason
