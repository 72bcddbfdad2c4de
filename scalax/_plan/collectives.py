"""What do the devices of a program send one another? Its collectives, counted over a whole step.

Read from the program as the SPMD partitioner leaves it. Later passes of a compiler rewrite collectives (an
all-gather becomes an all-reduce, or a loop of permutes), and split or join them; how many bytes have to
move, and along which mesh axes, is clearest here.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from scalax._plan.device_coords import Network, Place, networks_of
from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.hlo_loops import Counted, visits
from scalax._plan.mesh_axes import axes_of_groups, devices_along
from scalax._plan.provenance import Source, source_of
from scalax._plan.replica_groups import Groups, replica_groups, source_target_pairs, written_groups
from scalax._plan.scattered import keeps_a_part
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
# Results that are one device's part of the array: the whole is as many times as large as the group.
_PARTS = {'reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all'}
# Attributes of what sends something to other devices.
_TO_OTHERS = ('replica_groups=', 'source_target_pairs=')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: ``'all-gather'``, ``'all-reduce'``, ``'reduce-scatter'``, ``'all-to-all'``,
            ``'collective-permute'``, ``'collective-broadcast'`` or ``'ragged-all-to-all'``.
        axes: the mesh axes along which it runs.
        group: how many devices take part in each group; fewer than there are along `axes` where a group
            is a part of them.
        count: how often it is executed in a step.
        counted: how well that is known.
        bytes: the bytes of the whole (gathered) array of one group, in one execution.
        source: what in the user's program caused it.
        part: of a group that is a part of its axes, one such group: positions in ``mesh.devices.flat``. Empty
            for groups of all devices along the axes.
        scattered: whether it is an all-reduce of which each device keeps but its own part: the partitioner's
            way to say reduce-scatter, which compilers for accelerators make of it.
        networks: what carries it: ``'ici'`` between the chips of a slice, ``'dcn'`` between slices,
            ``'chip'`` between the devices of a chip; several where groups need several. Empty where devices
            do not lie in slices, as CPUs.
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
        places: where the devices of the mesh lie, in the order of the mesh.

    Raises:
        PlanError: some collective is written in a way that is not known.
    """
    counts: collections.Counter[Collective] = collections.Counter()
    for visit in visits(module):
        for instruction in distinct(visit.computation, module.partitions):
            kind = _kind(instruction)
            if kind is None:
                continue
            reach = _reach(instruction, kind, module.partitions, mesh, places)
            if reach.group > 1:
                whole = instruction.bytes * (reach.group if kind in _PARTS else 1)
                row = Collective(
                    kind=kind,
                    axes=reach.axes,
                    group=reach.group,
                    count=0,
                    counted=visit.counted,
                    bytes=whole,
                    source=source_of(module, visit.computation, instruction),
                    part=reach.part,
                    scattered=kind == 'all-reduce'
                    and keeps_a_part(visit.computation, instruction, reach.groups),
                    networks=reach.networks,
                )
                counts[row] += visit.count
    rows = (dataclasses.replace(row, count=count) for row, count in counts.items())
    return tuple(sorted(rows, key=lambda row: (-row.bytes * row.count, row.kind, row.axes, row.source)))


def distinct(computation: Computation, devices: int) -> Iterator[Instruction]:
    """The instructions of a computation, without all-gathers that repeat another one.

    The partitioner of TPUs writes one for each use of a value, its groups not always in the same notation;
    common-subexpression elimination, a later pass, leaves the first.

    Args:
        computation: the computation.
        devices: on how many devices the program runs.
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
                f'the program holds {opcode!r}: it is not that which the partitioner left, but a '
                'later one, in which collectives are rewritten'
            )
    between_devices = opcode == 'send' and 'is_host_transfer=true' not in attributes
    if between_devices or any(name in attributes for name in _TO_OTHERS):
        raise PlanError(
            f'the program holds {opcode!r}: devices send one another something in a way that is not known'
        )
    return None


class _Reach(NamedTuple):
    """Groups, along which mesh axes they lie, how many devices each has, one that is a part of its axes."""

    groups: Groups
    axes: tuple[str, ...]
    group: int
    part: tuple[int, ...]
    networks: tuple[Network, ...]


def _reach(
    instruction: Instruction, kind: Kind, devices: int, mesh: Mapping[str, int], places: Sequence[Place]
) -> _Reach:
    if kind == 'collective-permute':
        text = instruction.attribute('source_target_pairs') or ''
        groups = source_target_pairs(text)
        groups = groups[groups[:, 0] != groups[:, 1]]  # nothing is sent to oneself
        fit = not groups.size or groups.max() < devices
    else:
        text = written_groups(instruction.attributes) or ''
        if not text:
            raise PlanError(f'a collective without groups: {instruction.name} {instruction.attributes[:200]}')
        groups = replica_groups(text, devices)
        # Groups of fewer are of replicas of the program, not of devices. A broadcast may leave some out.
        fit = np.unique(groups).size == groups.size and groups.max() < devices
        fit = fit and (groups.size == devices or kind == 'collective-broadcast')
    if not fit:
        raise PlanError(f'the groups of a collective do not fit {devices} devices: {text}')
    axes = axes_of_groups(groups, mesh)
    along = devices_along(axes, mesh)
    if kind == 'collective-permute':
        return _Reach(groups, axes, along, (), networks_of(groups, places))
    whole = groups.shape[1] == along
    part = () if whole else tuple(map(int, groups[0]))
    return _Reach(groups, axes, int(groups.shape[1]), part, networks_of(groups, places))
