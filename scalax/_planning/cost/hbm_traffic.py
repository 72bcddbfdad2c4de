"""HBM traffic: the bytes that a device reads from its memory and writes to it, per instruction.

Optimized programs contain the memory space of each array. Whatever an instruction or a fusion reads from the
main memory, or writes to it, counts once, which is a lower bound. Of an operand that is sliced or
gathered from, only the elements read count; of a result that is updated in place, only the update. Arrays in
the vector memory of a chip do not count. Custom kernels may read any part of their operands, so only their
results count; kernels of libraries, such as cuBLAS, read all operands.

A program that is not optimized, such as that for CPUs in place of other hardware, has no fusions. There
matmuls count, by the model of https://jax-ml.github.io/scaling-book/roofline ("Matrix multiplication"): both
operands are read and the result is written, each in its smallest form, because elementwise operations are
fused into matmuls. In addition the program reads the arguments that it uses and writes its results:
`Traffic.boundary`.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Container, Mapping

from scalax._planning.program.call_tree import ComputationInstance
from scalax._planning.program.hlo import MAIN, Array, Computation, Instruction, Module

MATMUL_OPS = ('dot', 'convolution', 'fft')
# Operations that only call computations or forward values.
_NO_TRAFFIC_OPS = {
    *('add-dependency', 'after-all', 'async-update', 'bitcast', 'call', 'conditional', 'constant', 'domain'),
    *('get-tuple-element', 'opt-barrier', 'parameter', 'partition-id', 'recv', 'replica-id', 'tuple'),
    'while',
}
_LIBRARY = re.compile(r'custom_call_target="__cu(?:blas|dnn)\$')
_NON_KERNELS = re.compile(r'custom_call_target="(?:AllocateBuffer|AsyncCollectiveStart|ConcatBitcast)"')
_SHARDING_MARKERS = re.compile(r'custom_call_target="(?:xla\.sdy\.|Sharding"|SPMD)')
_ALIASING_OPS = ('bitcast', 'get-tuple-element', 'reshape')
_SLICING_OPS = ('dynamic-slice', 'gather', 'slice')
# Operations that update a part of their first operand -> the index of the operand with the new values.
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}
# Operations that read all of their operands, even if only a part of the result is used.
_READ_ALL_OPS = {
    *('cholesky', 'conditional', 'custom-call', 'reduce', 'reduce-window', 'select-and-scatter', 'sort'),
    *('topk', 'triangular-solve', 'while', *MATMUL_OPS),
}
_CALLING_OPS = ('async-start', 'call', 'fusion')
_OPAQUE_OPS = ('conditional', 'custom-call', 'while')
# Operations that fuse into a matmul that reads their result, and into one that produces their operand.
_FUSED_BEFORE = {
    *('add', 'bitcast', 'bitcast-convert', 'broadcast', 'convert', 'copy', 'divide', 'iota', 'multiply'),
    *('negate', 'reshape', 'select', 'subtract', 'transpose'),
}
_FUSED_AFTER = {
    *(_FUSED_BEFORE - {'broadcast', 'iota'}),
    *('abs', 'exponential', 'logistic', 'maximum', 'minimum', 'reduce', 'slice', 'tanh'),
}

InstructionNames = Container[tuple[str, str]]
"""The names of instructions, each after the name of its computation."""


class Traffic:
    """The HBM traffic of the instructions of a program.

    Args:
        module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._fused = {
            called.name
            for _, instruction in module.instructions()
            if instruction.opcode in ('async-start', 'fusion')
            for called in module.calls(instruction)
        }
        self._elements_needed: dict[tuple[str, int | None], Mapping[str, int]] = {}
        self._smallest: dict[str, dict[str, int]] = {}

    def bytes_of(self, instance: ComputationInstance, instruction: Instruction) -> int:
        """Returns the bytes that one execution of an instruction reads and writes, without its calls."""
        computation, opcode = instance.computation, instruction.opcode
        if not self._module.scheduled:
            return self._matmul_bytes(computation, instruction) if opcode in MATMUL_OPS else 0
        if computation.name in self._fused or opcode in _NO_TRAFFIC_OPS:
            return 0
        if instance.caller is not None and instance.caller.opcode == 'custom-call':
            return 0
        read = 0 if opcode.endswith('-done') else self._read(computation, instruction)
        is_start = (
            opcode.endswith('-start') or opcode == 'send'
        )  # the result is that of the '-done' operation
        return read + (0 if is_start else self._written(computation, instruction))

    def _read(self, computation: Computation, instruction: Instruction) -> int:
        if instruction.opcode == 'custom-call' and not _LIBRARY.search(instruction.attributes):
            return 0
        elements = collections.Counter[str]()  # a value that is an operand twice is read once
        for index, operand in enumerate(instruction.operands):
            elements[operand] += self._elements_read(computation, instruction, index, None)
        return sum(
            _bytes_of_elements(array, min(count, math.prod(array.dims)))
            for operand, count in elements.items()
            if (array := computation.array(operand)) is not None and array.space == MAIN
        )

    def _written(self, computation: Computation, instruction: Instruction) -> int:
        amounts = zip(self._written_arrays(computation, instruction.name), instruction.arrays, strict=True)
        return sum(amount for amount, array in amounts if array.space == MAIN)

    def _written_arrays(
        self, computation: Computation, value: str, writers: InstructionNames | None = None
    ) -> list[int]:
        """Returns the bytes written for each array of a value; 0 for parameters of its computation.

        Args:
            computation: the computation that contains the value.
            value: the name of the instruction that produces the value, or an element of it.
            writers: counts only what these instructions write, and searches for them through the operations
                that forward the value.
        """
        name, _, element = value.partition('#')
        if element:
            return [self._written_arrays(computation, name, writers)[int(element)]]
        producer = computation.instructions[name]
        nothing = [0] * len(producer.arrays)
        if writers is not None or computation.name in self._fused:
            if _is_parameter(computation, name):
                return nothing
            if producer.opcode == 'tuple':
                return [
                    amount
                    for operand in producer.operands
                    for amount in self._written_arrays(computation, operand, writers)
                ]
            if producer.opcode in _ALIASING_OPS or _is_sharding_marker(producer):
                amounts = self._written_arrays(computation, producer.operands[0], writers)
                return amounts if len(amounts) == 1 else [amounts[int(producer.attribute('index') or 0)]]
        if writers is not None and producer.opcode == 'call':
            [called] = self._module.calls(producer)
            return self._written_arrays(called, called.root, writers)
        if writers is not None and (
            producer.opcode in _OPAQUE_OPS or (computation.name, name) not in writers
        ):
            return nothing
        while producer.opcode in ('async-done', 'async-update'):
            producer = computation.producer(producer.operands[0])
        if producer.opcode in ('async-start', 'fusion'):
            [called] = self._module.calls(producer)
            return self._written_arrays(called, called.root)
        if producer.opcode == 'custom-call' and (
            'output_to_operand_aliasing=' in producer.attributes or _NON_KERNELS.search(producer.attributes)
        ):
            return nothing
        if producer.opcode == 'custom-call' and _LIBRARY.search(producer.attributes):
            return [producer.arrays[0].bytes, *nothing[1:]]  # the rest is scratch memory
        if self._updates_in_place(computation, producer):
            update = computation.array(producer.operands[_UPDATES[producer.opcode]])
            return [0 if update is None else update.bytes]
        return [array.bytes for array in producer.arrays]

    def _updates_in_place(self, computation: Computation, instruction: Instruction) -> bool:
        if instruction.opcode not in _UPDATES or len(instruction.arrays) > 1:
            return False
        if not self._module.scheduled and not self._module.donates:
            return False  # the compiler has to copy the operand
        return computation.name not in self._fused or _is_parameter(computation, instruction.operands[0])

    def _elements_read(
        self, computation: Computation, user: Instruction, index: int, result_elements: int | None
    ) -> int:
        """Returns how many elements of an operand an instruction reads.

        Args:
            computation: the computation that contains the instruction.
            user: the instruction.
            index: the index of the operand.
            result_elements: how many elements of its result are needed; None if all are written to memory.
        """
        size = _size(computation, user.operands[index])
        if user.opcode in _CALLING_OPS:
            [called] = self._module.calls(user)
            return min(size, self._needed(called, result_elements)[called.parameters[index]])
        if index == 0 and result_elements is None and self._updates_in_place(computation, user):
            return _size(computation, user.operands[2]) if self._accumulates(user) else 0
        if user.opcode in _READ_ALL_OPS or (
            index and (user.opcode in _SLICING_OPS or user.opcode in _UPDATES)
        ):
            return size
        return min(size, math.prod(user.arrays[0].dims) if result_elements is None else result_elements)

    def _needed(self, computation: Computation, root_elements: int | None) -> Mapping[str, int]:
        """Returns how many elements of each value of a computation are needed, at most its size.

        Args:
            computation: the computation.
            root_elements: how many elements of its result are needed; None if all are written to memory. Then
                parameters that it only returns are not read.
        """
        key = computation.name, root_elements
        if key not in self._elements_needed:
            root = computation.instructions[computation.root]
            returned = root.operands if root.opcode == 'tuple' else (root.name,)
            needed = collections.Counter[str]()
            for value in returned:
                if root_elements is not None or not _is_parameter(computation, value):
                    needed[value] = _size(computation, value) if root_elements is None else root_elements
            for user in reversed([*computation.instructions.values()]):
                if user.opcode == 'tuple' or not user.operands or user.opcode in ('constant', 'parameter'):
                    continue
                is_result = user.name in returned and user.opcode not in _ALIASING_OPS
                elements = root_elements if is_result or len(user.arrays) > 1 else needed[user.name]
                for index, operand in enumerate(user.operands if elements != 0 else ()):
                    read = self._elements_read(computation, user, index, elements)
                    needed[operand] = min(_size(computation, operand), needed[operand] + read)
            self._elements_needed[key] = needed
        return self._elements_needed[key]

    def _accumulates(self, update: Instruction) -> bool:
        """Whether a scatter combines its updates with the elements of its operand."""
        for combiner in self._module.called(update, 'to_apply') if update.opcode == 'scatter' else ():
            return not _is_parameter(combiner, combiner.root)
        return False

    # --- Programs that are not optimized ------------------------------------------------------------

    def _matmul_bytes(self, computation: Computation, matmul: Instruction) -> int:
        if computation.name not in self._smallest:
            self._smallest[computation.name] = _smallest(computation)
        smallest = self._smallest[computation.name]
        read = sum({_source(computation, name): smallest[name] for name in matmul.operands}.values())
        written, value = matmul.bytes, matmul
        while len(users := computation.users.get(value.name, [])) == 1 and users[0].opcode in _FUSED_AFTER:
            [value] = users
            written = min(written, value.bytes)
        return read + written

    def boundary(self, names: InstructionNames) -> int:
        """Returns the bytes of arguments that some instructions read, and of results that they write.

        Arguments and results of loops, branches and kernels do not count.
        """
        entry = self._module.computations[self._module.entry]
        total = sum(self._written_arrays(entry, entry.root, names))
        for name, instruction in entry.instructions.items():
            if instruction.opcode == 'parameter' and len(instruction.arrays) == 1:
                [array] = instruction.arrays
                size = math.prod(array.dims)
                total += _bytes_of_elements(array, min(size, self._read_by(entry, name, names)))
        return total

    def _read_by(self, entry: Computation, argument: str, readers: InstructionNames) -> int:
        """Returns how many elements of an argument some instructions read."""
        elements, values = 0, [(entry, argument)]
        for computation, value in values:  # grows in the loop
            for user, index in computation.uses(value):
                is_reader = (computation.name, user.name) in readers
                if user.opcode == 'call':
                    values += [(called, called.parameters[index]) for called in self._module.calls(user)]
                elif _is_sharding_marker(user) or (user.opcode in _FUSED_BEFORE and len(user.operands) == 1):
                    values.append((computation, user.name))
                    is_result = all(item.opcode == 'tuple' for item in computation.users.get(user.name, ()))
                    if (
                        is_result
                        and is_reader
                        and computation is entry
                        and not _is_parameter(entry, user.name)
                    ):
                        elements += _size(entry, value)
                elif user.opcode not in (*_OPAQUE_OPS, 'tuple') and is_reader:
                    elements += self._elements_read(computation, user, index, None)
        return elements


def _is_sharding_marker(instruction: Instruction) -> bool:
    """Whether an instruction only states the sharding of a value."""
    return instruction.opcode == 'custom-call' and bool(_SHARDING_MARKERS.search(instruction.attributes))


def _source(computation: Computation, operand: str) -> str:
    """Returns the value that an operand is computed from by unary elementwise operations."""
    while (producer := computation.producer(operand)).opcode in _FUSED_BEFORE and len(producer.operands) == 1:
        [operand] = producer.operands
    return operand


def _smallest(computation: Computation) -> dict[str, int]:
    """Returns the bytes of each value, or of the inputs of its elementwise operations if they are smaller."""
    smallest: dict[str, int] = {}
    for name, instruction in computation.instructions.items():
        for i, array in enumerate(instruction.arrays):
            smallest[f'{name}#{i}'] = array.bytes
        smallest[name] = instruction.bytes
        if instruction.opcode in _FUSED_BEFORE:
            operand_bytes = sum(smallest[operand] for operand in {*instruction.operands})
            smallest[name] = min(instruction.bytes, operand_bytes)
    return smallest


def _size(computation: Computation, operand: str) -> int:
    array = computation.array(operand)
    return 0 if array is None else math.prod(array.dims)


def _bytes_of_elements(array: Array, elements: int) -> int:
    """Returns the bytes of some elements of an array."""
    return array._replace(dims=(elements,)).bytes


def _is_parameter(computation: Computation, operand: str) -> bool:
    """Whether a value is a parameter of its computation, an element of one, or an alias."""
    producer = computation.producer(operand)
    while producer.opcode in _ALIASING_OPS or _is_sharding_marker(producer):
        producer = computation.producer(producer.operands[0])
    return producer.opcode == 'parameter'
