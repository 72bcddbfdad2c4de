"""The arrays that fill the memory of a device when it holds the most, and the lines that they come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from scalax._planning.cost.memory import MemoryLayout, Value
from scalax._planning.program.hlo import Computation, Instruction, Module
from scalax._planning.program.provenance import Source, source_of

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


def largest_buffers(layout: MemoryLayout, module: Module) -> tuple[Buffer, ...]:
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
            if operand.partition('#')[0] in computation.instructions:  # and not a constant
                near = _place(computation, operand)
                yield self._made(near)
                # A round may only move the state to and fro.
                if (before := self._before(near)) is not None:
                    yield self._made(before)
        for user in computation.users.get(instruction.name, ()):
            if user.opcode not in _TUPLES:
                yield _Place(computation, user, '')

    def _made(self, place: _Place) -> _Place:
        """Where a value is made: for the state of a loop in the loop, or before it if the loop keeps it."""
        for _ in range(_FAR):
            before = self._before(place)
            following = _inside_tuples(place)
            if before is not None:
                following = self._returned(self.loops[place.computation.name].instruction, place.element)
                if following.instruction is place.instruction and following.element == place.element:
                    following = before
            elif place.instruction.opcode == 'while' and place.element:
                following = self._returned(place.instruction, place.element)
            if following == place:
                return place
            place = following
        return place

    def _before(self, place: _Place) -> _Place | None:
        """The value of an element of the state of a loop before the loop; None for other places."""
        if (
            place.instruction.opcode != 'parameter'
            or not place.element
            or place.computation.name not in self.loops
        ):
            return None
        loop = self.loops[place.computation.name]
        return _place(loop.computation, f'{loop.instruction.operands[0]}#{place.element}')

    def _returned(self, loop: Instruction, element: str) -> _Place:
        """What a round of a loop makes of an element of its state."""
        [body] = self.module.called(loop, 'body')
        return _inside_tuples(_Place(body, body.instructions[body.root], element))


def _place(computation: Computation, operand: str) -> _Place:
    element = operand.partition('#')[2]  # elements of elements are not followed
    return _Place(computation, computation.producer(operand), element if element.isdigit() else '')


def _inside_tuples(place: _Place) -> _Place:
    """The value that an element of a tuple is."""
    computation, instruction, element = place
    if instruction.opcode == 'get-tuple-element':
        return _inside_tuples(
            _place(computation, f'{instruction.operands[0]}#{instruction.attribute("index")}')
        )
    if instruction.opcode == 'tuple' and element:
        return _inside_tuples(_place(computation, instruction.operands[int(element)]))
    return place
