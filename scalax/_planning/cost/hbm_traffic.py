"""The bytes that a device reads from its memory and writes to it, by the instructions of its program.

Optimized programs say where each array is. Whatever an instruction or a fusion takes from the main memory
is read once, and what it leaves there is written once: at least so much moves, however it is tiled. Of an
operand that is sliced or gathered from, only what is taken counts; of a result that is updated in place, only
the update. Arrays in the vector memory of a chip do not count. Kernels may read any part of their operands,
so only their results count; those of libraries, such as cuBLAS, read all of them.

A program that is not optimized, as one of CPUs that stand for other hardware, has no fusions. There products
count, by the book's model (https://jax-ml.github.io/scaling-book/roofline, "Matrix multiplication"): both
operands are read and the result is written, each in its smallest form, since what is elementwise is fused
into products. The rest has to read the arguments that it uses and to write the results: `boundary`.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Container, Mapping

from scalax._planning.program.call_tree import ComputationInstance
from scalax._planning.program.hlo import MAIN, Array, Computation, Instruction, Module

PRODUCTS = ('dot', 'convolution', 'fft')
# They run other computations, or give another name to what is there.
_MOVE_NOTHING = {
    *('add-dependency', 'after-all', 'async-update', 'bitcast', 'call', 'conditional', 'constant', 'domain'),
    *('get-tuple-element', 'opt-barrier', 'parameter', 'partition-id', 'recv', 'replica-id', 'tuple'),
    'while',
}
_LIBRARY = re.compile(r'custom_call_target="__cu(?:blas|dnn)\$')
_NO_KERNELS = re.compile(r'custom_call_target="(?:AllocateBuffer|AsyncCollectiveStart|ConcatBitcast)"')
_MARKS = re.compile(r'custom_call_target="(?:xla\.sdy\.|Sharding"|SPMD)')
_RENAMES = ('bitcast', 'get-tuple-element', 'reshape')
_SLICES = ('dynamic-slice', 'gather', 'slice')
# What changes a part of its first operand -> the place of the operand with the new values.
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}
# What needs all of its operands, however little of its result is used.
_NEED_ALL = {
    *('cholesky', 'conditional', 'custom-call', 'reduce', 'reduce-window', 'select-and-scatter', 'sort'),
    *('topk', 'triangular-solve', 'while', *PRODUCTS),
}
_CALLS = ('async-start', 'call', 'fusion')
_LOOPS = ('conditional', 'custom-call', 'while')
# What a product can do to its operands as it reads them, and to its result before it is written.
_FUSED_BEFORE = {
    *('add', 'bitcast', 'bitcast-convert', 'broadcast', 'convert', 'copy', 'divide', 'iota', 'multiply'),
    *('negate', 'reshape', 'select', 'subtract', 'transpose'),
}
_FUSED_AFTER = {
    *(_FUSED_BEFORE - {'broadcast', 'iota'}),
    *('abs', 'exponential', 'logistic', 'maximum', 'minimum', 'reduce', 'slice', 'tanh'),
}

Names = Container[tuple[str, str]]
"""Instructions: the names of their computation, and their own."""


class Traffic:
    """What the instructions of a program move between the memory of a device and its cores.

    Args:
        module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._fused = {
            inside.name
            for _, each in module.instructions()
            if each.opcode in ('async-start', 'fusion')
            for inside in module.calls(each)
        }
        self._known: dict[tuple[str, int | None], Mapping[str, int]] = {}
        self._smallest: dict[str, dict[str, int]] = {}

    def bytes_of(self, visit: ComputationInstance, instruction: Instruction) -> int:
        """The bytes that one execution of an instruction moves, without computations that it calls."""
        computation, opcode = visit.computation, instruction.opcode
        if not self._module.scheduled:
            return self._of_product(computation, instruction) if opcode in PRODUCTS else 0
        if computation.name in self._fused or opcode in _MOVE_NOTHING:
            return 0
        if visit.caller is not None and visit.caller.opcode == 'custom-call':
            return 0
        read = 0 if opcode.endswith('-done') else self._read(computation, instruction)
        starts = opcode.endswith('-start') or opcode == 'send'  # what is written is the result of its end
        return read + (0 if starts else self._written(computation, instruction))

    def _read(self, computation: Computation, instruction: Instruction) -> int:
        if instruction.opcode == 'custom-call' and not _LIBRARY.search(instruction.attributes):
            return 0
        taken = collections.Counter[str]()  # what is an operand twice is read once
        for place, operand in enumerate(instruction.operands):
            taken[operand] += self._taken(computation, instruction, place, None)
        return sum(
            _part(array, min(many, math.prod(array.dims)))
            for operand, many in taken.items()
            if (array := computation.array(operand)) is not None and array.space == MAIN
        )

    def _written(self, computation: Computation, instruction: Instruction) -> int:
        amounts = zip(self._left(computation, instruction.name), instruction.arrays, strict=True)
        return sum(amount for amount, array in amounts if array.space == MAIN)

    def _left(self, computation: Computation, value: str, some: Names | None = None) -> list[int]:
        """The bytes of each array of a value that is written; none of what is given to its computation.

        Args:
            computation: that of the value.
            value: the instruction that makes it, or an element of that.
            some: only what these instructions write counts, and they are looked for behind what returns it.
        """
        name, _, element = value.partition('#')
        if element:
            return [self._left(computation, name, some)[int(element)]]
        made = computation.instructions[name]
        nothing = [0] * len(made.arrays)
        if some is not None or computation.name in self._fused:
            if _is_given(computation, name):
                return nothing
            if made.opcode == 'tuple':
                return [amount for each in made.operands for amount in self._left(computation, each, some)]
            if made.opcode in _RENAMES or _is_mark(made):
                amounts = self._left(computation, made.operands[0], some)
                return amounts if len(amounts) == 1 else [amounts[int(made.attribute('index') or 0)]]
        if some is not None and made.opcode == 'call':
            [inside] = self._module.calls(made)
            return self._left(inside, inside.root, some)
        if some is not None and (made.opcode in _LOOPS or (computation.name, name) not in some):
            return nothing
        while made.opcode in ('async-done', 'async-update'):
            made = computation.producer(made.operands[0])
        if made.opcode in ('async-start', 'fusion'):
            [inside] = self._module.calls(made)
            return self._left(inside, inside.root)
        if made.opcode == 'custom-call' and (
            'output_to_operand_aliasing=' in made.attributes or _NO_KERNELS.search(made.attributes)
        ):
            return nothing
        if made.opcode == 'custom-call' and _LIBRARY.search(made.attributes):
            return [made.arrays[0].bytes, *nothing[1:]]  # the rest is scratch
        if self._updates_in_place(computation, made):
            update = computation.array(made.operands[_UPDATES[made.opcode]])
            return [0 if update is None else update.bytes]
        return [array.bytes for array in made.arrays]

    def _updates_in_place(self, computation: Computation, instruction: Instruction) -> bool:
        if instruction.opcode not in _UPDATES or len(instruction.arrays) > 1:
            return False
        if not self._module.scheduled and not self._module.donates:
            return False  # the compiler has to copy what is updated
        return computation.name not in self._fused or _is_given(computation, instruction.operands[0])

    def _taken(self, computation: Computation, user: Instruction, place: int, of_result: int | None) -> int:
        """How many elements of one of its operands an instruction takes.

        Args:
            computation: that of the instruction.
            user: the instruction.
            place: which of its operands.
            of_result: how many elements of its result are needed; None for all, which leave the fusion.
        """
        size = _size(computation, user.operands[place])
        if user.opcode in _CALLS:
            [inside] = self._module.calls(user)
            return min(size, self._needed(inside, of_result)[inside.parameters[place]])
        if place == 0 and of_result is None and self._updates_in_place(computation, user):
            return _size(computation, user.operands[2]) if self._adds(user) else 0
        if user.opcode in _NEED_ALL or (place and (user.opcode in _SLICES or user.opcode in _UPDATES)):
            return size
        return min(size, math.prod(user.arrays[0].dims) if of_result is None else of_result)

    def _needed(self, computation: Computation, of_root: int | None) -> Mapping[str, int]:
        """How many elements of each value of a computation are needed, at most its size.

        Args:
            computation: the computation.
            of_root: how many elements are needed of what it returns; None for all, which leave the fusion.
                Parameters that it only passes on are not read then.
        """
        key = computation.name, of_root
        if key not in self._known:
            root = computation.instructions[computation.root]
            returned = root.operands if root.opcode == 'tuple' else (root.name,)
            needed = collections.Counter[str]()
            for value in returned:
                if of_root is not None or not _is_given(computation, value):
                    needed[value] = _size(computation, value) if of_root is None else of_root
            for user in reversed([*computation.instructions.values()]):
                if user.opcode == 'tuple' or not user.operands or user.opcode in ('constant', 'parameter'):
                    continue
                leaves = user.name in returned and user.opcode not in _RENAMES
                of_user = of_root if leaves or len(user.arrays) > 1 else needed[user.name]
                for place, operand in enumerate(user.operands if of_user != 0 else ()):
                    taken = self._taken(computation, user, place, of_user)
                    needed[operand] = min(_size(computation, operand), needed[operand] + taken)
            self._known[key] = needed
        return self._known[key]

    def _adds(self, update: Instruction) -> bool:
        """Whether a scatter combines its updates with what is there."""
        for combined in self._module.called(update, 'to_apply') if update.opcode == 'scatter' else ():
            return not _is_given(combined, combined.root)
        return False

    # --- Programs that are not optimized ------------------------------------------------------------

    def _of_product(self, computation: Computation, product: Instruction) -> int:
        if computation.name not in self._smallest:
            self._smallest[computation.name] = _smallest(computation)
        smallest = self._smallest[computation.name]
        read = sum({_source(computation, each): smallest[each] for each in product.operands}.values())
        written, value = product.bytes, product
        while len(users := computation.users.get(value.name, [])) == 1 and users[0].opcode in _FUSED_AFTER:
            [value] = users
            written = min(written, value.bytes)
        return read + written

    def boundary(self, some: Names) -> int:
        """The bytes that some instructions at least move: of arguments that they read, and results they make.

        Loops, branches and kernels are not looked into. What only these read or make does not count.
        """
        entry = self._module.computations[self._module.entry]
        moved = sum(self._left(entry, entry.root, some))
        for name, instruction in entry.instructions.items():
            if instruction.opcode == 'parameter' and len(instruction.arrays) == 1:
                [array] = instruction.arrays
                moved += _part(array, min(math.prod(array.dims), self._read_by(entry, name, some)))
        return moved

    def _read_by(self, entry: Computation, value: str, some: Names) -> int:
        """The elements of an argument that instructions read."""
        taken, names = 0, [(entry, value)]
        for inside, name in names:  # which grows
            for user, place in inside.uses(name):
                counts = (inside.name, user.name) in some
                if user.opcode == 'call':
                    names += [(each, each.parameters[place]) for each in self._module.calls(user)]
                elif _is_mark(user) or (user.opcode in _FUSED_BEFORE and len(user.operands) == 1):
                    names.append((inside, user.name))
                    is_result = all(each.opcode == 'tuple' for each in inside.users.get(user.name, ()))
                    if is_result and counts and inside is entry and not _is_given(entry, user.name):
                        taken += _size(entry, name)
                elif user.opcode not in (*_LOOPS, 'tuple') and counts:
                    taken += self._taken(inside, user, place, None)
        return taken


def _is_mark(instruction: Instruction) -> bool:
    """Whether an instruction does nothing but say how a value is sharded."""
    return instruction.opcode == 'custom-call' and bool(_MARKS.search(instruction.attributes))


def _source(computation: Computation, operand: str) -> str:
    """The array that an operand is, or is made of elementwise, if that is one."""
    while (made := computation.producer(operand)).opcode in _FUSED_BEFORE and len(made.operands) == 1:
        [operand] = made.operands
    return operand


def _smallest(computation: Computation) -> dict[str, int]:
    """The bytes of each array, or of what it is made of elementwise, if these are fewer."""
    smallest: dict[str, int] = {}
    for name, instruction in computation.instructions.items():
        for place, array in enumerate(instruction.arrays):
            smallest[f'{name}#{place}'] = array.bytes
        smallest[name] = instruction.bytes
        if instruction.opcode in _FUSED_BEFORE:
            parts = sum(smallest[operand] for operand in {*instruction.operands})
            smallest[name] = min(instruction.bytes, parts)
    return smallest


def _size(computation: Computation, operand: str) -> int:
    array = computation.array(operand)
    return 0 if array is None else math.prod(array.dims)


def _part(array: Array, elements: int) -> int:
    """The bytes of some elements of an array."""
    return array._replace(dims=(elements,)).bytes


def _is_given(computation: Computation, operand: str) -> bool:
    """Whether a value is a parameter of its computation, or a part of one, under another name."""
    made = computation.producer(operand)
    while made.opcode in _RENAMES or _is_mark(made):
        made = computation.producer(made.operands[0])
    return made.opcode == 'parameter'
