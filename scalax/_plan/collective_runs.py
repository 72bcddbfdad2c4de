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
from typing import Literal, get_args

from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.hlo_loops import Visit, visits
from scalax._plan.replica_groups import replica_groups, written_groups
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
_STARTS: dict[str, Kind] = {f'{kind}-start': kind for kind in KINDS}
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
class Run:
    """One collective at one place of a program.

    Attributes:
        kind: its kind.
        instruction: the instruction.
        visit: the computation that holds it, and how often that runs.
    """

    kind: Kind
    instruction: Instruction
    visit: Visit

    @property
    def computation(self) -> Computation:
        """The computation that holds it."""
        return self.visit.computation

    @property
    def holder(self) -> tuple[Computation, Instruction]:
        """The fusion or asynchronous call that holds it, and the computation of that; else itself."""
        caller, outside = self.visit.caller, self.visit.outside
        if caller is None or outside is None or caller.opcode not in ('fusion', 'async-start'):
            return self.computation, self.instruction
        return outside, caller

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
        if opcode in _STARTS:  # whose result holds more than the result
            operands = self.computation.operands_of(self.instruction)
            return sum(array.bytes for array in operands) * (group if self.kind in _PARTIAL_OPERANDS else 1)
        if opcode == 'recv':  # which receives an array, its state and a token
            return self.instruction.arrays[0].bytes * (group if self.kind in _PARTIAL_RESULTS else 1)
        return self.instruction.bytes * (group if opcode in _PARTIAL_RESULTS else 1)


def channel_of(instruction: Instruction) -> str:
    """The channel of an instruction; empty if it has none."""
    found = _CHANNEL.search(instruction.attributes)
    return found[1] if found else ''


def runs(module: Module) -> Iterator[Run]:
    """The collectives of a program, as often as they stand at different places of the call tree.

    Of branches, those of the one that sends most.

    Raises:
        PlanError: devices send something to one another in an unknown way.
    """
    begun = _begun(module)

    def sent(visit: Visit, instruction: Instruction) -> int:
        run = _run(visit, instruction, module, begun)
        return run.whole_bytes(1) if run else 0

    for visit in visits(module, sent):
        computation = visit.computation
        instructions = computation.instructions.values()
        for instruction in instructions if module.scheduled else _distinct(computation, module.partitions):
            run = _run(visit, instruction, module, begun)
            if run is not None:
                yield run


def _run(visit: Visit, instruction: Instruction, module: Module, begun: Container[str]) -> Run | None:
    """The collective that an instruction is, or begins."""
    kind = _kind(instruction)
    if kind is None:
        return None
    run = Run(_fused_kind(kind, instruction, visit), instruction, visit)
    return None if _continues(run, module, begun) else run


def _distinct(computation: Computation, devices: int) -> Iterator[Instruction]:
    """The instructions of a computation, without repeated all-gathers.

    The partitioner writes one for each use of a value, sometimes with groups in another notation; a later
    pass, common-subexpression elimination, leaves only the first.

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
    if opcode in _STARTS:
        return _STARTS[opcode]
    if opcode in _ENDS:
        return None
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


def _fused_kind(kind: Kind, instruction: Instruction, visit: Visit) -> Kind:
    """A fusion of an all-reduce with the slice of it that a device keeps is a reduce-scatter."""
    users = visit.computation.users.get(instruction.name, [])
    fused = visit.caller is not None and visit.caller.opcode == 'fusion'
    if fused and kind == 'all-reduce' and users and all(user.opcode == 'dynamic-slice' for user in users):
        return 'reduce-scatter'
    return kind


def _continues(run: Run, module: Module, begun: Container[str]) -> bool:
    """Whether a fusion goes on with a collective that another fusion has begun, whose results it gets.

    A collective may go on beside a loop; then its results so far are part of what the loop carries.
    """
    outside, holder = run.holder
    if holder is run.instruction or not run.channel or _begins(run.computation):
        return False
    todo = outside.makers_of(holder)
    while todo:
        maker = todo.pop()
        if maker.opcode in _FORWARDS:
            todo += outside.makers_of(maker)
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
