"""Integers of an HLO computation, as far as they follow from constants and from what is given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.loop_rounds import OPERATIONS, Values, computed

_TYPES = {f'{sign}{bits}': f'{sign}int{bits}'.lstrip('s') for sign in 'su' for bits in (8, 16, 32, 64)}
_TYPES['pred'] = 'bool'
_FORWARDING = ('bitcast', 'broadcast', 'convert', 'copy', 'copy-done', 'copy-start', 'reshape')
_WORD = re.compile(r'-?\d+|true|false')
_DEEP = 30  # operations that a value may be computed in, one after the other


class Integers:
    """The integers of a computation.

    Args:
        module: the program.
        computation: one of its computations.
        given: (instruction, element of its tuple) -> its values; None where they are not given.
        rows: the number of cases that values are computed for at once.
    """

    def __init__(
        self,
        module: Module,
        computation: Computation,
        given: Callable[[Instruction, int], Values | None] = lambda *_: None,
        rows: int = 1,
    ) -> None:
        self._module, self._computation, self._given, self._rows = module, computation, given, rows
        self._known: dict[str, Values | None] = {}

    def values(self, operand: str, depth: int = 0) -> Values | None:
        """The values of an operand (``name#2`` is an element of a tuple); None if they are not known."""
        if operand not in self._known and depth < _DEEP:
            self._known[operand] = self._read(operand, depth + 1)
        return self._known.get(operand)

    def _read(self, operand: str, depth: int) -> Values | None:
        name, _, element = operand.partition('#')
        instruction = self._computation.instructions.get(name)
        if instruction is None or '#' in element:  # an element of an element is not followed
            return None
        opcode, operands, index = instruction.opcode, instruction.operands, int(element or 0)
        if opcode == 'get-tuple-element':
            return self.values(f'{operands[0]}#{instruction.attribute("index")}', depth)
        if opcode == 'opt-barrier':
            return self.values(f'{operands[0]}#{index}', depth)
        if opcode == 'tuple':
            return self.values(operands[index], depth)
        dtype, dims, _ = instruction.arrays[index]
        if dtype not in _TYPES:
            return None
        if (given := self._given(instruction, index)) is not None:
            return given
        if opcode == 'constant':
            return self._constant(operands[0], dtype, dims)
        if opcode in ('call', 'fusion'):
            return self._returned(instruction, index, depth)
        if opcode == 'compare':
            opcode = instruction.attribute('direction') or ''
        if opcode not in (*OPERATIONS, *_FORWARDING, 'dynamic-slice'):
            return None
        values = [self.values(part, depth) for part in operands]
        if opcode in OPERATIONS:
            return computed(opcode, values)
        first = values[0]
        if first is None:
            return None
        if opcode == 'dynamic-slice':
            one_of_a_list = dims == (1,) and [value is not None and value.ndim for value in values] == [2, 1]
            return self._element(first, values[1]) if one_of_a_list else None
        shape = (self._rows, *dims)
        return first.reshape(shape).astype(_TYPES[dtype]) if first.size == math.prod(shape) else None

    def _element(self, table: Values, start: Values | None) -> Values | None:
        if start is None:
            return None
        return table[np.arange(self._rows), np.clip(start, 0, table.shape[1] - 1)][:, None]

    def _constant(self, text: str, dtype: str, dims: tuple[int, ...]) -> Values | None:
        words = {'true': 1, 'false': 0}
        numbers = [words[word] if word in words else int(word) for word in _WORD.findall(text)]
        if len(dims) > 1 or len(numbers) != math.prod(dims):  # a long list is not printed
            return None
        value = np.array(numbers, _TYPES[dtype]).reshape(dims)
        return np.tile(value, (self._rows, *[1] * len(dims)))

    def _returned(self, call: Instruction, index: int, depth: int) -> Values | None:
        """What a called computation returns."""
        [called] = self._module.calls(call)

        def argument(parameter: Instruction, element: int) -> Values | None:
            if parameter.opcode != 'parameter':
                return None
            operand = call.operands[int(parameter.operands[0])]
            return self.values(f'{operand}#{element}' if element else operand, depth)

        inside = Integers(self._module, called, argument, self._rows)
        return inside.values(f'{called.root}#{index}', depth)
