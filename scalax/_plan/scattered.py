"""Recognition of reduce-scatters: all-reduces of which each device keeps only its own part.

The partitioner writes a reduce-scatter as an all-reduce and a slice that begins at the part of the device.
The program computes that start from the number of the device; here it is computed for all devices at once. A
slice chosen otherwise, such as by the index along another mesh axis, is no reduce-scatter. XLA does not print
long tables (``constant({...})``): a slice that starts where such a table says is assumed to be the device's
part.

This is a file of its own because it computes values of the program, where `collectives` only reads it, and
because only the programs of simulated devices need it.
"""

from __future__ import annotations

import numpy as np

from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.hlo_loops import Integers
from scalax._plan.loop_rounds import Values
from scalax._plan.replica_groups import Groups


class _UnprintedTableError(Exception):
    """A start depends on a table that is not printed."""


def is_reduce_scatter(
    module: Module, computation: Computation, instruction: Instruction, groups: Groups
) -> bool:
    """Whether every use of an all-reduce takes a different part of it on each device of a group.

    Args:
        module: the program.
        computation: the computation that holds it.
        instruction: the all-reduce.
        groups: one row a group, of device numbers.
    """
    numbers = np.arange(groups.size)

    def own_number(each: Instruction, _: int) -> Values | None:
        if each.opcode == 'constant' and '...' in each.operands[0]:
            raise _UnprintedTableError
        return numbers if each.opcode == 'partition-id' else None

    integers = Integers(module, computation, own_number, groups.size)
    users = computation.users.get(instruction.name, [])
    return bool(users) and all(_takes_own_part(integers, instruction, user, groups) for user in users)


def _takes_own_part(integers: Integers, instruction: Instruction, user: Instruction, groups: Groups) -> bool:
    count = groups.shape[1]
    if user.opcode != 'dynamic-slice' or user.bytes * count != instruction.bytes:
        return False
    whole, part, starts = instruction.arrays[0].dims, user.arrays[0].dims, []
    for dimension, (size, taken) in enumerate(zip(whole, part, strict=True)):
        if taken < size:
            try:
                start = integers.values(user.operands[1 + dimension])
            except _UnprintedTableError:
                return True
            if start is None or start.ndim != 1 or (start % taken).any():
                return False
            starts.append(np.clip(start, 0, size - taken)[groups])
    return all(len(set(zip(*rows, strict=True))) == count for rows in zip(*starts, strict=True))
