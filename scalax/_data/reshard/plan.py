"""Plan of a reshard: bytes by network, time and memory, computed without moving anything."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from jax.sharding import AbstractMesh

from scalax._core.pytree.paths import element_bits
from scalax._core.render import serialization
from scalax._core.render.tables import human_bytes, milliseconds, table, terminal_width
from scalax._data.host.boxes import volume
from scalax._data.reshard.leaf_mapping import NameMapping
from scalax._data.reshard.request import ReshardOptions, ReshardRequest
from scalax._jax.devices import slice_of
from scalax._planning.hardware.specs import (
    HARDWARE,
    Hardware,
    find_hardware,
    hardware_of,
    network_text,
    required_specs,
)
from scalax.errors import MeshError, plural
from scalax.rules import RuleLike


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """The bytes, time and memory of a `MeshShardingHelper.reshard`; ``str()`` of it is a table.

    Attributes:
        bytes: the bytes of the result, counting each element once.
        local_bytes: the bytes that stay on their device, summed over devices.
        bytes_by_network: the bytes sent over each network: ``'ici'`` within a slice (on GPUs: NVLink),
            ``'dcn'`` between slices.
        max_bytes_sent: the largest number of bytes that one device sends.
        max_bytes_received: the largest number of bytes that one device receives.
        communication_rounds: the number of rounds. In a round each device sends at most one piece and
            receives at most one.
        peak: the peak bytes of pieces on one device, not counting the source and the result.
        seconds: a lower bound of the time. Each round costs one hop and the slower of two transfers: the
            largest piece over one link, and the bytes of one host over its share of the data-center
            network. None if the speeds of the hardware are not known.
        hardware: the name of the hardware.
    """

    bytes: int
    local_bytes: int
    bytes_by_network: dict[str, int]
    max_bytes_sent: int
    max_bytes_received: int
    communication_rounds: int
    peak: int
    seconds: float | None
    hardware: str

    def to_json(self) -> str:
        """Returns the plan as JSON, with a format version."""
        return serialization.write(dataclasses.asdict(self))

    def __str__(self) -> str:
        chip = HARDWARE.get(self.hardware)
        sizes = {
            'stays on its device': self.local_bytes,
            **{f'moves by {network_text(name, chip)}': size for name, size in self.bytes_by_network.items()},
            'sent by one device, at most': self.max_bytes_sent,
            'received by one device, at most': self.max_bytes_received,
            'on one device beside source and result': self.peak,
        }
        seconds = 'time not known' if self.seconds is None else f'{milliseconds(self.seconds)} at least'
        lead = f'{human_bytes(self.bytes)} in {plural(self.communication_rounds, "round")}, {seconds}'
        cells = [('what', 'bytes'), *((label, human_bytes(size)) for label, size in sizes.items())]
        return '\n'.join([lead, *table(cells, terminal_width(None), 0, {1})])


def plan_reshard(
    helper: Any,
    tree: Any,
    rules: RuleLike,
    *,
    hardware: Hardware | str | None = None,
    mapping: NameMapping = None,
    dtype: Any = None,
    donate: bool = False,
    memory: int | str | None = None,
) -> ReshardPlan:
    """Plans ``helper.reshard(tree, rules, ...)`` without moving anything; it needs no devices.

    Args:
        helper: the helper of the target mesh, which may be from `from_topology`.
        tree: arrays, or ``jax.ShapeDtypeStruct`` with shardings, as `MeshShardingHelper.abstract` makes them.
        rules: as for `MeshShardingHelper.reshard`.
        hardware: the hardware whose speeds to use: a `Hardware`, or its name. Default: that of the devices.
        mapping: as for `MeshShardingHelper.reshard`.
        dtype: as for `MeshShardingHelper.reshard`.
        donate: as for `MeshShardingHelper.reshard`.
        memory: as for `MeshShardingHelper.reshard`.

    Raises:
        ArgumentError: some leaves have no sharding, or an option is invalid.
        MeshError: the helper was made from an AbstractMesh.
        PlanError: the hardware is unknown, or some of its speeds are.

    Example:
        >>> import jax
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> trainer = MeshShardingHelper([4], ['fsdp'], devices=jax.devices()[:4])
        >>> sampler = MeshShardingHelper([4], ['tp'], devices=jax.devices()[4:])
        >>> w = trainer.abstract(jax.ShapeDtypeStruct((1024, 1024), 'float32'), PartitionSpec('fsdp'))
        >>> plan = plan_reshard(sampler, w, PartitionSpec(None, 'tp'), dtype='bfloat16', hardware='h100')
        >>> plan.bytes_by_network, plan.communication_rounds, plan.max_bytes_sent
        ({'ici': 2097152, 'dcn': 0}, 4, 524288)
    """
    if isinstance(helper.mesh, AbstractMesh):
        raise MeshError('plan_reshard needs a mesh of devices, which may be absent ones: from_topology')
    options = ReshardOptions.of(mapping, dtype, donate, memory)
    request = ReshardRequest.of(helper, tree, rules, options, plan_only=True)
    kind = helper.mesh.devices.flat[0].device_kind
    chip = find_hardware(hardware, kind) if hardware is not None else hardware_of(kind)
    speeds = 'ici_bytes_per_second', 'dcn_bytes_per_second', 'hop_seconds'
    link, dcn, hop = required_specs(chip, *speeds, for_='a move') if chip else (1, 1, 0)
    sent, received, by_network = Counter[Any](), Counter[Any](), {'ici': 0, 'dcn': 0}
    local_bytes, rounds, peak, seconds = 0, 0, 0, 0.0
    for transfer in [
        request.transfer(source, target) for target in request.targets for source in target.sources
    ]:
        bits, schedule = element_bits(transfer.sent_dtype), transfer.schedule
        local_bytes += sum(
            volume(piece.box) * bits // 8 for pieces in schedule.local_rounds for piece in pieces
        )
        for pieces in schedule.transfer_rounds:
            size = volume(pieces[0].box) * bits // 8
            # Per host, the number of pieces over the data-center network; per device, pieces in memory.
            dcn_pieces, alive = Counter[Any](), Counter[Any]()
            for source, target in [(piece.source, piece.target) for piece in pieces]:
                is_dcn = slice_of(source) != slice_of(target)
                by_network['dcn' if is_dcn else 'ici'] += size
                sent[source] += size
                received[target] += size
                alive.update([source, target])
                dcn_pieces.update(
                    {('from', source.process_index): is_dcn, ('to', target.process_index): is_dcn}
                )
            rounds += 1
            peak = max(peak, size * max(alive.values()))
            seconds += size * max(1 / link, max(dcn_pieces.values()) / dcn) + hop
    return ReshardPlan(
        bytes=request.bytes,
        local_bytes=local_bytes,
        bytes_by_network=by_network,
        max_bytes_sent=max(sent.values(), default=0),
        max_bytes_received=max(received.values(), default=0),
        communication_rounds=rounds,
        peak=peak,
        seconds=seconds if chip else None,
        hardware=chip.name if chip else kind,
    )
