"""The program as the SPMD partitioner left it: the origin of what a later program runs."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from scalax._plan.collective_runs import Kind, Run, channel_of, runs
from scalax._plan.hlo import Computation, Instruction, Module

# What a collective may become, beside its own kind: between slices and inside of them it is several, and a
# permute moves what was padded.
_BECOMES: dict[Kind, tuple[Kind, ...]] = {
    'all-gather': ('collective-permute',),
    'all-reduce': ('reduce-scatter', 'all-gather', 'collective-permute'),
    'reduce-scatter': ('all-reduce', 'collective-permute'),
}
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="[^"]*"')
_FAR = 300  # instructions to look at around one without an op name


class Partitioned:
    """The collectives of the partitioner's program, to be found again from those of a later one.

    Attributes:
        module: the program.
    """

    def __init__(self, module: Module, axes_of: Callable[[Run], tuple[str, ...]]) -> None:
        """Reads a program; *axes_of* gives the mesh axes of one of its collectives."""
        self.module = module
        self._by_op_name: dict[str, list[_Origin]] = collections.defaultdict(list)
        self._by_function: dict[str, list[_Origin]] = collections.defaultdict(list)
        self._by_channel: dict[str, list[_Origin]] = collections.defaultdict(list)
        for run in runs(module):
            origin = _Origin(run, axes_of(run))
            self._by_op_name[run.op_name].append(origin)
            if function := _function(run.op_name):
                self._by_function[function].append(origin)
            self._by_channel[run.channel].append(origin)

    def origin(self, run: Run, later: Module, axes: tuple[str, ...], group: int) -> Run | None:
        """The collective that one of a later program comes from; None for one that a later pass added.

        Both come from the same operation of the traced program. Of several, it is the one with the same
        channel, else along the same axes, of the same kind, of the same bytes: passes may give new channels
        and change kinds, and programs of `shard_map` give one channel to all. A collective without an
        operation is recognized by its channel, or by what is next to it.

        Args:
            run: the collective of the later program.
            later: that program.
            axes: the mesh axes along which it runs.
            group: the number of devices of its groups.
        """
        wanted = _Wanted(run, axes, group)
        if run.op_name:
            alike: Sequence[_Origin] = self._by_op_name.get(run.op_name, [])
        else:
            near = [*self._near(run, later)]
            found = (*map(wanted.equal, near), *map(wanted.among, near))
            alike = next((some for some in found if some), [])
        best = max(alike, key=wanted.likeness, default=None)
        return None if best is None else best.run

    def _near(self, run: Run, later: Module) -> Iterator[list[_Origin]]:
        """The collectives with the channel or the operation of instructions around one, the nearest first."""
        computation, holder = run.holder
        for instruction in itertools.islice(_around(computation, holder), _FAR):
            yield from (self._by_channel.get(channel, []) for channel in _channels(instruction, later))
            if op_name := run.visit.op_name(instruction):
                yield self._by_op_name.get(op_name, [])
                yield self._by_function.get(_function(op_name), [])
        yield self._by_op_name.get('', [])


class _Origin(NamedTuple):
    """A collective of the partitioner's program, and its mesh axes."""

    run: Run
    axes: tuple[str, ...]


class _Wanted(NamedTuple):
    """A collective of a later program, its mesh axes, and the number of devices of its groups."""

    run: Run
    axes: tuple[str, ...]
    group: int

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Its bytes, and those of each of its arrays: it may be several that were combined."""
        whole, arrays = self.run.whole_bytes(self.group), self.run.instruction.arrays
        together = sum(array.bytes for array in arrays) or 1
        return whole, *(whole * array.bytes // together for array in arrays)

    def likeness(self, other: _Origin) -> tuple[bool, bool, bool, bool]:
        """In what they agree: channel, mesh axes, kind, bytes."""
        return (
            other.run.channel == self.run.channel,
            other.axes == self.axes,
            other.run.kind == self.run.kind,
            other.run.whole_bytes(self.group) in self._sizes,
        )

    def equal(self, origins: Sequence[_Origin]) -> list[_Origin]:
        """Those of its axes, kind and bytes."""
        return [other for other in origins if all(self.likeness(other)[1:])]

    def among(self, origins: Sequence[_Origin]) -> list[_Origin]:
        """Those that may have become this; if there are several, those of its axes, kind and bytes."""
        fitting = [other for other in origins if self._may_be(other)]
        if len({other.run.instruction.name for other in fitting}) <= 1:
            return fitting
        return self.equal(fitting)

    def _may_be(self, other: _Origin) -> bool:
        kind, own = other.run.kind, self.run.kind
        if (kind, own) == ('all-gather', 'all-reduce'):  # a sum with zeros, along all of its axes
            return self.axes == other.axes
        return {*self.axes} <= {*other.axes} and own in (kind, *_BECOMES.get(kind, ()))


def _function(op_name: str) -> str:
    """The function of JAX that an operation is in, such as ``.../jit(dynamic_index_in_dim)``; else empty."""
    function = op_name.rpartition('/')[0]
    return function if function.endswith(')') and '/jit(' in f'/{function.rpartition("/")[2]}' else ''


def _around(computation: Computation, start: Instruction) -> Iterator[Instruction]:
    """An instruction, its users and operands, theirs, and so on."""
    todo, seen = collections.deque([start]), {start.name}
    if found := _RENDEZVOUS.search(start.attributes):  # what is received was sent by another instruction
        todo += (other for other in computation.instructions.values() if found[0] in other.attributes)
    while todo:
        instruction = todo.popleft()
        yield instruction
        for other in (*computation.users.get(instruction.name, ()), *computation.makers_of(instruction)):
            if other.name not in seen:
                seen.add(other.name)
                todo.append(other)


def _channels(instruction: Instruction, module: Module) -> Iterator[str]:
    """The channels of the collectives that an instruction is or holds."""
    held = module.called(instruction, 'calls')
    inside = itertools.chain.from_iterable(computation.instructions.values() for computation in held)
    if instruction.opcode not in ('send', 'recv'):  # whose channels are of another kind
        yield from filter(None, map(channel_of, (instruction, *inside)))
