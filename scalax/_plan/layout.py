"""The layout of a TPU program in memory, from the tables that its compiler writes.

Arrays that live for the whole program have an allocation each: arguments, outputs, constants. All others
share one, each at an offset while it is live, so that between them are gaps.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scalax._plan.hlo import MAIN
from scalax.errors import PlanError

_TOTAL = re.compile(r'Memory Space: \S+ \(color=(\d+)\)\s+Total bytes: (\d+)')
_ALLOCATION = re.compile(r'allocation \d+: size (\d+)(?:, color (\d+))?, ')
_VALUE = re.compile(
    r' value: <\d+ ([^ {>]+)(?:\{([\d,]*)\})?(?: \([a-z-]+\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S*)'
)
_ARRAY = re.compile(r'\w+\[[\d,<=]*\]')
_LIVE = re.compile(r'    ([^ {]+)\{([\d,]*)\}:(\d+)-(\d+)$')


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
    values: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The memory of a program.

    Attributes:
        totals: number of a memory -> the bytes that the program takes of it.
        allocations: the pieces of all memories.
        live: (instruction, element) -> the first and the last moment when the value is needed.
    """

    totals: Mapping[int, int]
    allocations: tuple[Allocation, ...]
    live: Mapping[tuple[str, str], tuple[int, int]]

    def of(self, space: int) -> Iterator[Allocation]:
        """The allocations in one memory."""
        return (allocation for allocation in self.allocations if allocation.space == space)

    def check_lifetimes(self) -> None:
        """Raises PlanError if it is not known when a value of a shared allocation is live."""
        for value in itertools.chain.from_iterable(allocation.values for allocation in self._shared()):
            if (value.instruction, value.element) not in self.live:
                raise PlanError(
                    f'the compiler wrote lifetimes in an unknown form: there is none of {value.instruction!r}'
                )

    @functools.cached_property
    def held(self) -> tuple[tuple[int, Value | None], ...]:
        """What the main memory of a device holds at the moment when it holds the most.

        Bytes, and the value that they belong to; None for an allocation without values.
        """
        fullest = self._at(self._fullest_moment())
        # If an output takes over the buffer of an argument, the argument comes first.
        always = ((a.bytes, next(iter(a.values), None)) for a in self.of(MAIN) if not a.shared)
        return (*((value.bytes, value) for value in fullest), *always)

    def _fullest_moment(self) -> int:
        """The moment when shared allocations hold the most bytes.

        Live values may have a place in common: one may take over that of another at the last moment of that
        one. So the sum of all that are live bounds what is held, and moments are tried from the largest sum.
        """
        values = [(place, value) for place, each in enumerate(self._shared()) for value in each.values]
        values.sort(key=lambda pair: (pair[0], pair[1].offset))
        lifetimes = np.array([self._lifetime(value) for _, value in values], np.int64)
        first, last = lifetimes.reshape(-1, 2).T
        # One after the other, allocations are one line.
        lengths = [0, *itertools.accumulate(allocation.bytes for allocation in self._shared())]
        start = np.array([lengths[place] + value.offset for place, value in values], np.int64)
        size = np.array([value.bytes for _, value in values], np.int64)
        moments, bounds = _sums(first, last + 1, size)
        most, fullest = 0, 0
        for order in np.argsort(-bounds, kind='stable'):
            if bounds[order] <= most:
                break
            live = (first <= moments[order]) & (moments[order] <= last)
            end = np.maximum.accumulate(start[live] + size[live])
            before = np.concatenate([[0], end[:-1]])
            held = int((end - np.maximum(before, start[live])).sum())
            if held > most:
                most, fullest = held, int(moments[order])
        return fullest

    def _at(self, moment: int) -> Iterator[Value]:
        """The values in shared allocations at one moment, each byte once."""
        for allocation in self._shared():
            live = (v for v in allocation.values if self._lifetime(v)[0] <= moment <= self._lifetime(v)[1])
            end = 0
            for value in sorted(live, key=lambda value: (value.offset, -value.bytes)):
                if value.offset >= end:
                    end = value.offset + value.bytes
                    yield value

    def _shared(self) -> Iterator[Allocation]:
        return (allocation for allocation in self.of(MAIN) if allocation.shared)

    def _lifetime(self, value: Value) -> tuple[int, int]:
        """The first and the last moment when a value is needed."""
        return self.live[value.instruction, value.element]


def _sums(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The moments when something starts or ends, and the sizes of what goes on then, added up."""
    moments, place = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    change = np.zeros(len(moments), np.int64)
    np.add.at(change, place, np.concatenate([sizes, -sizes]))
    return moments, np.cumsum(change)


def read_layout(tables: MemoryTables) -> Layout:
    """Reads the tables of one program.

    Raises:
        PlanError: they are written in an unknown form.
    """
    totals = {int(space): int(size) for space, size in _TOTAL.findall(tables.report)}
    allocations = tuple(_allocations(tables.assignment))
    live = {
        (found[1], found[2]): (int(found[3]), int(found[4]))
        for found in map(_LIVE.match, tables.live.splitlines())
        if found
    }
    if MAIN not in totals or not allocations or not live:
        raise PlanError('the compiler wrote the memory of the program in an unknown form')
    layout = Layout(totals, allocations, live)
    layout.check_lifetimes()
    return layout


def _allocations(assignment: str) -> Iterator[Allocation]:
    head: str | None = None
    values: list[Value] = []
    for line in assignment.splitlines():
        if line.startswith('allocation '):
            if head is not None:
                yield _allocation(head, values)
            head, values = line, []
        elif line.startswith(' value:'):
            found = _VALUE.match(line)
            if found is None:
                raise PlanError(f'the compiler wrote a value in an unknown form: {line[:200]!r}')
            array = _ARRAY.match(found[5])
            values.append(
                Value(found[1], found[2] or '', int(found[3]), int(found[4]), array[0] if array else '')
            )
    if head is not None:
        yield _allocation(head, values)


def _allocation(head: str, values: list[Value]) -> Allocation:
    found = _ALLOCATION.match(head)
    if found is None:
        raise PlanError(f'the compiler wrote an allocation in an unknown form: {head[:200]!r}')
    return Allocation(
        space=int(found[2] or MAIN),
        bytes=int(found[1]),
        parameter=', parameter ' in head,
        output='maybe-live-out' in head,
        shared='preallocated-temp' in head,
        values=tuple(values),
    )
