"""The collectives of a step, each with its executions, its bytes and the reason why it is there.

Compilers for accelerators rewrite the collectives that the SPMD partitioner wrote: they sum partial results
before they reduce them, turn an all-gather into an all-reduce, and combine small collectives. So kinds,
counts and bytes are those of the program after all optimizations, which is the one that runs. Much of the
information that explains a collective is lost there. It comes from the partitioner's program of the same
compilation.

A program for CPUs represents other hardware, which does not share XLA:CPU's optimizations. Its counts come
from the partitioner's program.
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
        group: the number of devices in each group; fewer than along `axes` if a group contains only some of
            those devices.
        count: the number of executions in a step.
        exactness: the exactness of the count.
        bytes: the bytes of the full (gathered) array of one group, in one execution.
        source: the location in the user's program that caused it.
        replica_group: one of the groups, as indices into ``mesh.devices.flat``, if a group contains only some
            of the devices along `axes`. Otherwise empty.
        scattered: whether it is an all-reduce of which each device uses only its shard. The partitioner
            writes a reduce-scatter like that, and compilers for accelerators turn it into one. Only on CPUs,
            for which the partitioner's program is counted.
        networks: the networks that carry it: ``'ici'`` between the chips of a slice, ``'dcn'`` between
            slices, ``'chip'`` between the devices of a chip; several if groups use several. Empty for devices
            that are not in a torus, such as CPUs.
        cause: why it is there. ``'program'``: the user's program contains it, such as `jax.lax.psum`.
            ``'sharding'``: the shardings of an operation's operands and result require it.
            ``'resharding'``: XLA found no direct conversion between two shardings of a value, so it gathers
            the value on every device and slices it again (it warns of an involuntary full
            rematerialization). ``'halo'``: devices exchange the edges of their shards. ``'ring'``: an
            all-gather or a reduce-scatter that runs in pieces, concurrently with a matmul, as permutes in a
            loop. ``'padding'``: the compiler padded the shards of a collective, and moves the elements that
            are then on the wrong device. ``'compiler'``: another optimization added it, and the
            partitioner's program has no similar one.
        reason: why scalax wrote it, as `CollectiveRow.reason`: ``'weight params/up for dot_general'``,
            ``'gradient of params/up'``, ``'examples gathered for sort'``; empty if XLA or the user wrote it.
        partitioned_as: its kind in the partitioner's program, if the compiler changed it.
        phase: the phase of a training step: ``'forward'``, ``'backward'``, ``'recomputed'`` (by
            `jax.checkpoint`), ``'update'`` (computations with gradients), or ``'other'``.
        scopes: the modules or named scopes that it runs in, with the executions in each.
        crossing: for a permute between slices, how many devices of one slice send to another one, at most.
    """

    kind: Kind
    axes: tuple[str, ...]
    group: int
    count: int
    exactness: Exactness
    bytes: int
    source: Source
    replica_group: tuple[int, ...] = ()
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
    """Returns the collectives of a program, the largest first; equal ones are one row.

    Args:
        module: the program to count.
        mesh: mesh axis name -> size, in the order of the mesh.
        positions: the positions of the devices of the mesh, in the order of the mesh.
        partitioned: the program after SPMD partitioning in the same compilation; None if that is *module*.
        device_ids: the ids of the devices of the mesh.
        switched: whether slices without a torus are nodes, as for `networks_of`.
        reasons: index of a collective that scalax wrote -> the reason.

    Raises:
        PlanError: a collective is written in an unknown form.
    """
    devices = _MeshDevices(mesh, positions, device_ids, switched)
    source_module = module if partitioned is None else partitioned
    phases, scopes, source_scopes = PhaseFinder(module), Scopes(module), Scopes(source_module)
    counts: dict[Collective, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    staying: dict[Collective, int] = {}
    mesh_collectives = [item for item in devices.collectives(module) if item.group >= 2]
    instances = [item.instance for item in mesh_collectives]
    indices = {index for instance in instances if (index := collective_index(instance)) is not None}
    op_names = {instance.op_name for instance in instances}
    origins = (
        None if partitioned is None else PartitionerCollectives(devices.collectives(partitioned), op_names)
    )
    for mesh_collective in mesh_collectives:
        instance = mesh_collective.instance
        origin = instance if origins is None else origins.origin(mesh_collective, module)
        name, phase = _name_and_phase(instance, origin, phases)
        source, scope = Source(), scopes.of(name, frame_id(module, *instance.holder))
        if origin is not None:
            source = source_of(source_module, *origin.location)
            scope = scope or source_scopes.of(origin.op_name, frame_id(source_module, *origin.location))
        if not (source.file or source.operand):
            # The stack frames of a called computation lack those of its caller. The later program has both.
            location = source_of(module, *instance.holder)
            source = location._replace(annotation=source.annotation or location.annotation)
        row = dataclasses.replace(
            _row(mesh_collective),
            source=source,
            scattered=origins is None and is_scattered(instance, mesh_collective.group),
            cause=cause_of(instance, origin),
            partitioned_as='' if origin is None or origin.kind == instance.kind else origin.kind,
            phase=phase,
            reason=reason_of(instance, origin, reasons, indices),
        )
        counts[row][scope] += instance.parent.count
        staying[row] = max(mesh_collective.staying, staying.get(row, 0))
    slice_size = len(positions) // len({position.slice for position in positions} or [0])
    if not switched:
        counts = _joined_permutes(counts, staying, slice_size)
    rows = (
        dataclasses.replace(row, count=times.total(), scopes=tuple(starmap(ScopeRuns, times.items())))
        for row, times in counts.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.bytes * row.count, row.kind, row.axes, row.source)))


def _name_and_phase(
    instance: CollectiveInstance, origin: CollectiveInstance | None, phases: PhaseFinder
) -> tuple[str, Phase]:
    """Returns the op name and the phase of a collective, or of the operation that it moves a value for."""
    mover = instance if origin is None else origin
    name = first_user_op_name(*mover.location, mover.parent.op_name)
    phase = phase_of(name)
    if phase == 'other':
        phase = collective_phase(instance if instance.op_name or origin is None else origin)
        name = instance.op_name if '/' in instance.op_name or not name else name
    if phase == 'other' and phases.of(instance.parent, instance.instruction) == 'update':
        phase = 'update'
    return name, phase


def collective_times(
    time: Callable[[Sequence[Collective]], Iterable[float]],
    module: Module,
    mesh: Mapping[str, int],
    positions: Sequence[DevicePosition],
    device_ids: Sequence[int],
) -> dict[tuple[str, str], tuple[Kind, float]]:
    """Returns the time of each collective of a program, in all of its branches, on devices with switches.

    Args:
        time: returns the seconds of one execution of each of some collectives.
        module: the program.
        mesh: as for `collectives`.
        positions: as for `collectives`.
        device_ids: as for `collectives`.

    Returns:
        The names of a computation and of the instruction that is or starts a collective -> its kind, and the
        seconds of one execution.
    """
    rows = {}
    for mesh_collective in _MeshDevices(mesh, positions, device_ids, True).collectives(module, True):
        computation, instruction = mesh_collective.instance.holder
        row = dataclasses.replace(_row(mesh_collective), count=1, exactness=Exactness.EXACT)
        rows[computation.name, instruction.name] = row
    distinct = [row for row in dict.fromkeys(rows.values()) if row.group > 1]  # a single device sends nothing
    seconds = dict(zip(distinct, time(distinct), strict=True))
    return {location: (row.kind, seconds.get(row, 0.0)) for location, row in rows.items()}


def _row(mesh_collective: MeshCollective) -> Collective:
    """Returns the row of a collective, before its executions are counted and its source is found."""
    return Collective(
        kind=mesh_collective.instance.kind,
        axes=mesh_collective.axes,
        group=mesh_collective.group,
        count=0,
        exactness=mesh_collective.instance.parent.exactness,
        bytes=mesh_collective.instance.full_bytes(mesh_collective.group),
        source=Source(),
        replica_group=mesh_collective.replica_group,
        networks=mesh_collective.networks,
        crossing=mesh_collective.crossing,
    )


def _joined_permutes(
    counts: Mapping[Collective, collections.Counter[str]], staying: Mapping[Collective, int], slice_size: int
) -> dict[Collective, collections.Counter[str]]:
    """Joins the pieces of a permute within slices and between them into one row.

    The compiler for TPUs writes two collectives, which run at the same time on two networks. In one permute
    each device sends once. So if more devices of a slice send than it has, these are two permutes.

    Args:
        counts: row -> the number of executions in each scope.
        staying: row -> how many devices of a slice send within the slice.
        slice_size: the number of devices of a slice.
    """
    within_slices: dict[Collective, Collective] = {}
    for row in counts:
        if row.kind == 'collective-permute' and row.networks and 'dcn' not in row.networks:
            within_slices[_without_networks(row)] = row
    joined = dict(counts)
    for row, times in counts.items():
        inner = within_slices.get(_without_networks(row)) if row.networks == ('dcn',) else None
        if inner is None or staying[inner] + row.crossing > slice_size:
            continue
        if counts[inner].total() == times.total():
            joined.pop(inner)
            joined.pop(row)
            joined[dataclasses.replace(row, networks=(*inner.networks, 'dcn'))] = times
    return joined


def _without_networks(row: Collective) -> Collective:
    return dataclasses.replace(row, networks=(), crossing=0)


class _MeshDevices:
    """The devices of a mesh, to which the replica groups of a program refer.

    Args:
        mesh: mesh axis name -> size.
        positions: the positions of the devices; none if they are unknown.
        ids: the ids of the devices; none if the program does not contain ids.
        switched: whether slices without a torus are nodes.
    """

    def __init__(
        self, mesh: Mapping[str, int], positions: Sequence[DevicePosition], ids: Sequence[int], switched: bool
    ) -> None:
        self._mesh, self._positions, self._ids, self._switched = mesh, positions, ids, switched
        # Hundreds of collectives of a program may have the same groups, of thousands of devices.
        self._cache: dict[tuple[object, ...], MeshCollective] = {}

    def collectives(self, module: Module, every_branch: bool = False) -> Iterator[MeshCollective]:
        """Yields the collectives of a program; of several branches those of the one that sends most, or all.

        Raises:
            PlanError: their groups do not fit the devices.
        """
        for instance in collective_instances(module, every_branch):
            instruction = instance.instruction
            attributes = map(instruction.attribute, ('source_target_pairs', '_xla_megascale_target'))
            groups_text = replica_groups_text(instruction.attributes)
            key = instance.kind, instruction.opcode, module.partitions, groups_text, *attributes
            if key not in self._cache:
                groups = self._groups(instance, module.partitions)
                self._cache[key] = self._mesh_collective(instance, groups)
            yield self._cache[key]._replace(instance=instance)

    def _mesh_collective(self, instance: CollectiveInstance, groups: Groups) -> MeshCollective:
        axes = axes_of_groups(groups, self._mesh)
        group = along = devices_along(axes, self._mesh)
        replica_group: tuple[int, ...] = ()
        staying = crossing = 0
        if instance.kind == 'collective-permute':
            staying, crossing = self._senders(groups)
        elif groups.shape[1] != along:
            group, replica_group = groups.shape[1], tuple(map(int, groups[0]))
        networks = networks_of(groups, self._positions, switched=self._switched)
        return MeshCollective(instance, axes, group, replica_group, networks, crossing, staying)

    def _senders(self, pairs: Groups) -> tuple[int, int]:
        """Returns how many devices of one slice send within it, and to another one, at most."""
        if not self._positions:
            return 0, 0
        slices = [[self._positions[device].slice for device in pair] for pair in pairs.tolist()]
        within = collections.Counter(source for source, target in slices if source == target)
        across = collections.Counter(source for source, target in slices if source != target)
        return max(within.values(), default=0), max(across.values(), default=0)

    def _groups(self, instance: CollectiveInstance, partitions: int) -> Groups:
        instruction = instance.instruction
        if instruction.opcode == 'recv':
            return groups_between_slices(instruction.attribute('_xla_megascale_target') or '', self._ids)
        if instance.kind == 'collective-permute':
            text = instruction.attribute('source_target_pairs') or ''
            groups = source_target_pairs(text)
            groups = groups[groups[:, 0] != groups[:, 1]]  # a device sends nothing to itself
            fits = not groups.size or groups.max() < partitions
        else:
            text = replica_groups_text(instruction.attributes) or ''
            if not text:
                raise PlanError(
                    f'a collective without groups: {instruction.name} {instruction.attributes[:200]}'
                )
            groups = replica_groups(text, partitions)
            # Groups of fewer devices are groups of replicas of the program, except in a broadcast.
            fits = np.unique(groups).size == groups.size and groups.max() < partitions
            fits = fits and (groups.size == partitions or instance.kind == 'collective-broadcast')
        if not fits:
            raise PlanError(f'the groups of a collective do not fit {partitions} devices: {text}')
        return np.concatenate([devices[groups] for devices in self._devices_of_programs(partitions)])

    def _devices_of_programs(self, partitions: int) -> list[Groups]:
        """Returns the indices of the devices of each program: of all devices, or of each slice."""
        size = math.prod(self._mesh.values())
        if partitions == size:
            return [np.arange(size)]
        slice_of_device = np.array([position.slice for position in self._positions])
        slices = [np.flatnonzero(slice_of_device == index) for index in np.unique(slice_of_device)]
        if not slices or {len(devices) for devices in slices} != {partitions}:
            raise PlanError(f'a program of {partitions} devices is not that of a slice of the mesh')
        return slices
