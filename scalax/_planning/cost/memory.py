"""Memory of a program: its sums, and its layout from the tables that the compilers for TPUs and GPUs write.

Arrays that live for the whole program have an allocation each: arguments, outputs, constants. All others
share one, each at an offset while it is live, so that between them are gaps.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from scalax._planning.program.hlo import HOST, MAIN, Module
from scalax.errors import PlanError

_TOTAL = re.compile(r'Memory Space: \S+ \(color=(\d+)\)\s+Total bytes: (\d+)')
_ALLOCATION = re.compile(r'allocation \d+: size (\d+)(?:, color (\d+))?, ')
_VALUE = re.compile(
    r' value: <\d+ ([^ {>]+)(?:\{([\d,]*)\})?(?: \([a-z-]+\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S*)'
)
_ARRAY = re.compile(r'\w+\[[\d,<=]*\]')
_LIVE = re.compile(r'    ([^ {]+)\{([\d,]*)\}:(\d+)-(\d+)$')


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a program runs, as the compiler counts them.

    Attributes:
        arguments: the arguments.
        outputs: the outputs, without those that take over the buffers of donated arguments.
        temporaries: everything else, with the gaps between arrays.
        donated: the bytes of arguments whose buffers outputs take over.
        estimated: whether the count is only a guide, because it is that of XLA for CPUs, which stand in for
            other hardware.
        peak: the most that arrays hold at a time. A program takes `total` of a device; the rest are gaps
            between arrays, for arrays of other times. `total` if the compiler gives no such number.
        limit: the memory of the device that a program can use; None if unknown.
        host: what the program holds in the memory of the host, for one device.
    """

    arguments: int
    outputs: int
    temporaries: int
    donated: int = 0
    estimated: bool = True
    peak: int = 0
    limit: int | None = None
    host: int = 0

    def __post_init__(self) -> None:
        if not self.peak:
            object.__setattr__(self, 'peak', self.total)

    @property
    def total(self) -> int:
        """Arguments, outputs and temporaries together: what the program takes of a device."""
        return self.arguments + self.outputs + self.temporaries


class MemoryTables(NamedTuple):
    """The tables that the compiler writes about memory.

    Attributes:
        report: the use of each memory (``memory-usage-report``).
        assignment: the positions of values (``buffer-assignment``).
        live: when values are live (``live-range``).
    """

    report: str
    assignment: str
    live: str


class Value(NamedTuple):
    """A value of the program at its position in an allocation.

    Attributes:
        instruction: the name of the instruction that makes it.
        element: the part of the instruction's tuple, such as ``'0'`` or ``'1,2'``; empty for the whole.
        bytes: its bytes, as they are padded in memory.
        offset: the first of its bytes in the allocation.
        array: its type and shape; empty for a tuple, which is a table of addresses.
    """

    instruction: str
    element: str
    bytes: int
    offset: int
    array: str


class Allocation(NamedTuple):
    """A piece of memory.

    Attributes:
        space: the number of the memory that it is in.
        bytes: its size.
        parameter: whether it holds an argument.
        output: whether it holds an output; of an argument too, if the output takes over its buffer.
        shared: whether values are in it only while they are live.
        values: those that are in it at some time.
    """

    space: int
    bytes: int
    parameter: bool
    output: bool
    shared: bool
    values: list[Value]


class MemoryLayout(NamedTuple):
    """The layout of a program in memory.

    Attributes:
        totals: number of a memory -> the bytes that the program takes of it.
        allocations: the pieces of the main memory of a device.
        held: what that holds at the moment when it holds the most: bytes, and the value that they belong to;
            None for an allocation without values.
    """

    totals: Mapping[int, int]
    allocations: Sequence[Allocation]
    held: Sequence[tuple[int, Value | None]]


def read_layout(tables: MemoryTables, one_memory: bool = False) -> MemoryLayout:
    """Reads the tables of one program.

    Args:
        tables: the tables.
        one_memory: as for `parse`.

    Raises:
        PlanError: they are written in an unknown form.
    """
    main = (lambda space: space != HOST) if one_memory else (lambda space: space == MAIN)
    totals = collections.Counter[int]()
    for space, size in _TOTAL.findall(tables.report):
        totals[MAIN if main(int(space)) else int(space)] += int(size)
    allocations = [each for each in _allocations(tables.assignment) if main(each.space)]
    live = {
        (found[1], found[2]): (int(found[3]), int(found[4]))
        for found in map(_LIVE.match, tables.live.splitlines())
        if found
    }
    if MAIN not in totals or not allocations or not live:
        raise PlanError('the compiler wrote the memory of the program in an unknown form')
    shared = [[(value, *_lifetime(value, live)) for value in a.values] for a in allocations if a.shared]
    # If an output takes over the buffer of an argument, the argument comes first.
    always = ((each.bytes, next(iter(each.values), None)) for each in allocations if not each.shared)
    return MemoryLayout(totals, allocations, [*((value.bytes, value) for value in _fullest(shared)), *always])


_Live = tuple[Value, int, int]
"""A value, and the first and the last moment when it is needed."""


def _lifetime(value: Value, live: Mapping[tuple[str, str], tuple[int, int]]) -> tuple[int, int]:
    key = value.instruction, value.element
    if key not in live:
        raise PlanError(f'the compiler wrote lifetimes in an unknown form: there is none of {key[0]!r}')
    return live[key]


def _fullest(shared: Sequence[Sequence[_Live]]) -> list[Value]:
    """The values in shared allocations at the moment when these hold the most bytes.

    Live values may have a place in common: one may take over that of another at the last moment of that one.
    So the sum of all that are live bounds what is held, and moments are tried from the largest sum.
    """
    change = collections.Counter[int]()
    for value, first, last in itertools.chain.from_iterable(shared):
        change[first] += value.bytes
        change[last + 1] -= value.bytes
    moments = sorted(change)
    bounds = zip(itertools.accumulate(change[moment] for moment in moments), moments, strict=True)
    most, fullest = 0, list[Value]()
    for bound, moment in sorted(bounds, key=lambda pair: -pair[0]):
        if bound <= most:
            break
        found = [*itertools.chain.from_iterable(_held(values, moment) for values in shared)]
        if (size := sum(value.bytes for value in found)) > most:
            most, fullest = size, found
    return fullest


def _held(values: Sequence[_Live], moment: int) -> Iterator[Value]:
    """The values in an allocation at one moment, each byte once."""
    live = (value for value, first, last in values if first <= moment <= last)
    end = 0
    for value in sorted(live, key=lambda value: (value.offset, -value.bytes)):
        if value.offset >= end:
            end = value.offset + value.bytes
            yield value


def _allocations(assignment: str) -> list[Allocation]:
    allocations: list[Allocation] = []
    for line in assignment.splitlines():
        if line.startswith('allocation '):
            found = _ALLOCATION.match(line)
            if found is None:
                raise PlanError(f'the compiler wrote an allocation in an unknown form: {line[:200]!r}')
            is_output, is_shared = 'maybe-live-out' in line, 'preallocated-temp' in line
            space, size, is_parameter = int(found[2] or MAIN), int(found[1]), ', parameter ' in line
            allocations.append(Allocation(space, size, is_parameter, is_output, is_shared, []))
        elif line.startswith(' value:'):
            found = _VALUE.match(line)
            if found is None or not allocations:
                raise PlanError(f'the compiler wrote a value in an unknown form: {line[:200]!r}')
            array = _ARRAY.match(found[5])
            size, offset = int(found[3]), int(found[4])
            value = Value(found[1], found[2] or '', size, offset, array[0] if array else '')
            allocations[-1].values.append(value)
    return allocations


def assigned_memory(layout: MemoryLayout) -> Memory:
    """The memory of a program that a compiler for TPUs or GPUs has laid out."""
    arguments = donated = outputs = 0
    for allocation in layout.allocations:
        arguments += allocation.bytes if allocation.parameter else 0
        donated += allocation.bytes if allocation.parameter and allocation.output else 0
        outputs += allocation.bytes if allocation.output and not allocation.parameter else 0
    return Memory(
        arguments,
        outputs,
        max(0, layout.totals[MAIN] - arguments - outputs),
        donated,
        estimated=False,
        peak=sum(size for size, _ in layout.held),
        host=layout.totals.get(HOST, 0),
    )


def constant_bytes(module: Module) -> int:
    """The bytes of array constants in a program."""
    return sum(
        instruction.bytes
        for _, instruction in module.instructions()
        if instruction.opcode == 'constant' and any(array.dims for array in instruction.arrays)
    )
