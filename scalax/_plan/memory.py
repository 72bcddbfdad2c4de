"""Memory of a program, and its largest buffers, as the compiler reports them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.provenance import Source, source_of
from scalax._report.tables import array_text
from scalax.errors import PlanError

_ALLOCATION = re.compile(r'allocation \d+: size (\d+)(?:, color (\d+))?, ')
_VALUE = re.compile(
    r' value: <\d+ ([^ {>]+)(?:\{([\d,]*)\})?(?: \([a-z-]+\))? @\d+> \(size=\d+,offset=(\d+)\)'
)
_LIVE = re.compile(r'\s+([^ {]+)\{([\d,]*)\}: (\d+) bytes \(cumulative')
_MAIN = re.compile(r'Memory Space: \S+ \(color=0\)\s+Total bytes: (\d+)')
_SHOWN = 20
_SMALL = 1000


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a program runs, as the compiler counts them.

    Attributes:
        arguments: the arguments.
        outputs: the outputs, without those that take over the buffers of donated arguments.
        temporaries: everything else.
        donated: the bytes of arguments whose buffers outputs take over.
        estimated: whether the count is only a guide, because it is that of XLA for CPUs, which stand in for
            other hardware.
        peak: the most that is held at a time, as the compiler counts it; on TPUs this includes the vector
            memory of a chip. `total` if the compiler gives no such number.
        limit: the memory of the device that a program can use; None if unknown.
    """

    arguments: int
    outputs: int
    temporaries: int
    donated: int = 0
    estimated: bool = True
    peak: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        if not self.peak:
            object.__setattr__(self, 'peak', self.total)

    @property
    def total(self) -> int:
        """Arguments, outputs and temporaries together, as if nothing were freed."""
        return self.arguments + self.outputs + self.temporaries


class Buffer(NamedTuple):
    """One array that a device holds at the peak of its memory.

    Attributes:
        bytes: its bytes.
        array: its type and shape on one device, such as ``'bf16[4096,1024]'``.
        source: the argument that it is, or the line that makes it.
    """

    bytes: int
    array: str
    source: Source


class MemoryTables(NamedTuple):
    """The tables that the compiler writes about memory.

    Attributes:
        report: the use of each memory (``memory-usage-report``).
        assignment: the positions of values (``buffer-assignment``).
        live: the values that are live at the peak (``live-range``).
    """

    report: str
    assignment: str
    live: str


def assigned_memory(tables: MemoryTables) -> Memory:
    """The memory of a program that the compiler laid out, but refused.

    Raises:
        PlanError: the tables are written in an unknown form.
    """
    found = _MAIN.search(tables.report)
    allocations = list(_allocations(tables.assignment))
    if found is None or not allocations:
        raise PlanError('the compiler wrote the memory of the program in an unknown form')
    peak = int(found[1])
    sizes = {'parameter': 0, 'donated': 0, 'output': 0}
    for line, size in allocations:
        live_out = 'maybe-live-out' in line
        if ', parameter ' in line:
            sizes['parameter'] += size
            sizes['donated'] += size if live_out else 0
        elif live_out:
            sizes['output'] += size
    rest = max(0, peak - sizes['parameter'] - sizes['output'])
    return Memory(sizes['parameter'], sizes['output'], rest, sizes['donated'], estimated=False, peak=peak)


def _allocations(assignment: str) -> Iterator[tuple[str, int]]:
    """The allocations in the main memory: (the line, bytes)."""
    for line in assignment.splitlines():
        found = _ALLOCATION.match(line)
        if found and found[2] in (None, '0'):
            yield line, int(found[1])


def constant_bytes(module: Module) -> int:
    """The bytes of array constants in a program."""
    return sum(
        instruction.bytes
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == 'constant' and any(array.dims for array in instruction.arrays)
    )


def largest_buffers(tables: MemoryTables, module: Module) -> tuple[Buffer, ...]:
    """The largest arrays in main memory at its peak, the largest first.

    Args:
        tables: the tables that the compiler wrote.
        module: the program that it laid out.
    """
    places = _positions(tables.assignment)
    owners = {
        name: (computation, instruction)
        for computation in module.computations.values()
        for name, instruction in computation.instructions.items()
    }
    held: dict[tuple[int, int], Buffer] = {}
    for name, index, size in _live_values(tables.live):
        place = places.get((name, index))
        # Values that share a position (such as a loop's state and its initial values) are one buffer.
        if place is None or name not in owners or (place in held and held[place].bytes >= size):
            continue
        computation, instruction = owners[name]
        held[place] = Buffer(size, _type_at(instruction, index), _source(module, computation, instruction))
    buffers = sorted(held.values(), key=lambda buffer: -buffer.bytes)[:_SHOWN]
    return tuple(buffer for buffer in buffers if buffer.bytes * _SMALL >= buffers[0].bytes)


def _live_values(live: str) -> Iterator[tuple[str, str, int]]:
    """The values at the peak: (instruction, index into its tuple, bytes)."""
    for line in live.splitlines():
        found = _LIVE.match(line)
        if found:
            yield found[1], found[2], int(found[3])


def _positions(assignment: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(instruction, index) -> (allocation, offset), of all values in main memory."""
    places: dict[tuple[str, str], tuple[int, int]] = {}
    allocation, main = 0, False
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            allocation, main = allocation + 1, found[2] in (None, '0')
        elif main and (found := _VALUE.match(line)):
            places[found[1], found[2] or ''] = allocation, int(found[3])
    return places


def _type_at(instruction: Instruction, index: str) -> str:
    arrays = instruction.arrays
    place = int(index) if index.isdigit() else 0
    return array_text(*(arrays[place] if place < len(arrays) else arrays[0]))


def _source(module: Module, computation: Computation, instruction: Instruction) -> Source:
    if instruction.opcode == 'parameter' and computation.name == module.entry:
        return Source(operand=instruction.op_name.replace("\\'", "'"))
    return source_of(module, computation, instruction)
