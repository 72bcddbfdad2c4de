"""Memory of a program: its totals, and its layout from the tables of the compilers for TPUs and GPUs.

Arrays that live as long as the program (arguments, outputs, constants) have an allocation each. All others
share one, each at an offset while it is live, so that there are gaps between them.
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
        outputs: the outputs, except those that reuse the buffers of donated arguments.
        temporaries: everything else, including the gaps between arrays.
        donated: the arguments whose buffers outputs reuse.
        estimated: whether the counts are estimates, because they are those of XLA for CPUs, which stand in
            for other hardware.
        peak: the largest number of live bytes at any time. The program allocates `total`, including gaps,
            which are used at other times. It equals `total` if the compiler does not report it.
        limit: the memory of the device that a program can use; None if unknown.
        host: the bytes that the program allocates in host memory, per device.
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
        """The bytes that the program allocates on a device: arguments, outputs and temporaries."""
        return self.arguments + self.outputs + self.temporaries


class MemoryTables(NamedTuple):
    """The text of the compiler's tables about memory.

    Attributes:
        report: the use of each memory space (``memory-usage-report``).
        assignment: the allocations and offsets of values (``buffer-assignment``).
        live: the live ranges of values (``live-range``).
    """

    report: str
    assignment: str
    live: str


class Value(NamedTuple):
    """A value of the program at its offset in an allocation.

    Attributes:
        instruction: the name of the instruction that produces it.
        element: its index in the tuple of the instruction, such as ``'0'`` or ``'1,2'``; empty without a
            tuple.
        bytes: its bytes, including padding.
        offset: its offset in the allocation.
        array: its type and shape; empty for a tuple, which is a table of addresses.
    """

    instruction: str
    element: str
    bytes: int
    offset: int
    array: str


class Allocation(NamedTuple):
    """A contiguous piece of memory.

    Attributes:
        space: its memory space.
        bytes: its size.
        parameter: whether it contains an argument.
        output: whether it contains an output, possibly one that reuses the buffer of an argument.
        shared: whether its values share it, each while it is live.
        values: the values that are in it at some time.
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
        totals: memory space -> the bytes that the program allocates in it.
        allocations: the allocations in the main memory of a device.
        live_at_peak: the bytes that are live in it at the peak, each with its value; None for an allocation
            without values.
    """

    totals: Mapping[int, int]
    allocations: Sequence[Allocation]
    live_at_peak: Sequence[tuple[int, Value | None]]


def read_layout(tables: MemoryTables, one_memory: bool = False) -> MemoryLayout:
    """Parses the tables of one program.

    Args:
        tables: the tables.
        one_memory: as for `parse`.

    Raises:
        PlanError: the tables are written in an unknown form.
    """
    is_main = (lambda space: space != HOST) if one_memory else (lambda space: space == MAIN)
    totals = collections.Counter[int]()
    for space, size in _TOTAL.findall(tables.report):
        totals[MAIN if is_main(int(space)) else int(space)] += int(size)
    allocations = [item for item in _allocations(tables.assignment) if is_main(item.space)]
    live = {
        (match[1], match[2]): (int(match[3]), int(match[4]))
        for match in map(_LIVE.match, tables.live.splitlines())
        if match
    }
    if MAIN not in totals or not allocations or not live:
        raise PlanError('the compiler wrote the memory of the program in an unknown form')
    shared = [
        [(value, *_live_range(value, live)) for value in item.values] for item in allocations if item.shared
    ]
    # If an output reuses the buffer of an argument, the argument comes first.
    always_live = [(item.bytes, next(iter(item.values), None)) for item in allocations if not item.shared]
    live_at_peak = [*((value.bytes, value) for value in _live_at_peak(shared)), *always_live]
    return MemoryLayout(totals, allocations, live_at_peak)


_Live = tuple[Value, int, int]
"""A value, and the first and the last time at which it is live."""


def _live_range(value: Value, live: Mapping[tuple[str, str], tuple[int, int]]) -> tuple[int, int]:
    key = value.instruction, value.element
    if key not in live:
        raise PlanError(f'the compiler wrote live ranges in an unknown form: {key[0]!r} has none')
    return live[key]


def _live_at_peak(shared: Sequence[Sequence[_Live]]) -> list[Value]:
    """Returns the values in shared allocations at the time when they have the most live bytes.

    Live values may overlap, because one may reuse the memory of another at the last time of that one. So the
    sum of the live values is an upper bound, and times are searched in the order of this bound.
    """
    changes = collections.Counter[int]()
    for value, first, last in itertools.chain.from_iterable(shared):
        changes[first] += value.bytes
        changes[last + 1] -= value.bytes
    times = sorted(changes)
    bounds = zip(itertools.accumulate(changes[time] for time in times), times, strict=True)
    peak, live_at_peak = 0, list[Value]()
    for bound, time in sorted(bounds, key=lambda pair: -pair[0]):
        if bound <= peak:
            break
        live = [*itertools.chain.from_iterable(_live_at(values, time) for values in shared)]
        if (size := sum(value.bytes for value in live)) > peak:
            peak, live_at_peak = size, live
    return live_at_peak


def _live_at(values: Sequence[_Live], time: int) -> Iterator[Value]:
    """Yields the live values of an allocation at one time, without values that overlap an earlier one."""
    live = (value for value, first, last in values if first <= time <= last)
    end = 0
    for value in sorted(live, key=lambda value: (value.offset, -value.bytes)):
        if value.offset >= end:
            end = value.offset + value.bytes
            yield value


def _allocations(assignment: str) -> list[Allocation]:
    allocations: list[Allocation] = []
    for line in assignment.splitlines():
        if line.startswith('allocation '):
            match = _ALLOCATION.match(line)
            if match is None:
                raise PlanError(f'the compiler wrote an allocation in an unknown form: {line[:200]!r}')
            is_output, is_shared = 'maybe-live-out' in line, 'preallocated-temp' in line
            space, size, is_parameter = int(match[2] or MAIN), int(match[1]), ', parameter ' in line
            allocations.append(Allocation(space, size, is_parameter, is_output, is_shared, []))
        elif line.startswith(' value:'):
            match = _VALUE.match(line)
            if match is None or not allocations:
                raise PlanError(f'the compiler wrote a value in an unknown form: {line[:200]!r}')
            array = _ARRAY.match(match[5])
            size, offset = int(match[3]), int(match[4])
            value = Value(match[1], match[2] or '', size, offset, array[0] if array else '')
            allocations[-1].values.append(value)
    return allocations


def assigned_memory(layout: MemoryLayout) -> Memory:
    """Returns the memory of a program from the layout of a compiler for TPUs or GPUs."""
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
        peak=sum(size for size, _ in layout.live_at_peak),
        host=layout.totals.get(HOST, 0),
    )


def constant_bytes(module: Module) -> int:
    """Returns the bytes of the array constants of a program."""
    return sum(
        instruction.bytes
        for _, instruction in module.instructions()
        if instruction.opcode == 'constant' and any(array.dims for array in instruction.arrays)
    )
