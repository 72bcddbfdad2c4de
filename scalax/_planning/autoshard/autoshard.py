"""The function `autoshard`, which chooses a mesh and a sharding rule for a step."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from scalax._core.mesh import topologies
from scalax._core.render.trial_log import TrialLog
from scalax._core.util.progress import progress
from scalax._planning.autoshard.build_result import build_result
from scalax._planning.autoshard.coordinate_descent import CoordinateDescent
from scalax._planning.autoshard.layout import Axes
from scalax._planning.autoshard.problem import make_problem
from scalax._planning.autoshard.result import AutoShardingResult, StopReason
from scalax._planning.autoshard.step import trace_step
from scalax._planning.autoshard.trial import OutOfTime, Trials
from scalax._planning.hardware.specs import Hardware, hardware_of
from scalax._planning.mesh_search.meshes import Constraints, possible_meshes
from scalax.errors import ArgumentError, IndivisibleWarning, PipelineWarning, PlanError
from scalax.rules import TreePathShardingRule

_log = logging.getLogger('scalax.autoshard')

OptimizerState = Literal['as parameters', 'zero1']
Pairs = TreePathShardingRule | Sequence[tuple[str, PartitionSpec]]


def autoshard(
    step: Callable[..., Any],
    args: Sequence[Any],
    topology: str | None = None,
    *,
    batch_argnums: int | Sequence[int],
    donate_argnums: int | Sequence[int] = (),
    keep: Pairs = (),
    optimizer_state: OptimizerState = 'as parameters',
    batch_dim: int = 0,
    axis_names: Sequence[str] | None = None,
    sizes: Constraints = None,
    num_slices: int = 1,
    hardware: Hardware | None = None,
    memory: int | None = None,
    headroom: float = 0.1,
    budget_s: float = 600.0,
    file: str | os.PathLike[str] | None = None,
) -> AutoShardingResult:
    """Finds a mesh and a sharding rule for a step written for one device (auto-sharding).

    The step is compiled (`MeshShardingHelper.plan`, quickly) with one layout after another. First, on each
    mesh, dimensions of the model, such as its heads, are sharded over the second mesh axis in all arrays that
    have them; the matmuls of the step show which dimensions of arrays are the same. Then, on the best meshes,
    the sharding of each group of parameters is changed by itself, until nothing improves. Each layout is
    partitioned along the batch (`sjit`). Over several slices, if the step scans over stacked layers,
    pipelines are tried, too (`Pipeline`). The search is deterministic unless the budget is used up first.

    The objective is the average of the fully overlapped and the serial step time; of equal layouts, the one
    with less memory wins. For devices of unknown speed, such as simulated ones, 4e14 FLOP/s and links of 1e11
    bytes a second are assumed.

    Progress is shown in one line, on stderr in a terminal or in the output of a notebook cell
    (``SCALAX_PROGRESS=0`` turns it off). Elsewhere it is logged (``scalax.autoshard``, level INFO).

    Args:
        step: a function for one device, with positional arguments.
        args: its arguments: trees of arrays or ShapeDtypeStructs.
        topology: the slice, such as ``'v5p:4x4x4'``, or the GPUs, such as ``'h100:4x8'``, as for
            `MeshShardingHelper.from_topology`; the devices of this process by default.
        batch_argnums: the arguments that hold a batch. A rule is found for all others.
        donate_argnums: the arguments that the step may overwrite, as for ``jax.jit``.
        keep: pairs of a regex and a PartitionSpec, for leaves whose sharding is fixed.
        optimizer_state: ``'as parameters'``: statistics are sharded like their parameter; ``'zero1'``: only
            statistics are sharded over the axes of the batch, and parameters are replicated along these axes.
        batch_dim: the batch dimension of the arrays of the batch.
        axis_names: the names of the mesh axes: the one that shards the batch, and the model axis; for several
            slices, first the one across slices. By default data, fsdp and tp.
        sizes: mesh axis -> its size, or its possible sizes; or a function of the sizes that returns whether
            to try them.
        num_slices: the number of slices; for GPUs, of nodes. The first mesh axis is across slices.
        hardware: hardware specifications to use instead of the known ones, for example with a slower network:
            an entry of `HARDWARE` changed by `dataclasses.replace`.
        memory: the bytes of memory of a device. By default those of the hardware, or no limit if these are
            unknown, as for simulated devices.
        headroom: the fraction of the memory to leave free.
        budget_s: the number of seconds after which no new layout is tried.
        file: a file to which each trial is appended. A later search for the same step, with the same compiler
            and flags, continues from it.

    Returns:
        An `AutoShardingResult`. Ctrl-C ends the search early, with the best layout so far.

    Raises:
        ArgumentError: the step does not trace for one device, has nothing to shard, or an argument is
            invalid.
        PlanError: no layout could be compiled.
        Exception: another error of the step or of scalax, with a note that names the layout.
        MissingDependencyError: the compiler for TPUs or for GPUs is not installed.
        MeshError: the topology is unknown.
        DataError: *file* holds something other than trials.

    Example:
        >>> from scalax.plan import autoshard
        >>> result = autoshard(train_step, (state, batch), 'v5p:4x4x4', batch_argnums=1)  # doctest: +SKIP
        >>> print(result.to_code())  # doctest: +SKIP
    """
    names = _checked_names(axis_names, num_slices)
    _check(headroom, optimizer_state, batch_dim)
    trial_file = TrialLog(file)
    traced = trace_step(step, args, batch_argnums, donate_argnums)
    if topology is None and num_slices > 1:
        raise ArgumentError('several slices need a topology, such as v5p:4x4x4')
    devices = jax.devices() if topology is None else topologies.topology_devices(topology, num_slices)
    axes = Axes(*names)
    problem = make_problem(traced, devices, axes, num_slices, keep, optimizer_state == 'zero1', hardware)
    hardware = hardware or hardware_of(devices[0].device_kind)
    limit = memory if memory is not None else hardware.hbm_bytes if hardware else None
    usable = None if limit is None else int(limit * (1 - headroom))
    meshes = [*_mesh_sizes(len(devices), num_slices, axes, sizes)]
    started = time.monotonic()
    stop_reason: StopReason = ''
    # Set here, because warning filters belong to the process: threads of trials could not restore them.
    with warnings.catch_warnings(), progress('finding a rule:', _log) as update_progress:
        warnings.simplefilter('error', IndivisibleWarning)
        warnings.simplefilter('ignore', PipelineWarning)
        warnings.filterwarnings('ignore', 'Some donated buffers were not usable')  # the result warns once
        trials = Trials(problem, usable, trial_file, update_progress, started + budget_s)
        try:
            CoordinateDescent(trials, meshes, batch_dim).run()
        except OutOfTime:
            stop_reason = 'budget'
        except KeyboardInterrupt:
            if not trials.results:
                raise
            stop_reason = 'interrupted'
    best = trials.best
    if best is None:
        raise ArgumentError(
            f'no mesh of {len(devices)} devices divides the batch dimension: dimension {batch_dim} of '
            f'{", ".join(map(str, dict.fromkeys(traced.batch_shapes)))}'
        )
    if best.failure:
        raise PlanError(f'no layout of {traced.name} could be compiled: {best.failure}')
    return build_result(trials, best, topology, stop_reason, time.monotonic() - started)


def _checked_names(names: Sequence[str] | None, num_slices: int) -> tuple[str, str, str]:
    if isinstance(num_slices, bool) or not isinstance(num_slices, int) or num_slices < 1:
        raise ArgumentError(f'num_slices has to be a positive integer, got {num_slices!r}')
    default_names = ('fsdp', 'tp') if num_slices == 1 else ('data', 'fsdp', 'tp')
    axis_names = default_names if names is None else tuple(names) if isinstance(names, list | tuple) else ()
    are_strings = all(isinstance(name, str) for name in axis_names)
    if len({*axis_names}) != len(default_names) or not are_strings:
        raise ArgumentError(
            f'axis_names has to be {len(default_names)} names of mesh axes, such as fsdp and tp, '
            f'got {names!r}'
        )
    *dcn, fsdp, model = axis_names
    return (dcn[0] if dcn else ''), fsdp, model


def _check(headroom: float, optimizer_state: str, batch_dim: int) -> None:
    if not isinstance(headroom, int | float) or not 0 <= headroom < 1:
        raise ArgumentError(
            f'headroom has to be a fraction of the memory, from 0 to below 1, got {headroom!r}'
        )
    if optimizer_state not in ('as parameters', 'zero1'):
        raise ArgumentError(f"optimizer_state has to be 'as parameters' or 'zero1', got {optimizer_state!r}")
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
        raise ArgumentError(f'batch_dim has to be the index of a dimension, got {batch_dim!r}')


def _mesh_sizes(devices: int, num_slices: int, axes: Axes, sizes: Constraints) -> Iterator[dict[str, int]]:
    """Yields the sizes of the mesh axes, starting with the smallest model axis."""
    slice_devices = devices // num_slices
    meshes = [*possible_meshes(slice_devices, [axes.fsdp, axes.model], sizes, 'sizes')]
    if not meshes:
        raise ArgumentError(f'no mesh of {slice_devices} devices in a slice has the sizes {sizes}')
    for mesh in meshes:
        used_axes = {name: size for name, size in mesh.items() if size > 1 or name == axes.fsdp}
        yield {axes.dcn: num_slices, **used_axes} if num_slices > 1 else used_axes
