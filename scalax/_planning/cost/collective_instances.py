"""The collectives of a program, with the number of executions at each call site.

The partitioner's program has one instruction for each collective. Later passes may split it: into
``all-gather-start`` and ``all-gather-done``, into an asynchronous call, or, on TPUs, into fusions that each
contain a clone of it and a concurrent matmul. The pieces of one collective count once.

The program for several TPU slices is that of one slice. Transfers between slices go through the host; their
attributes (``_xla_megascale_...``) contain the kind of the collective.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterator
from typing import Literal, NamedTuple, get_args

from scalax._planning.hardware.torus import Network
from scalax._planning.program.call_tree import ComputationInstance, computation_instances
from scalax._planning.program.hlo import Computation, Instruction, Module
from scalax._planning.program.replica_groups import replica_groups, replica_groups_text
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
COLLECTIVE_OPS: dict[str, Kind] = {f'{kind}{start}': kind for kind in KINDS for start in ('', '-start')}
"""Operation -> the kind of the collective that it is or starts."""
_BETWEEN_SLICES: dict[str, Kind] = {
    'ALL_GATHER': 'all-gather',
    'ALL_REDUCE': 'all-reduce',
    'REDUCE_SCATTER': 'reduce-scatter',
    'ALL_TO_ALL': 'all-to-all',
    'ONE_TO_ONE': 'collective-permute',
}
_MEGASCALE = '_xla_megascale_transfer_type="'
_END_OPS = tuple(f'{kind}-{end}' for kind in (*KINDS, 'async') for end in ('update', 'done'))
# The result is a local shard, so the full array is larger by the size of the group.
_SHARDED_RESULTS = ('reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
# The operand is a local shard.
_SHARDED_OPERANDS = ('all-gather', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
# Attributes of instructions that communicate between devices.
_COMMUNICATION_ATTRIBUTES = ('replica_groups=', 'source_target_pairs=')
_CHANNEL = re.compile(r'(?:^|[ ,])channel_id=(\d+)')
_ASYNC_START = 'custom_call_target="AsyncCollectiveStart"'
# Operations that may connect the pieces of one collective.
_FORWARDING_OPS = ('bitcast', 'copy', 'get-tuple-element', 'tuple', 'while')


@dataclasses.dataclass(frozen=True)
class CollectiveInstance:
    """One collective at one node of the call tree.

    Attributes:
        kind: its kind.
        instruction: its instruction.
        parent: the instance of the computation that contains the instruction.
    """

    kind: Kind
    instruction: Instruction
    parent: ComputationInstance

    @property
    def computation(self) -> Computation:
        """The computation that contains it."""
        return self.parent.computation

    @property
    def location(self) -> tuple[Computation, Instruction]:
        """The instruction, after the computation that contains it."""
        return self.computation, self.instruction

    @property
    def holder(self) -> tuple[Computation, Instruction]:
        """The location of the fusion or asynchronous call that contains it; by default its own location."""
        caller, outer = self.parent.caller, self.parent.parent
        if caller is None or outer is None or caller.opcode not in ('fusion', 'async-start'):
            return self.location
        return outer.computation, caller

    @property
    def op_name(self) -> str:
        """Its op name; that of its fusion if it has none."""
        return self.parent.op_name(self.instruction) or self.parent.op_name(self.holder[1])

    @property
    def channel(self) -> str:
        """Its channel id, which several collectives may share."""
        return channel_of(self.instruction)

    def full_bytes(self, group: int) -> int:
        """Returns the bytes of the full array of a group of that many devices."""
        opcode = self.instruction.opcode
        if opcode in COLLECTIVE_OPS and opcode.endswith(
            '-start'
        ):  # its result is a tuple of more than the array
            operands = self.computation.operands_of(self.instruction)
            return sum(array.bytes for array in operands) * (group if self.kind in _SHARDED_OPERANDS else 1)
        if opcode == 'recv':  # its result is the array, a state and a token
            return self.instruction.arrays[0].bytes * (group if self.kind in _SHARDED_RESULTS else 1)
        return self.instruction.bytes * (group if opcode in _SHARDED_RESULTS else 1)


class MeshCollective(NamedTuple):
    """A collective, and the devices of the mesh that take part.

    Attributes:
        instance: the collective.
        axes: as `Collective.axes`.
        group: as `Collective.group`.
        replica_group: as `Collective.replica_group`.
        networks: as `Collective.networks`.
        crossing: as `Collective.crossing`.
        staying: for a permute, how many devices of one slice send to another device of that slice, at most.
    """

    instance: CollectiveInstance
    axes: tuple[str, ...]
    group: int
    replica_group: tuple[int, ...]
    networks: tuple[Network, ...]
    crossing: int
    staying: int


def channel_of(instruction: Instruction) -> str:
    """Returns the channel id of an instruction; empty if it has none."""
    match = _CHANNEL.search(instruction.attributes)
    return match[1] if match else ''


def collective_instances(module: Module, every_branch: bool = False) -> Iterator[CollectiveInstance]:
    """Yields the collectives of a program, once for each node of the call tree.

    Args:
        module: the program.
        every_branch: whether to yield the collectives of all branches of a conditional, instead of those of
            the branch that sends most.

    Raises:
        PlanError: devices communicate in an unknown way.
    """
    started = _started_channels(module)

    def instance_of(parent: ComputationInstance, instruction: Instruction) -> CollectiveInstance | None:
        """Returns the collective that an instruction is or starts."""
        kind = _kind(instruction)
        if kind is None:
            return None
        instance = CollectiveInstance(_fused_kind(kind, instruction, parent), instruction, parent)
        return None if _continues(instance, module, started) else instance

    def sent_bytes(parent: ComputationInstance, instruction: Instruction) -> int:
        instance = instance_of(parent, instruction)
        return instance.full_bytes(1) if instance else 0

    for parent in computation_instances(module, None if every_branch else sent_bytes):
        gathers = set()
        for instruction in parent.computation.instructions.values():
            instance = instance_of(parent, instruction)
            if instance is None:
                continue
            if instruction.opcode == 'all-gather' and not module.scheduled:
                # The partitioner writes an all-gather for each use of a value. A later pass keeps the first.
                gather = _gather_key(instruction, module.partitions)
                if gather in gathers:
                    continue
                gathers.add(gather)
            yield instance


def _gather_key(instruction: Instruction, devices: int) -> tuple[object, ...]:
    """Returns a key that equal all-gathers share, in whatever notation their groups are written."""
    text = replica_groups_text(instruction.attributes)
    groups = None if text is None else replica_groups(text, devices).tobytes()
    return instruction.arrays, instruction.operands, groups, instruction.attribute('dimensions')


def _kind(instruction: Instruction) -> Kind | None:
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode in COLLECTIVE_OPS or opcode in _END_OPS:
        return COLLECTIVE_OPS.get(opcode)
    if opcode == 'recv' and _MEGASCALE in attributes:
        transfer = attributes.partition(_MEGASCALE)[2].partition('"')[0]
        if transfer in _BETWEEN_SLICES:
            return _BETWEEN_SLICES[transfer]
        raise PlanError(f'the program sends something between slices in an unknown way: {transfer!r}')
    is_device_send = opcode == 'send' and 'is_host_transfer=true' not in attributes
    if is_device_send or any(name in attributes for name in _COMMUNICATION_ATTRIBUTES):
        raise PlanError(
            f'the program holds {opcode!r}: devices send something to one another in an unknown way'
        )
    return None


def _fused_kind(kind: Kind, instruction: Instruction, parent: ComputationInstance) -> Kind:
    """Returns 'reduce-scatter' for an all-reduce that is fused with a slice of its result."""
    users = parent.computation.users.get(instruction.name, [])
    is_fused = parent.caller is not None and parent.caller.opcode == 'fusion'
    if is_fused and kind == 'all-reduce' and users and all(user.opcode == 'dynamic-slice' for user in users):
        return 'reduce-scatter'
    return kind


def _continues(instance: CollectiveInstance, module: Module, started: Container[str]) -> bool:
    """Whether a fusion continues a collective that another fusion started, whose results it receives.

    A collective may continue beside a loop. Then its partial results are in the carry of the loop.
    """
    outer, holder = instance.holder
    if holder is instance.instruction or not instance.channel or _starts_collective(instance.computation):
        return False
    todo, seen = outer.producers_of(holder), set()  # nested tuples lead to the same producers
    while todo:
        producer = todo.pop()
        if producer.name in seen:
            continue
        seen.add(producer.name)
        if producer.opcode in _FORWARDING_OPS:
            todo += outer.producers_of(producer)
        elif producer.opcode == 'fusion':
            [fused] = module.called(producer, 'calls')
            if instance.channel in map(channel_of, fused.instructions.values()):
                return True
        elif producer.opcode == 'parameter' and outer.name != module.entry and instance.channel in started:
            return True
    return False


def _started_channels(module: Module) -> frozenset[str]:
    """Returns the channels of collectives that start in one fusion, and continue in others."""
    starts = filter(_starts_collective, module.computations.values())
    return frozenset(channel_of(item) for start in starts for item in start.instructions.values())


def _starts_collective(computation: Computation) -> bool:
    return any(
        item.opcode == 'custom-call' and _ASYNC_START in item.attributes
        for item in computation.instructions.values()
    )
