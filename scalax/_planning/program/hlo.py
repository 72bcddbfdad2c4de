"""Parser of HLO modules: computations and instructions of a compiled program.

The parser reads what plans need: calls, shapes, operands, attributes as text, and the stack frames of the
user's program. https://openxla.org/xla/operation_semantics describes the operations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from scalax.errors import PlanError

# Bits of an element; https://openxla.org/xla/shapes lists the types.
_BITS = {f'{sign}{bits}': bits for sign in 'su' for bits in (1, 2, 4, 8, 16, 32, 64)}
_BITS |= {'f16': 16, 'bf16': 16, 'f32': 32, 'f64': 64, 'c64': 64, 'c128': 128}
_BITS |= {'pred': 8, 'token': 0, 'opaque': 0}
_SHAPE = re.compile(r'([a-z][a-z0-9]*)\[([^\]]*)\](?:\{(?:[^{}]*S\((\d+)\))?[^{}]*\})?')
_CALLED = re.compile(r'[\w.\-]+')
_COMBINED = re.compile(r'/\(([^:]+):.*\)$')
_DIGITS = re.compile(r'\d+')
_COMMENT = re.compile(r'/\*.*?\*/')
_NAME = re.compile(r'%?([\w.\-]+(?:#\d+)*)$')
# XLA prints a program before any pass without the types of computations.
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+)\s+(?:\(.*\)\s*->\s.*)?\{\s*$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = ')
_OPCODE = re.compile(r'\s*([a-z][a-z0-9\-]*)\(')
_SEPARATOR = re.compile(r'[(){}\[\],]')
_BRACKET_OR_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]')
_DEPTH = {**dict.fromkeys('({[', 1), **dict.fromkeys(')}]', -1)}
# XLA for GPUs prints asynchronous fusions under other names.
_ASYNC_FUSIONS = {f'fusion-{step}': f'async-{step}' for step in ('start', 'update', 'done')}

CALLS = {
    'async-start': ('calls',),
    'call': ('to_apply',),
    'conditional': ('branch_computations', 'true_computation', 'false_computation'),
    'custom-call': ('called_computations',),
    'fusion': ('calls',),
    'while': ('body', 'condition'),
}
"""Operations that run computations, and the attributes that name them.

The computations of other operations, such as the sum of a reduction, work on scalars only."""

MAIN, HOST = 0, 5
"""The memory spaces of a device's main memory and of its host's memory."""
_OTHER_SPACE = re.compile(rf':S\((?!{HOST}\))\d+\)\}}')


class Array(NamedTuple):
    """The type of one array on one device.

    Attributes:
        dtype: the type of its elements, such as ``'bf16'``.
        dims: its dimensions.
        space: its memory space: `MAIN`, `HOST`, or another one, such as the vector memory of a chip. Known in
            optimized programs only.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = MAIN

    @property
    def bytes(self) -> int:
        """The bytes of the array, rounded up."""
        bits = _BITS.get(self.dtype)
        if bits is None and (match := re.match(r'f(\d+)e\d+m\d+', self.dtype)):
            bits = int(match[1])  # the small floats: f8e4m3fn, f4e2m1fn ...
        if bits is None:
            raise PlanError(f'the compiled program has arrays of an unknown type {self.dtype!r}')
        return -(-math.prod(self.dims) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: its name in its computation.
        opcode: the operation, such as ``all-gather``.
        arrays: the type of its result; several for a tuple.
        operands: the names of its operands (``name#2`` is an element of a tuple), or the text of a constant.
        attributes: the text after the operands.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        """The bytes of the result on one device."""
        return sum(array.bytes for array in self.arrays)

    def attribute(self, name: str) -> str | None:
        """Returns the text of an attribute, up to the comma that ends it; None without the attribute."""
        match = re.search(rf'(?:^|[ ,]){name}=', self.attributes)
        return None if match is None else next(_split(self.attributes[match.end() :]), '').strip()

    @property
    def op_name(self) -> str:
        """The path of the operation in the traced program, such as ``jit(step)/jvp()/dot_general``.

        For an argument it is the argument's name. For combined operations, which XLA writes as
        ``jit(step)/(a/dot_general:b/add)``, it is the first path.
        """
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return _COMBINED.sub(r'/\1', _unescaped(match[1])) if match else ''

    @property
    def frame(self) -> int:
        """The id of the stack frame; 0 without one."""
        match = re.search(r'stack_frame_id=(\d+)', self.attributes)
        return int(match[1]) if match else 0


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation of a program.

    Attributes:
        name: its name.
        instructions: name -> instruction, in the order of the text.
        root: the name of the instruction whose result it returns.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """The names of the parameters, by index."""
        parameters = (item for item in self.instructions.values() if item.opcode == 'parameter')
        return {int(item.operands[0]): item.name for item in parameters}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The users of each instruction, by its name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users.setdefault(operand.partition('#')[0], []).append(instruction)
        return users

    def uses(self, name: str) -> Iterator[tuple[Instruction, int]]:
        """Yields each user of a value, with the index of the operand."""
        for user in {item.name: item for item in self.users.get(name, ())}.values():
            yield from ((user, index) for index, operand in enumerate(user.operands) if operand == name)

    def producers_of(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that produce the operands of an instruction."""
        names = (operand.partition('#')[0] for operand in instruction.operands)
        return [self.instructions[name] for name in names if name in self.instructions]

    def producer(self, operand: str) -> Instruction:
        """Returns the instruction that produces an operand."""
        return self.instructions[operand.partition('#')[0]]

    def array(self, operand: str) -> Array | None:
        """Returns the type of an operand; None if it is a tuple of several arrays."""
        name, _, element = operand.partition('#')
        arrays = self.instructions[name].arrays
        return arrays[int(element)] if element else arrays[0] if len(arrays) == 1 else None

    @functools.cached_property
    def calling(self) -> list[Instruction]:
        """The instructions that may call other computations."""
        return [item for item in self.instructions.values() if item.opcode in CALLS]

    def operands_of(self, instruction: Instruction) -> list[Array]:
        """Returns the types of the operands of an instruction."""
        parts = (operand.partition('#') for operand in instruction.operands)
        return [self.instructions[name].arrays[int(element or 0)] for name, _, element in parts]


class Frame(NamedTuple):
    """A stack frame of a Python program."""

    file: str
    function: str
    line: int


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        computations: name -> computation.
        entry: the name of the entry computation.
        partitions: the number of devices that the program runs on.
        scheduled: whether instructions are in execution order. They are after all optimizations.
        frames: stack frame id -> the frame, and the id of its parent.
        donates: whether results may reuse the memory of arguments.
    """

    computations: Mapping[str, Computation]
    entry: str
    partitions: int
    scheduled: bool
    frames: Mapping[int, tuple[Frame, int]]
    donates: bool = False

    def called(self, instruction: Instruction, *attributes: str) -> Iterator[Computation]:
        """Yields the computations that attributes of an instruction name.

        Raises:
            PlanError: the program lacks one of them.
        """
        for attribute in attributes:
            for name in _CALLED.findall(instruction.attribute(attribute) or ''):
                if name not in self.computations:
                    raise PlanError(
                        f'{instruction.name!r} calls {name!r}, which the HLO module does not have'
                    )
                yield self.computations[name]

    def calls(self, instruction: Instruction) -> Iterator[Computation]:
        """Yields the computations that an operation of `CALLS` runs; raises as `called` does."""
        return self.called(instruction, *CALLS[instruction.opcode])

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields every instruction, with its computation."""
        for computation in self.computations.values():
            yield from ((computation, instruction) for instruction in computation.instructions.values())

    def stack(self, frame_id: int) -> Iterator[Frame]:
        """Yields the frames of a stack, the innermost first."""
        while frame_id in self.frames:
            frame, frame_id = self.frames[frame_id]
            yield frame


def parse(text: str, one_memory: bool = False) -> Module:
    """Parses an HLO module.

    Args:
        text: the module, as XLA prints it.
        one_memory: whether all memory spaces except the host's are in the main memory, as on GPUs, where XLA
            has a separate space for the buffers of collectives.

    Raises:
        PlanError: the text is not an HLO module.
    """
    if one_memory:
        text = _OTHER_SPACE.sub('}', text)
    lines = iter(text.splitlines())
    head = next(lines, '')
    if not head.startswith('HloModule '):
        raise PlanError(f'this is not an HLO module: it begins with {head[:60]!r}')
    tables: dict[str, list[str]] = {}
    computations: dict[str, Computation] = {}
    entry, table = '', None
    for line in lines:
        match = _COMPUTATION.match(line)
        if match:
            computations[match[2]] = _computation(match[2], lines)
            entry = match[2] if match[1] else entry
        elif line in ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames'):
            table = tables.setdefault(line, [])
        elif line.strip():
            if table is None:
                raise PlanError(f'this line of an HLO module begins no computation: {line[:200]!r}')
            table.append(line)
    if not entry:
        raise PlanError('the HLO module has no entry computation')
    scheduled, donates = 'is_scheduled=true' in head, 'input_output_alias=' in head
    return Module(computations, entry, devices_of(head), scheduled, _frames(tables), donates)


def integers(text: str) -> list[int]:
    """Returns the integers in a text."""
    return [int(digits) for digits in _DIGITS.findall(text)]


def devices_of(text: str) -> int:
    """Returns the number of devices of an HLO module, which is on its first line if there are several."""
    head = text.partition('\n')[0]
    return math.prod(int(count) for count in re.findall(r'num_(?:partitions|replicas)=(\d+)', head))


def _computation(name: str, lines: Iterator[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    nested: dict[str, str] = {}  # name -> the type, for results that are nested tuples
    root = ''
    for line in lines:
        if line.startswith('}'):
            return Computation(name, instructions, root)
        match = _INSTRUCTION.match(line)
        if not match:
            raise PlanError(f'this line of an HLO module is not an instruction: {line.strip()[:200]!r}')
        # XLA prints the metadata of a Pallas kernel over several lines.
        while line.count('{') != line.count('}') and _is_open(line):
            line += next(lines, '}')
        text = _COMMENT.sub('', line[match.end() :])
        instruction = _instruction(match[2], text, nested)
        instructions[instruction.name] = instruction
        root = instruction.name if match[1] else root
    raise PlanError(f'the HLO module ends inside computation {name!r}')


def _instruction(name: str, text: str, nested: dict[str, str]) -> Instruction:
    """Parses ``TYPE opcode(operands), attributes``, and adds a nested tuple type to *nested*."""
    # The type of a tuple ends with its closing parenthesis, another one at the first blank.
    end = _closing(text, 0) + 1 if text.startswith('(') else text.index(' ')
    match = _OPCODE.match(text, end)
    if not match:
        raise PlanError(f'an instruction of an HLO module has no operation: {name} = {text[:200]!r}')
    close = _closing(text, match.end() - 1)
    arrays = tuple(
        Array(dtype, tuple(int(n.lstrip('<=')) for n in dims.split(',') if n.strip()), int(space or MAIN))
        for dtype, dims, space in _SHAPE.findall(text[:end])
    )
    if text.startswith('((') or ', (' in text[:end]:
        nested[name] = text[:end]
    inside = text[match.end() : close]
    operands = (inside,) if match[1] == 'constant' else tuple(map(_operand, _split(inside)))
    if nested:
        operands = tuple(_flat_element(operand, nested) for operand in operands)
    opcode = _ASYNC_FUSIONS.get(match[1], match[1])
    return Instruction(name, opcode, arrays, operands, text[close + 1 :].lstrip(', '))


def _operand(text: str) -> str:
    """Returns the name of an operand, which may follow its type."""
    match = _NAME.search(text.strip())
    return match[1] if match else text.strip()


def _flat_element(operand: str, nested: Mapping[str, str]) -> str:
    """Returns an element of a nested tuple, which XLA prints as a path, by its index among all arrays."""
    name, *path = operand.split('#')
    if not path or name not in nested:
        return operand
    index, type_ = 0, nested[name]
    for step in path:
        *before, type_ = [*_split(type_.strip()[1:-1])][: int(step) + 1]
        index += sum(len(_SHAPE.findall(element)) for element in before)
    return f'{name}#{index}'


def _closing(text: str, start: int) -> int:
    """Returns the index of the bracket that closes the one at *start*, ignoring quoted text."""
    depth = 0
    for match in _BRACKET_OR_QUOTED.finditer(text, start):
        depth += _DEPTH.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise PlanError(f'an instruction of an HLO module does not close its brackets: {text[:200]!r}')


def _is_open(text: str) -> bool:
    """Whether a text has an unclosed bracket."""
    return sum(_DEPTH.get(token, 0) for token in _BRACKET_OR_QUOTED.findall(text)) > 0


def _split(text: str) -> Iterator[str]:
    """Yields the parts between commas outside brackets."""
    start, depth = 0, 0
    for match in _SEPARATOR.finditer(text):
        depth += _DEPTH.get(match[0], 0)
        if match[0] == ',' and depth == 0:
            if text[start : match.start()].strip():
                yield text[start : match.start()]
            start = match.end()
    if text[start:].strip():
        yield text[start:]


def _frames(tables: Mapping[str, list[str]]) -> dict[int, tuple[Frame, int]]:
    """Returns stack frame id -> the frame, and the id of its parent."""
    files, functions = (
        {int(number): name[1:-1] for number, _, name in (line.partition(' ') for line in tables.get(key, []))}
        for key in ('FileNames', 'FunctionNames')
    )
    locations = {}
    for number, fields in _records(tables.get('FileLocations', [])):
        file, function = files.get(fields['file_name_id'], ''), functions.get(fields['function_name_id'], '')
        names = _unescaped(file), _unescaped(function)
        locations[number] = Frame(*names, fields['line'])
    # XLA writes the id of the parent plus one; 0 stands for no parent.
    return {
        number: (locations[fields['file_location_id']], fields['parent_frame_id'] - 1)
        for number, fields in _records(tables.get('StackFrames', []))
    }


def _unescaped(text: str) -> str:
    """Decodes quoted text of a program, where non-ASCII bytes are C escapes."""
    return text.encode().decode('unicode_escape').encode('latin-1').decode() if '\\' in text else text


def _records(lines: list[str]) -> Iterator[tuple[int, dict[str, int]]]:
    """Yields the id and the fields of lines of the form ``3 {line=7 column=2}``."""
    for line in lines:
        number, _, rest = line.partition(' ')
        yield int(number), {key: int(value) for key, value in re.findall(r'(\w+)=(-?\d+)', rest)}
