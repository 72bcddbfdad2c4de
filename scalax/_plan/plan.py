"""Plans: memory, communication and time of a compiled step; and the difference of two."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scalax._plan.batch import followed_text
from scalax._plan.hardware import network_text
from scalax._plan.page import memory_taken, plan_blocks
from scalax._plan.pipelines import bubble_text
from scalax._plan.plan_data import PlanData
from scalax._report import saved
from scalax._report.blocks import Block
from scalax._report.pages import visible
from scalax._report.shown import Shown
from scalax._report.tables import distinct_texts, human_bytes, milliseconds
from scalax._tree.specs import axis_sizes_text
from scalax.errors import ArgumentError
from scalax.explain import ReportDiff

_CollectiveKey = tuple[str, tuple[str, ...], int]
_WIDTH = 110  # of messages


@dataclasses.dataclass(frozen=True)
class Plan(PlanData, Shown):
    """Memory, communication and time of a compiled step; ``str()`` of it is a page of text.

    `MeshShardingHelper.plan` makes one.

    Attributes:
        name: the name of the function.
        mesh: mesh axis name -> size.
        devices: the number of devices that it runs on: one, if neither arguments nor outputs have shardings.
        platform: the hardware that it was compiled for, such as ``'cpu'``.
        memory: bytes on each device.
        inputs: the arguments with their shardings.
        outputs: the outputs with theirs.
        collectives: the collectives of one call, the largest first.
        flops: the floating-point operations of one call, on all devices together, as the function is written:
            those of its matrix products, convolutions and FFTs; forward, backward, and recomputed. What idle
            stages of pipelines compute is not among them (`idle_flops`).
        flops_counted: how well that is known.
        work: what each device computes and moves, as the compiler has partitioned it; work that several
            devices repeat counts for each.
        model_flops: the operations that the model needs in one call: those of the forward and the backward
            pass (`count_model_flops`), without what is recomputed, unless `with_model_flops` has given
            others. None if not all of them can be counted.
        device_kind: what JAX calls the devices.
        places: the positions of the devices of the mesh, in the order of the mesh.
        quick: whether the compiler only laid the program out, without making code. Memory is then that of the
            layout, which is close to the final one, and shardings are the requested ones.
        refusal: the error of the compiler for a program that does not fit into the memory of a device; empty
            if it fits, and for quick plans.
        buffers: the arrays that are held at the peak of memory, the largest first: at least 99 % of it; for
            TPUs and GPUs only.
        host_moves: what each device exchanges with its host; for TPUs and GPUs only.
        followed: the values that stay sharded along the batch dimension, as `SjitFunction.followed` reports;
            None for functions that ``sjit`` did not make.
        flags: for GPUs, the options of their compiler that are not its defaults: those in ``XLA_FLAGS``,
            those of the function (``compiler_options``), and, unless one of these has them or the GPUs are
            here, those with which products are cuBLAS's.
        schedule: for GPUs whose numbers are known, the seconds along the compiler's schedule.
        pipelines: the loops over layers that run as pipelines, as *stages* of ``sjit`` requests.
        given_hardware: the numbers of the devices, if the plan was made with others than are known of them.
    """

    def _title(self) -> str:
        return f'Plan of {self.name}'

    def _blocks(self, title: str) -> list[Block]:
        return plan_blocks(self, title)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain Python values, ready for ``json.dumps``."""
        values = {field.name: saved.plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        memory = {**values['memory'], 'total': self.memory.total}
        return {**values, 'memory': memory, 'fits': self.fits}

    def to_json(self) -> str:
        """The plan as JSON: `to_dict` and a version; keep it beside a test, and compare."""
        return saved.write(self.to_dict())

    @classmethod
    def load(cls, text_or_path: str | os.PathLike[str]) -> Plan:
        """Reads what `to_json` wrote.

        Args:
            text_or_path: the JSON itself, or the path of a file of it.

        Raises:
            DataError: this is not a plan, or one of another version, or the file cannot be read.
            FileNotFoundError: there is no such file.
            ArgumentError: it is neither text nor a path.
        """
        return saved.read(cls, text_or_path, 'plan')

    def diff(self, other: Plan) -> PlanDiff:
        """The changes in *other*, a later plan; false when nothing changed.

        Args:
            other: the plan to compare with.

        Raises:
            ArgumentError: it is not a plan.
        """
        if not isinstance(other, Plan):
            raise ArgumentError(f'diff takes another plan, got {type(other).__name__}: Plan.load reads one')
        return PlanDiff(self, other)

    def check(
        self,
        *,
        fits: bool | None = None,
        peak: float | None = None,
        bytes: Mapping[str | tuple[str, ...], float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Asserts that the plan is within limits: for tests of a training step.

        Args:
            fits: whether it has to fit (or not to fit) into the memory of a device.
            peak: the most bytes of memory that a device may need.
            bytes: mesh axes (or one axis) -> the most bytes that may be sent along exactly these, as in
                `totals`, of all kinds together.
            seconds: the longest fully overlapped step time (`Roofline.step_seconds`, the bound).

        Raises:
            AssertionError: a limit is exceeded; the message lists all that are.
            ArgumentError: the mesh has no such axis.
            PlanError: *seconds* are given, and the time of a step is not known.

        Example:
            >>> import jax
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> total = helper.sjit(lambda x: x.sum(), in_shardings=PartitionSpec('fsdp'))
            >>> plan = helper.plan(total, jax.ShapeDtypeStruct((64,), 'float32'))
            >>> plan.check(peak=1e6, bytes={'fsdp': 4, 'tp': 0})
        """
        problems = []
        if fits is not None and self.fits is not fits:
            verdict = {True: 'fits', False: 'does not fit', None: 'is not known to fit'}[self.fits]
            problems.append(f'it {verdict}: {memory_taken(self)}')

        def limit(what: str, most: float, found: float, shown: Callable[[Any], str], unit: str) -> None:
            if not found <= most:
                found_text, most_text = distinct_texts(found, most, shown, unit)
                problems.append(f'{what}: {found_text}, at most {most_text}')

        if peak is not None:
            limit('peak of memory', peak, self.memory.peak, human_bytes, ' B')
        for given, most in (bytes or {}).items():
            axes = self._known_axes(given)
            moved = sum(sum(kinds.values()) for own, kinds in self.totals.items() if {*own} == {*axes})
            limit(f'along {" x ".join(axes)}', most, moved, human_bytes, ' B')
        if seconds is not None:
            limit('a step at least', seconds, self.roofline().step_seconds.bound, milliseconds, ' s')
        if problems:
            lines = [f'{self.name} violates its limits:', *(f'  {problem}' for problem in problems)]
            raise AssertionError('\n'.join([*map(visible, lines), '', self.to_text(_WIDTH)]))


@dataclasses.dataclass(frozen=True)
class PlanDiff:
    """The difference of two plans: false when nothing changed; ``str()`` of it lists the changes.

    Attributes:
        before: the first plan.
        after: the second one.
    """

    before: Plan
    after: Plan

    @property
    def collectives(self) -> dict[_CollectiveKey, tuple[int, int]]:
        """The collectives that changed: (kind, mesh axes, bytes) -> how often before, and after.

        Their lines in the program are not compared, because lines move.
        """
        before, after = _counts(self.before), _counts(self.after)
        return {
            key: (before[key], after[key])
            for key in sorted({*before, *after}, key=lambda key: (-key[2], key))
            if before[key] != after[key]
        }

    @property
    def inputs(self) -> ReportDiff:
        """The arguments whose shardings changed."""
        return self.before.inputs.diff(self.after.inputs)

    @property
    def outputs(self) -> ReportDiff:
        """The outputs whose shardings changed."""
        return self.before.outputs.diff(self.after.outputs)

    def __bool__(self) -> bool:
        return bool(self._changed_facts() or self.collectives or self.inputs or self.outputs)

    def __str__(self) -> str:
        if not self:
            return visible(f'{self.after.name}: nothing changed')
        meshes = [axis_sizes_text(plan.mesh) for plan in (self.before, self.after)]
        lines = [f'{self.after.name}: ' + ' -> '.join(dict.fromkeys(f'({mesh})' for mesh in meshes))]
        lines += [f'  {name:<12}  {old} -> {new}' for name, old, new in self._changed_facts()]
        if self.collectives:
            lines += ['', 'collectives (times before -> after):']
            lines += [
                f'  {kind}  {" x ".join(axes)}  {human_bytes(size)}  {old} -> {new}'
                for (kind, axes, size), (old, new) in self.collectives.items()
            ]
        lines = [visible(line) for line in lines]
        for name, report in (('arguments', self.inputs), ('outputs', self.outputs)):
            lines += ['', f'{name}:', str(report)] if report else []
        return '\n'.join(lines)

    def _changed_facts(self) -> list[tuple[str, str, str]]:
        """What changed, beside collectives and shardings, as text."""
        sizes = zip(_sizes(self.before), _sizes(self.after), strict=True)
        every = [(name, *distinct_texts(old, new, human_bytes, ' B')) for (name, old), (_, new) in sizes]
        flops = distinct_texts(self.before.flops, self.after.flops, '{:.4g}'.format, '')
        every.append(('flops', *flops))
        facts = zip(_facts(self.before), _facts(self.after), strict=True)
        every += [(name, old, new) for (name, old), (_, new) in facts]
        return [(name, old, new) for name, old, new in every if old != new]


def _counts(plan: PlanData) -> collections.Counter[_CollectiveKey]:
    counts: collections.Counter[_CollectiveKey] = collections.Counter()
    for row in plan.collectives:
        counts[row.kind, row.axes, row.bytes] += row.count
    return counts


def _sizes(plan: PlanData) -> Iterator[tuple[str, int]]:
    memory, moves = plan.memory, plan.host_moves
    yield 'peak', memory.peak
    for name in ('arguments', 'outputs', 'temporaries'):
        yield name, getattr(memory, name)
    yield 'on the host', memory.host
    yield 'host:out', moves.to_host
    yield 'host:in', moves.from_host


def _facts(plan: PlanData) -> Iterator[tuple[str, str]]:
    yield 'devices', f'{plan.devices} {plan.device_kind}'
    yield 'fits', {True: 'yes', False: 'no', None: 'not known'}[plan.fits]
    roofline = plan.known_roofline
    step = None if roofline is None else ' .. '.join(map(milliseconds, roofline.step_seconds))
    yield 'step', step or 'not known'
    yield 'bound by', 'not known' if roofline is None else network_text(roofline.bound, roofline.hardware)
    yield 'bubble', bubble_text(plan) or 'none'
    yield 'batch', followed_text(plan.followed)
