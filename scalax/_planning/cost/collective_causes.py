"""Why a program has a collective: its cause, its phase, and the reason that scalax wrote it for."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal

from scalax._planning.cost.collective_instances import CollectiveInstance
from scalax._planning.program.phases import Phase, phase_of
from scalax._planning.program.provenance import is_spmd_generated, nearby_instructions
from scalax._spmd.placements.collectives import COLLECTIVE_SCOPE

# JAX operations that are collectives; psum has several names.
_COLLECTIVE_OPS = (
    *('all_gather', 'all_to_all', 'pbroadcast', 'pmax', 'pmin', 'ppermute', 'psum', 'ragged_all_to_all'),
    'reduce_scatter',
)
Cause = Literal['program', 'sharding', 'resharding', 'halo', 'ring', 'padding', 'compiler']


def collective_index(instance: CollectiveInstance | None) -> int | None:
    """Returns the index of a collective that scalax wrote, from its op name; None for others."""
    match = None if instance is None else COLLECTIVE_SCOPE.search(instance.op_name)
    return None if match is None else int(match[2])


def reason_of(
    instance: CollectiveInstance,
    origin: CollectiveInstance | None,
    reasons: Mapping[int, str],
    indices: Container[int],
) -> str:
    """Returns why scalax wrote a collective; empty if it did not, or if the reason is unknown.

    Args:
        instance: the collective.
        origin: the collective of the partitioner's program that it comes from; None if that is unknown.
        reasons: index -> reason.
        indices: the indices of all collectives of the program. A collective without an index is never the
            same as one with an index, even if it seems to come from it.
    """
    index = collective_index(instance)
    if index is None:
        index = collective_index(origin)
        index = None if index in indices else index
    return '' if index is None else reasons.get(index, '')


def collective_phase(instance: CollectiveInstance) -> Phase:
    """Returns the phase of a collective.

    A collective that moves the state of a loop has no op name. It is in the phase of a nearby instruction, or
    of the loop.
    """
    if instance.op_name:
        return phase_of(instance.op_name)
    parent = instance.parent
    nearby = nearby_instructions(instance.computation, instance.instruction)
    phases = [parent.phase_of(item) for item in nearby if item.opcode != 'parameter']
    if parent.caller is not None:
        phases.append(parent.phase_of(parent.caller))
    return next((phase for phase in phases if phase != 'other'), 'other')


def is_scattered(instance: CollectiveInstance, group: int) -> bool:
    """Whether each device uses only a slice of an all-reduce, as large as its shard of a reduce-scatter."""
    users = instance.computation.users.get(instance.instruction.name, [])
    slices = [user for user in users if user.opcode == 'dynamic-slice']
    return (
        instance.kind == 'all-reduce'
        and 0 < len(slices) == len(users)
        and all(user.bytes * group == instance.instruction.bytes for user in slices)
    )


def cause_of(instance: CollectiveInstance, origin: CollectiveInstance | None) -> Cause:
    """Returns the cause of a collective, which comes from one of the partitioner's program."""
    if origin is None:
        return 'compiler'
    if instance.kind == 'collective-permute' != origin.kind:
        return 'padding'
    instruction = origin.instruction
    if COLLECTIVE_SCOPE.search(origin.op_name):
        return 'sharding'
    # Older compilers do not mark the instructions that the partitioner added.
    is_user_collective = instruction.op_name.rpartition('/')[2].startswith(_COLLECTIVE_OPS)
    if is_user_collective and not is_spmd_generated(instruction):
        return 'program'
    if origin.kind != 'collective-permute':
        is_resharding = origin.kind == 'all-gather' and _is_sliced_again(origin)
        return 'resharding' if is_resharding else 'sharding'
    if instruction.op_name.endswith('dot_general'):
        return 'ring'
    operand = origin.computation.instructions.get(instruction.operands[0])
    return 'halo' if operand is not None and operand.opcode in ('slice', 'dynamic-slice') else 'sharding'


def _is_sliced_again(instance: CollectiveInstance) -> bool:
    """Whether each device uses only a slice of the result, which depends on the device."""
    computation = instance.computation
    users = computation.users.get(instance.instruction.name, [])
    producers = [producer for user in users for producer in computation.producers_of(user)]
    depends_on_device = any(
        item.opcode == 'partition-id'
        for producer in producers
        for item in nearby_instructions(computation, producer)
    )
    return depends_on_device and all(user.opcode == 'dynamic-slice' for user in users)
