"""Making a plan: compiling a function for the mesh of a helper, and analyzing the program."""

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
    """Makes a plan, as `MeshShardingHelper.plan` does, with arguments that cannot clash with options.

    Args:
        helper: the helper of the mesh.
        fun: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        quick: as for `MeshShardingHelper.plan`.
        hardware: the hardware, such as one with a slower network; by default that of the devices.

    Raises:
        PlanError: the compiler failed, or wrote the program in an unknown form.
        MeshError: the helper was made from an AbstractMesh.
        ArgumentError: *fun* is not a function, or has no shardings for a mesh of devices that are not
            attached.
    """
    step = lower_step(helper, fun, args, kwargs, hardware)
    is_slow = not quick and step.mesh.devices.flat[0].platform == 'tpu'
    duration = ' in full: minutes, or seconds with quick' if is_slow else ''
    with progress(f'planning {step.name}{duration}', _log):
        return plan_lowered(step, quick=quick)


def plan_lowered(step: LoweredStep, *, quick: bool = False) -> Plan:
    """Makes the plan of a lowered step; raises as `make_plan` does."""
    mesh, lowered, traced = step.mesh, step.lowered, step.traced
    device = mesh.devices.flat[0]
    hardware = step.hardware
    limit = hardware.hbm_bytes if hardware else None
    compiled = _compile(step, limit, step.argument_bytes if quick else None)
    if not {*mesh.devices.flat}.issuperset(compiled.runs_on):
        raise _no_shardings_error(step.name)
    if f'custom_call_target="{error_texts.CUSTOM_PARTITIONING}"' in compiled.partitioned:
        raise _custom_partitioning_error(step.name, device)  # a quick plan would gather its operands
    # Without partitioning, the device runs the lowered program. (``lowered.as_text`` would print every
    # constant.)
    partitioned = parse(compiled.partitioned or lowered.compiler_ir(dialect='hlo').as_hlo_text())
    is_gpu = device.platform == 'gpu'
    program = parse(compiled.optimized, is_gpu) if compiled.optimized else partitioned
    pipelines = pipelines_of(step.function, step.args, step.kwargs)
    jaxpr = traced.jaxpr if pipelines is None else pipelines.original_jaxpr
    flops = count_flops(jaxpr)
    positions = step.device_positions
    switched = hardware is not None and hardware.torus_axes == 0
    sizes = dict(mesh.shape)
    input_shardings, output_shardings = _shardings(compiled, lowered, step.shardings)
    before = partitioned if compiled.optimized else None
    ids = [device.id for device in mesh.devices.flat]
    positional, by_name = lowered.args_info
    names = _names_of_arguments(step.function, step.args, lowered.args_info)
    inputs = _report([*positional, *by_name.values()], input_shardings, mesh, names)
    partitioning = partitioned_step(step.function, step.args, step.kwargs)
    reasons = {} if partitioning is None else partitioning.collective_reasons
    rows = (
        collectives(program, sizes, positions, before, ids, switched, reasons) if compiled.partitioned else ()
    )
    function = step.function
    is_sjit = step.already_jitted and isinstance(function, SjitFunction)
    plan = Plan(
        name=step.name,
        mesh=sizes,
        devices=compiled.devices,
        platform=device.platform,
        memory=_memory(compiled, partitioned, limit),
        inputs=inputs,
        outputs=_report(lowered.out_info, output_shardings, mesh),
        collectives=rows,
        flops=flops.count,
        flops_exactness=flops.exactness,
        device_cost=device_cost_of(program),
        model_flops=count_model_flops(jaxpr),
        device_kind=device.device_kind,
        device_positions=positions,
        quick=quick and device.platform == 'tpu',
        refusal=compiled.refusal,
        flags=compiled.flags,
        buffers=() if compiled.layout is None else largest_buffers(compiled.layout, program),
        host_transfers=host_transfers(program) if compiled.optimized else HostTransfers(),
        propagation=function.explain_propagation(*step.args, **step.kwargs) if is_sjit else None,
        pipelines=() if pipelines is None else with_flops(pipelines.loops),
        hardware_override=step.hardware_override,
    )
    return dataclasses.replace(plan, schedule=gpu_schedule(plan, program, ids)) if is_gpu else plan


def gpu_schedule(plan: Plan, program: Module, ids: Sequence[int]) -> Schedule | None:
    """Returns the schedule of a program for GPUs; None if specs that it needs are unknown.

    Args:
        plan: the plan of the program.
        program: the optimized program.
        ids: the ids of the devices of the mesh.
    """
    roofline = plan.known_roofline
    if roofline is None or hardware_of(plan.device_kind) is None:
        return None
    [hbm_rate] = required_specs(roofline.hardware, 'hbm_bytes_per_second', for_='a schedule')
    host_rate = roofline.hardware.host_bytes_per_second or math.inf  # known if there are transfers
    times = collective_times(
        functools.partial(nccl_collective_seconds, plan, roofline.hardware),
        program,
        plan.mesh,
        plan.device_positions,
        ids,
    )
    return schedule_of(program, roofline.peak / plan.devices, hbm_rate, host_rate, times)


def nccl_collective_seconds(plan: Plan, hardware: Hardware, rows: Sequence[Collective]) -> Iterator[float]:
    """Yields the seconds of one execution of collectives, by NCCL's model if it has one, or by the roofline.

    Args:
        plan: the plan of the devices.
        hardware: the hardware.
        rows: the collectives.
    """
    compiled_for = hardware_of(plan.device_kind)
    assert compiled_for is not None
    target, gpus_per_host = TARGETS[compiled_for.name], hardware.chips_per_host or 1
    dcn_rate = hardware.dcn_bytes_per_second
    card = None if dcn_rate is None else dcn_rate / gpus_per_host
    routes = routes_of(rows, plan.mesh, plan.device_positions, hardware) if rows else []
    timed = time_collectives(rows, plan.mesh, plan.device_positions, plan.device_kind, hardware).collectives
    for (row, seconds), row_routes in zip(timed, routes, strict=True):
        times = [
            nccl_seconds(row.kind, row.bytes, route, target, card, hardware.switches_add)
            for route in row_routes
        ]
        yield max((time for time in times if time is not None), default=seconds / max(1, row.count))


def _compile(step: LoweredStep, limit: int | None, layout_for: int | None) -> Compiled:
    """Compiles a step for the devices of its mesh."""
    mesh, name = step.mesh, step.name
    device = mesh.devices.flat[0]
    devices = f'{mesh.size} {device.device_kind!r} devices ({axis_sizes_text(mesh.shape)})'
    try:
        with compiling(f'{name!r} for {devices}'):
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
            # JAX called the compiler for the local devices, which lacks the options of the other compiler.
            raise _no_shardings_error(name) from error
        if error_texts.lacks_custom_partitioning(error):
            raise _custom_partitioning_error(name, device) from error
        raise PlanError(
            f'{error}\nBecause of this error {name!r} was not compiled for {devices}, and there is no plan'
        ) from error


def _custom_partitioning_error(name: str, device: Any) -> PlanError:
    return PlanError(
        f'{name!r} has an operation with custom_partitioning, which JAX does not register with compilers for '
        f'devices that are not attached, such as these {device.device_kind!r}: they report "Custom emitter '
        f'for {error_texts.CUSTOM_PARTITIONING} not found".\nWhat to do: with scalax.custom_op, plan with '
        'from_topology(..., axis_types=AxisType.Explicit); run the operation in helper.shard_map; or plan it '
        'on simulated devices, and time it with plan.roofline(hardware, torus=...)'
    )


def _no_shardings_error(name: str) -> ArgumentError:
    return ArgumentError(
        f'{name!r} has no shardings on this mesh, whose devices are not attached. Pass shardings of its '
        'arguments or outputs: helper.sjit(fun, in_shardings=...), or helper.abstract(tree, rules)'
    )


def _memory(compiled: Compiled, partitioned: Module, limit: int | None) -> Memory:
    """Returns the memory of a program, with the limit of the devices."""
    memory = dataclasses.replace(compiled.memory, limit=limit)
    if not memory.estimated:
        return memory
    # XLA for CPUs stores constants in the code, and does not count them.
    constants = constant_bytes(partitioned)
    return dataclasses.replace(
        memory, temporaries=memory.temporaries + constants, peak=memory.peak + constants
    )


def reject_own_argument(fun: Any, name: str, method: str, otherwise: str) -> None:
    """Raises ArgumentError for an option that is also an argument of the user's function.

    Args:
        fun: the function.
        name: the option.
        method: the method that has the option.
        otherwise: what to do if the argument cannot be passed by position.
    """
    if any(name == parameter for parameter, _ in _parameters(fun)):
        raise ArgumentError(
            f'{name!r} is an option of {method}, and an argument of {name_of(fun)!r}: pass the argument by '
            f'position, or {otherwise}'
        )


def reject_misspelt(fun: Any, keywords: Iterable[str], options: Iterable[str], method: str) -> None:
    """Raises ArgumentError for a keyword that resembles an option and that the user's function lacks.

    Args:
        fun: the function.
        keywords: the names of its keyword arguments.
        options: the names of the options.
        method: the method that has the options.
    """
    parameters = dict(_parameters(fun))
    if not parameters or inspect.Parameter.VAR_KEYWORD in parameters.values():
        return
    for name in keywords:
        near = near_names(name, [*options, *parameters])
        if name not in parameters and near and near[0] in options:
            raise ArgumentError(
                f'neither {method} nor {name_of(fun)!r} has an argument {name!r} (did you mean {near[0]!r}?)'
            )


def _shardings(compiled: Compiled, lowered: Any, requested: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns the shardings of arguments and outputs; without an executable the requested ones."""
    if compiled.executable is not None:
        positional, by_name = compiled.executable.input_shardings
        input_tree: Any = jax.tree.structure(lowered.args_info)
        output_tree: Any = jax.tree.structure(lowered.out_info)
        inputs = input_tree.flatten_up_to((tuple(positional), by_name))
        return inputs, output_tree.flatten_up_to(compiled.executable.output_shardings)
    inputs, outputs = requested
    return inputs[: len(jax.tree.leaves(lowered.args_info))], outputs


def _parameters(function: Any) -> list[tuple[str, Any]]:
    try:
        return [(name, parameter.kind) for name, parameter in inspect.signature(function).parameters.items()]
    except (TypeError, ValueError):  # some built-ins have no signature
        return []


def _names_of_arguments(function: Any, args: Sequence[Any], info: tuple[Any, Any]) -> list[str]:
    """Returns the names of the arguments of a jitted function; *info* is the ``args_info`` of the program."""
    positional, by_name = info
    names = argument_names(function, args)
    if names is None:
        names = [name for name, kind in _parameters(function) if kind in _POSITIONAL][: len(positional)]
        if not len(args) == len(positional) == len(names):  # the program has no static arguments
            names = [f'args[{i}]' for i in range(len(positional))]
    return [*names, *map(str, by_name)]


def _report(tree: Any, shardings: Sequence[Any], mesh: Mesh, names: Sequence[str] = ()) -> ShardingReport:
    """Returns a report of the shardings of a tree, in which shardings on another mesh are the compiler's.

    Args:
        tree: the tree.
        shardings: the sharding of each leaf.
        mesh: the mesh.
        names: the names to show in place of the first keys of paths, if these are positions.
    """
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    named_shardings = map(_named_sharding, shardings, jax.tree.leaves(structs))
    sharding_tree = jax.tree.unflatten(jax.tree.structure(structs), named_shardings)
    resolution = resolve(sharding_tree, structs, mesh, mode=ResolveMode.BOUNDARY, where='a compiled program')
    # The dtypes are those on the devices, and without x64 reports would show float64 as float32.
    with jax.enable_x64(True):
        report = make_report(sharding_tree, resolution, dict(mesh.shape))
    rows = []
    for row in report.rows:
        path = row.path
        if names:
            position, below, rest = path.partition('/')
            path = join(names[int(position)], rest if below else None) or ''
        rows.append(dataclasses.replace(row, path=path, rule='', reason=''))
    return dataclasses.replace(report, rows=tuple(rows))


def _named_sharding(sharding: Any, leaf: Any) -> NamedSharding | None:
    """Returns the sharding of a leaf if it is a NamedSharding."""
    if not isinstance(sharding, NamedSharding):
        return None
    if len(sharding.spec) <= len(leaf.shape):
        return sharding
    # For the compiler a typed key has one more dimension: that of its data.
    spec = PartitionSpec(*sharding.spec[: len(leaf.shape)])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
