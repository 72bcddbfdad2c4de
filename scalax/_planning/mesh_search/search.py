"""The search for the best mesh: plans all quickly, compiles in full where that decides, and ranks them."""

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
from scalax._core.render.trial_log import TrialFile
from scalax._core.util.progress import UpdateProgress, progress
from scalax._planning.compiler.lowered_step import LoweredStep, lower_step
from scalax._planning.hardware.specs import Hardware
from scalax._planning.mesh_search.candidate import Candidate
from scalax._planning.mesh_search.meshes import Constraints, Sizes, helper_of, possible_meshes, slices_along
from scalax._planning.mesh_search.objective import reason_of_failure
from scalax._planning.mesh_search.ranking import may_fit, order, ranked, surely_fits
from scalax._planning.mesh_search.result import SearchResult
from scalax._planning.report.make_plan import plan_lowered
from scalax._planning.report.plan import Plan
from scalax._planning.report.plan_page import memory_taken
from scalax._spmd.pipelines.config import Pipeline
from scalax.errors import ArgumentError, DataError, IndivisibleWarning, StagesWarning, did_you_mean

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

    The memory of the arguments is known before the step is compiled: a mesh on which they alone do not fit is
    ruled out. The others are planned quickly (`MeshShardingHelper.plan`), which takes seconds. Meshes on
    which the step does not fit, or some dimension does not divide, come last. The others are ranked as
    `autoshard` ranks layouts: by the average of the fully overlapped and the serial step time, and equal
    ones by their memory. If the best is so close to the memory limit that its quick plan does not tell
    whether it fits, it is compiled in full.

    A line on stderr shows where the search is, on a terminal and in a notebook (``SCALAX_PROGRESS=0`` turns
    it off). Elsewhere it is logged (``scalax.search``, level INFO).

    Args:
        make_step: called with a helper; with *pipelines* also with ``pipeline=``, for `sjit`. Returns the
            step, such as one made by `sjit`, and the tuple of its arguments.
        topology: the slice, such as ``'v5p:4x4x4'``, or the GPUs, such as ``'h100:4x8'``, as for
            `MeshShardingHelper.from_topology`; or devices that are here, such as ``jax.devices()``.
        axis_names: the mesh axes; every product of sizes that uses all devices is a candidate.
        constraints: mesh axis -> its size, or the sizes that it may have (``{'tp': [1, 2, 4, 8]}``); or a
            function of the sizes (mesh axis -> size) that returns whether to try them.
        num_slices: the number of slices; of GPUs that of NVLink domains, if *topology* does not have it.
        dcn_axis: the mesh axis that runs from slice to slice; needed for several slices. Of several axes the
            first ones run from slice to slice as far as their sizes divide: in front of pipelines and of
            data parallelism alike, ``['stage', 'data']``.
        pipelines: the pipelines that are tried wherever their axis has several devices, such as
            ``[Pipeline('stage', num_microbatches=m) for m in (8, 16, 32)]``. Elsewhere *make_step* is called
            with ``pipeline=None``.
        hardware: the numbers of the devices, such as those of a slower network: `HARDWARE` with
            `dataclasses.replace`. By default what is known of the topology.
        full: how many of the best to compile in full in any case, which takes minutes for each. For GPUs
            all plans are full ones.
        file: a file to which each plan is appended. A search of the same step, with the same compiler and
            flags, continues from it.

    Returns:
        A `SearchResult`. Ctrl-C ends the search early; the result then ranks the meshes planned so far.

    Raises:
        ArgumentError: there is no candidate, constraints or dcn_axis name no mesh axis, or an argument is
            invalid.
        Exception: an error of *make_step*, of the step, or of scalax, with a note that names the mesh.
        MissingDependencyError: the compiler for TPUs or for GPUs is not installed.
        MeshError: the topology is unknown, or names of axes are invalid.
        DataError: *file* holds something other than plans of a search.

    Example:
        >>> from scalax.plan import search
        >>> found = search(
        ...     make_step, 'v5p:4x4x4', ['fsdp', 'tp'], constraints={'tp': [1, 2, 4, 8]}
        ... )  # doctest: +SKIP
        >>> print(found)  # doctest: +SKIP
        >>> found.best.mesh  # doctest: +SKIP
        {'fsdp': 16, 'tp': 4}
        >>> search(make_step, jax.devices(), ['fsdp', 'tp']).best.mesh  # doctest: +SKIP
    """
    names = list(meshes.checked_axes([1] * len(axis_names), axis_names)[1])
    _check(make_step, names)
    outer = [] if dcn_axis is None else [dcn_axis] if isinstance(dcn_axis, str) else [*dcn_axis]
    for axis in outer:
        if axis not in names:
            raise ArgumentError(f'dcn_axis={axis!r} is no mesh axis ({did_you_mean(axis, names)})')
    pipelines = _as_pipelines(pipelines, names)
    _check_parameters(make_step, bool(pipelines))
    if num_slices > 1 and not outer:
        raise ArgumentError(
            f'{num_slices} slices need dcn_axis=..., the mesh axis that runs from slice to slice'
        )
    trial_file = TrialFile(file)
    devices, name = _devices(topology, num_slices)
    if devices[0].platform != 'tpu':  # plans of others are full ones
        full = 0
    meshes_of_all = possible_meshes(len(devices), names, constraints)
    todo = [each for sizes in meshes_of_all for each in _candidates(sizes, pipelines)]
    if not todo:
        raise ArgumentError(
            f'no mesh over {", ".join(names)} with {len(devices)} devices satisfies the constraints'
        )
    attempt = _Attempts(make_step, devices, (num_slices, outer), bool(pipelines), hardware, trial_file)
    done: dict[int, Candidate] = {}
    interrupted = False
    started = time.monotonic()
    with progress('planning', _log) as note:
        try:
            for place, candidate in enumerate(todo):
                note(f'{place + 1} of {len(todo)}: {candidate.name}')
                done[place] = attempt(candidate, quick=True)
            _in_full(attempt, done, full, note)
        except KeyboardInterrupt:
            interrupted = True
    return SearchResult(
        ranked(done.values()),
        name,
        interrupted,
        num_untried=len(todo) - len(done),
        num_quick_plans=attempt.quick,
        num_full_plans=attempt.full,
        num_cached_plans=attempt.read,
        search_seconds=time.monotonic() - started,
    )


@dataclasses.dataclass
class _Attempts:
    """What a search tries its candidates with, and how often it has compiled.

    Attributes:
        make_step: makes the step and its arguments for a helper.
        devices: the devices.
        slices: how many slices there are, and along which mesh axes, the first ones first.
        has_pipelines: whether *make_step* takes ``pipeline=``.
        hardware: the numbers of the devices, if they are not those that are known of them.
        file: the plans of earlier searches, to which new ones are appended.
        quick: how many quick plans were compiled.
        full: how many full plans were.
        read: how many plans of either kind were read from the file.
    """

    make_step: Callable[..., tuple[Any, Sequence[Any]]]
    devices: Sequence[Any]
    slices: tuple[int, Sequence[str]]
    has_pipelines: bool
    hardware: Hardware | None
    file: TrialFile
    quick: int = 0
    full: int = 0
    read: int = 0

    def __call__(self, candidate: Candidate, *, quick: bool) -> Candidate:
        """Returns the candidate with its plan, or with the reason why it has none."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('error', IndivisibleWarning)
                warnings.simplefilter('ignore', StagesWarning)
                step = self._lowered(candidate)
                candidate = dataclasses.replace(candidate, argument_bytes=step.argument_bytes)
                limit = step.hardware.hbm_bytes if step.hardware else None
                if quick and limit is not None and candidate.argument_bytes > limit:
                    least, most = human_bytes(candidate.argument_bytes), human_bytes(limit)
                    lost = f'cannot fit: its arguments alone take {least} of {most}'
                    return dataclasses.replace(candidate, reason=lost, ruled_out=True)
                name = f'{step.fingerprint} {"quick" if quick else "in full"}' if self.file.path else ''
                plan = self._saved(name) or self._compiled(step, name, quick)
        except Exception as error:  # noqa: BLE001 - lost_by raises what is no result of the compiler
            return dataclasses.replace(candidate, reason=reason_of_failure(error, candidate.name))
        lost = f'does not fit: {memory_taken(plan)}' if plan.fits is False else ''
        return dataclasses.replace(candidate, plan=plan, reason=lost)

    def _saved(self, name: str) -> Plan | None:
        """The plan in the file of trials; None if it has none, or a damaged one."""
        values = self.file.get(name)
        if values is not None:
            with contextlib.suppress(DataError):
                plan = Plan.load(json.dumps(values.get('plan')))
                self.read += 1
                return plan
        return None

    def _compiled(self, step: LoweredStep, name: str, quick: bool) -> Plan:
        plan = plan_lowered(step, quick=quick)
        self.quick, self.full = self.quick + quick, self.full + (not quick)
        if self.file.path:
            self.file.add(name, {'plan': json.loads(plan.to_json())})
        return plan

    def _lowered(self, candidate: Candidate) -> LoweredStep:
        sizes = dict(candidate.mesh)
        helper = helper_of(sizes, self.devices, slices_along(sizes, *self.slices))
        options = {'pipeline': candidate.pipeline} if self.has_pipelines else {}
        step, arguments = self.make_step(helper, **options)
        return lower_step(helper, step, arguments, {}, self.hardware)


def _devices(topology: Any, num_slices: int) -> tuple[Sequence[Any], str]:
    """The devices, and what the result calls them."""
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
        given = 'helper, pipeline=...' if has_pipelines else 'helper'
        raise ArgumentError(
            f'search calls {name_of(make_step)}({given}), which has the parameters '
            f'{inspect.signature(make_step)}: {error}\n'
            'What to do: give it a function that takes these, compiles the step with the helper, and returns '
            'the step and its arguments. For a step of one device, use autoshard(step, arguments).'
        ) from None


def _candidates(sizes: Sizes, pipelines: Iterable[Pipeline]) -> list[Candidate]:
    """The candidates of a mesh: with each pipeline that it has an axis for."""
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


def _in_full(attempt: _Attempts, done: dict[int, Candidate], most: int | None, note: UpdateProgress) -> None:
    """Compiles the best in full until *most* of them fit; by default until the best fits for sure."""
    fitting = 0
    near = [place for place, candidate in done.items() if may_fit(candidate)]
    for place in sorted(near, key=lambda place: order(done[place])):
        if fitting >= (1 if most is None else most) or (most is None and surely_fits(done[place])):
            return
        note(f'in full: {done[place].name}')
        done[place] = attempt(dataclasses.replace(done[place], reason=''), quick=False)
        fitting += not done[place].reason
