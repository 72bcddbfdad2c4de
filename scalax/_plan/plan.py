"""Plans: memory, communication and time of a compiled step."""

from __future__ import annotations

import collections
import dataclasses
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalax._plan.buffers import Buffer
from scalax._plan.collective_runs import KINDS
from scalax._plan.collectives import Collective
from scalax._plan.formulas import Counted
from scalax._plan.hardware import (
    HARDWARE,
    Hardware,
    find_hardware,
    hardware_of,
    numbers_of,
    with_unknown_at_best,
)
from scalax._plan.hlo_cost import Work
from scalax._plan.host_moves import HostMoves
from scalax._plan.memory import Memory
from scalax._plan.plan_check import check_plan
from scalax._plan.plan_diff import PlanDiff
from scalax._plan.roofline import Roofline, Seconds, not_compiled_for, phases_of, time_collectives
from scalax._plan.text import render
from scalax._plan.torus import (
    NETWORKS,
    Network,
    Place,
    devices_per_chip,
    places_in_nodes,
    places_on_torus,
)
from scalax._report import saved
from scalax._transforms.followed_batch import FollowedBatch
from scalax._util.strict_json import brief
from scalax.errors import ArgumentError, PlanError, did_you_mean
from scalax.explain import ShardingReport

_NO_WORK = Work()
_NOTHING_MOVED = HostMoves()
_MOST_DEVICES = 1 << 24
_MOST_AXES = 32


@dataclasses.dataclass(frozen=True)
class Plan:
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
            those of its matrix products, convolutions and FFTs; forward, backward, and recomputed.
        flops_counted: how well that is known.
        work: what each device computes and moves, as the compiler has partitioned it; work that several
            devices repeat counts for each.
        model_flops: the operations that the model needs in one call: those of the forward and the backward
            pass (`count_model_flops`), without what is computed again, unless `with_model_flops` has given
            others. None if not all of them can be counted.
        device_kind: what JAX calls the devices.
        simulates: the hardware that they stand for, such as ``'h100'``, a name in `HARDWARE`; empty if they
            stand for none.
        places: the positions of the devices of the mesh, in the order of the mesh.
        quick: whether the compiler only laid the program out, without making code. Memory is then that of the
            layout, which is close to the final one, and shardings are the requested ones.
        refusal: the error of the compiler for a program that does not fit into the memory of a device; empty
            if it fits, and for quick plans.
        buffers: the arrays that are held at the peak of memory, the largest first: at least 99 % of it; for
            TPUs only.
        host_moves: what each device exchanges with its host; for TPUs only.
        followed: the values that stay with the rows of the batch, as `SjitFunction.followed` says; None for
            functions that ``sjit`` did not make.
        batch_axes: the mesh axes over which rows of the batch are, also of one that is not followed; empty if
            no argument is known to be a batch.

    Raises:
        PlanError: it names devices that the mesh does not have or unknown hardware, or the mesh is too large.
    """

    name: str
    mesh: Mapping[str, int]
    devices: int
    platform: str
    memory: Memory
    inputs: ShardingReport
    outputs: ShardingReport
    collectives: tuple[Collective, ...]
    flops: int = 0
    flops_counted: Counted = Counted.EXACTLY
    work: Work = _NO_WORK
    model_flops: int | None = None
    device_kind: str = ''
    places: tuple[Place, ...] = ()
    quick: bool = False
    refusal: str = ''
    buffers: tuple[Buffer, ...] = ()
    host_moves: HostMoves = _NOTHING_MOVED
    followed: FollowedBatch | None = None
    batch_axes: tuple[str, ...] = ()
    simulates: str = ''

    def __post_init__(self) -> None:
        if self.simulates and self.simulates not in HARDWARE:
            raise PlanError(f'there is no hardware {brief(self.simulates)} to simulate')
        size = math.prod(self.mesh.values())
        if not 0 < size <= _MOST_DEVICES or len(self.mesh) > _MOST_AXES:
            raise PlanError(f'mesh has {brief(size)} devices along {len(self.mesh)} axes')
        if not 0 < self.devices <= size:
            raise PlanError(f'devices are {self.devices}, and the mesh has {size}')
        for row in self.collectives:
            known = self.mesh.keys() >= set(row.axes) and len(set(row.axes)) == len(row.axes)
            if not known or any(device >= size for device in row.part):
                raise PlanError(f'a collective is of devices that the mesh does not have: {brief(row)}')
        unknown = sorted(
            {*self.batch_axes, *(self.followed.axes if self.followed else ())} - self.mesh.keys()
        )
        if unknown:
            raise PlanError(
                f'rows of the batch are over an axis that the mesh does not have: {brief(unknown[0])}'
            )
        if self.places:
            axes = {len(place.coords) for place in self.places}
            if len(self.places) != size or len(axes) > 1 or max(axes) > _MOST_AXES:
                raise PlanError(f'places are not one for each of {size} devices, of as many coordinates each')
            longest = [max(axis) + 1 for axis in zip(*(place.coords for place in self.places), strict=True)]
            if math.prod(longest) * (max(place.core for place in self.places) + 1) > _MOST_DEVICES:
                raise PlanError('places are too far from one another')

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the memory of each device; None if the size of that memory is not known.

        The compiler for TPUs refuses a program that does not fit, and its word is final. For a quick plan and
        for other devices, the memory is compared with the limit.
        """
        if self.refusal:
            return False
        if self.platform == 'tpu' and not self.memory.estimated and not self.quick:
            return True
        return None if self.memory.limit is None else self.memory.total <= self.memory.limit

    @property
    def hardware(self) -> Hardware | None:
        """The hardware that the devices are, or stand for; None if its numbers are not known."""
        return HARDWARE[self.simulates] if self.simulates else hardware_of(self.device_kind)

    @property
    def not_compiled_for(self) -> str:
        """A sentence: the program was compiled for simulated devices, and not for what they stand for.

        Empty if the devices stand for no other hardware. Of other hardware see `Roofline.not_compiled_for`.
        """
        return not_compiled_for(HARDWARE[self.simulates], self.device_kind) if self.simulates else ''

    @property
    def known_roofline(self) -> Roofline | None:
        """The `roofline` of the devices that the plan is for; None if numbers are missing for it."""
        try:
            return self.roofline() if self.hardware else None
        except PlanError:
            return None

    @property
    def totals(self) -> dict[tuple[str, ...], dict[str, int]]:
        """The bytes moved along mesh axes: axes -> kind of collective -> bytes of all executions.

        Bytes are counted as in `Collective.bytes`.
        """
        totals: dict[tuple[str, ...], collections.Counter[str]] = {}
        for row in self.collectives:
            totals.setdefault(row.axes, collections.Counter())[row.kind] += row.count * row.bytes
        return {axes: dict(kinds) for axes, kinds in totals.items()}

    @property
    def networks(self) -> dict[tuple[str, ...], tuple[Network, ...]]:
        """The networks that carry `totals`: axes -> the `Collective.networks` of all that run along them."""
        used: dict[tuple[str, ...], set[Network]] = {}
        for row in self.collectives:
            used.setdefault(row.axes, set()).update(row.networks)
        return {axes: tuple(name for name in NETWORKS if name in those) for axes, those in used.items()}

    @property
    def explained(self) -> float:
        """The part of the bytes of `collectives` whose origin in the user's program was found.

        The other rows have the cause ``'compiler'``.
        """
        moved = sum(row.count * row.bytes for row in self.collectives)
        found = sum(row.count * row.bytes for row in self.collectives if row.cause != 'compiler')
        return found / moved if moved else 1.0

    def count(self, kind: str, axes: str | tuple[str, ...] | None = None) -> int:
        """How often collectives of a kind run in one call.

        Args:
            kind: one of `KINDS`, such as ``'all-gather'``.
            axes: count only collectives along exactly these mesh axes (or this one).

        Raises:
            ArgumentError: an unknown kind, or an axis that the mesh does not have.
        """
        axes = (axes,) if isinstance(axes, str) else axes
        if kind not in KINDS:
            raise ArgumentError(f'there is no collective {kind!r} ({did_you_mean(kind, KINDS)})')
        for axis in axes or ():
            if axis not in self.mesh:
                raise ArgumentError(f'the mesh has no axis {axis!r} ({did_you_mean(str(axis), self.mesh)})')
        return sum(
            row.count
            for row in self.collectives
            if row.kind == kind and (axes is None or set(row.axes) == set(axes))
        )

    def with_model_flops(self, model_flops: float) -> Plan:
        """The same plan with the number of operations that the model needs, which `Roofline.mfu` uses.

        Args:
            model_flops: operations of one call, in place of those that are counted: such as 6 x parameters x
                tokens for training a dense decoder (https://jax-ml.github.io/scaling-book/transformers), or
                with causal attention at half. Recomputation does not count.

        Raises:
            PlanError: it is not positive.
        """
        if not isinstance(model_flops, numbers.Real) or not 0 < model_flops < float('inf'):
            raise PlanError(f'model_flops has to be a positive number, got {model_flops!r}')
        return dataclasses.replace(self, model_flops=round(model_flops))

    def roofline(
        self,
        hardware: Hardware | str | None = None,
        *,
        torus: Mapping[str, int | Sequence[int]] | None = None,
    ) -> Roofline:
        """The least time of one call, and what bounds it.

        Args:
            hardware: a `Hardware`, or the name of one in `HARDWARE`; by default that of the devices that the
                plan is for, or that they stand for.
            torus: for devices that are not in a torus, such as simulated ones: the lengths of the axes of the
                torus that each mesh axis runs along, ``{'fsdp': (4, 4), 'tp': 4}``. Each device then stands
                for a chip. Mesh axes that are not named run across slices. Of hardware without a torus,
                such as GPUs, simulated devices fill nodes in the order of the mesh.

        Numbers of networks that the hardware does not have are named, and the rest is given
        (`Roofline.unknown`).

        Raises:
            PlanError: the speed of computing or of memory is not known, or the positions of devices are not
                understood.

        Example:
            >>> import jax
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> step = helper.sjit(lambda x: x @ x.T, in_shardings=PartitionSpec('fsdp', 'tp'))
            >>> plan = helper.plan(step, jax.ShapeDtypeStruct((4096, 4096), 'bfloat16'))
            >>> plan.flops == 2 * 4096**3
            True
            >>> plan.roofline('v5p', torus={'fsdp': 4, 'tp': 2}).bound
            'ici:fsdp'
        """
        hardware = find_hardware(hardware or self.simulates or None, self.device_kind)
        places = self.places if torus is None else places_on_torus(torus, self.mesh, hardware)
        if torus is None and self.platform == 'cpu' and not self.simulates:
            places = places_in_nodes(places, hardware)
        timed, unknown = with_unknown_at_best(lambda known: self._roofline_of(places, known), hardware)
        counted = timed.counted.along(Counted.AT_LEAST) if unknown else timed.counted
        return dataclasses.replace(timed, hardware=hardware, unknown=unknown, counted=counted)

    def _roofline_of(self, places: Sequence[Place], hardware: Hardware) -> Roofline:
        """The roofline of devices at these places; raises if any number that it needs is not known."""
        flops_rate, hbm_rate = numbers_of(
            hardware, 'flops_per_second', 'hbm_bytes_per_second', for_='a roofline'
        )
        per_chip = devices_per_chip(places, hardware)
        known = self.work.flops
        # The operations of kernels are known only from the function.
        flops = max(known, self.flops / self.devices) if self.work.kernels or not known else known
        compute, hbm = flops * per_chip / flops_rate, self.work.bytes * per_chip / hbm_rate
        timed = time_collectives(self.collectives, self.mesh, places, self.device_kind, hardware)
        to_host, from_host = self._host_seconds(hardware, per_chip)
        return Roofline(
            hardware=hardware,
            devices=self.devices,
            peak=self.devices * flops_rate / per_chip,
            compute=compute,
            hbm=hbm,
            communication=timed.communication,
            collectives=timed.collectives,
            model_flops=self.model_flops,
            counted=self.flops_counted.along(self.work.counted)
            .along(timed.counted)
            .along(self.host_moves.counted),
            to_host=to_host,
            from_host=from_host,
            compiled_for=self.device_kind,
            phases=phases_of(self.work, compute, hbm),
        )

    def _host_seconds(self, hardware: Hardware, per_chip: int) -> tuple[float, float]:
        """The time of the link to the host, out and in."""
        moves = self.host_moves
        if not moves.to_host and not moves.from_host:
            return 0.0, 0.0
        (rate,) = numbers_of(hardware, 'host_bytes_per_second', for_='a roofline of a step that offloads')
        return moves.to_host * per_chip / rate, moves.from_host * per_chip / rate

    @property
    def step_seconds(self) -> Seconds:
        """`Roofline.step_seconds` of the devices that the plan is for; raises as `roofline` does."""
        return self.roofline().step_seconds

    @property
    def bound(self) -> str:
        """`Roofline.bound` of the devices that the plan is for; raises as `roofline` does."""
        return self.roofline().bound

    @property
    def mfu(self) -> float | None:
        """`Roofline.mfu` of the devices that the plan is for; raises as `roofline` does."""
        return self.roofline().mfu

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The plan as text.

        Args:
            width: the width in columns; that of the terminal by default.
        """
        return render(self, width)

    def _repr_html_(self) -> str:
        from scalax._plan.page import render_fragment  # here, because few programs show pages

        return render_fragment(self)

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Writes the plan as a page that loads nothing; scripts only sort its tables.

        Args:
            path: the file to write.
            title: the title of the page; `name` by default.
        """
        from scalax._plan.page import render_page

        Path(path).write_bytes(render_page(self, f'Plan of {self.name}' if title is None else title).encode())

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
        before: Plan | None = None,
    ) -> None:
        """Asserts that the plan keeps within limits: for tests of a training step.

        Args:
            fits: whether it has to fit (or not to fit) into the memory of a device.
            peak: the most bytes of memory that a device may need.
            bytes: mesh axes (or one axis) -> the most bytes that may move along exactly these, as in
                `totals`, of all kinds together.
            seconds: the longest that a step may take at least (`Roofline.step_seconds`, the bound).
            before: an earlier plan that kept the limits; the message then shows what changed since.

        Raises:
            AssertionError: a limit is exceeded; the message gives all that are.
            ArgumentError: the mesh has no such axis, or a limit is not a number.
            PlanError: *seconds* are given, and the time of a step is not known.

        Example:
            >>> import jax
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> total = helper.sjit(lambda x: x.sum(), in_shardings=PartitionSpec('fsdp'))
            >>> plan = helper.plan(total, jax.ShapeDtypeStruct((64,), 'float32'))
            >>> plan.check(peak=1e6, bytes={'fsdp': 4, 'tp': 0})
        """
        check_plan(self, fits, peak, bytes or {}, seconds, before)
