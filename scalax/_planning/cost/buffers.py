"""The largest arrays in the memory of a device at its peak, with their sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from scalax._planning.cost.memory import MemoryLayout, Value
from scalax._planning.program.hlo import Computation, Instruction, Module
from scalax._planning.program.provenance import Source, source_of

_COVERAGE = 0.99  # of the peak; the rest are thousands of scalars and tables of addresses
_MAX_HOPS = 12
_TUPLE_OPS = ('tuple', 'while', 'conditional')


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Arrays of the same type and source that are live on a device at the peak.

    Attributes:
        bytes: the bytes of all of them, including padding.
        array: the type and shape of each on one device, such as ``'bf16[4096,1024]'``; empty for a table of
            the addresses of a tuple.
        source: the argument, or the line that produces the array.
        count: the number of arrays.
    """

    bytes: int
    array: str
    source: Source
    count: int = 1


class _TupleElement(NamedTuple):
    """An instruction, and the index of an element of its tuple; '' for its entire result."""

    computation: Computation
    instruction: Instruction
    element: str


def largest_buffers(layout: MemoryLayout, module: Module) -> tuple[Buffer, ...]:
    """Returns the arrays in the main memory of a device at its peak, the largest first.

    They make up at least 99 % of the peak; the smallest arrays are left out.

    Args:
        layout: the layout of the program.
        module: the program of that layout.
    """
    finder = _SourceFinder(module)
    rows: dict[tuple[str, Source], Buffer] = {}
    peak = 0
    for size, value in layout.live_at_peak:
        peak += size
        array, source = ('', Source()) if value is None else finder.type_and_source(value)
        row = rows.get((array, source), Buffer(0, array, source, 0))
        rows[array, source] = dataclasses.replace(row, bytes=row.bytes + size, count=row.count + 1)
    largest, covered = [], 0
    for row in sorted(rows.values(), key=lambda row: -row.bytes):
        if covered >= _COVERAGE * peak:
            break
        largest.append(row)
        covered += row.bytes
    return tuple(largest)


class _SourceFinder:
    """Finds the sources of values, also of values in the state of loops."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.definitions = {
            instruction.name: _TupleElement(computation, instruction, '')
            for computation, instruction in module.instructions()
        }
        # The body and the condition of each loop -> the loop.
        self.loops = {
            called.name: loop
            for loop in self.definitions.values()
            if loop.instruction.opcode == 'while'
            for called in module.calls(loop.instruction)
        }

    def type_and_source(self, value: Value) -> tuple[str, Source]:
        """Returns the type of a value, and its source."""
        definition = self.definitions.get(value.instruction)
        if definition is None:
            return value.array, Source()
        return value.array, self._source(definition._replace(element=value.element.partition(',')[0]))

    def _source(self, value: _TupleElement) -> Source:
        """Returns the source of the nearest instruction that has one, among producers and users."""
        level = [self._origin(value)]
        seen: set[str] = set()
        for _ in range(_MAX_HOPS):
            for computation, instruction, _ in level:
                source = self._source_of(computation, instruction)
                if source != Source():
                    return source
            seen.update(item.instruction.name for item in level)
            next_level = {near.instruction.name: near for item in level for near in self._neighbors(item)}
            level = [near for name, near in next_level.items() if name not in seen]
        return Source()

    def _source_of(self, computation: Computation, instruction: Instruction) -> Source:
        if instruction.opcode == 'parameter' and computation.name == self.module.entry:
            return Source(operand=instruction.op_name)
        return source_of(self.module, computation, instruction)

    def _neighbors(self, value: _TupleElement) -> Iterator[_TupleElement]:
        """Yields the operands and the users of an instruction, not through tuples and loops."""
        computation, instruction, _ = value
        if instruction.opcode in _TUPLE_OPS:
            return
        for operand in instruction.operands:
            if operand.partition('#')[0] in computation.instructions:  # not the text of a constant
                element = _tuple_element(computation, operand)
                yield self._origin(element)
                # An iteration may only copy the state.
                if (initial := self._initial_state(element)) is not None:
                    yield self._origin(initial)
        for user in computation.users.get(instruction.name, ()):
            if user.opcode not in _TUPLE_OPS:
                yield _TupleElement(computation, user, '')

    def _origin(self, value: _TupleElement) -> _TupleElement:
        """Returns where a value is produced.

        State of a loop is produced in its body, or before the loop if the body passes it through.
        """
        for _ in range(_MAX_HOPS):
            initial = self._initial_state(value)
            previous = _through_tuples(value)
            if initial is not None:
                previous = self._next_state(self.loops[value.computation.name].instruction, value.element)
                if previous.instruction is value.instruction and previous.element == value.element:
                    previous = initial
            elif value.instruction.opcode == 'while' and value.element:
                previous = self._next_state(value.instruction, value.element)
            if previous == value:
                return value
            value = previous
        return value

    def _initial_state(self, value: _TupleElement) -> _TupleElement | None:
        """Returns the initial value of an element of a loop's state; None for other values."""
        if (
            value.instruction.opcode != 'parameter'
            or not value.element
            or value.computation.name not in self.loops
        ):
            return None
        loop = self.loops[value.computation.name]
        return _tuple_element(loop.computation, f'{loop.instruction.operands[0]}#{value.element}')

    def _next_state(self, loop: Instruction, element: str) -> _TupleElement:
        """Returns the value of an element of a loop's state after an iteration."""
        [body] = self.module.called(loop, 'body')
        return _through_tuples(_TupleElement(body, body.instructions[body.root], element))


def _tuple_element(computation: Computation, operand: str) -> _TupleElement:
    element = operand.partition('#')[2]  # nested tuples are not supported
    return _TupleElement(computation, computation.producer(operand), element if element.isdigit() else '')


def _through_tuples(value: _TupleElement) -> _TupleElement:
    """Returns the value that an element of a tuple refers to."""
    computation, instruction, element = value
    if instruction.opcode == 'get-tuple-element':
        operand = f'{instruction.operands[0]}#{instruction.attribute("index")}'
        return _through_tuples(_tuple_element(computation, operand))
    if instruction.opcode == 'tuple' and element:
        return _through_tuples(_tuple_element(computation, instruction.operands[int(element)]))
    return value
