"""Provenance of HLO instructions: the annotation and the line of the user's program that they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from scalax._core.util.user_frames import file_text, innermost_user_frame, is_cell
from scalax._planning.program.hlo import Computation, Frame, Instruction, Module
from scalax._planning.program.phases import Phase, phase_of
from scalax._spmd.pipelines.summary import PIPELINE_SCOPE

_ANNOTATION = re.compile(r'annotation\(([^()]*)\)')
# Operations that only forward a value.
_FORWARDING_OPS = {
    *('bitcast', 'bitcast-convert', 'broadcast', 'convert', 'copy', 'dynamic-slice', 'get-tuple-element'),
    *('reshape', 'slice', 'transpose', 'tuple'),
}
_MAX_HOPS = 4
_SPMD_GENERATED = 'is_spmd_generated="true"'
# The phases of a step in execution order.
_EXECUTION_ORDER: tuple[Phase, ...] = ('forward', 'recomputed', 'backward', 'update', 'other')
_REDUCING_OPS = ('all-reduce', 'reduce-scatter')


class Source(NamedTuple):
    """A location in the user's program. Unknown fields are empty.

    Attributes:
        annotation: the name of the `with_sharding_annotation` there.
        file: the path of the file; for a cell of a notebook its number, such as ``'In[5]'``.
        line: the line, from 1.
        function: the function.
        operand: the argument, if the value is an argument that is moved before anything is computed from it.
    """

    annotation: str = ''
    file: str = ''
    line: int = 0
    function: str = ''
    operand: str = ''

    def __str__(self) -> str:
        function = self.function.rpartition('<locals>.')[2]
        location = f'{file_text(self.file)}:{self.line} {function}'.rstrip() if self.file else ''
        annotation = f'annotation {self.annotation!r}' if self.annotation else ''
        argument = f'argument {self.operand}' if self.operand else ''
        return ', '.join(filter(None, (annotation, location or argument))) or 'not known'


def is_spmd_generated(instruction: Instruction) -> bool:
    """Whether the SPMD partitioner added an instruction to the user's program."""
    return _SPMD_GENERATED in instruction.attributes


def source_of(module: Module, computation: Computation, instruction: Instruction) -> Source:
    """Returns the location in the user's program that an instruction comes from.

    The partitioner puts a collective where a value is produced or where it is used, so the annotation may be
    on either side. The line is that of the instruction itself, or of the first user if the partitioner moves
    a value for its users; otherwise that of the nearest instruction with a line. Sends of a pipeline have the
    line of the loop.
    """
    if pipeline_send := PIPELINE_SCOPE.search(instruction.op_name):
        purpose, file, line, function = pipeline_send.groups()
        return Source(file=file, line=int(line), function=f'{function}, {purpose}')
    near = [*nearby_instructions(computation, instruction)]
    annotation = next((match[1] for item in near for match in _ANNOTATION.finditer(item.op_name)), '')
    for item in near:
        frame = _user_frame(module, item)
        if frame is not None:
            file = file_text(frame.file) if is_cell(frame.file) else frame.file
            return Source(annotation, file, frame.line, frame.function)
    # An argument has no line; its op_name is its name.
    argument = next((item.op_name for item in near if item.opcode == 'parameter' and item.op_name), '')
    return Source(annotation, operand=argument)


def _user_frame(module: Module, instruction: Instruction) -> Frame | None:
    return innermost_user_frame(module.stack(instruction.frame), lambda frame: frame.file)


def frame_id(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the id of the stack frame that `source_of` reads; 0 if there is none."""
    near = nearby_instructions(computation, instruction)
    return next((item.frame for item in near if _user_frame(module, item) is not None), 0)


def nearby_instructions(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """Yields an instruction, its users and its operands, the nearest first.

    Users come before an instruction that the partitioner added to move a value for them.
    """
    users = [*_users(computation, instruction)]
    if moves_for_users(instruction):
        yield from users
    yield instruction
    yield from users
    yield from _reachable(instruction, computation.producers_of)


def moves_for_users(instruction: Instruction) -> bool:
    """Whether the partitioner added an instruction that only moves a value for its users."""
    return is_spmd_generated(instruction) and instruction.opcode not in _REDUCING_OPS


def first_user_op_name(
    computation: Computation, instruction: Instruction, name_of: Callable[[Instruction], str]
) -> str:
    """Returns the op name of the first user of a moved value; empty unless the instruction moves a value.

    An instruction that moves a value has the name of the operation that produces it, or of the argument (JAX
    0.12), but it runs when the first of its users does.

    Args:
        computation: the computation that holds the instruction.
        instruction: the instruction.
        name_of: returns the full op name of an instruction.
    """
    users = _users(computation, instruction) if moves_for_users(instruction) else ()
    names = [name for user in users if '/' in (name := name_of(user))]
    return min(names, key=lambda name: _EXECUTION_ORDER.index(phase_of(name)), default='')


def _users(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    return _reachable(instruction, lambda item: computation.users.get(item.name, []))


def _reachable(
    start: Instruction, step: Callable[[Instruction], Iterable[Instruction]]
) -> Iterator[Instruction]:
    """Yields the instructions a few hops away, through operations that forward a value; nearest first."""
    level = [start]
    for _ in range(_MAX_HOPS):
        level = [neighbor for item in level for neighbor in step(item)]
        yield from level
        level = [item for item in level if item.opcode in _FORWARDING_OPS]
