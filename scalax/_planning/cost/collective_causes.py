"""Why a program has a collective: its cause, its part of a step, and the reason for which scalax wrote it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal

from scalax._planning.cost.collective_instances import CollectiveInstance
from scalax._planning.program.phases import Phase, phase_of
from scalax._planning.program.provenance import is_spmd_generated, nearby_instructions
from scalax._spmd.placements.collectives import COLLECTIVE_SCOPE

# The operations of JAX that ask for collectives; psum has several names.
_ASKED_FOR = (
    *('all_gather', 'all_to_all', 'pbroadcast', 'pmax', 'pmin', 'ppermute', 'psum', 'ragged_all_to_all'),
    'reduce_scatter',
)
Cause = Literal['program', 'sharding', 'resharding', 'halo', 'ring', 'padding', 'compiler']


def collective_index(run: CollectiveInstance | None) -> int | None:
    """Returns the number of a collective that scalax wrote, which is in the name of its operation."""
    found = None if run is None else COLLECTIVE_SCOPE.search(run.op_name)
    return None if found is None else int(found[2])


def reason_of(
    run: CollectiveInstance,
    origin: CollectiveInstance | None,
    reasons: Mapping[int, str],
    numbers: Container[int],
) -> str:
    """Returns why scalax wrote a collective; empty if it did not, or if that is not known.

    Args:
        run: the collective.
        origin: the collective of the partitioner's program that it comes from, as far as is known.
        reasons: the reasons, by numbers.
        numbers: those of all collectives of the program. One of them without a number is another one than
            those that have theirs, whatever is next to it.
    """
    number = collective_index(run)
    if number is None:
        number = collective_index(origin)
        number = None if number in numbers else number
    return '' if number is None else reasons.get(number, '')


def collective_phase(run: CollectiveInstance) -> Phase:
    """The part of a step that a collective belongs to.

    That which moves the state of a loop has no op name. It is part of what is next to it, else of the loop.
    """
    if run.op_name:
        return phase_of(run.op_name)
    visit = run.visit
    near = nearby_instructions(run.computation, run.instruction)
    parts = [visit.phase_of(item) for item in near if item.opcode != 'parameter']
    if visit.caller is not None:
        parts.append(visit.phase_of(visit.caller))
    return next((part for part in parts if part != 'other'), 'other')


def is_scattered(run: CollectiveInstance, group: int) -> bool:
    """Whether only slices of an all-reduce are used, each as large as the part of a device of its group."""
    users = run.computation.users.get(run.instruction.name, [])
    slices = [user for user in users if user.opcode == 'dynamic-slice']
    return (
        run.kind == 'all-reduce'
        and 0 < len(slices) == len(users)
        and all(user.bytes * group == run.instruction.bytes for user in slices)
    )


def cause_of(run: CollectiveInstance, origin: CollectiveInstance | None) -> Cause:
    """Why a program has a collective, which comes from one of the partitioner's."""
    if origin is None:
        return 'compiler'
    if run.kind == 'collective-permute' != origin.kind:
        return 'padding'
    instruction = origin.instruction
    if COLLECTIVE_SCOPE.search(origin.op_name):
        return 'sharding'
    # Older compilers do not mark what the partitioner added.
    asked = instruction.op_name.rpartition('/')[2].startswith(_ASKED_FOR)
    if asked and not is_spmd_generated(instruction):
        return 'program'
    if origin.kind != 'collective-permute':
        return 'resharding' if origin.kind == 'all-gather' and _is_sliced_again(origin) else 'sharding'
    if instruction.op_name.endswith('dot_general'):
        return 'ring'
    moved = origin.computation.instructions.get(instruction.operands[0])
    return 'halo' if moved is not None and moved.opcode in ('slice', 'dynamic-slice') else 'sharding'


def _is_sliced_again(run: CollectiveInstance) -> bool:
    """Whether each device keeps of the result no more than a block of its own."""
    computation = run.computation
    users = computation.users.get(run.instruction.name, [])
    places = [maker for user in users for maker in computation.producers_of(user)]
    by_device = any(
        near.opcode == 'partition-id' for each in places for near in nearby_instructions(computation, each)
    )
    return by_device and all(user.opcode == 'dynamic-slice' for user in users)
