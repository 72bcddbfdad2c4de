"""Where a program runs collectives, and how often.

The partitioner's program has one instruction for each. In later programs it may be split: into
``all-gather-start`` and ``all-gather-done``, into a call that runs beside others, or, for TPUs, into fusions
that each hold a clone of it and a product beside it. Whatever it is split into counts once.

The TPU program of several slices is that of one slice. Between slices it sends through the host, with
attributes that say which collective this is part of (``_xla_megascale_...``).
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
"""The kind of each operation that is a collective, or begins one."""
_BETWEEN_SLICES: dict[str, Kind] = {
    'ALL_GATHER': 'all-gather',
    'ALL_REDUCE': 'all-reduce',
    'REDUCE_SCATTER': 'reduce-scatter',
    'ALL_TO_ALL': 'all-to-all',
    'ONE_TO_ONE': 'collective-permute',
}
_MEGASCALE = '_xla_megascale_transfer_type="'
_ENDS = tuple(f'{kind}-{end}' for kind in (*KINDS, 'async') for end in ('update', 'done'))
# The result is one device's part of the array: the whole is larger by the size of the group.
_PARTIAL_RESULTS = ('reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
# The operand is one device's part of it.
_PARTIAL_OPERANDS = ('all-gather', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
# Attributes of instructions that send something to other devices.
_BETWEEN_DEVICES = ('replica_groups=', 'source_target_pairs=')
_CHANNEL = re.compile(r'(?:^|[ ,])channel_id=(\d+)')
_BEGINS = 'custom_call_target="AsyncCollectiveStart"'
# What may stand between the parts of one collective.
_FORWARDS = ('bitcast', 'copy', 'get-tuple-element', 'tuple', 'while')


@dataclasses.dataclass(frozen=True)
class CollectiveInstance:
    """One collective at one place of a program.

    Attributes:
        kind: its kind.
        instruction: the instruction.
        visit: the computation that holds it, and how often that runs.
    """

    kind: Kind
    instruction: Instruction
    visit: ComputationInstance

    @property
    def computation(self) -> Computation:
        """The computation that holds it."""
        return self.visit.computation

    @property
    def place(self) -> tuple[Computation, Instruction]:
        """The instruction, after the computation that holds it."""
        return self.computation, self.instruction

    @property
    def holder(self) -> tuple[Computation, Instruction]:
        """The fusion or asynchronous call that holds it, and the computation of that; else itself."""
        caller, parent = self.visit.caller, self.visit.parent
        if caller is None or parent is None or caller.opcode not in ('fusion', 'async-start'):
            return self.place
        return parent.computation, caller

    @property
    def op_name(self) -> str:
        """Its place in the traced program; that of its fusion, if it has none."""
        return self.visit.op_name(self.instruction) or self.visit.op_name(self.holder[1])

    @property
    def channel(self) -> str:
        """The number that the compiler gave it. Several collectives may have the same one."""
        return channel_of(self.instruction)

    def whole_bytes(self, group: int) -> int:
        """The bytes of the whole array of a group of so many devices."""
        opcode = self.instruction.opcode
        if opcode in COLLECTIVE_OPS and opcode.endswith('-start'):  # whose result holds more than the result
            operands = self.computation.operands_of(self.instruction)
            return sum(array.bytes for array in operands) * (group if self.kind in _PARTIAL_OPERANDS else 1)
        if opcode == 'recv':  # which receives an array, its state and a token
            return self.instruction.arrays[0].bytes * (group if self.kind in _PARTIAL_RESULTS else 1)
        return self.instruction.bytes * (group if opcode in _PARTIAL_RESULTS else 1)


class MeshCollective(NamedTuple):
    """A collective, and the devices of the mesh that take part.

    Attributes:
        run: the collective.
        axes: as `Collective.axes`, and so are the others.
        staying: of a permute, how many devices of one slice send inside of it, at most.
    """

    run: CollectiveInstance
    axes: tuple[str, ...]
    group: int
    part: tuple[int, ...]
    networks: tuple[Network, ...]
    crossing: int
    staying: int


def channel_of(instruction: Instruction) -> str:
    """The channel of an instruction; empty if it has none."""
    found = _CHANNEL.search(instruction.attributes)
    return found[1] if found else ''


def collective_instances(module: Module, every_branch: bool = False) -> Iterator[CollectiveInstance]:
    """The collectives of a program, as often as they stand at different places of the call tree.

    Of branches, those of the one that sends most; or of all.

    Raises:
        PlanError: devices send something to one another in an unknown way.
    """
    begun = _begun(module)

    def run_of(visit: ComputationInstance, instruction: Instruction) -> CollectiveInstance | None:
        """The collective that an instruction is, or begins."""
        kind = _kind(instruction)
        if kind is None:
            return None
        run = CollectiveInstance(_fused_kind(kind, instruction, visit), instruction, visit)
        return None if _continues(run, module, begun) else run

    def sent(visit: ComputationInstance, instruction: Instruction) -> int:
        run = run_of(visit, instruction)
        return run.whole_bytes(1) if run else 0

    for visit in computation_instances(module, None if every_branch else sent):
        gathers = set()
        for instruction in visit.computation.instructions.values():
            run = run_of(visit, instruction)
            if run is None:
                continue
            if instruction.opcode == 'all-gather' and not module.scheduled:
                # The partitioner writes one for each use of a value. A later pass leaves only the first.
                gather = _gathered(instruction, module.partitions)
                if gather in gathers:
                    continue
                gathers.add(gather)
            yield run


def _gathered(instruction: Instruction, devices: int) -> tuple[object, ...]:
    """What an all-gather gathers; its groups may be written in several notations."""
    text = replica_groups_text(instruction.attributes)
    groups = None if text is None else replica_groups(text, devices).tobytes()
    return instruction.arrays, instruction.operands, groups, instruction.attribute('dimensions')


def _kind(instruction: Instruction) -> Kind | None:
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode in COLLECTIVE_OPS or opcode in _ENDS:
        return COLLECTIVE_OPS.get(opcode)
    if opcode == 'recv' and _MEGASCALE in attributes:
        transfer = attributes.partition(_MEGASCALE)[2].partition('"')[0]
        if transfer in _BETWEEN_SLICES:
            return _BETWEEN_SLICES[transfer]
        raise PlanError(f'the program sends something between slices in an unknown way: {transfer!r}')
    between_devices = opcode == 'send' and 'is_host_transfer=true' not in attributes
    if between_devices or any(name in attributes for name in _BETWEEN_DEVICES):
        raise PlanError(
            f'the program holds {opcode!r}: devices send something to one another in an unknown way'
        )
    return None


def _fused_kind(kind: Kind, instruction: Instruction, visit: ComputationInstance) -> Kind:
    """A fusion of an all-reduce with the slice of it that a device keeps is a reduce-scatter."""
    users = visit.computation.users.get(instruction.name, [])
    fused = visit.caller is not None and visit.caller.opcode == 'fusion'
    if fused and kind == 'all-reduce' and users and all(user.opcode == 'dynamic-slice' for user in users):
        return 'reduce-scatter'
    return kind


def _continues(run: CollectiveInstance, module: Module, begun: Container[str]) -> bool:
    """Whether a fusion goes on with a collective that another fusion has begun, whose results it gets.

    A collective may go on beside a loop; then its results so far are part of what the loop carries.
    """
    outside, holder = run.holder
    if holder is run.instruction or not run.channel or _begins(run.computation):
        return False
    todo, seen = outside.producers_of(holder), set()  # what many tuples forward is reached in many ways
    while todo:
        maker = todo.pop()
        if maker.name in seen:
            continue
        seen.add(maker.name)
        if maker.opcode in _FORWARDS:
            todo += outside.producers_of(maker)
        elif maker.opcode == 'fusion':
            [inside] = module.called(maker, 'calls')
            if run.channel in map(channel_of, inside.instructions.values()):
                return True
        elif maker.opcode == 'parameter' and outside.name != module.entry and run.channel in begun:
            return True
    return False


def _begun(module: Module) -> frozenset[str]:
    """The channels of collectives that are begun in one fusion, and go on in others."""
    first = filter(_begins, module.computations.values())
    return frozenset(channel_of(each) for inside in first for each in inside.instructions.values())


def _begins(computation: Computation) -> bool:
    return any(
        each.opcode == 'custom-call' and _BEGINS in each.attributes
        for each in computation.instructions.values()
    )
