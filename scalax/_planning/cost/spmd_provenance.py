"""SPMD provenance: the collective of the SPMD partitioner that a collective of a later program comes from."""

from __future__ import annotations

import collections
import itertools
import math
import operator
import re
from collections.abc import Container, Iterable, Iterator, Sequence

from scalax._planning.cost.collective_instances import (
    COLLECTIVE_OPS,
    CollectiveInstance,
    Kind,
    MeshCollective,
    channel_of,
)
from scalax._planning.program.hlo import Computation, Instruction, Module
from scalax._spmd.placements.collectives import COLLECTIVE_SCOPE

# The kinds that later passes may turn a collective into, besides its own: a collective within and between
# slices becomes several, and a permute moves padding.
_LATER_KINDS: dict[Kind, tuple[Kind, ...]] = {
    'all-gather': ('collective-permute',),
    'all-reduce': ('reduce-scatter', 'all-gather', 'collective-permute'),
    'reduce-scatter': ('all-reduce', 'collective-permute'),
}
_CLONE = re.compile(r'\.clone(\.\d+)?$')  # which passes append to the name of a computation
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="[^"]*"')
_MAX_PADDING = 0.1  # as a fraction of the bytes of a collective
_MAX_NEIGHBORS = 300  # instructions to search around one without an op name


class PartitionerCollectives:
    """The collectives of the partitioner's program, to be matched with those of a later program.

    Args:
        collectives: the collectives.
        op_names: the op names of the collectives of the later program.
    """

    def __init__(self, collectives: Iterable[MeshCollective], op_names: Container[str] = ()) -> None:
        # Indices by channel, by the computation that adds two elements, by op name, and by its function.
        self._by_key: dict[tuple[str, str], list[MeshCollective]] = collections.defaultdict(list)
        # The collectives that scalax wrote and whose op name the later program lacks.
        self._nameless: list[MeshCollective] = []
        for collective in collectives:
            op_name = collective.instance.op_name
            if COLLECTIVE_SCOPE.search(op_name) and op_name not in op_names:
                self._nameless.append(collective)
            self._by_key['channel', collective.instance.channel].append(collective)
            if reducer := collective.instance.instruction.attribute('to_apply'):
                self._by_key['reducer', reducer].append(collective)
            self._by_key['operation', op_name].append(collective)
            if function := _function(op_name):
                self._by_key['function', function].append(collective)

    def origin(self, later: MeshCollective, module: Module) -> CollectiveInstance | None:
        """Returns the collective that a later one comes from; None if a later pass added it.

        Both have the same op name. Of several candidates, the one with the same channel is preferred, then
        the same axes, kind and bytes: passes may assign new channels and change kinds, and programs of
        `shard_map` use one channel for all. A collective without an op name is matched by the computation
        that it reduces with; or it comes from the only similar one that has lost its name, or is matched by
        its channel, or by the instructions next to it.

        Args:
            later: the collective of the later program.
            module: the later program.
        """
        instance = later.instance
        candidates: Sequence[MeshCollective] = []
        if instance.op_name:
            candidates = self._by_key.get(('operation', instance.op_name), [])
        if not candidates and not instance.parent.op_name(instance.instruction):
            # If it is in a fusion, its op name was that of a concurrent matmul.
            candidates = (
                self._with_same_reducer(later)
                or self._matching_nameless(later)
                or self._in_scope(later, module)
                or self._near(later, module)
            )
        best = max(candidates, key=lambda candidate: _similarity(later, candidate), default=None)
        return None if best is None else best.instance

    def _with_same_reducer(self, later: MeshCollective) -> list[MeshCollective]:
        """Returns the collectives that reduce with the same computation, or with that of which it is a clone.

        Before optimizations, each reduction has a computation of its own.
        """
        same = (
            [item for item in self._by_key.get(('reducer', name), ()) if _may_become(item, later)]
            for name in _reducers(later.instance.instruction)
        )
        return next(filter(None, same), [])

    def _near(self, later: MeshCollective, module: Module) -> Sequence[MeshCollective]:
        """Returns the collectives of the nearest instructions that may have become a later one."""
        nearby = [self._by_key[key] for key in _keys_near(later.instance, module) if key in self._by_key]
        matches = (
            *(_with_same_form(later, collectives) for collectives in nearby),
            *(_possible_origins(later, collectives) for collectives in nearby),
        )
        return next((collectives for collectives in matches if collectives), [])

    def _in_scope(self, later: MeshCollective, module: Module) -> list[MeshCollective]:
        """Returns the only collective that lost its name in the scope of a nearby instruction."""
        for instruction in itertools.islice(_neighborhood(*later.instance.holder), _MAX_NEIGHBORS):
            scope = later.instance.parent.op_name(instruction).rpartition('/')[0]
            matches = [
                item
                for item in self._nameless
                if COLLECTIVE_SCOPE.split(item.instance.op_name)[0] == f'{scope}/'
                and _may_become(item, later)
                and _has_dims_around(item.instance, later.instance)
            ]
            if matches:
                return matches if len(matches) == 1 else []
        return []

    def _matching_nameless(self, later: MeshCollective) -> list[MeshCollective]:
        """Returns the collectives that lost a name, if one name only has the axes, kind and bytes of another.

        The bytes of the later collective may include padding.
        """
        size = later.instance.full_bytes(later.group)
        matches = [
            candidate
            for candidate in self._nameless
            if candidate.axes == later.axes
            and candidate.instance.kind == later.instance.kind
            and 0 <= size - candidate.instance.full_bytes(candidate.group) <= _MAX_PADDING * size
        ]
        return matches if len({match.instance.op_name for match in matches}) == 1 else []


def _keys_near(instance: CollectiveInstance, module: Module) -> Iterator[tuple[str, str]]:
    """Yields the channels and op names of the instructions around a collective, the nearest first."""
    computation, holder = instance.holder
    for instruction in itertools.islice(_neighborhood(computation, holder), _MAX_NEIGHBORS):
        for item in _instructions_of(instruction, module):
            yield from (('reducer', name) for name in _reducers(item))
        yield from (('channel', channel) for channel in _channels(instruction, module))
        if op_name := instance.parent.op_name(instruction):
            yield 'operation', op_name
            yield 'function', _function(op_name)
    yield 'operation', ''


def _similarity(later: MeshCollective, candidate: MeshCollective) -> tuple[bool, bool, bool, bool]:
    """Compares channel, mesh axes, kind and bytes of two collectives."""
    size, arrays = later.instance.full_bytes(later.group), later.instance.instruction.arrays
    total = sum(array.bytes for array in arrays) or 1
    # The later one may combine several collectives. Then one of its arrays is that of the candidate.
    sizes = (size, *(size * array.bytes // total for array in arrays))
    return (
        candidate.instance.channel == later.instance.channel,
        candidate.axes == later.axes,
        candidate.instance.kind == later.instance.kind,
        candidate.instance.full_bytes(later.group) in sizes,
    )


def _with_same_form(later: MeshCollective, candidates: Sequence[MeshCollective]) -> list[MeshCollective]:
    """Returns the candidates with the same axes, kind and bytes."""
    return [candidate for candidate in candidates if all(_similarity(later, candidate)[1:])]


def _possible_origins(later: MeshCollective, candidates: Sequence[MeshCollective]) -> list[MeshCollective]:
    """Returns the candidates that may have become a collective; of several, those of the same form."""
    possible = [candidate for candidate in candidates if _may_become(candidate, later)]
    if len({candidate.instance.instruction.name for candidate in possible}) <= 1:
        return possible
    return _with_same_form(later, possible)


def _may_become(candidate: MeshCollective, later: MeshCollective) -> bool:
    kind, later_kind = candidate.instance.kind, later.instance.kind
    if (kind, later_kind) == ('all-gather', 'all-reduce'):  # an all-reduce of zero-padded shards, on all axes
        return later.axes == candidate.axes
    return {*later.axes} <= {*candidate.axes} and later_kind in (kind, *_LATER_KINDS.get(kind, ()))


def _has_dims_around(instance: CollectiveInstance, later: CollectiveInstance) -> bool:
    """Whether a later collective has the dimensions before and after the one that a gather concatenates.

    It may have split them.
    """
    dim = int((instance.instruction.attribute('dimensions') or '{0}').strip('{}'))
    shape, later_shape = (item.instruction.arrays[0].dims for item in (instance, later))
    before = itertools.accumulate(later_shape, operator.mul, initial=1)
    after = itertools.accumulate(reversed(later_shape), operator.mul, initial=1)
    return math.prod(shape[:dim]) in before and math.prod(shape[dim + 1 :]) in after


def _function(op_name: str) -> str:
    """Returns the enclosing JAX function of an op name, such as ``.../jit(dynamic_index_in_dim)``; or ''."""
    function = op_name.rpartition('/')[0]
    return function if function.endswith(')') and '/jit(' in f'/{function.rpartition("/")[2]}' else ''


def _neighborhood(computation: Computation, start: Instruction) -> Iterator[Instruction]:
    """Yields an instruction, its users and operands, their users and operands, and so on."""
    todo, seen = collections.deque([start]), {start.name}
    if match := _RENDEZVOUS.search(start.attributes):  # another instruction sent what this one receives
        todo += (item for item in computation.instructions.values() if match[0] in item.attributes)
    while todo:
        instruction = todo.popleft()
        yield instruction
        users = computation.users.get(instruction.name, ())
        for neighbor in (*users, *computation.producers_of(instruction)):
            if neighbor.name not in seen:
                seen.add(neighbor.name)
                todo.append(neighbor)


def _reducers(instruction: Instruction) -> Iterator[str]:
    """Yields the computation that a collective reduces with, and the computations that it is a clone of."""
    name = instruction.attribute('to_apply') if instruction.opcode in COLLECTIVE_OPS else None
    while name:
        yield name
        name = _CLONE.sub('', name) if _CLONE.search(name) else None


def _instructions_of(instruction: Instruction, module: Module) -> Iterator[Instruction]:
    """Yields an instruction, and the instructions of the computations that it calls."""
    called = module.called(instruction, 'calls')
    yield instruction
    yield from itertools.chain.from_iterable(computation.instructions.values() for computation in called)


def _channels(instruction: Instruction, module: Module) -> Iterator[str]:
    """Yields the channels of the collectives that an instruction is or contains."""
    if instruction.opcode not in ('send', 'recv'):  # their channels are of another kind
        yield from filter(None, map(channel_of, _instructions_of(instruction, module)))
