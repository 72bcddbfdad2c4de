"""Recognition of reduce-scatters: all-reduces of which each device keeps only its own part.

The partitioner writes a reduce-scatter as an all-reduce and a slice that begins at the part of the device.
The program computes that start from the number of the device; here it is computed for all devices at once. A
slice chosen otherwise, such as by the index along another mesh axis, is no reduce-scatter. XLA does not print
long tables (``constant({...})``): a slice that starts where such a table says is assumed to be the device's
part.
"""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt

from scalax._plan.hlo import Computation, Instruction
from scalax._plan.loop_rounds import COMPARED, COMPUTED
from scalax._plan.replica_groups import Groups

Values = npt.NDArray[np.int64]
"""A number, or a list of them, for each device."""

_DEEP = 30  # instructions from the number of a device to the start of its part
_FORWARDING = ('bitcast', 'convert', 'copy', 'reshape')


class _ElidedConstant(Exception):
    """A constant is not printed, because it is too long."""


def is_reduce_scatter(computation: Computation, instruction: Instruction, groups: Groups) -> bool:
    """Whether every use of an all-reduce takes a different part of it on each device of a group.

    Args:
        computation: the computation that holds it.
        instruction: the all-reduce.
        groups: one row a group, of device numbers.
    """
    users = computation.users.get(instruction.name, [])
    return bool(users) and all(_takes_own_part(computation, instruction, user, groups) for user in users)


def _takes_own_part(
    computation: Computation, instruction: Instruction, user: Instruction, groups: Groups
) -> bool:
    count = groups.shape[1]
    if user.opcode != 'dynamic-slice' or user.bytes * count != instruction.bytes:
        return False
    whole, part = instruction.arrays[0].dims, user.arrays[0].dims
    evaluation, starts = _Evaluation(computation, groups.size), []
    for dimension, (size, taken) in enumerate(zip(whole, part, strict=True)):
        if taken < size:
            try:
                start = evaluation.value(user.operands[1 + dimension])
            except _ElidedConstant:
                return True
            if start is None or start.ndim != 1 or (start % taken).any():
                return False
            starts.append(np.clip(start, 0, size - taken)[groups])
    return all(len(set(zip(*rows, strict=True))) == count for rows in zip(*starts, strict=True))


class _Evaluation:
    """The values of instructions on each device, as far as they depend on its number alone."""

    def __init__(self, computation: Computation, devices: int) -> None:
        self.computation, self.devices = computation, devices
        self.known: dict[str, Values | None] = {}

    def value(self, name: str, depth: int = 0) -> Values | None:
        """The value of an instruction; None if it depends on more, or is computed in too many steps."""
        if name not in self.known:
            instruction = self.computation.instructions.get(name)
            number = instruction is not None and [array.dtype[0] in 'sup' for array in instruction.arrays]
            self.known[name] = self._compute(instruction, depth) if number == [True] and instruction else None
        return self.known[name]

    def _compute(self, instruction: Instruction, depth: int) -> Values | None:
        dims, opcode = instruction.arrays[0].dims, instruction.opcode
        if opcode == 'partition-id':
            return np.arange(self.devices)
        if opcode == 'constant':
            return self._constant(instruction.operands[0], dims)
        values = []
        for operand in instruction.operands if depth < _DEEP else ():
            value = self.value(operand, depth + 1)
            if value is None:
                return None
            values.append(value)
        if opcode in _FORWARDING and values:
            return values[0].reshape(self.devices, *dims)
        if opcode == 'dynamic-slice' and dims == (1,) and [value.ndim for value in values] == [2, 1]:
            table, start = values
            return table[np.arange(self.devices), np.clip(start, 0, table.shape[1] - 1)][:, None]
        if len({value.shape for value in values}) != 1:
            return None
        if opcode in COMPUTED and not (opcode in ('divide', 'remainder') and (values[1] <= 0).any()):
            return np.asarray(COMPUTED[opcode](*values), np.int64)
        if opcode == 'compare' and (compared := COMPARED.get(instruction.attribute('direction') or '')):
            return np.asarray(compared(*values), np.int64)
        return np.where(values[0] != 0, values[1], values[2]) if opcode == 'select' else None

    def _constant(self, text: str, dims: tuple[int, ...]) -> Values | None:
        if '...' in text:
            raise _ElidedConstant
        numbers = [int(number) for number in re.findall(r'-?\d+', text)]
        if len(dims) > 1 or len(numbers) != math.prod(dims):
            return None
        return np.tile(np.array(numbers).reshape(dims), (self.devices, *[1] * len(dims)))
