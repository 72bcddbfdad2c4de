"""Of which all-reduces does each device keep its own part only? Such are reduce-scatters to a compiler.

The partitioner writes them as an all-reduce and a slice of it that begins where a device's part does. Where
that is, is computed from the device's number: here for all devices at once. A slice that is chosen otherwise,
such as by the place along another mesh axis, makes no reduce-scatter. Long tables of the partitioner are not
written out (``constant({...})``): a slice that begins where one of them says is taken to be a device's part.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from scalax.plan._groups import Groups
from scalax.plan._module import Computation, Instruction

Values = npt.NDArray[np.int64]
"""A number, or a list of them, for each device."""

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
    starts = []
    for dimension, (size, taken) in enumerate(zip(whole, part, strict=True)):
        if taken < size:
            try:
                start = _value(computation, user.operands[1 + dimension], groups.size)
            except _NotWrittenOut:
                return True
            if start is None or start.ndim != 1 or (start % taken).any():
                return False
            starts.append(np.clip(start, 0, size - taken)[groups])
    return all(len(set(zip(*rows, strict=True))) == count for rows in zip(*starts, strict=True))


def _value(computation: Computation, name: str, devices: int) -> Values | None:
    """What an instruction computes on each device; None if that depends on more than the device's number."""
    instruction = computation.instructions.get(name)
    if instruction is None or len(instruction.arrays) != 1 or instruction.arrays[0].dtype[0] not in 'sup':
        return None
    dims, opcode = instruction.arrays[0].dims, instruction.opcode
    if opcode == 'partition-id':
        return np.arange(devices)
    if opcode == 'constant':
        if '...' in instruction.operands[0]:
            raise _NotWrittenOut
        numbers = [int(number) for number in re.findall(r'-?\d+', instruction.operands[0])]
        known = len(numbers) == int(np.prod(dims)) and len(dims) <= 1
        return np.tile(np.array(numbers).reshape(dims), (devices, *[1] * len(dims))) if known else None
    given = [_value(computation, operand, devices) for operand in instruction.operands]
    values = [value for value in given if value is not None]
    if len(values) < len(given) or not given:
        return None
    if opcode in _SAME:
        return values[0].reshape(devices, *dims)
    if opcode == 'dynamic-slice' and dims == (1,) and values[0].ndim == 2:
        table, start = values[0], np.clip(values[1], 0, values[0].shape[1] - 1)
        return table[np.arange(devices), start][:, None]
    if opcode in _COMPUTED and not (opcode in ('divide', 'remainder') and (values[1] <= 0).any()):
        return np.asarray(_COMPUTED[opcode](*values), np.int64)
    if opcode == 'compare' and (compared := _COMPARED.get(instruction.attribute('direction'))):
        return np.asarray(compared(*values), np.int64)
    if opcode == 'select':
        return np.where(values[0] != 0, values[1], values[2])
    return None
