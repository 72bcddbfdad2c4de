"""Programs for absent GPUs, and their plans from the recordings of `scripts/record_programs.py`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from scalax._compile.sjit.function import partitioned_step
from scalax._planning.compiler.compilation import CUBLAS_OPTIONS
from scalax._planning.cost.buffers import largest_buffers
from scalax._planning.cost.collectives import collectives
from scalax._planning.cost.device_cost import device_cost_of
from scalax._planning.cost.flops import count_flops, count_model_flops
from scalax._planning.cost.host_transfers import host_transfers
from scalax._planning.cost.memory import MemoryTables, assigned_memory, read_layout
from scalax._planning.hardware.specs import HARDWARE
from scalax._planning.hardware.torus import DevicePosition
from scalax._planning.program.hlo import parse
from scalax._planning.report.make_plan import gpu_schedule
from scalax.plan import Plan
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import tpu_programs as programs
from tests.support.recorded import recorded
from tests.support.tpu_programs import Program

TWO = {'fsdp': 4, 'tp': 2}
NOT_MODELLED = ('a100', 'gb200')
"""GPUs of whose kernels XLA knows no times: its tables have none, or are not read."""

NODES = {'data': 2, 'fsdp': 4}
PROGRAMS: dict[str, Program] = {
    **{
        f'{make.__name__} h100': Program(make, 'h100:2x4', TWO)
        for make in (programs.block, programs.fsdp_tp, programs.sequence_parallel, programs.zero_1)
    },
    **{
        f'{make.__name__} h100': Program(make, 'h100:2x4', TWO)
        for make in (programs.nested_loops, programs.branches, programs.accumulated, programs.stencil)
    },
    **{
        f'{make.__name__} h100': Program(make, 'h100:2x4', TWO)
        for make in (
            programs.fsdp_saved,
            programs.switch,
            programs.up_to,
            programs.resharded,
            programs.rolled,
        )
    },
    'parked h100': Program(programs.parked, 'h100:2x4', TWO),
    'two_products h100': Program(programs.two_products, 'h100:2x4', {'fsdp': 2, 'tp': 4}),
    'convolutions h100': Program(programs.convolutions, 'h100:2x4', {'fsdp': 8}),
    'vision h100': Program(programs.vision, 'h100:2x4', {'fsdp': 8}),
    'fsdp a100': Program(programs.fsdp, 'a100:2x4', NODES),
    'fsdp_tp gb200': Program(programs.fsdp_tp, 'gb200:2x4', TWO),
    'product h100': Program(programs.product, 'h100:2x4', TWO),
    'fsdp h100': Program(programs.fsdp, 'h100:2x4', NODES),
    'gathered h100': Program(programs.gathered, 'h100:2x4', {'fsdp': 8, 'tp': 1}),
    'experts h100': Program(programs.experts, 'h100:2x4', {'dp': 2, 'expert': 4}),
    'by_hand h100': Program(programs.by_hand, 'h100:2x4', {'a': 2, 'b': 2, 'c': 2}),
    'decoder h100': Program(programs.decoder, 'h100:2x4', TWO),
    'decoder gb200': Program(programs.decoder, 'gb200:2x4', TWO),
    'offloaded h100': Program(programs.offloaded, 'h100:2x4', TWO),
    'rings h100': Program(programs.rings, 'h100:2x4', {'sp': 8}),
    'attention h100': Program(programs.attention, 'h100:2x4', TWO),
}
OF_CUDNN = ('attention h100',)
"""Programs that compile only where nvidia-cudnn-cu12 is installed and the loader finds it."""


@functools.cache
def _any_plan() -> Plan:
    helper = MeshShardingHelper([8], ['x'], devices=jax.devices()[:8])
    step = helper.sjit(lambda x: x, in_shardings=P('x'))
    return helper.plan(step, jax.ShapeDtypeStruct((8,), 'float32'), quick=True)


@functools.cache
def recorded_plan(name: str) -> Plan:
    """Returns the plan of a recorded program, without its real name, arguments and batch."""
    program, recording = PROGRAMS[name], recorded(name)
    kind, _, size = program.topology.partition(':')
    hosts, chips_per_host = map(int, size.split('x'))
    hardware = HARDWARE[kind]
    slices = [
        i // chips_per_host if hardware.chips_per_slice is None else 0 for i in range(hosts * chips_per_host)
    ]
    positions = tuple(map(DevicePosition, slices))
    helper = MeshShardingHelper(list(program.mesh.values()), list(program.mesh), devices=jax.devices()[:8])
    step, arguments = program.make(helper)
    jaxpr = step.trace(*arguments).jaxpr
    flops, partitioning = count_flops(jaxpr), partitioned_step(step, arguments, {})
    reasons = {} if partitioning is None else partitioning.collective_reasons
    module, before = parse(recording.optimized, True), parse(recording.partitioned)
    layout = read_layout(MemoryTables(*recording.tables), True)
    plan = dataclasses.replace(
        _any_plan(),
        mesh=program.mesh,
        flops=flops.count,
        flops_exactness=flops.exactness,
        model_flops=count_model_flops(jaxpr),
        platform='gpu',
        device_kind=hardware.device_kinds[0],
        device_positions=positions,
        memory=dataclasses.replace(assigned_memory(layout), limit=hardware.hbm_bytes),
        collectives=collectives(module, program.mesh, positions, before, range(8), True, reasons),
        device_cost=device_cost_of(module),
        buffers=largest_buffers(layout, module),
        host_transfers=host_transfers(module),
        flags=tuple(f'--{name}={str(value).lower()}' for name, value in CUBLAS_OPTIONS.items()),
    )
    return dataclasses.replace(plan, schedule=gpu_schedule(plan, module, range(8)))


def made_plan(name: str) -> Plan:
    """Returns the plan of a program that is compiled now."""
    helper = PROGRAMS[name].helper()
    step, arguments = PROGRAMS[name].make(helper)
    plan: Any = helper.plan(step, *arguments)
    return plan
