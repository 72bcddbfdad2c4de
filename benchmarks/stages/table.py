"""``--only stages``: LLaMA-3 with hand-written pipeline stages, compared with FSDP and HSDP.

The steps are planned for absent TPUs and GPUs, and not run. A line takes a few CPU seconds.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks.stages.by_hand import Pipeline, train_step
from benchmarks.unchanged.llama import llama
from benchmarks.unchanged.measure import make_step, sent
from benchmarks.unchanged.model import ADAMW, Strategy
from examples.plan_llama import LLAMA_8B, LLAMA_70B, SEQUENCE, model_flops
from scalax.errors import PlanError
from scalax.plan import HARDWARE, Plan, make_plan
from scalax.sharding import MeshShardingHelper

MODELS = {'8B': LLAMA_8B, '70B': LLAMA_70B}
ROUNDS = {'8B': 4, '70B': 5}  # for short bubbles: groups of one to four layers
HEAD = (
    *('model', 'devices', 'rows', 'mesh', 'schedule', 'peak GiB', 'slow GiB', 'fast GiB', 'FLOPs', 'ticks'),
    *('cards GB/s', 'at least s', 'no overlap s', 'scheduled s'),
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, whose first axis connects slices or hosts, and a schedule.

    Attributes:
        mesh: the sizes of its axes: stage, fsdp and tp, or the axes of a strategy without stages.
        schedule: the options of `Pipeline`; None without stages.
    """

    mesh: Mapping[str, int]
    schedule: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """Layouts of one step over the same devices.

    Attributes:
        model: the name of the model.
        topology: a TPU slice, or GPUs.
        rows: the number of sequences per device.
        layouts: the layouts to compare.
        slices: the number of TPU slices.
        cards: bytes per second of all network cards of a host, one line for each; None: the hardware's.
    """

    model: str
    topology: str
    rows: float
    layouts: tuple[Layout, ...]
    slices: int = 1
    cards: tuple[float | None, ...] = (None,)

    def helper(self, layout: Layout) -> MeshShardingHelper:
        """Returns a helper for absent devices."""
        names, sizes = list(layout.mesh), list(layout.mesh.values())
        slow = [self.slices, *[1] * (len(names) - 1)] if self.slices > 1 else None
        return MeshShardingHelper.from_topology(
            self.topology, sizes, names, mesh_axis_splitting=True, num_slices=self.slices, dcn_axis_dims=slow
        )

    def plan(self, layout: Layout, quick: bool = True) -> Plan:
        """Returns the plan of a line."""
        config, helper = MODELS[self.model], self.helper(layout)
        rows = round(self.rows * helper.mesh.size)
        if layout.schedule is None:
            names = tuple(name for name in layout.mesh if name != 'tp')
            strategy = Strategy('by hand', layout.mesh, names, self.slices)
            step, args = make_step(llama(self.model, config, SEQUENCE), strategy, helper, 'hand', rows)
            params = args[0][0]
        else:
            step, (state, _) = train_step(Pipeline(helper.mesh, **layout.schedule), config, ADAMW)
            args = (state, jax.ShapeDtypeStruct((rows, SEQUENCE + 1), 'int32'))
            params = state[0]
        plan = make_plan(helper, step, args, {}, quick=quick)
        return plan.with_model_flops(model_flops(config, params, rows))

    def cells(self, layout: Layout, plan: Plan, cards: float | None) -> list[str]:
        """Returns the cells of a line."""
        hardware = HARDWARE[self.topology.partition(':')[0]]
        if cards is not None:
            hardware = dataclasses.replace(hardware, dcn_bytes_per_second=cards)
        slow = sum(sent(row) for row in plan.collectives if 'dcn' in row.networks)
        fast = sum(sent(row) for row in plan.collectives if 'dcn' not in row.networks)
        schedule = dict(layout.schedule or {})
        stages, hop, rounds = layout.mesh.get('stage', 1), schedule.get('hop', 1), schedule.get('rounds', 1)
        work = rounds * schedule.get('parts', 1)
        numbers = [plan.memory.peak / 2**30, slow / 2**30, fast / 2**30, plan.flops / (plan.model_flops or 1)]
        numbers += [1 + hop * (stages - 1) / work, (hardware.dcn_bytes_per_second or 0) / 1e9]
        numbers += [*plan.roofline(hardware).step_seconds]
        numbers += [plan.schedule.seconds] if plan.schedule and cards is None else []
        devices = self.topology + (f' x {self.slices}' if self.slices > 1 else '')
        mesh = ' '.join(f'{name}={size}' for name, size in plan.mesh.items() if size > 1)
        named = ' '.join(f'{name}={value}' for name, value in schedule.items())
        cells = [self.model, devices, f'{self.rows:g}', mesh, named, *(f'{number:.3g}' for number in numbers)]
        return [*cells, *['-'] * (len(HEAD) - len(cells))]


def gpipe(stages: int, fsdp: int, tp: int, parts: int, **options: Any) -> Layout:
    """Returns a GPipe pipeline over these axes."""
    return Layout({'stage': stages, 'fsdp': fsdp, 'tp': tp}, {'parts': parts, **options})


def cases() -> Iterator[Case]:
    """Yields the cases of the table: inside a slice, over slices, over nodes."""
    fsdp = Layout({'fsdp': -1})
    for model in MODELS:
        pipelines: tuple[Layout, ...] = (
            *(gpipe(4, 16, 1, 8), gpipe(4, 16, 1, 8, gathered='step')),
            *(gpipe(4, 16, 1, 8, rounds=2), gpipe(4, 4, 4, 8), gpipe(4, 4, 4, 16)),
        )
        yield Case(model, 'v5p:4x4x4', 2, (fsdp, *pipelines))
    for model, topology, slices, inside in (
        *(('8B', 'v5p:2x2x4', 4, 16), ('8B', 'v5e:4x4', 4, 16), ('8B', 'v5e:4x4', 8, 16)),
        *(('70B', 'v5p:4x4x4', 4, 64), ('70B', 'v5p:4x4x4', 8, 64), ('70B', 'v5e:8x8', 8, 64)),
    ):
        hsdp = Layout({'data': slices, 'fsdp': -1})
        many, few = 2 * slices, slices
        pipelines = (
            *(gpipe(slices, inside, 1, many), gpipe(slices, inside, 1, many, gathered='step')),
            *(gpipe(slices, inside // 4, 4, many), gpipe(slices, inside // 4, 4, many, rounds=2)),
        )
        yield Case(model, topology, 2, (fsdp, hsdp, *pipelines), slices)
        with_tp = (
            Layout({'fsdp': slices * inside // 4, 'tp': 4}),
            Layout({'data': slices, 'fsdp': inside // 4, 'tp': 4}),
        )
        for rows, parts in ((0.25, few), (0.5, many)):
            pipelines = (
                gpipe(slices, inside // 4, 4, parts),
                gpipe(slices, inside // 4, 4, parts, rounds=ROUNDS[model]),
                gpipe(slices, inside // 4, 4, parts, rounds=ROUNDS[model], gathered='step'),
            )
            yield Case(model, topology, rows, (*with_tp, *pipelines), slices)
    for model in MODELS:
        hsdp, fsdp_tp = Layout({'data': 8, 'fsdp': -1}), Layout({'fsdp': 8, 'tp': 8})
        pipelines = (
            *(gpipe(8, 8, 1, 16), gpipe(8, 8, 1, 16, gathered='step')),
            *(gpipe(8, 2, 4, 16), gpipe(8, 1, 8, 16), gpipe(8, 1, 8, 16, rounds=2)),
            *(gpipe(8, 1, 8, 32, hop=2), gpipe(8, 1, 8, 32, rounds=ROUNDS[model])),
        )
        few_tokens = gpipe(8, 1, 8, 16), gpipe(8, 1, 8, 16, rounds=ROUNDS[model])
        cards = (None, 2.5e10)  # one card per GPU, or one of 200 Gb/s per host
        yield Case(model, 'h100:8x8', 2, (fsdp, hsdp, fsdp_tp, *pipelines), cards=cards)
        yield Case(model, 'h100:8x8', 0.25, (fsdp_tp, *few_tokens), cards=cards)


def show(model: str = '', topology: str = '') -> None:
    """Prints the table of the models with this name and the devices whose names start so, line by line."""
    print(f'| {" | ".join(HEAD)} |')
    print('|' + '---|' * len(HEAD), flush=True)
    for case in cases():
        if model not in case.model or not case.topology.startswith(topology):
            continue
        for layout in case.layouts:
            try:
                plan = case.plan(layout)
            except PlanError as error:  # the compiler rejects the program
                print(f'{case.model} {case.topology} {layout}: {error}', file=sys.stderr)
                continue
            for cards in case.cards:
                print(f'| {" | ".join(case.cells(layout, plan, cards))} |', flush=True)
