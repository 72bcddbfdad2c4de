"""The data of a plan, and values derived from it: whether the step fits, totals, and the roofline."""

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
    """The attributes of a `Plan`, whose docstring documents them, and the properties that follow from them.

    Modules that render plans use this class, because `Plan` imports them.
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
        """The FLOPs of idle pipeline stages, whose results are not used."""
        return sum(loop.idle_flops for loop in self.pipelines)

    @property
    def fits(self) -> bool | None:
        """Whether the program fits into the memory of each device; None if that memory is unknown.

        The compiler for TPUs refuses a program that does not fit. For a quick plan and for other devices, the
        memory of the program is compared with the limit.
        """
        if self.refusal:
            return False
        if self.platform == 'tpu' and not self.memory.estimated and not self.quick:
            return True
        return None if self.memory.limit is None else self.memory.total <= self.memory.limit

    @property
    def hardware(self) -> Hardware | None:
        """The hardware of the devices; None if it is unknown."""
        return self.hardware_override or hardware_of(self.device_kind)

    @property
    def known_roofline(self) -> Roofline | None:
        """The `roofline` for the devices of the plan; None if specs that it needs are unknown."""
        try:
            return self.roofline() if self.hardware else None
        except PlanError:
            return None

    @property
    def totals(self) -> dict[tuple[str, ...], dict[str, int]]:
        """The bytes of collectives along mesh axes: axes -> kind of collective -> bytes of all executions.

        Bytes are counted as in `Collective.bytes`.
        """
        totals: dict[tuple[str, ...], collections.Counter[str]] = {}
        for row in self.collectives:
            totals.setdefault(row.axes, collections.Counter())[row.kind] += row.count * row.bytes
        return {axes: dict(kinds) for axes, kinds in totals.items()}

    @property
    def networks(self) -> dict[tuple[str, ...], tuple[Network, ...]]:
        """The networks that carry `totals`: axes -> the networks of all collectives along them."""
        used: dict[tuple[str, ...], set[Network]] = {}
        for row in self.collectives:
            used.setdefault(row.axes, set()).update(row.networks)
        return {axes: tuple(name for name in NETWORKS if name in names) for axes, names in used.items()}

    def count(self, kind: str, axes: str | tuple[str, ...] | None = None) -> int:
        """Counts the executions of collectives of a kind in one call.

        Args:
            kind: one of `KINDS`, such as ``'all-gather'``.
            axes: counts only collectives along exactly these mesh axes (or this one).

        Raises:
            ArgumentError: the kind is unknown, or the mesh lacks an axis.
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
        """Returns the plan with other model FLOPs, from which `Roofline.mfu` is computed.

        Args:
            model_flops: the FLOPs of one call, in place of the counted ones, such as 6 x parameters x tokens
                for training a dense decoder (https://jax-ml.github.io/scaling-book/transformers), or with
                causal attention at half. Recomputation does not count.

        Raises:
            PlanError: *model_flops* is not positive.
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
        """Returns the overlapped and the serial time of one call, and the bottleneck.

        Args:
            hardware: a `Hardware`, or the name of one in `HARDWARE`; by default that of the plan.
            torus: for devices that are not in a torus, such as simulated ones: mesh axis -> the lengths of
                the torus axes that it runs along, ``{'fsdp': (4, 4), 'tp': 4}``. Each device then stands for
                a chip, and other mesh axes run across slices. For hardware without a torus, such as GPUs,
                simulated devices fill nodes in the order of the mesh.

        Raises:
            PlanError: a required spec is unknown, or the positions of the devices are not supported.

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
        flops: float = self.device_cost.flops
        # The FLOPs of kernels are known only from the function.
        if self.device_cost.kernels or not flops:
            flops = max(flops, (self.flops + self.idle_flops) / self.devices)
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
        """Returns the time of transfers to the host, and from the host."""
        transfers = self.host_transfers
        if not transfers.to_host and not transfers.from_host:
            return 0.0, 0.0
        (rate,) = required_specs(hardware, 'host_bytes_per_second', for_='a roofline of a step that offloads')
        return transfers.to_host * per_chip / rate, transfers.from_host * per_chip / rate
