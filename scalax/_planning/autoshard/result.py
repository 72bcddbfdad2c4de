"""The result of auto-sharding: a mesh, a rule, the costs of other choices; and how it renders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.render import serialization
from scalax._core.render.blocks import Block, Cell, Code, Column, Figures, Heading, Lines, Row, Section, Table
from scalax._core.render.renderable import Renderable
from scalax._core.render.tables import human_bytes, milliseconds, signed_bytes
from scalax._planning.autoshard.codegen import rule_code, spec_code
from scalax._planning.mesh_search.objective import TIME_TOLERANCE, objective_seconds
from scalax._planning.report.plan import Plan
from scalax._planning.report.plan_page import headline, plan_blocks
from scalax._planning.time.roofline import StepTime
from scalax._spmd.pipelines.config import Pipeline, options_text
from scalax.errors import plural
from scalax.rules import TreePathShardingRule

StopReason = Literal['', 'budget', 'interrupted']


@dataclasses.dataclass(frozen=True)
class GroupChoice:
    """The sharding of a group of leaves, and the cost of the second best one.

    Attributes:
        name: the paths of the leaves.
        spec: the sharding of the leaves.
        next_spec: the second best sharding, with all other groups unchanged; None if none was tried.
        extra_seconds: how much longer the step takes with *next_spec*.
        extra_memory: how many more bytes of memory a device needs with it.
        extra_communication: how many more bytes a device sends with it, mesh axes -> bytes.
        next_fits: whether the step fits into memory with it.
    """

    name: str
    spec: PartitionSpec
    next_spec: PartitionSpec | None = None
    extra_seconds: float = 0.0
    extra_memory: int = 0
    extra_communication: Mapping[str, int] = dataclasses.field(default_factory=dict)
    next_fits: bool = True


@dataclasses.dataclass(frozen=True)
class MeshChoice:
    """The best layout for one mesh and one sharding of the batch.

    Attributes:
        mesh: mesh axis -> size.
        batch_spec: the sharding of the batch.
        pipeline: the pipeline over slices; None without one.
        overlapped_seconds: the fully overlapped step time, in seconds; None if there is no program.
        serial_seconds: the serial step time, in seconds; None if there is no program.
        memory: the bytes on a device.
        reason: why this is not the best layout; empty for the best.
    """

    mesh: Mapping[str, int]
    batch_spec: PartitionSpec
    pipeline: Pipeline | None
    overlapped_seconds: float | None
    serial_seconds: float | None
    memory: int
    reason: str

    @property
    def mean_seconds(self) -> float | None:
        """The average of the overlapped and the serial step time: the objective of the search."""
        return (
            None
            if self.overlapped_seconds is None or self.serial_seconds is None
            else objective_seconds(StepTime(self.overlapped_seconds, self.serial_seconds))
        )


@dataclasses.dataclass(frozen=True)
class AutoShardingResult(Renderable):
    """The result of `autoshard`. ``str()`` renders it as a page of text.

    Attributes:
        mesh: mesh axis -> size.
        rule: the rule for all arguments that are not batches.
        batch_spec: the sharding of the batch.
        pipeline: the pipeline over slices; None without one.
        plan: the quick plan of the step.
        groups: the groups of leaves with their shardings.
        meshes: the meshes that were tried, best first.
        fits: whether the step fits into the usable memory; None if the memory is unknown.
        ideal_seconds: a lower bound for any layout: all FLOPs of the step, divided evenly over the devices,
            at the peak for bfloat16; None if the speed of the devices is unknown.
        overlapped_seconds: the fully overlapped step time, in seconds.
        serial_seconds: the serial step time, in seconds.
        memory: the bytes on a device.
        num_trials: the number of layouts that were tried.
        search_seconds: the duration of the search.
        stop_reason: ``'budget'`` or ``'interrupted'`` if the search ended early; otherwise empty.
        topology: the hardware; None for the devices of this process.
    """

    mesh: Mapping[str, int]
    rule: TreePathShardingRule
    batch_spec: PartitionSpec
    pipeline: Pipeline | None
    plan: Plan
    groups: tuple[GroupChoice, ...]
    meshes: tuple[MeshChoice, ...]
    fits: bool | None
    ideal_seconds: float | None
    overlapped_seconds: float
    serial_seconds: float
    memory: int
    num_trials: int
    search_seconds: float
    stop_reason: StopReason
    topology: str | None
    _code: str = dataclasses.field(default='', repr=False)

    def _title(self) -> str:
        return f'A rule for {self.plan.name}'

    def _blocks(self, title: str) -> list[Block]:
        return result_blocks(self, title)

    def _page_blocks(self, title: str) -> list[Block]:
        heading, figures, head, rule, *others = result_blocks(self, title)
        plan = plan_blocks(self.plan, 'The plan', level=2)
        return [heading, rule, figures, head, *others, *plan]

    def to_code(self) -> str:
        """Returns Python source that makes the helper, the rule, and the sharded step."""
        return self._code

    def to_dict(self) -> dict[str, Any]:
        """Returns the result in plain Python values, ready for ``json.dumps``; the rule as its repr."""
        fields = {name: value for name, value in vars(self).items() if name not in ('rule', '_code')}
        return {**serialization.to_plain(fields), 'rule': repr(self.rule), 'code': self._code}


def result_blocks(result: AutoShardingResult, title: str) -> list[Block]:
    """Returns the blocks of a result, without the plan."""
    return [
        Heading(title, result.mesh, f'on {result.topology}' if result.topology else ''),
        Figures([*headline(result.plan, result.plan.known_roofline)]),
        Section('', [Lines(_head(result))]),
        Section('The rule', [Code(rule_code(result.rule).rstrip('\n'))]),
        Section('Shardings', [_groups(result)], 'The cost of the second best sharding of each group'),
        Section('Meshes', [_meshes(result)], 'The best layout for each mesh and sharding of the batch'),
    ]


def _head(result: AutoShardingResult) -> list[str]:
    """Summarizes a result in a few lines."""
    where = result.topology or f'{result.plan.devices} {result.plan.platform} devices'
    fits = {True: 'fits', False: 'does not fit', None: 'memory limit unknown'}[result.fits]
    peak = human_bytes(result.memory)
    lines = [
        f'{_mesh_text(result)} on {where}, batch {spec_code(result.batch_spec)}: {fits} '
        f'({peak} a device), at least {milliseconds(result.overlapped_seconds)}, '
        f'{milliseconds(result.serial_seconds)} if nothing overlaps'
    ]
    if (ideal := result.ideal_seconds) is not None:
        lines.append(
            f'no layout takes less than {milliseconds(ideal)}, all operations divided evenly; this one takes '
            f'at least {result.overlapped_seconds / ideal:.2f} times that, '
            f'{result.serial_seconds / ideal:.2f} times if nothing overlaps'
        )
    if not result.fits and result.plan.buffers:
        first = result.plan.buffers[0]
        lines.append(f'no layout that was tried fits; the largest array at the peak is {first}')
    ends = {
        '': 'until nothing improved',
        'budget': 'until the budget was used up: a larger budget_s may find a better layout',
        'interrupted': 'until it was stopped',
    }
    lines.append(
        f'{plural(result.num_trials, "layout")} in {result.search_seconds:.0f} s, {ends[result.stop_reason]}'
    )
    lines.append('to compare its results with one device: helper.verify(step, *arguments), as in to_code()')
    return lines


def _mesh_text(result: AutoShardingResult | MeshChoice) -> str:
    """Returns the sizes of the mesh, and the options of the pipeline."""
    pipeline = f'; {options_text(result.pipeline)}' if result.pipeline else ''
    return f'{axis_sizes_text(result.mesh)}{pipeline}'


def _groups(result: AutoShardingResult) -> Table:
    """Returns a table of the groups: the sharding, the second best one, and its additional cost."""
    rows: list[Row] = []
    mean_seconds = (result.overlapped_seconds + result.serial_seconds) / 2
    for group in result.groups:
        head = [group.name, spec_code(group.spec)]
        if group.next_spec is None:
            rows.append([*head, None, None, None, None])
            continue
        if not group.next_fits:  # it may not have been compiled
            seconds = 'does not fit'
        elif abs(group.extra_seconds) < TIME_TOLERANCE * mean_seconds:
            seconds = 'nearly equal'
        else:
            seconds = f'{"-" if group.extra_seconds < 0 else "+"}{milliseconds(abs(group.extra_seconds))}'
        communication = ', '.join(
            f'{axes} {signed_bytes(size)}' for axes, size in group.extra_communication.items() if size
        )
        costs: list[Cell | int | str] = [
            Cell(seconds, group.extra_seconds),
            group.extra_memory,
            communication,
        ]
        rows.append([*head, spec_code(group.next_spec), *costs])
    texts = Column('group', 'lead'), Column('spec', 'code'), Column('next best', 'code')
    numbers = Column('seconds', 'number'), Column('memory', 'number', signed_bytes)
    return Table([*texts, *numbers, Column('bytes', 'code')], rows)


def _meshes(result: AutoShardingResult) -> Table:
    """Returns a table of the meshes and shardings of the batch."""
    columns = [
        Column('mesh', 'lead'),
        Column('batch', 'code'),
        *(Column(head, 'number', milliseconds) for head in ('seconds', 'at least', 'serial')),
        Column('memory', 'number', human_bytes),
        Column('outcome', 'wide'),
    ]
    rows = [
        (
            _mesh_text(choice),
            spec_code(choice.batch_spec),
            *(choice.mean_seconds, choice.overlapped_seconds, choice.serial_seconds, choice.memory),
            choice.reason or 'best',
        )
        for choice in result.meshes
    ]
    return Table(columns, rows, best=0)
