"""Finds a mesh and a rule: checks the arguments, makes the problem, searches, and reports."""

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
from scalax._core.render.trial_log import TrialFile
from scalax._core.util.progress import progress
from scalax._planning.autoshard.build_result import build_result
from scalax._planning.autoshard.coordinate_descent import Descent
from scalax._planning.autoshard.layout import Axes
from scalax._planning.autoshard.problem import make_problem
from scalax._planning.autoshard.result import AutoShardingResult, StopReason
from scalax._planning.autoshard.step import make_step
from scalax._planning.autoshard.trial import OutOfTime, Trials
from scalax._planning.hardware.specs import Hardware, hardware_of
from scalax._planning.mesh_search.meshes import Constraints, possible_meshes
from scalax.errors import ArgumentError, IndivisibleWarning, PlanError, StagesWarning
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
    """Finds a mesh and a sharding rule for a step that is written for one device (auto-sharding).

    The step is compiled (`MeshShardingHelper.plan`, quickly) with one layout after another. First, for each
    mesh shape, dimensions of the model, such as its heads, are sharded over the second mesh axis in all
    arrays that have them; which dimensions are the same follows from what the step multiplies. Then, on the
    best meshes, the sharding of each group of parameters is changed by itself, until nothing improves. Each
    layout is partitioned along the batch (`sjit`). Over several slices, if the step loops over stacked
    layers, pipelines are tried too (`Pipeline`). The search is deterministic: the same arguments give the
    same result, unless the budget is used up first.

    The objective averages the fully overlapped and the serial step time; of equal layouts, the one with less
    memory wins. On devices of unknown speed, such as simulated ones, 4e14 operations and 1e11 bytes a second
    are assumed.

    A line on stderr shows the best so far, on a terminal and in a notebook (``SCALAX_PROGRESS=0`` turns it
    off). Elsewhere it is logged (``scalax.autoshard``, level INFO).

    Args:
        step: a function for one device, with positional arguments.
        args: its arguments: trees of arrays, or of ShapeDtypeStructs.
        topology: the slice, such as ``'v5p:4x4x4'``, or the GPUs, such as ``'h100:4x8'``, as for
            `MeshShardingHelper.from_topology`; the devices of this process by default.
        batch_argnums: the arguments that hold a batch. A rule is found for all others.
        donate_argnums: the arguments that the step may overwrite, as for ``jax.jit``.
        keep: pairs of a regex and a PartitionSpec, for leaves whose sharding is fixed.
        optimizer_state: ``'as parameters'``: statistics are sharded like their parameter; ``'zero1'``: only
            statistics are sharded over the axes of the batch, and parameters are replicated along these.
        batch_dim: the batch dimension of the arrays of the batch.
        axis_names: the names of two mesh axes: the one of the batch, and another one; with several slices,
            three: first the one across slices. By default fsdp and tp, and data.
        sizes: mesh axis -> its size, or the sizes that it may have; or a function of the sizes that returns
            whether they are allowed.
        num_slices: the number of slices; for GPUs the number of nodes, which the first mesh axis is across.
        hardware: the numbers of the devices, such as those of a slower network: `HARDWARE` with
            `dataclasses.replace`. By default what is known of the topology.
        memory: the bytes of memory of a device; by default those of the hardware, and no limit where that is
            unknown, as for simulated devices.
        headroom: the fraction of it that is to stay free.
        budget_s: the seconds after which no new layout is tried.
        file: a file to which each trial is appended. A search for the same step, with the same compiler and
            flags, continues from it.

    Returns:
        A `AutoShardingResult`. Ctrl-C ends the search early, with the best so far.

    Raises:
        ArgumentError: the step does not trace for one device, has nothing to shard, or an argument is
            invalid.
        PlanError: the compiler makes no program of any layout.
        Exception: another error of the step or of scalax, with a note that names the layout.
        MissingDependencyError: the compiler for TPUs or for GPUs is not installed.
        MeshError: the topology is unknown.
        DataError: *file* holds something other than trials.

    Example:
        >>> from scalax.plan import autoshard
        >>> found = autoshard(train_step, (state, batch), 'v5p:4x4x4', batch_argnums=1)  # doctest: +SKIP
        >>> print(found.to_code())  # doctest: +SKIP
    """
    names = _names(axis_names, num_slices)
    _check(headroom, optimizer_state, batch_dim)
    trial_file = TrialFile(file)
    traced = make_step(step, args, batch_argnums, donate_argnums)
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
    # Not in the threads of the trials: filters are those of the process, and would not be restored.
    with warnings.catch_warnings(), progress('finding a rule:', _log) as note:
        warnings.simplefilter('error', IndivisibleWarning)
        warnings.simplefilter('ignore', StagesWarning)
        warnings.filterwarnings('ignore', 'Some donated buffers were not usable')  # once, of the result
        trials = Trials(problem, usable, trial_file, note, started + budget_s)
        try:
            Descent(trials, meshes, batch_dim).run()
        except OutOfTime:
            stop_reason = 'budget'
        except KeyboardInterrupt:
            if not trials.known:
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


def _names(names: Sequence[str] | None, num_slices: int) -> tuple[str, str, str]:
    if isinstance(num_slices, bool) or not isinstance(num_slices, int) or num_slices < 1:
        raise ArgumentError(f'num_slices has to be a positive integer, got {num_slices!r}')
    usual = ('fsdp', 'tp') if num_slices == 1 else ('data', 'fsdp', 'tp')
    given = usual if names is None else tuple(names) if isinstance(names, list | tuple) else ()
    if len({*given}) != len(usual) or not all(isinstance(name, str) for name in given):
        raise ArgumentError(
            f'axis_names has to be {len(usual)} names of mesh axes, such as fsdp and tp, got {names!r}'
        )
    *slices, batch, other = given
    return (slices[0] if slices else ''), batch, other


def _check(headroom: float, optimizer_state: str, batch_dim: int) -> None:
    if not isinstance(headroom, int | float) or not 0 <= headroom < 1:
        raise ArgumentError(
            f'headroom has to be a fraction of the memory, from 0 to below 1, got {headroom!r}'
        )
    if optimizer_state not in ('as parameters', 'zero1'):
        raise ArgumentError(f"optimizer_state has to be 'as parameters' or 'zero1', got {optimizer_state!r}")
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
        raise ArgumentError(f'batch_dim has to be the number of a dimension, got {batch_dim!r}')


def _mesh_sizes(devices: int, slices: int, axes: Axes, sizes: Constraints) -> Iterator[dict[str, int]]:
    """The sizes of the mesh axes, the smallest second axis first."""
    each = devices // slices
    meshes = [*possible_meshes(each, [axes.batch, axes.other], sizes, 'sizes')]
    if not meshes:
        raise ArgumentError(f'no mesh of {each} devices in a slice has the sizes {sizes}')
    for mesh in meshes:
        kept = {name: size for name, size in mesh.items() if size > 1 or name == axes.batch}
        yield {axes.slices: slices, **kept} if slices > 1 else kept
