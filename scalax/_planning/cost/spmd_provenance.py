"""The program as the SPMD partitioner left it: the origin of what a later program runs."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Sequence

from scalax._planning.cost.collective_instances import CollectiveInstance, Kind, MeshCollective, channel_of
from scalax._planning.program.hlo import Computation, Instruction, Module
from scalax._spmd.placements.collectives import COLLECTIVE_SCOPE

# What a collective may become, beside its own kind: between slices and inside of them it is several, and a
# permute moves what was padded.
_BECOMES: dict[Kind, tuple[Kind, ...]] = {
    'all-gather': ('collective-permute',),
    'all-reduce': ('reduce-scatter', 'all-gather', 'collective-permute'),
    'reduce-scatter': ('all-reduce', 'collective-permute'),
}
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="[^"]*"')
_PADDING = 0.1  # of the bytes of a collective
_FAR = 300  # instructions to look at around one without an op name


class PartitionerCollectives:
    """The collectives of the partitioner's program, to be found again from those of a later one.

    Args:
        runs: the collectives.
        names: the names of the operations of collectives in the later program.
    """

    def __init__(self, runs: Iterable[MeshCollective], names: Container[str] = ()) -> None:
        # By what tells of each: its channel, its operation, and the function of that.
        self._known: dict[tuple[str, str], list[MeshCollective]] = collections.defaultdict(list)
        # Collectives with numbers of their own that no name of the later program has.
        self._unnamed: list[MeshCollective] = []
        for each in runs:
            if COLLECTIVE_SCOPE.search(each.run.op_name) and each.run.op_name not in names:
                self._unnamed.append(each)
            self._known['channel', each.run.channel].append(each)
            self._known['operation', each.run.op_name].append(each)
            if function := _function(each.run.op_name):
                self._known['function', function].append(each)

    def origin(self, wanted: MeshCollective, later: Module) -> CollectiveInstance | None:
        """The collective that one of a later program comes from; None for one that a later pass added.

        Both come from the same operation of the traced program. Of several, it is the one with the same
        channel, else along the same axes, of the same kind, of the same bytes: passes may give new channels
        and change kinds, and programs of `shard_map` give one channel to all. A collective without an
        operation is the only one like it that has lost its name, or is recognized by its channel, or by what
        is next to it.

        Args:
            wanted: the collective of the later program.
            later: that program.
        """
        if wanted.run.op_name:
            alike: Sequence[MeshCollective] = self._known.get(('operation', wanted.run.op_name), [])
        elif unnamed := self._without_name(wanted):
            alike = unnamed
        else:
            near = [self._known[key] for key in _keys_near(wanted.run, later) if key in self._known]
            found = (*(_equal(wanted, some) for some in near), *(_among(wanted, some) for some in near))
            alike = next((some for some in found if some), [])
        best = max(alike, key=lambda other: _likeness(wanted, other), default=None)
        return None if best is None else best.run

    def _without_name(self, wanted: MeshCollective) -> list[MeshCollective]:
        """Returns the collective that has lost its name, if one alone is of the axes, kind and bytes of one.

        The bytes may include padding.
        """
        size = wanted.run.whole_bytes(wanted.group)
        found = [
            other
            for other in self._unnamed
            if other.axes == wanted.axes
            and other.run.kind == wanted.run.kind
            and 0 <= size - other.run.whole_bytes(other.group) <= _PADDING * size
        ]
        return found if len({other.run.op_name for other in found}) == 1 else []


def _keys_near(run: CollectiveInstance, later: Module) -> Iterator[tuple[str, str]]:
    """The channels and operations of the instructions around a collective, the nearest first."""
    computation, holder = run.holder
    for instruction in itertools.islice(_around(computation, holder), _FAR):
        yield from (('channel', channel) for channel in _channels(instruction, later))
        if op_name := run.visit.op_name(instruction):
            yield 'operation', op_name
            yield 'function', _function(op_name)
    yield 'operation', ''


def _likeness(wanted: MeshCollective, other: MeshCollective) -> tuple[bool, bool, bool, bool]:
    """In what two agree: channel, mesh axes, kind, bytes."""
    whole, arrays = wanted.run.whole_bytes(wanted.group), wanted.run.instruction.arrays
    together = sum(array.bytes for array in arrays) or 1
    # It may be several that were combined: then one of its arrays is the other.
    sizes = (whole, *(whole * array.bytes // together for array in arrays))
    return (
        other.run.channel == wanted.run.channel,
        other.axes == wanted.axes,
        other.run.kind == wanted.run.kind,
        other.run.whole_bytes(wanted.group) in sizes,
    )


def _equal(wanted: MeshCollective, others: Sequence[MeshCollective]) -> list[MeshCollective]:
    """Those of the same axes, kind and bytes."""
    return [other for other in others if all(_likeness(wanted, other)[1:])]


def _among(wanted: MeshCollective, others: Sequence[MeshCollective]) -> list[MeshCollective]:
    """Those that may have become this; if there are several, those of its axes, kind and bytes."""
    fitting = [other for other in others if _may_become(other, wanted)]
    if len({other.run.instruction.name for other in fitting}) <= 1:
        return fitting
    return _equal(wanted, fitting)


def _may_become(other: MeshCollective, wanted: MeshCollective) -> bool:
    kind, own = other.run.kind, wanted.run.kind
    if (kind, own) == ('all-gather', 'all-reduce'):  # a sum with zeros, along all of its axes
        return wanted.axes == other.axes
    return {*wanted.axes} <= {*other.axes} and own in (kind, *_BECOMES.get(kind, ()))


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
        for other in (*computation.users.get(instruction.name, ()), *computation.producers_of(instruction)):
            if other.name not in seen:
                seen.add(other.name)
                todo.append(other)


def _channels(instruction: Instruction, module: Module) -> Iterator[str]:
    """The channels of the collectives that an instruction is or holds."""
    held = module.called(instruction, 'calls')
    inside = itertools.chain.from_iterable(computation.instructions.values() for computation in held)
    if instruction.opcode not in ('send', 'recv'):  # whose channels are of another kind
        yield from filter(None, map(channel_of, (instruction, *inside)))
