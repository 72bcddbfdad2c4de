"""Of which all-reduces does each device keep its own part only? Such are reduce-scatters to a compiler.

The partitioner writes them as an all-reduce and a slice of it that begins where a device's part does. Where
that is, is computed from the device's number: here for all devices at once. A slice that is chosen otherwise,
such as by the place along another mesh axis, makes no reduce-scatter. Long tables of the partitioner are not
written out (``constant({...})``): a slice that begins where one of them says is taken to be a device's part.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from scalax._plan.hlo import Computation, Instruction
from scalax._plan.replica_groups import Groups

Values = npt.NDArray[np.int64]
"""A number, or a list of them, for each device."""

_DEEP = 30  # the steps from a device's number to where its part begins
_SAME = ('bitcast', 'convert', 'copy', 'reshape')
_COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    'add': operator.add,
    'and': operator.and_,
    'divide': operator.floordiv,
    'maximum': np.maximum,
    'minimum': np.minimum,
    'multiply': operator.mul,
    'or': operator.or_,
    'remainder': operator.mod,
    'subtract': operator.sub,
}
_COMPARED: dict[str | None, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name.lower()) for name in ('LT', 'LE', 'GT', 'GE', 'EQ', 'NE')
}


class _NotWrittenOut(Exception):
    """A table is too long to be written."""


def keeps_a_part(computation: Computation, instruction: Instruction, groups: Groups) -> bool:
    """Whether every use of an all-reduce takes another part of it on each device of a group.

    Args:
        computation: where it stands.
        instruction: the all-reduce.
        groups: one row a group, of device numbers.
    """
    users = computation.users.get(instruction.name, [])
    return bool(users) and all(_is_own_part(computation, instruction, user, groups) for user in users)


def _is_own_part(
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
            except _NotWrittenOut:
                return True
            if start is None or start.ndim != 1 or (start % taken).any():
                return False
            starts.append(np.clip(start, 0, size - taken)[groups])
    return all(len(set(zip(*rows, strict=True))) == count for rows in zip(*starts, strict=True))


class _Evaluation:
    """What instructions of a computation give on each device, as far as that depends on its number alone."""

    def __init__(self, computation: Computation, devices: int) -> None:
        self.computation, self.devices = computation, devices
        self.known: dict[str, Values | None] = {}

    def value(self, name: str, depth: int = 0) -> Values | None:
        """What an instruction gives; None if that depends on more, or on too much."""
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
        if opcode in _SAME and values:
            return values[0].reshape(self.devices, *dims)
        if opcode == 'dynamic-slice' and dims == (1,) and [value.ndim for value in values] == [2, 1]:
            table, start = values
            return table[np.arange(self.devices), np.clip(start, 0, table.shape[1] - 1)][:, None]
        if len({value.shape for value in values}) != 1:
            return None
        if opcode in _COMPUTED and not (opcode in ('divide', 'remainder') and (values[1] <= 0).any()):
            return np.asarray(_COMPUTED[opcode](*values), np.int64)
        if opcode == 'compare' and (compared := _COMPARED.get(instruction.attribute('direction'))):
            return np.asarray(compared(*values), np.int64)
        return np.where(values[0] != 0, values[1], values[2]) if opcode == 'select' else None

    def _constant(self, text: str, dims: tuple[int, ...]) -> Values | None:
        if '...' in text:
            raise _NotWrittenOut
        numbers = [int(number) for number in re.findall(r'-?\d+', text)]
        if len(dims) > 1 or len(numbers) != math.prod(dims):
            return None
        return np.tile(np.array(numbers).reshape(dims), (self.devices, *[1] * len(dims)))
