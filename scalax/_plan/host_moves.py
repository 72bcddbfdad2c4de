"""Bytes that a program moves between the memory of a device and that of its host, read from what runs.

Offloaded arrays are in the layout of the program: copies have one side on the host, and slices of stacked
arrays are read and written there layer by layer.
"""

from __future__ import annotations

import dataclasses

from scalax._plan.formulas import Counted
from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.hlo_loops import visits


@dataclasses.dataclass(frozen=True)
class HostMoves:
    """The bytes that one device and its host exchange in one call.

    Attributes:
        to_host: those that the device writes to the memory of the host.
        from_host: those that it reads there.
        counted: how well both are known.
    """

    to_host: int = 0
    from_host: int = 0
    counted: Counted = Counted.EXACTLY


def host_moves(module: Module) -> HostMoves:
    """What a program moves to and from the host.

    Args:
        module: the program after all optimizations, whose arrays have places.
    """
    sent = read = 0
    counted = Counted.EXACTLY
    if not any(i.on_host for c in module.computations.values() for i in c.instructions.values()):
        return HostMoves()
    for visit in visits(module):
        for instruction in visit.computation.instructions.values():
            if instruction.opcode not in _MOVED_OPERAND:
                continue
            moved, from_host = _moved(visit.computation, instruction)
            to_host = instruction.on_host[:1] == (True,)
            if to_host != from_host:
                sent += visit.count * moved if to_host else 0
                read += visit.count * moved if from_host else 0
                counted = counted.along(visit.counted)
    return HostMoves(sent, read, counted)


# The operand that is moved; of a slice only the part that it takes.
_MOVED_OPERAND = {'copy': 0, 'copy-start': 0, 'slice': 0, 'dynamic-slice': 0, 'dynamic-update-slice': 1}


def _moved(computation: Computation, instruction: Instruction) -> tuple[int, bool]:
    """The bytes that an instruction moves, and whether they come from the host."""
    name, _, element = instruction.operands[_MOVED_OPERAND[instruction.opcode]].partition('#')
    operand, place = computation.instructions[name], int(element or 0)
    from_host = bool(operand.on_host) and operand.on_host[place]
    updates = instruction.opcode == 'dynamic-update-slice'
    return (operand.arrays[place] if updates else instruction.arrays[0]).bytes, from_host
