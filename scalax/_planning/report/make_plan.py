"""Makes a plan: compiles a function for the mesh of a helper, without running it, and reads the program."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._compile.call.signature import name_of
from scalax._compile.sjit.function import (
    SjitFunction,
    argument_names,
    partitioned_step,
    pipelines_of,
)
from scalax._core.context.active_helper import MeshOwner
from scalax._core.mesh.gpu_targets import TARGETS
from scalax._core.mesh.meshes import has_devices
from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.pytree.paths import join
from scalax._core.util.progress import progress
from scalax._jax import error_texts
from scalax._planning.compiler.compilation import QUICK_PLAN_OPTIONS, Compiled, compile_lowered
from scalax._planning.compiler.lowered_step import LoweredStep, lower_step
from scalax._planning.compiler.running_compilations import compiling
from scalax._planning.cost.buffers import largest_buffers
from scalax._planning.cost.collectives import Collective, collective_times, collectives
from scalax._planning.cost.device_cost import device_cost_of
from scalax._planning.cost.flops import count_flops, count_model_flops
from scalax._planning.cost.host_transfers import HostTransfers, host_transfers
from scalax._planning.cost.memory import Memory, constant_bytes
from scalax._planning.hardware.specs import Hardware, hardware_of, required_specs
from scalax._planning.program.hlo import Module, parse
from scalax._planning.report.pipeline_section import with_flops
from scalax._planning.report.plan import Plan
from scalax._planning.time.nccl import nccl_seconds
from scalax._planning.time.roofline import routes_of, time_collectives
from scalax._planning.time.schedule import Schedule, schedule_of
from scalax.errors import ArgumentError, PlanError, near_names
from scalax.explain import ShardingReport, make_report
from scalax.rules._resolve import ResolveMode, resolve

_log = logging.getLogger('scalax.plan')

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def make_plan(
    helper: MeshOwner,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    quick: bool = False,
    hardware: Hardware | None = None,
) -> Plan:
    """Makes a plan, as `MeshShardingHelper.plan` does; options cannot clash with arguments of the function.

    Args:
        helper: the helper of the mesh.
        fun: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        quick: as for `MeshShardingHelper.plan`.
        hardware: the numbers of the devices, such as those of a slower network; by default what is known of
            them.

    Raises:
        PlanError: the compiler failed, or the compiled program is written in an unknown form.
        MeshError: the helper was made from an AbstractMesh.
        ArgumentError: *fun* is not a function, or nothing ties it to a mesh of absent devices.
    """
    step = lower_step(helper, fun, args, kwargs, hardware)
    is_slow = not quick and step.mesh.devices.flat[0].platform == 'tpu'
    how = ' in full: minutes, or seconds with quick' if is_slow else ''
    with progress(f'planning {step.name}{how}', _log):
        return plan_lowered(step, quick=quick)


def plan_lowered(step: LoweredStep, *, quick: bool = False) -> Plan:
    """Makes the plan of a step that is lowered; raises as `make_plan` does."""
    mesh, lowered, traced = step.mesh, step.lowered, step.traced
    device = mesh.devices.flat[0]
    hardware = step.hardware
    limit = hardware.hbm_bytes if hardware else None
    compiled = _compile(step, limit, step.argument_bytes if quick else None)
    if not {*mesh.devices.flat}.issuperset(compiled.runs_on):
        raise _not_on_mesh(step.name)
    if f'custom_call_target="{error_texts.CUSTOM_PARTITIONING}"' in compiled.partitioned:
        raise _not_told(step.name, device)  # a quick plan would count it as one that needs whole arrays
    # If nothing is partitioned, the lowered program is that of the device. (``lowered.as_text`` would print
    # every constant.)
    partitioned = parse(compiled.partitioned or lowered.compiler_ir(dialect='hlo').as_hlo_text())
    is_gpu = device.platform == 'gpu'
    program = parse(compiled.optimized, is_gpu) if compiled.optimized else partitioned
    staged = pipelines_of(step.function, step.args, step.kwargs)
    written = traced.jaxpr if staged is None else staged.original_jaxpr
    flops = count_flops(written)
    positions = step.device_positions
    switched = hardware is not None and hardware.torus_axes == 0
    sizes = dict(mesh.shape)
    given, returned = _shardings(compiled, lowered, step.shardings)
    before, ids = partitioned if compiled.optimized else None, [device.id for device in mesh.devices.flat]
    positional, by_name = lowered.args_info
    names = _names_of_arguments(step.function, step.args, lowered.args_info)
    inputs = _report([*positional, *by_name.values()], given, mesh, names)
    blocks = partitioned_step(step.function, step.args, step.kwargs)
    reasons = {} if blocks is None else blocks.collective_reasons
    rows = (
        collectives(program, sizes, positions, before, ids, switched, reasons) if compiled.partitioned else ()
    )
    asked, has_batch = step.function, step.already_jitted and isinstance(step.function, SjitFunction)
    plan = Plan(
        name=step.name,
        mesh=sizes,
        devices=compiled.devices,
        platform=device.platform,
        memory=_memory(compiled, partitioned, limit),
        inputs=inputs,
        outputs=_report(lowered.out_info, returned, mesh),
        collectives=rows,
        flops=flops.count,
        flops_exactness=flops.exactness,
        device_cost=device_cost_of(program),
        model_flops=count_model_flops(written),
        device_kind=device.device_kind,
        device_positions=positions,
        quick=quick and device.platform == 'tpu',
        refusal=compiled.refusal,
        flags=compiled.flags,
        buffers=() if compiled.layout is None else largest_buffers(compiled.layout, program),
        host_transfers=host_transfers(program) if compiled.optimized else HostTransfers(),
        propagation=asked.explain_propagation(*step.args, **step.kwargs) if has_batch else None,
        pipelines=() if staged is None else with_flops(staged.loops),
        hardware_override=step.hardware_override,
    )
    return dataclasses.replace(plan, schedule=gpu_schedule(plan, program, ids)) if is_gpu else plan


def gpu_schedule(plan: Plan, program: Module, ids: Sequence[int]) -> Schedule | None:
    """The seconds along the schedule of a program for GPUs; None if numbers are missing for it.

    Args:
        plan: the plan of the program.
        program: the optimized program.
        ids: the ids of the devices of the mesh.
    """
    roofline = plan.known_roofline
    if roofline is None or hardware_of(plan.device_kind) is None:
        return None
    [hbm_rate] = required_specs(roofline.hardware, 'hbm_bytes_per_second', for_='a schedule')
    host_rate = roofline.hardware.host_bytes_per_second or math.inf  # known if anything goes there
    times = collective_times(
        functools.partial(nccl_collective_seconds, plan, roofline.hardware),
        program,
        plan.mesh,
        plan.device_positions,
        ids,
    )
    return schedule_of(program, roofline.peak / plan.devices, hbm_rate, host_rate, times)


def nccl_collective_seconds(plan: Plan, hardware: Hardware, rows: Sequence[Collective]) -> Iterator[float]:
    """The seconds of one execution of some collectives: as NCCL expects, or else those of the roofline.

    Args:
        plan: the plan whose devices run them.
        hardware: their numbers.
        rows: the collectives.
    """
    compiled_for = hardware_of(plan.device_kind)
    assert compiled_for is not None
    target, of_host = TARGETS[compiled_for.name], hardware.chips_per_host or 1
    card = None if hardware.dcn_bytes_per_second is None else hardware.dcn_bytes_per_second / of_host
    routes = routes_of(rows, plan.mesh, plan.device_positions, hardware) if rows else []
    timed = time_collectives(rows, plan.mesh, plan.device_positions, plan.device_kind, hardware).collectives
    for (row, seconds), ways in zip(timed, routes, strict=True):
        found = [nccl_seconds(row.kind, row.bytes, way, target, card, hardware.switches_add) for way in ways]
        yield max((time for time in found if time is not None), default=seconds / max(1, row.count))


def _compile(step: LoweredStep, limit: int | None, layout_for: int | None) -> Compiled:
    """Compiles a step for the devices of its mesh."""
    mesh, name = step.mesh, step.name
    device = mesh.devices.flat[0]
    where = f'{mesh.size} {device.device_kind!r} devices ({axis_sizes_text(mesh.shape)})'
    try:
        with compiling(f'{name!r} for {where}'):
            return compile_lowered(
                step.lowered,
                device.platform,
                limit=limit,
                layout_for=layout_for,
                attached=has_devices(mesh),
                user_options=step.compiler_options if device.platform == 'gpu' else (),
            )
    except jax.errors.JaxRuntimeError as error:
        if error_texts.unknown_option(error) in QUICK_PLAN_OPTIONS:
            # JAX asked the compiler of the local devices, which does not know the options of the other one.
            raise _not_on_mesh(name) from error
        if error_texts.lacks_custom_partitioning(error):
            raise _not_told(name, device) from error
        raise PlanError(
            f'{error}\nBecause of this error {name!r} was not compiled for {where}, and there is no plan'
        ) from error


def _not_told(name: str, device: Any) -> PlanError:
    return PlanError(
        f'{name!r} has an operation with custom_partitioning, which JAX does not register with compilers for '
        f'absent devices, such as these {device.device_kind!r}: they report "Custom emitter for '
        f'{error_texts.CUSTOM_PARTITIONING} not found".\nWhat to do: with scalax.custom_op, plan with '
        'from_topology(..., axis_types=AxisType.Explicit); run the operation in helper.shard_map; or plan it '
        'on simulated devices, and time it with plan.roofline(hardware, torus=...)'
    )


def _not_on_mesh(name: str) -> ArgumentError:
    return ArgumentError(
        f'nothing ties {name!r} to this mesh, whose devices are absent: give its arguments or '
        'outputs shardings: helper.sjit(fun, in_shardings=...), or helper.abstract(tree, rules)'
    )


def _memory(compiled: Compiled, partitioned: Module, limit: int | None) -> Memory:
    """The memory of a program on devices with so much."""
    memory = dataclasses.replace(compiled.memory, limit=limit)
    if not memory.estimated:
        return memory
    # XLA for CPUs keeps constants with its code, and does not count them.
    baked = constant_bytes(partitioned)
    return dataclasses.replace(memory, temporaries=memory.temporaries + baked, peak=memory.peak + baked)


def reject_own_argument(fun: Any, name: str, of: str, otherwise: str) -> None:
    """Raises ArgumentError for an option that is also an argument of the user's function.

    Args:
        fun: the function.
        name: the option.
        of: the method that has it.
        otherwise: what to do, if the argument cannot be given by position.
    """
    if any(name == own for own, _ in _parameters(fun)):
        raise ArgumentError(
            f'{name!r} is an option of {of}, and an argument of {name_of(fun)!r}: give that by position, or '
            f'{otherwise}'
        )


def reject_misspelt(fun: Any, keywords: Iterable[str], options: Iterable[str], of: str) -> None:
    """Raises ArgumentError about a keyword that looks like an option, and that the user's function lacks.

    Args:
        fun: the function.
        keywords: the names of its keyword arguments.
        options: the names of the options.
        of: the method that has the options.
    """
    own = dict(_parameters(fun))
    if not own or inspect.Parameter.VAR_KEYWORD in own.values():
        return
    for name in keywords:
        if name not in own and (near := near_names(name, [*options, *own])) and near[0] in options:
            raise ArgumentError(
                f'neither {of} nor {name_of(fun)!r} has an argument {name!r} (did you mean {near[0]!r}?)'
            )


def _shardings(compiled: Compiled, lowered: Any, asked: tuple[Any, Any]) -> tuple[Any, Any]:
    """The shardings of arguments and outputs; those that were asked for if the program was refused."""
    if compiled.executable is not None:
        positional, by_name = compiled.executable.input_shardings
        inputs: Any = jax.tree.structure(lowered.args_info)
        outputs: Any = jax.tree.structure(lowered.out_info)
        given = inputs.flatten_up_to((tuple(positional), by_name))
        return given, outputs.flatten_up_to(compiled.executable.output_shardings)
    given, returned = asked
    return given[: len(jax.tree.leaves(lowered.args_info))], returned


def _parameters(function: Any) -> list[tuple[str, Any]]:
    try:
        return [(name, parameter.kind) for name, parameter in inspect.signature(function).parameters.items()]
    except (TypeError, ValueError):  # some built-ins have no signature
        return []


def _names_of_arguments(function: Any, args: Sequence[Any], info: tuple[Any, Any]) -> list[str]:
    """The names of the arguments of a jitted function; *info* is that of the lowered program."""
    positional, by_name = info
    names = argument_names(function, args)
    if names is None:
        names = [name for name, kind in _parameters(function) if kind in _POSITIONAL][: len(positional)]
        if not len(args) == len(positional) == len(names):  # static ones are not among those of the program
            names = [f'args[{i}]' for i in range(len(positional))]
    return [*names, *map(str, by_name)]


def _report(tree: Any, shardings: Sequence[Any], mesh: Mesh, names: Sequence[str] = ()) -> ShardingReport:
    """The shardings of a tree. Those that are not on this mesh are shown as the compiler's own.

    Args:
        tree: the tree.
        shardings: one for each of its leaves.
        mesh: the mesh.
        names: what is shown for the first keys of paths, if these are positions.
    """
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    placed = map(_sharding_of_leaf, shardings, jax.tree.leaves(structs))
    known = jax.tree.unflatten(jax.tree.structure(structs), placed)
    resolution = resolve(known, structs, mesh, mode=ResolveMode.BOUNDARY, where='a compiled program')
    # These are the dtypes on the devices. Outside of x64, reports show float64 as float32.
    with jax.enable_x64(True):
        report = make_report(known, resolution, dict(mesh.shape))
    rows = []
    for row in report.rows:
        path = row.path
        if names:
            position, below, rest = path.partition('/')
            path = join(names[int(position)], rest if below else None) or ''
        rows.append(dataclasses.replace(row, path=path, rule='', reason=''))
    return dataclasses.replace(report, rows=tuple(rows))


def _sharding_of_leaf(own: Any, leaf: Any) -> NamedSharding | None:
    """The sharding of a leaf, if it is one of the mesh."""
    if not isinstance(own, NamedSharding):
        return None
    if len(own.spec) <= len(leaf.shape):
        return own
    # For the compiler a typed key has one more dimension: that of its data.
    return NamedSharding(own.mesh, PartitionSpec(*own.spec[: len(leaf.shape)]), memory_kind=own.memory_kind)
