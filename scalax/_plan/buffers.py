"""The arrays that fill the memory of a device when it holds the most, and the lines that they come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.memory import Layout, Value
from scalax._plan.provenance import Source, source_of

_ENOUGH = 0.99  # of the peak; the rest are thousands of scalars and tables of addresses
_FAR = 12
_TUPLES = ('tuple', 'while', 'conditional')


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Arrays of one type and source that a device holds when it holds the most.

    Attributes:
        bytes: the bytes of all of them, as they are padded in memory.
        array: the type and shape of each on one device, such as ``'bf16[4096,1024]'``; empty for addresses
            of the parts of a tuple.
        source: the argument that it is, or the line that makes it.
        count: how many there are.
    """

    bytes: int
    array: str
    source: Source
    count: int = 1


class _Place(NamedTuple):
    """An instruction, and the part of its tuple that is meant: its index, or empty."""

    computation: Computation
    instruction: Instruction
    element: str


def largest_buffers(layout: Layout, module: Module) -> tuple[Buffer, ...]:
    """The arrays in the main memory of a device when it holds the most, the largest first.

    They are at least 99 % of what is held then; the smallest are left out.

    Args:
        layout: the layout of the program.
        module: the program that was laid out.
    """
    reader = _Reader(module)
    rows: dict[tuple[str, Source], Buffer] = {}
    peak = 0
    for size, value in layout.held:
        peak += size
        array, source = ('', Source()) if value is None else reader.named(value)
        old = rows.get((array, source), Buffer(0, array, source, 0))
        rows[array, source] = dataclasses.replace(old, bytes=old.bytes + size, count=old.count + 1)
    shown, covered = [], 0
    for row in sorted(rows.values(), key=lambda row: -row.bytes):
        if covered >= _ENOUGH * peak:
            break
        shown.append(row)
        covered += row.bytes
    return tuple(shown)


class _Reader:
    """Finds the source of a value, also through the loops that it is the state of."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.owners = {each.name: _Place(inside, each, '') for inside, each in module.instructions()}
        # The body and the condition of each loop -> the loop.
        self.loops = {
            called.name: owner
            for owner in self.owners.values()
            if owner.instruction.opcode == 'while'
            for called in module.calls(owner.instruction)
        }

    def named(self, value: Value) -> tuple[str, Source]:
        """The type of a value, and its source."""
        owner = self.owners.get(value.instruction)
        if owner is None:
            return value.array, Source()
        return value.array, self._source(owner._replace(element=value.element.partition(',')[0]))

    def _source(self, place: _Place) -> Source:
        """That of the nearest instruction that has one, in both directions."""
        level = [self._made(place)]
        seen: set[str] = set()
        for _ in range(_FAR):
            for computation, instruction, _ in level:
                source = self._own(computation, instruction)
                if source != Source():
                    return source
            seen.update(near.instruction.name for near in level)
            following = {near.instruction.name: near for item in level for near in self._near(item)}
            level = [near for name, near in following.items() if name not in seen]
        return Source()

    def _own(self, computation: Computation, instruction: Instruction) -> Source:
        if instruction.opcode == 'parameter' and computation.name == self.module.entry:
            return Source(operand=instruction.op_name)
        return source_of(self.module, computation, instruction)

    def _near(self, place: _Place) -> Iterator[_Place]:
        """The operands and the users of an instruction; a loop and its state are no connection."""
        computation, instruction, _ = place
        if instruction.opcode in _TUPLES:
            return
        for operand in instruction.operands:
            near = self._operand(computation, operand)
            if near is not None:
                yield self._made(near)
                # A round may only move the state to and fro.
                before = self._before(near)
                if before is not None:
                    yield self._made(before)
        for user in computation.users.get(instruction.name, ()):
            if user.opcode not in _TUPLES:
                yield _Place(computation, user, '')

    def _made(self, place: _Place) -> _Place:
        """Where a value is made: for the state of a loop in the loop, or before it if the loop keeps it."""
        for _ in range(_FAR):
            following = self._step(place)
            if following is None:
                return place
            place = following
        return place

    def _step(self, place: _Place) -> _Place | None:
        computation, instruction, element = place
        if instruction.opcode == 'get-tuple-element':
            index = instruction.attribute('index') or ''
            return self._operand(computation, f'{instruction.operands[0]}#{index}')
        if not element.isdigit():
            return None
        if instruction.opcode == 'tuple':
            return self._operand(computation, instruction.operands[int(element)])
        if instruction.opcode == 'while':
            return self._returned(instruction, element)
        if instruction.opcode == 'parameter' and computation.name in self.loops:
            returned = self._returned(self.loops[computation.name].instruction, element)
            kept = (returned.instruction.opcode, returned.element) == ('parameter', element)
            return self._before(place) if kept else returned
        return None

    def _before(self, place: _Place) -> _Place | None:
        """The value of an element of the state of a loop before the loop; None for other places."""
        computation, instruction, element = place
        if instruction.opcode != 'parameter' or not element.isdigit() or computation.name not in self.loops:
            return None
        outside, loop, _ = self.loops[computation.name]
        return self._operand(outside, f'{loop.operands[0]}#{element}')

    def _returned(self, loop: Instruction, element: str) -> _Place:
        """What a round of a loop makes of an element of its state."""
        [body] = self.module.called(loop, 'body')
        place = _Place(body, body.instructions[body.root], element)
        while place.instruction.opcode in ('tuple', 'get-tuple-element'):
            inside = self._step(place)
            if inside is None:
                break
            place = inside
        return place

    def _operand(self, computation: Computation, operand: str) -> _Place | None:
        name, _, element = operand.partition('#')
        instruction = computation.instructions.get(name)
        return None if instruction is None else _Place(computation, instruction, element)
