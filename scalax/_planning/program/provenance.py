"""Provenance of instructions: the annotation and the line of Python in the user's program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from scalax._core.util.user_frames import file_text, innermost_user_frame, is_cell
from scalax._planning.program.counting import Phase, phase_of
from scalax._planning.program.hlo import Computation, Frame, Instruction, Module
from scalax._spmd.pipelines.summary import PIPELINE_SCOPE

_ANNOTATION = re.compile(r'annotation\(([^()]*)\)')
# Instructions that only forward a value.
_FORWARDS = {
    *('bitcast', 'bitcast-convert', 'broadcast', 'convert', 'copy', 'dynamic-slice', 'get-tuple-element'),
    *('reshape', 'slice', 'transpose', 'tuple'),
}
_FAR = 4
_MOVED = 'is_spmd_generated="true"'
# The parts of a step, in the order in which a value that all of them use is needed.
_IN_ORDER: tuple[Phase, ...] = ('forward', 'recomputed', 'backward', 'update', 'other')
_COMPUTES = ('all-reduce', 'reduce-scatter')


class Source(NamedTuple):
    """A place in the user's program; fields that are not known are empty.

    Attributes:
        annotation: the name of the `with_sharding_annotation` that it comes from.
        file: the path of the file; of the cell of a notebook, its number, such as ``'In[5]'``.
        line: the line, from 1.
        function: the function.
        operand: the argument, if it is moved before anything is computed from it.
    """

    annotation: str = ''
    file: str = ''
    line: int = 0
    function: str = ''
    operand: str = ''

    def __str__(self) -> str:
        function = self.function.rpartition('<locals>.')[2]
        place = f'{file_text(self.file)}:{self.line} {function}'.rstrip() if self.file else ''
        named = f'annotation {self.annotation!r}' if self.annotation else ''
        moved = f'argument {self.operand}' if self.operand else ''
        return ', '.join(part for part in (named, place or moved) if part) or 'not known'


def is_of_the_partitioner(instruction: Instruction) -> bool:
    """Whether the partitioner added an instruction, which the user's program does not have."""
    return _MOVED in instruction.attributes


def source_of(module: Module, computation: Computation, instruction: Instruction) -> Source:
    """The place in the user's program that an instruction comes from.

    The partitioner puts a collective where a value is made or where it is used, so an annotation may be at
    either. The line is that of the instruction itself, or of the first user if the partitioner moves a value
    for its users; otherwise that of the nearest instruction with a line. What a pipeline sends has that of
    the loop.
    """
    if sent := PIPELINE_SCOPE.search(instruction.op_name):
        what, file, line, function = sent.groups()
        return Source(file=file, line=int(line), function=f'{function}, {what}')
    near = [*neighbourhood(computation, instruction)]
    annotation = next((found[1] for item in near for found in _ANNOTATION.finditer(item.op_name)), '')
    for item in near:
        frame = _users_frame(module, item)
        if frame is not None:
            file = file_text(frame.file) if is_cell(frame.file) else frame.file
            return Source(annotation, file, frame.line, frame.function)
    # An argument has no line; its op_name is its name.
    given = next((item.op_name for item in near if item.opcode == 'parameter' and item.op_name), '')
    return Source(annotation, operand=given)


def _users_frame(module: Module, instruction: Instruction) -> Frame | None:
    return innermost_user_frame(module.stack(instruction.frame), lambda each: each.file)


def frame_number(module: Module, computation: Computation, instruction: Instruction) -> int:
    """The stack frame that `source_of` reads; 0 if there is none."""
    near = neighbourhood(computation, instruction)
    return next((item.frame for item in near if _users_frame(module, item) is not None), 0)


def neighbourhood(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """An instruction, its users and its operands, the nearest first.

    Users come before an instruction that the partitioner added to move a value for them.
    """
    users = [*_users(computation, instruction)]
    if moves_for_users(instruction):
        yield from users
    yield instruction
    yield from users
    yield from _reached(instruction, computation.makers_of)


def moves_for_users(instruction: Instruction) -> bool:
    """Whether the partitioner added an instruction to move a value for its users, and to compute nothing."""
    return is_of_the_partitioner(instruction) and instruction.opcode not in _COMPUTES


def users_name(
    computation: Computation, instruction: Instruction, name_of: Callable[[Instruction], str]
) -> str:
    """The op name of the first operation that a value is moved for; empty for other instructions.

    What moves a value has the name of the operation that makes it, or of the argument that it is (JAX 0.12).
    It runs when the first of its users does.

    Args:
        computation: the computation that holds the instruction.
        instruction: the instruction.
        name_of: gives the whole op name of an instruction.
    """
    users = _users(computation, instruction) if moves_for_users(instruction) else ()
    names = [name for user in users if '/' in (name := name_of(user))]
    return min(names, key=lambda name: _IN_ORDER.index(phase_of(name)), default='')


def _users(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    return _reached(instruction, lambda item: computation.users.get(item.name, []))


def _reached(
    start: Instruction, step: Callable[[Instruction], Iterable[Instruction]]
) -> Iterator[Instruction]:
    """The instructions reached by a few steps through those that only forward a value, the nearest first."""
    level = [start]
    for _ in range(_FAR):
        level = [other for item in level for other in step(item)]
        yield from level
        level = [item for item in level if item.opcode in _FORWARDS]
