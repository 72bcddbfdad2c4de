"""Bytes that a program moves between the memory of a device and that of its host, read from what runs.

Offloaded arrays are in the layout of the program: copies have one side on the host, and slices of stacked
arrays are read and written there layer by layer.
"""

from __future__ import annotations

import dataclasses
import itertools

from scalax._planning.program.call_tree import ComputationInstance, measured_instructions
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.hlo import HOST, Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class HostTransfers:
    """The bytes that one device and its host exchange in one call.

    Attributes:
        to_host: those that the device writes to the memory of the host.
        from_host: those that it reads there.
        exactness: how well both are known: at least, if an operation moves something in an unknown way.
    """

    to_host: int = 0
    from_host: int = 0
    exactness: Exactness = Exactness.EXACT


def host_transfers(module: Module) -> HostTransfers:
    """What a program moves to and from the host.

    Args:
        module: the program after all optimizations, whose arrays have places.
    """
    sent = read = 0
    exactness = Exactness.EXACT
    for visit, instruction, moved in measured_instructions(module, host_bytes):
        if instruction.arrays[0].space == HOST:
            sent += moved
        else:
            read += moved
        exactness = exactness.combine(visit.exactness)
    if any(itertools.starmap(_is_unknown, module.instructions())):
        exactness = exactness.combine(Exactness.AT_LEAST)
    return HostTransfers(sent, read, exactness)


# Operations that move nothing themselves: they hold arrays of both sides, or what moves is inside of them.
_HOLDING = {
    *('after-all', 'async-done', 'async-start', 'async-update', 'call', 'conditional', 'constant'),
    *('copy-done', 'custom-call', 'fusion', 'get-tuple-element', 'opt-barrier', 'parameter', 'recv'),
    *('recv-done', 'send', 'send-done', 'tuple', 'while'),
}
# The operand that is moved; of a slice only the part that it takes.
_MOVED_OPERAND = {'copy': 0, 'copy-start': 0, 'slice': 0, 'dynamic-slice': 0, 'dynamic-update-slice': 1}


def _is_unknown(computation: Computation, instruction: Instruction) -> bool:
    """Whether an operation has arrays on both sides, and is none of those that are known."""
    if instruction.opcode in _HOLDING or instruction.opcode in _MOVED_OPERAND:
        return False
    arrays = (*instruction.arrays, *computation.operands_of(instruction))
    return len({array.space == HOST for array in arrays}) > 1


def host_bytes(visit: ComputationInstance, instruction: Instruction) -> int:
    """The bytes that one execution moves to the host, if that has its result, or from there."""
    if instruction.opcode not in _MOVED_OPERAND:
        return 0
    operand = visit.computation.operands_of(instruction)[_MOVED_OPERAND[instruction.opcode]]
    result = instruction.arrays[0]
    if (operand.space == HOST) == (result.space == HOST):
        return 0
    return (operand if instruction.opcode == 'dynamic-update-slice' else result).bytes
