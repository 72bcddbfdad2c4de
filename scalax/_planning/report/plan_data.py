"""What a plan knows of a compiled step, and what follows from it: whether it fits, its sums, its seconds."""

from __future__ import annotations

import collections
import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Self

from scalax._planning.cost.buffers import Buffer
from scalax._planning.cost.collective_instances import KINDS
from scalax._planning.cost.collectives import Collective
from scalax._planning.cost.device_cost import DeviceCost
from scalax._planning.cost.host_transfers import HostTransfers
from scalax._planning.cost.memory import Memory
from scalax._planning.hardware.specs import Hardware, find_hardware, hardware_of, required_specs
from scalax._planning.hardware.torus import (
    NETWORKS,
    DevicePosition,
    Network,
    devices_per_chip,
    positions_in_nodes,
    positions_on_torus,
)
from scalax._planning.program.exactness import Exactness
from scalax._planning.time.roofline import Roofline, phase_times, time_collectives
from scalax._planning.time.schedule import Schedule
from scalax._spmd.pipelines.summary import PipelinedLoop
from scalax._spmd.report.explain import PropagationReport
from scalax.errors import ArgumentError, PlanError, did_you_mean
from scalax.explain import ShardingReport

_NO_COST = DeviceCost()
_NO_TRANSFERS = HostTransfers()


@dataclasses.dataclass(frozen=True)
class PlanData:
    """The attributes of a `Plan`, which says what each is, and what follows from them.

    What shows a plan takes this, so that a plan can be above what shows it.
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
    flops_exactness: Exactness = Exactness.EXACT
    device_cost: DeviceCost = _NO_COST
    model_flops: int | None = None
    device_kind: str = ''
    device_positions: tuple[DevicePosition, ...] = ()
    quick: bool = False
    refusal: str = ''
    buffers: tuple[Buffer, ...] = ()
    host_transfers: HostTransfers = _NO_TRANSFERS
    propagation: PropagationReport | None = None
    flags: tuple[str, ...] = ()
    schedule: Schedule | None = None
    pipelines: tuple[PipelinedLoop, ...] = ()
    hardware_override: Hardware | None = None

    @property
    def idle_flops(self) -> int:
        """The operations of idle stages of pipelines: devices compute them, and nothing of it is used."""
        return sum(loop.idle_flops for loop in self.pipelines)

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
        """The hardware that the devices are; None if its numbers are not known."""
        return self.hardware_override or hardware_of(self.device_kind)

    @property
    def known_roofline(self) -> Roofline | None:
        """The `roofline` of the devices that the plan is for; None if numbers are missing for it."""
        try:
            return self.roofline() if self.hardware else None
        except PlanError:
            return None

    @property
    def totals(self) -> dict[tuple[str, ...], dict[str, int]]:
        """The bytes sent along mesh axes: axes -> kind of collective -> bytes of all executions.

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

    def count(self, kind: str, axes: str | tuple[str, ...] | None = None) -> int:
        """How often collectives of a kind run in one call.

        Args:
            kind: one of `KINDS`, such as ``'all-gather'``.
            axes: count only collectives along exactly these mesh axes (or this one).

        Raises:
            ArgumentError: an unknown kind, or an axis that the mesh does not have.
        """
        if kind not in KINDS:
            raise ArgumentError(f'there is no collective {kind!r} ({did_you_mean(kind, KINDS)})')
        rows = [row for row in self.collectives if row.kind == kind]
        if axes is not None:
            along = (axes,) if isinstance(axes, str) else axes
            for axis in along:
                if axis not in self.mesh:
                    near = did_you_mean(str(axis), self.mesh)
                    raise ArgumentError(f'the mesh has no axis {axis!r} ({near})')
            rows = [row for row in rows if {*row.axes} == {*along}]
        return sum(row.count for row in rows)

    def with_model_flops(self, model_flops: float) -> Self:
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
        """The fully overlapped and the serial time of one call, and the bottleneck.

        Args:
            hardware: a `Hardware`, or the name of one in `HARDWARE`; by default that of the devices that the
                plan is for.
            torus: for devices that are not in a torus, such as simulated ones: the lengths of the axes of the
                torus that each mesh axis runs along, ``{'fsdp': (4, 4), 'tp': 4}``. Each device then stands
                for a chip. Mesh axes that are not named run across slices. Of hardware without a torus,
                such as GPUs, simulated devices fill nodes in the order of the mesh.

        Raises:
            PlanError: a number of the hardware that it needs is not known, or the positions of devices are
                not understood.

        Example:
            >>> import jax
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> step = helper.sjit(lambda x: x @ x.T, in_shardings=PartitionSpec('fsdp', 'tp'))
            >>> plan = helper.plan(step, jax.ShapeDtypeStruct((4096, 4096), 'bfloat16'))
            >>> plan.flops == 2 * 4096**3
            True
            >>> plan.roofline('v5p', torus={'fsdp': 4, 'tp': 2}).bottleneck
            'ici:fsdp'
        """
        hardware = find_hardware(hardware or self.hardware_override, self.device_kind)
        positions = self.device_positions if torus is None else positions_on_torus(torus, self.mesh, hardware)
        if torus is None and self.platform == 'cpu':
            positions = positions_in_nodes(positions, hardware)
        flops_rate, hbm_rate = required_specs(
            hardware, 'flops_per_second', 'hbm_bytes_per_second', for_='a roofline'
        )
        per_chip = devices_per_chip(positions, hardware)
        known = self.device_cost.flops
        # The operations of kernels are known only from the function.
        written = (self.flops + self.idle_flops) / self.devices
        flops = max(known, written) if self.device_cost.kernels or not known else known
        compute, hbm = flops * per_chip / flops_rate, self.device_cost.bytes * per_chip / hbm_rate
        timed = time_collectives(self.collectives, self.mesh, positions, self.device_kind, hardware)
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
            exactness=self.flops_exactness.combine(self.device_cost.exactness)
            .combine(timed.exactness)
            .combine(self.host_transfers.exactness),
            to_host=to_host,
            from_host=from_host,
            compiled_for=self.device_kind,
            phases=phase_times(self.device_cost, compute, hbm),
        )

    def _host_seconds(self, hardware: Hardware, per_chip: int) -> tuple[float, float]:
        """The time of the link to the host, out and in."""
        moves = self.host_transfers
        if not moves.to_host and not moves.from_host:
            return 0.0, 0.0
        (rate,) = required_specs(hardware, 'host_bytes_per_second', for_='a roofline of a step that offloads')
        return moves.to_host * per_chip / rate, moves.from_host * per_chip / rate
