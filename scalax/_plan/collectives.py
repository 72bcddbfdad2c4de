"""The collectives of a program, counted over a whole step.

They are read from the program as the SPMD partitioner leaves it. Later passes rewrite collectives (an
all-gather becomes an all-reduce, or a loop of permutes), and split or join them; the bytes that have to move,
and the mesh axes that they move along, are clearest here.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from scalax._plan.formulas import Counted
from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.hlo_loops import visits
from scalax._plan.provenance import Source, source_of
from scalax._plan.replica_groups import (
    Groups,
    axes_of_groups,
    devices_along,
    replica_groups,
    source_target_pairs,
    written_groups,
)
from scalax._plan.scattered import is_reduce_scatter
from scalax._plan.torus import Network, Place, networks_of
from scalax.errors import PlanError

Kind = Literal[
    'all-gather',
    'all-reduce',
    'reduce-scatter',
    'all-to-all',
    'collective-permute',
    'collective-broadcast',
    'ragged-all-to-all',
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The result is one device's part of the array: the whole is larger by the size of the group.
_PARTIAL_RESULTS = {'reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all'}
# Attributes of instructions that send something to other devices.
_BETWEEN_DEVICES = ('replica_groups=', 'source_target_pairs=')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: ``'all-gather'``, ``'all-reduce'``, ``'reduce-scatter'``, ``'all-to-all'``,
            ``'collective-permute'``, ``'collective-broadcast'`` or ``'ragged-all-to-all'``.
        axes: the mesh axes along which it runs.
        group: the number of devices in each group; fewer than there are along `axes` if a group is a part of
            them.
        count: how often it runs in a step.
        counted: how well that is known.
        bytes: the bytes of the whole (gathered) array of one group, in one execution.
        source: the place in the user's program that caused it.
        part: one of the groups, as positions in ``mesh.devices.flat``, if groups are a part of their axes.
            Empty for groups of all devices along the axes.
        scattered: whether it is an all-reduce of which each device keeps only its own part: the partitioner
            writes a reduce-scatter so, and compilers for accelerators turn it into one.
        networks: the networks that carry it: ``'ici'`` between the chips of a slice, ``'dcn'`` between
            slices, ``'chip'`` between the devices of a chip; several if groups need several. Empty for
            devices that are not in a torus, such as CPUs.
    """

    kind: Kind
    axes: tuple[str, ...]
    group: int
    count: int
    counted: Counted
    bytes: int
    source: Source
    part: tuple[int, ...] = ()
    scattered: bool = False
    networks: tuple[Network, ...] = ()


def collectives(
    module: Module, mesh: Mapping[str, int], places: Sequence[Place] = ()
) -> tuple[Collective, ...]:
    """The collectives of a program, the largest first; equal ones in one row.

    Args:
        module: the program after SPMD partitioning.
        mesh: mesh axis name -> size, in the order of the mesh.
        places: the positions of the devices of the mesh, in the order of the mesh.

    Raises:
        PlanError: a collective is written in an unknown form.
    """
    counts: collections.Counter[Collective] = collections.Counter()
    for visit in visits(module):
        for instruction in distinct(visit.computation, module.partitions):
            kind = _kind(instruction)
            if kind is None:
                continue
            found = _groups_on_mesh(instruction, kind, module.partitions, mesh, places)
            if found.group > 1:
                whole = instruction.bytes * (found.group if kind in _PARTIAL_RESULTS else 1)
                row = Collective(
                    kind=kind,
                    axes=found.axes,
                    group=found.group,
                    count=0,
                    counted=visit.counted,
                    bytes=whole,
                    source=source_of(module, visit.computation, instruction),
                    part=found.part,
                    scattered=kind == 'all-reduce'
                    and is_reduce_scatter(visit.computation, instruction, found.groups),
                    networks=found.networks,
                )
                counts[row] += visit.count
    rows = (dataclasses.replace(row, count=count) for row, count in counts.items())
    return tuple(sorted(rows, key=lambda row: (-row.bytes * row.count, row.kind, row.axes, row.source)))


def distinct(computation: Computation, devices: int) -> Iterator[Instruction]:
    """The instructions of a computation, without repeated all-gathers.

    The partitioner for TPUs writes one for each use of a value, sometimes with groups in another notation;
    a later pass, common-subexpression elimination, leaves only the first.

    Args:
        computation: the computation.
        devices: the number of devices that the program runs on.
    """
    seen = set()
    for instruction in computation.instructions.values():
        if instruction.opcode == 'all-gather':
            text, dims = written_groups(instruction.attributes), instruction.attribute('dimensions')
            groups = None if text is None else replica_groups(text, devices).tobytes()
            same = instruction.arrays, instruction.operands, groups, dims
            if same in seen:
                continue
            seen.add(same)
        yield instruction


def _kind(instruction: Instruction) -> Kind | None:
    opcode, attributes = instruction.opcode, instruction.attributes
    for kind in KINDS:
        if opcode == kind:
            return kind
        if opcode == f'{kind}-start':
            raise PlanError(
                f'the program holds {opcode!r}: it is not the one that the partitioner left, but a '
                'later one, in which collectives are rewritten'
            )
    between_devices = opcode == 'send' and 'is_host_transfer=true' not in attributes
    if between_devices or any(name in attributes for name in _BETWEEN_DEVICES):
        raise PlanError(
            f'the program holds {opcode!r}: devices send something to one another in an unknown way'
        )
    return None


class _GroupsOnMesh(NamedTuple):
    """The groups of a collective, and `Collective.axes`, `group`, `part` and `networks`."""

    groups: Groups
    axes: tuple[str, ...]
    group: int
    part: tuple[int, ...]
    networks: tuple[Network, ...]


def _groups_on_mesh(
    instruction: Instruction, kind: Kind, devices: int, mesh: Mapping[str, int], places: Sequence[Place]
) -> _GroupsOnMesh:
    if kind == 'collective-permute':
        text = instruction.attribute('source_target_pairs') or ''
        groups = source_target_pairs(text)
        groups = groups[groups[:, 0] != groups[:, 1]]  # pairs of a device with itself send nothing
        fit = not groups.size or groups.max() < devices
    else:
        text = written_groups(instruction.attributes) or ''
        if not text:
            raise PlanError(f'a collective without groups: {instruction.name} {instruction.attributes[:200]}')
        groups = replica_groups(text, devices)
        # Groups that leave devices out are of replicas of the program; but a broadcast may leave some out.
        fit = np.unique(groups).size == groups.size and groups.max() < devices
        fit = fit and (groups.size == devices or kind == 'collective-broadcast')
    if not fit:
        raise PlanError(f'the groups of a collective do not fit {devices} devices: {text}')
    axes = axes_of_groups(groups, mesh)
    along = devices_along(axes, mesh)
    if kind == 'collective-permute':
        return _GroupsOnMesh(groups, axes, along, (), networks_of(groups, places))
    whole = groups.shape[1] == along
    part = () if whole else tuple(map(int, groups[0]))
    return _GroupsOnMesh(groups, axes, int(groups.shape[1]), part, networks_of(groups, places))
