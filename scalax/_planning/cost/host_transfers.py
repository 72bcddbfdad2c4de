"""Transfers of a program between the memory of a device and the memory of its host.

Optimized programs contain the memory space of each array. Copies of offloaded arrays have one side on the
host, and slices of stacked arrays are read and written there layer by layer.
"""

from __future__ import annotations

import dataclasses
import itertools

from scalax._planning.program.call_tree import ComputationInstance, measured_instructions
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.hlo import HOST, Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class HostTransfers:
    """The bytes transferred between one device and its host in one call.

    Attributes:
        to_host: the bytes that the device writes to host memory.
        from_host: the bytes that it reads from host memory.
        exactness: the exactness of both; a lower bound if an unknown operation accesses both memories.
    """

    to_host: int = 0
    from_host: int = 0
    exactness: Exactness = Exactness.EXACT


def host_transfers(module: Module) -> HostTransfers:
    """Counts the transfers of a program.

    Args:
        module: the program after all optimizations, with the memory space of each array.
    """
    written = read = 0
    exactness = Exactness.EXACT
    for instance, instruction, size in measured_instructions(module, host_bytes):
        if instruction.arrays[0].space == HOST:
            written += size
        else:
            read += size
        exactness = exactness.combine(instance.exactness)
    if any(itertools.starmap(_is_unknown, module.instructions())):
        exactness = exactness.combine(Exactness.AT_LEAST)
    return HostTransfers(written, read, exactness)


# Operations that transfer nothing themselves: they forward arrays, or contain the transfer.
_FORWARDING_OPS = {
    *('after-all', 'async-done', 'async-start', 'async-update', 'call', 'conditional', 'constant'),
    *('copy-done', 'custom-call', 'fusion', 'get-tuple-element', 'opt-barrier', 'parameter', 'recv'),
    *('recv-done', 'send', 'send-done', 'tuple', 'while'),
}
# The index of the operand that is transferred. Slices transfer only the elements of the slice.
_TRANSFERRED_OPERAND = {'copy': 0, 'copy-start': 0, 'slice': 0, 'dynamic-slice': 0, 'dynamic-update-slice': 1}


def _is_unknown(computation: Computation, instruction: Instruction) -> bool:
    """Whether an unknown operation accesses both memories."""
    if instruction.opcode in _FORWARDING_OPS or instruction.opcode in _TRANSFERRED_OPERAND:
        return False
    arrays = (*instruction.arrays, *computation.operands_of(instruction))
    return len({array.space == HOST for array in arrays}) > 1


def host_bytes(instance: ComputationInstance, instruction: Instruction) -> int:
    """Returns the bytes that one execution of an instruction transfers to or from the host."""
    if instruction.opcode not in _TRANSFERRED_OPERAND:
        return 0
    operand = instance.computation.operands_of(instruction)[_TRANSFERRED_OPERAND[instruction.opcode]]
    result = instruction.arrays[0]
    if (operand.space == HOST) == (result.space == HOST):
        return 0
    return (operand if instruction.opcode == 'dynamic-update-slice' else result).bytes
