"""How much memory does a program take, and what takes most of it? As the compiler writes down."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from scalax._plan.hlo import Array, Computation, Instruction, Module
from scalax._plan.provenance import Source, source_of
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
        temporaries: all else.
        donated: the bytes of arguments whose buffers outputs take over.
        estimated: whether it is the count of a compiler for other hardware than the one that is meant: that
            of XLA for CPUs is a guide, no more.
        peak: the most that is held at a time, as the compiler counts it; on TPUs with what lies in the
            vector memory of a chip. `total` where the compiler has no such number.
        limit: what a program can use of the memory of the device; None where that is not known.
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
        """All of them together, as if nothing were freed."""
        return self.arguments + self.outputs + self.temporaries


class Buffer(NamedTuple):
    """One array that a device holds when it holds most.

    Attributes:
        bytes: its bytes.
        array: its type and shape on one device, such as ``'bf16[4096,1024]'``.
        source: the argument that it is, or the line that makes it.
    """

    bytes: int
    array: str
    source: Source


class Tables(NamedTuple):
    """What the compiler writes down about memory, as it stands in its files.

    Attributes:
        report: how much is used of each memory (``memory-usage-report``).
        assignment: which values lie where (``buffer-assignment``).
        live: what is held when most is held (``live-range``).
    """

    report: str
    assignment: str
    live: str


def assigned_memory(tables: Tables) -> Memory:
    """The memory of a program that the compiler laid out, but refused.

    Raises:
        PlanError: it is written in a way that is not known.
    """
    found = _MAIN.search(tables.report)
    allocations = list(_allocations(tables.assignment))
    if found is None or not allocations:
        raise PlanError('the compiler wrote down the memory of the program in a way that is not known')
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


def constants(module: Module) -> int:
    """The bytes of arrays that are written into a program."""
    return sum(
        instruction.bytes
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == 'constant' and any(array.dims for array in instruction.arrays)
    )


def largest_buffers(tables: Tables, module: Module) -> tuple[Buffer, ...]:
    """What takes most of the main memory when most of it is taken, the largest first.

    Args:
        tables: what the compiler wrote down.
        module: the program that it laid out.
    """
    places = _places(tables.assignment)
    owners = {
        name: (computation, instruction)
        for computation in module.computations.values()
        for name, instruction in computation.instructions.items()
    }
    held: dict[tuple[int, int], Buffer] = {}
    for name, index, size in _held(tables.live):
        place = places.get((name, index))
        # Values that share a place (a loop's state and what it is made of) are one buffer.
        if place is None or name not in owners or (place in held and held[place].bytes >= size):
            continue
        computation, instruction = owners[name]
        held[place] = Buffer(size, _array(instruction, index), _source(module, computation, instruction))
    buffers = sorted(held.values(), key=lambda buffer: -buffer.bytes)[:_SHOWN]
    return tuple(buffer for buffer in buffers if buffer.bytes * _SMALL >= buffers[0].bytes)


def _held(live: str) -> Iterator[tuple[str, str, int]]:
    """The values at the peak: (instruction, index into its tuple, bytes)."""
    for line in live.splitlines():
        found = _LIVE.match(line)
        if found:
            yield found[1], found[2], int(found[3])


def _places(assignment: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(instruction, index) -> (allocation, offset), of all that lies in the main memory."""
    places: dict[tuple[str, str], tuple[int, int]] = {}
    allocation, main = 0, False
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            allocation, main = allocation + 1, found[2] in (None, '0')
        elif main and (found := _VALUE.match(line)):
            places[found[1], found[2] or ''] = allocation, int(found[3])
    return places


def _array(instruction: Instruction, index: str) -> str:
    arrays = instruction.arrays
    place = int(index) if index.isdigit() else 0
    array: Array = arrays[place] if place < len(arrays) else arrays[0]
    return f'{array.dtype}[{",".join(map(str, array.dims))}]'


def _source(module: Module, computation: Computation, instruction: Instruction) -> Source:
    if instruction.opcode == 'parameter' and computation.name == module.entry:
        return Source(operand=instruction.op_name.replace("\\'", "'"))
    return source_of(module, computation, instruction)
