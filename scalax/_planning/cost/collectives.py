"""The collectives of a program, counted over a whole step, each with the reason why it is there.

Compilers for accelerators rewrite what the SPMD partitioner left: partial results are added before they are
reduced, an all-gather becomes an all-reduce, small collectives are combined. So kinds, counts and bytes are
read from the program after all optimizations, which is the one that runs. It has lost much of what explains a
collective. That is read from the partitioner's program of the same compilation.

XLA for CPUs stands in for other hardware, and its own rewriting says nothing about that. There the
partitioner's program is counted, too.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from types import MappingProxyType
from typing import Literal

import numpy as np

from scalax._planning.cost.collective_causes import (
    Cause,
    cause_of,
    collective_index,
    collective_phase,
    is_scattered,
    reason_of,
)
from scalax._planning.cost.collective_instances import (
    CollectiveInstance,
    Kind,
    MeshCollective,
    collective_instances,
)
from scalax._planning.cost.spmd_provenance import PartitionerCollectives
from scalax._planning.hardware.torus import DevicePosition, Network, networks_of
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.hlo import Module
from scalax._planning.program.module_scopes import ScopeRuns, Scopes
from scalax._planning.program.phase_finder import PhaseFinder
from scalax._planning.program.phases import Phase, phase_of
from scalax._planning.program.provenance import (
    Source,
    first_user_op_name,
    frame_id,
    source_of,
)
from scalax._planning.program.replica_groups import (
    Groups,
    axes_of_groups,
    devices_along,
    groups_between_slices,
    replica_groups,
    replica_groups_text,
    source_target_pairs,
)
from scalax.errors import PlanError


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: ``'all-gather'``, ``'all-reduce'``, ``'reduce-scatter'``, ``'all-to-all'``,
            ``'collective-permute'``, ``'collective-broadcast'`` or ``'ragged-all-to-all'``.
        axes: the mesh axes along which it runs.
        group: the number of devices in each group; fewer than there are along `axes` if a group holds only
            some of them.
        count: how often it runs in a step.
        exactness: how well that is known.
        bytes: the bytes of the full (gathered) array of one group, in one execution.
        source: the place in the user's program that caused it.
        part: one of the groups, as positions in ``mesh.devices.flat``, if groups are a part of their axes.
            Empty for groups of all devices along the axes.
        scattered: whether it is an all-reduce of which each device keeps only a part, as large as if it were
            its own: the partitioner writes a reduce-scatter so, and compilers for accelerators turn it into
            one. Only on CPUs, for which the partitioner's program is counted.
        networks: the networks that carry it: ``'ici'`` between the chips of a slice, ``'dcn'`` between
            slices, ``'chip'`` between the devices of a chip; several if groups need several. Empty for
            devices that are not in a torus, such as CPUs.
        cause: why it is there. ``'program'``: the user's program asks for it, as `jax.lax.psum` does.
            ``'sharding'``: the shardings of an operation's operands and result need it. ``'resharding'``:
            XLA found no direct way between two shardings of a value, whose shards are gathered on every
            device and sliced again (it warns of an involuntary full rematerialization). ``'halo'``: devices
            exchange the edges of their blocks. ``'ring'``: an all-gather or a reduce-scatter that runs piece
            by piece beside a product, as permutes in a loop. ``'padding'``: the compiler padded the shards
            of a collective, and moves what is then on the wrong device. ``'compiler'``: another optimization
            added it, and the partitioner's program has none like it.
        reason: why scalax wrote it, as `CollectiveRow.reason`: ``'weight params/up for dot_general'``,
            ``'gradient of params/up'``, ``'examples gathered for sort'``; empty if XLA or the user wrote it.
        partitioned_as: the kind that it has in the partitioner's program, if the compiler changed that.
        phase: the part of a training step that it belongs to: ``'forward'``, ``'backward'``,
            ``'recomputed'`` (by `jax.checkpoint`), ``'update'`` (with gradients), or ``'other'``.
        scopes: the modules or named scopes that it runs in, and how often in each.
        crossing: of a permute between slices, how many devices of one slice send to another one, at most.
    """

    kind: Kind
    axes: tuple[str, ...]
    group: int
    count: int
    exactness: Exactness
    bytes: int
    source: Source
    part: tuple[int, ...] = ()
    scattered: bool = False
    networks: tuple[Network, ...] = ()
    cause: Cause = 'sharding'
    partitioned_as: Literal['', Kind] = ''
    phase: Phase = 'other'
    scopes: tuple[ScopeRuns, ...] = ()
    crossing: int = 0
    reason: str = ''


def collectives(
    module: Module,
    mesh: Mapping[str, int],
    positions: Sequence[DevicePosition] = (),
    partitioned: Module | None = None,
    device_ids: Sequence[int] = (),
    switched: bool = False,
    reasons: Mapping[int, str] = MappingProxyType({}),
) -> tuple[Collective, ...]:
    """The collectives of a program, the largest first; equal ones in one row.

    Args:
        module: the program to count.
        mesh: mesh axis name -> size, in the order of the mesh.
        positions: the positions of the devices of the mesh, in the order of the mesh.
        partitioned: the program after SPMD partitioning in the same compilation; None if that is *module*.
        device_ids: the ids of the devices of the mesh.
        switched: whether slices without a torus are nodes, as for `networks_of`.
        reasons: why scalax wrote each of its collectives, by their numbers.

    Raises:
        PlanError: a collective is written in an unknown form.
    """
    devices = _Devices(mesh, positions, device_ids, switched)
    staying: dict[Collective, int] = {}
    explaining = module if partitioned is None else partitioned
    parts, scopes, scopes_before = PhaseFinder(module), Scopes(module), Scopes(explaining)
    counts: dict[Collective, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    collective_instances = [each for each in devices.runs(module) if each.group >= 2]
    numbers = {number for each in collective_instances if (number := collective_index(each.run)) is not None}
    names = {each.run.op_name for each in collective_instances}
    before = None if partitioned is None else PartitionerCollectives(devices.runs(partitioned), names)
    for each in collective_instances:
        run = each.run
        origin = run if before is None else before.origin(each, module)
        mover = run if origin is None else origin
        name = first_user_op_name(*mover.place, mover.visit.op_name)
        phase = phase_of(name)
        if phase == 'other':
            phase = collective_phase(run if run.op_name or origin is None else origin)
            name = run.op_name if '/' in run.op_name or not name else name
        if phase == 'other' and parts.of(run.visit, run.instruction) == 'update':
            phase = 'update'
        source, scope = Source(), scopes.of(name, frame_id(module, *run.holder))
        if origin is not None:
            source = source_of(explaining, *origin.place)
            scope = scope or scopes_before.of(origin.op_name, frame_id(explaining, *origin.place))
        if not (source.file or source.operand):
            # The frames of a called computation are without those of its caller. The later program has both.
            place = source_of(module, *run.holder)
            source = place._replace(annotation=source.annotation or place.annotation)
        row = dataclasses.replace(
            _uncounted(each),
            source=source,
            scattered=before is None and is_scattered(run, each.group),
            cause=cause_of(run, origin),
            partitioned_as='' if origin is None or origin.kind == run.kind else origin.kind,
            phase=phase,
            reason=reason_of(run, origin, reasons, numbers),
        )
        counts[row][scope] += run.visit.count
        staying[row] = max(each.staying, staying.get(row, 0))
    of_slice = len(positions) // len({position.slice for position in positions} or [0])
    rows = (
        dataclasses.replace(row, count=times.total(), scopes=tuple(starmap(ScopeRuns, times.items())))
        for row, times in (counts if switched else _whole_permutes(counts, staying, of_slice)).items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.bytes * row.count, row.kind, row.axes, row.source)))


def collective_times(
    time: Callable[[Sequence[Collective]], Iterable[float]],
    module: Module,
    mesh: Mapping[str, int],
    positions: Sequence[DevicePosition],
    device_ids: Sequence[int],
) -> dict[tuple[str, str], tuple[Kind, float]]:
    """What each collective of a program takes, of all its branches, whose devices switches join.

    Args:
        time: the seconds of one execution of each of some collectives.
        module: the program, and the others as for `collectives`.
        mesh: as for `collectives`.
        positions: as for `collectives`.
        device_ids: as for `collectives`.

    Returns:
        The names of a computation and of the instruction that is a collective, or starts it -> its kind, and
        the seconds of one execution.
    """
    found = {}
    for each in _Devices(mesh, positions, device_ids, True).runs(module, every_branch=True):
        computation, instruction = each.run.holder
        once = dataclasses.replace(_uncounted(each), count=1, exactness=Exactness.EXACT)
        found[computation.name, instruction.name] = once
    rows = [row for row in dict.fromkeys(found.values()) if row.group > 1]  # one device sends nothing
    seconds = dict(zip(rows, time(rows), strict=True))
    return {place: (row.kind, seconds.get(row, 0.0)) for place, row in found.items()}


def _uncounted(each: MeshCollective) -> Collective:
    """The row of a collective, before its executions are counted and its source is found."""
    return Collective(
        kind=each.run.kind,
        axes=each.axes,
        group=each.group,
        count=0,
        exactness=each.run.visit.exactness,
        bytes=each.run.whole_bytes(each.group),
        source=Source(),
        part=each.part,
        networks=each.networks,
        crossing=each.crossing,
    )


def _whole_permutes(
    counts: Mapping[Collective, collections.Counter[str]], staying: Mapping[Collective, int], of_slice: int
) -> dict[Collective, collections.Counter[str]]:
    """The rows, where the two parts of a permute inside slices and between them are one.

    The compiler for TPUs writes them apart. They run at the same time, on two networks. In one permute a
    device sends once: where more devices of a slice send than it has, these are two.

    Args:
        counts: the rows, and how often each runs in each scope.
        staying: how many devices of a slice send inside of it in each row.
        of_slice: the devices of a slice.
    """
    inside: dict[Collective, Collective] = {}
    for row in counts:
        if row.kind == 'collective-permute' and row.networks and 'dcn' not in row.networks:
            inside[_without_networks(row)] = row
    joined = dict(counts)
    for row, times in counts.items():
        own = inside.get(_without_networks(row)) if row.networks == ('dcn',) else None
        if own is None or staying[own] + row.crossing > of_slice:
            continue
        if counts[own].total() == times.total():
            joined.pop(own)
            joined.pop(row)
            joined[dataclasses.replace(row, networks=(*own.networks, 'dcn'))] = times
    return joined


def _without_networks(row: Collective) -> Collective:
    return dataclasses.replace(row, networks=(), crossing=0)


class _Devices:
    """The devices of a mesh, in its order, and which of them run a program.

    Args:
        mesh: mesh axis name -> size.
        positions: their positions; none if they are not known.
        ids: their ids; none if the program does not name them.
        switched: whether slices without a torus are nodes.
    """

    def __init__(
        self, mesh: Mapping[str, int], positions: Sequence[DevicePosition], ids: Sequence[int], switched: bool
    ) -> None:
        self._mesh, self._positions, self._ids, self._switched = mesh, positions, ids, switched
        # Hundreds of collectives of a program have the same groups, of thousands of devices.
        self._known: dict[tuple[object, ...], MeshCollective] = {}

    def runs(self, module: Module, every_branch: bool = False) -> Iterator[MeshCollective]:
        """The collectives of a program; of branches those of the one that sends most, or of all.

        Raises:
            PlanError: their groups do not fit the devices.
        """
        for run in collective_instances(module, every_branch):
            own = run.instruction
            named = map(own.attribute, ('source_target_pairs', '_xla_megascale_target'))
            key = run.kind, own.opcode, module.partitions, replica_groups_text(own.attributes), *named
            if key not in self._known:
                self._known[key] = self._on_mesh(run, self._groups(run, module.partitions))
            yield self._known[key]._replace(run=run)

    def _on_mesh(self, run: CollectiveInstance, groups: Groups) -> MeshCollective:
        axes = axes_of_groups(groups, self._mesh)
        group = along = devices_along(axes, self._mesh)
        part: tuple[int, ...] = ()
        staying = crossing = 0
        if run.kind == 'collective-permute':
            staying, crossing = self._senders(groups)
        elif groups.shape[1] != along:
            group, part = groups.shape[1], tuple(map(int, groups[0]))
        networks = networks_of(groups, self._positions, switched=self._switched)
        return MeshCollective(run, axes, group, part, networks, crossing, staying)

    def _senders(self, pairs: Groups) -> tuple[int, int]:
        """How many devices of one slice send inside of it, and to another, at most."""
        if not self._positions:
            return 0, 0
        slices = [[self._positions[device].slice for device in pair] for pair in pairs.tolist()]
        inside = collections.Counter(start for start, end in slices if start == end)
        outside = collections.Counter(start for start, end in slices if start != end)
        return max(inside.values(), default=0), max(outside.values(), default=0)

    def _groups(self, run: CollectiveInstance, partitions: int) -> Groups:
        instruction = run.instruction
        if instruction.opcode == 'recv':
            return groups_between_slices(instruction.attribute('_xla_megascale_target') or '', self._ids)
        if run.kind == 'collective-permute':
            text = instruction.attribute('source_target_pairs') or ''
            groups = source_target_pairs(text)
            groups = groups[groups[:, 0] != groups[:, 1]]  # pairs of a device with itself send nothing
            fit = not groups.size or groups.max() < partitions
        else:
            text = replica_groups_text(instruction.attributes) or ''
            if not text:
                raise PlanError(
                    f'a collective without groups: {instruction.name} {instruction.attributes[:200]}'
                )
            groups = replica_groups(text, partitions)
            # Groups that leave devices out are of replicas of the program; but a broadcast may do so.
            fit = np.unique(groups).size == groups.size and groups.max() < partitions
            fit = fit and (groups.size == partitions or run.kind == 'collective-broadcast')
        if not fit:
            raise PlanError(f'the groups of a collective do not fit {partitions} devices: {text}')
        return np.concatenate([slice_[groups] for slice_ in self._programs(partitions)])

    def _programs(self, partitions: int) -> list[Groups]:
        """The positions of the devices of each program: all of them, or those of one slice each."""
        size = math.prod(self._mesh.values())
        if partitions == size:
            return [np.arange(size)]
        numbers = np.array([position.slice for position in self._positions])
        slices = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        if not slices or {len(members) for members in slices} != {partitions}:
            raise PlanError(f'a program of {partitions} devices is not that of a slice of the mesh')
        return slices
