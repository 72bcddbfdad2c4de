"""Parser of HLO modules: computations and instructions of a compiled program.

Only the parts that plans need are read: calls, shapes, operands, attributes as text, and the lines of the
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

# Bits of one element; https://openxla.org/xla/shapes lists the types.
_BITS = {f'{sign}{bits}': bits for sign in 'su' for bits in (1, 2, 4, 8, 16, 32, 64)}
_BITS |= {'f16': 16, 'bf16': 16, 'f32': 32, 'f64': 64, 'c64': 64, 'c128': 128}
_BITS |= {'pred': 8, 'token': 0, 'opaque': 0}
_SHAPE = re.compile(r'([a-z][a-z0-9]*)\[([^\]]*)\](?:\{(?:[^{}]*S\((\d+)\))?[^{}]*\})?')
_CALLED = re.compile(r'[\w.\-]+')
_COMBINED = re.compile(r'/\(([^:]+):.*\)$')
_DIGITS = re.compile(r'\d+')
_COMMENT = re.compile(r'/\*.*?\*/')
_NAME = re.compile(r'%?([\w.\-]+(?:#\d+)*)$')
# A program before any pass is printed without the types of computations.
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+)\s+(?:\(.*\)\s*->\s.*)?\{\s*$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = ')
_OPCODE = re.compile(r'\s*([a-z][a-z0-9\-]*)\(')
_SEPARATOR = re.compile(r'[(){}\[\],]')
_BRACKET_OR_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]')
_DEPTH = {**dict.fromkeys('({[', 1), **dict.fromkeys(')}]', -1)}
# How XLA for GPUs prints asynchronous fusions.
_PLAIN = {f'fusion-{step}': f'async-{step}' for step in ('start', 'update', 'done')}

CALLS = {
    'async-start': ('calls',),
    'call': ('to_apply',),
    'conditional': ('branch_computations', 'true_computation', 'false_computation'),
    'custom-call': ('called_computations',),
    'fusion': ('calls',),
    'while': ('body', 'condition'),
}
"""Operations that run computations, and the attributes that name these. Others call only those of scalars."""

MAIN, HOST = 0, 5
"""The memory of a device, and that of its host."""
_OTHER_SPACE = re.compile(rf':S\((?!{HOST}\))\d+\)\}}')


class Array(NamedTuple):
    """The type of one array on one device.

    Attributes:
        dtype: the type of its elements, such as ``'bf16'``.
        dims: its dimensions.
        space: the memory that it is in, of `MAIN`, `HOST` and others, such as the vector memory of a chip;
            only an optimized program says so.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = MAIN

    @property
    def bytes(self) -> int:
        """Its bytes, rounded up to whole ones."""
        bits = _BITS.get(self.dtype)
        if bits is None and (found := re.match(r'f(\d+)e\d+m\d+', self.dtype)):
            bits = int(found[1])  # the small floats: f8e4m3fn, f4e2m1fn ...
        if bits is None:
            raise PlanError(f'the compiled program has arrays of an unknown type {self.dtype!r}')
        return -(-math.prod(self.dims) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: its name in its computation.
        opcode: what it does, such as ``all-gather``.
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
        """The text of one attribute: up to the comma that ends it."""
        found = re.search(rf'(?:^|[ ,]){name}=', self.attributes)
        return None if found is None else next(_split(self.attributes[found.end() :]), '').strip()

    @property
    def op_name(self) -> str:
        """Its place in the traced program: ``jit(step)/jvp()/dot_general``; of an argument, its name.

        Of several that were combined, written as ``jit(step)/(a/dot_general:b/add)``, the first.
        """
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return _COMBINED.sub(r'/\1', _unescaped(found[1])) if found else ''

    @property
    def frame(self) -> int:
        """The number of its stack frame; 0 without one."""
        found = re.search(r'stack_frame_id=(\d+)', self.attributes)
        return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text, and the name of the one whose result it returns."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """The names of its parameters, by their numbers."""
        made = (each for each in self.instructions.values() if each.opcode == 'parameter')
        return {int(each.operands[0]): each.name for each in made}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Which instructions use each one."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users.setdefault(operand.partition('#')[0], []).append(instruction)
        return users

    def uses(self, name: str) -> Iterator[tuple[Instruction, int]]:
        """Each instruction that has a value as an operand, and the place of that."""
        for user in {each.name: each for each in self.users.get(name, ())}.values():
            yield from ((user, place) for place, operand in enumerate(user.operands) if operand == name)

    def makers_of(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that make the operands of one."""
        names = (operand.partition('#')[0] for operand in instruction.operands)
        return [self.instructions[name] for name in names if name in self.instructions]

    def maker(self, operand: str) -> Instruction:
        """The instruction that makes an operand."""
        return self.instructions[operand.partition('#')[0]]

    def array(self, operand: str) -> Array | None:
        """The type of an operand; None for a tuple as a whole."""
        name, _, element = operand.partition('#')
        arrays = self.instructions[name].arrays
        return arrays[int(element)] if element else arrays[0] if len(arrays) == 1 else None

    @functools.cached_property
    def calling(self) -> list[Instruction]:
        """The instructions that may call other computations."""
        return [each for each in self.instructions.values() if each.opcode in CALLS]

    def operands_of(self, instruction: Instruction) -> list[Array]:
        """The types of the operands of an instruction."""
        parts = (operand.partition('#') for operand in instruction.operands)
        return [self.instructions[name].arrays[int(element or 0)] for name, _, element in parts]


class Frame(NamedTuple):
    """A place in a Python program."""

    file: str
    function: str
    line: int


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        computations: by name.
        entry: the name of the one that runs first.
        partitions: the number of devices that it runs on.
        scheduled: whether its instructions are in the order in which they run: it is the last program, after
            all optimizations.
        frames: stack frame number -> the frame, and the number of its parent.
        donates: whether results may take the memory of arguments.
    """

    computations: Mapping[str, Computation]
    entry: str
    partitions: int
    scheduled: bool
    frames: Mapping[int, tuple[Frame, int]]
    donates: bool = False

    def called(self, instruction: Instruction, *attributes: str) -> Iterator[Computation]:
        """The computations that attributes of an instruction name.

        Raises:
            PlanError: the program does not have one of them.
        """
        for attribute in attributes:
            for name in _CALLED.findall(instruction.attribute(attribute) or ''):
                if name not in self.computations:
                    raise PlanError(
                        f'{instruction.name!r} calls {name!r}, which the HLO module does not have'
                    )
                yield self.computations[name]

    def calls(self, instruction: Instruction) -> Iterator[Computation]:
        """The computations that an operation runs, of those in `CALLS`; raises as `called` does."""
        return self.called(instruction, *CALLS[instruction.opcode])

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction, after its computation."""
        for computation in self.computations.values():
            yield from ((computation, instruction) for instruction in computation.instructions.values())

    def stack(self, number: int) -> Iterator[Frame]:
        """The frames from one outwards."""
        while number in self.frames:
            frame, number = self.frames[number]
            yield frame


def parse(text: str, one_memory: bool = False) -> Module:
    """Reads an HLO module.

    Args:
        text: the module, as XLA prints it.
        one_memory: whether all spaces but that of the host are in the main memory, as on GPUs, where XLA has
            one of its own for what collectives use.

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
        found = _COMPUTATION.match(line)
        if found:
            computation = _computation(found[2], lines)
            computations[found[2]] = computation
            entry = found[2] if found[1] else entry
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
    """The numbers in a text."""
    return [int(number) for number in _DIGITS.findall(text)]


def devices_of(text: str) -> int:
    """The number of devices of an HLO module, which its first line gives if there are several."""
    head = text.partition('\n')[0]
    return math.prod(int(count) for count in re.findall(r'num_(?:partitions|replicas)=(\d+)', head))


def _computation(name: str, lines: Iterator[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    nested: dict[str, str] = {}  # the types of results that are tuples in a tuple
    root = ''
    for line in lines:
        if line.startswith('}'):
            return Computation(name, instructions, root)
        found = _INSTRUCTION.match(line)
        if not found:
            raise PlanError(f'this line of an HLO module is not an instruction: {line.strip()[:200]!r}')
        # The metadata of a Pallas kernel is printed over several lines.
        while line.count('{') != line.count('}') and _is_open(line):
            line += next(lines, '}')
        text = _COMMENT.sub('', line[found.end() :])
        instruction = _instruction(found[2], text, nested)
        instructions[instruction.name] = instruction
        root = instruction.name if found[1] else root
    raise PlanError(f'the HLO module ends inside computation {name!r}')


def _instruction(name: str, text: str, nested: dict[str, str]) -> Instruction:
    """An instruction of the form ``TYPE opcode(operands), attributes``; *nested* has the types of others."""
    # A type ends with the closing bracket of a tuple, else at the first blank.
    end = _closing(text, 0) + 1 if text.startswith('(') else text.index(' ')
    found = _OPCODE.match(text, end)
    if not found:
        raise PlanError(f'an instruction of an HLO module has no operation: {name} = {text[:200]!r}')
    close = _closing(text, found.end() - 1)
    arrays = tuple(
        Array(dtype, tuple(int(n.lstrip('<=')) for n in dims.split(',') if n.strip()), int(space or MAIN))
        for dtype, dims, space in _SHAPE.findall(text[:end])
    )
    if text.startswith('((') or ', (' in text[:end]:
        nested[name] = text[:end]
    inside = text[found.end() : close]
    parts = (inside,) if found[1] == 'constant' else tuple(_operand(part) for part in _split(inside))
    operands = tuple(_by_array(part, nested) for part in parts) if nested else parts
    opcode = _PLAIN.get(found[1], found[1])
    return Instruction(name, opcode, arrays, operands, text[close + 1 :].lstrip(', '))


def _operand(text: str) -> str:
    """The name of an operand, possibly after its type."""
    found = _NAME.search(text.strip())
    return found[1] if found else text.strip()


def _by_array(operand: str, nested: Mapping[str, str]) -> str:
    """An element of a tuple, by its place among all arrays; of a tuple in a tuple it is printed as a path."""
    name, *path = operand.split('#')
    if not path or name not in nested:
        return operand
    place, type_ = 0, nested[name]
    for step in path:
        *before, type_ = [*_split(type_.strip()[1:-1])][: int(step) + 1]
        place += sum(len(_SHAPE.findall(each)) for each in before)
    return f'{name}#{place}'


def _closing(text: str, start: int) -> int:
    """The index of the bracket that closes the one at *start*; quoted text does not count."""
    depth = 0
    for found in _BRACKET_OR_QUOTED.finditer(text, start):
        depth += _DEPTH.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise PlanError(f'an instruction of an HLO module does not close its brackets: {text[:200]!r}')


def _is_open(text: str) -> bool:
    """Whether a bracket of a text is not closed in it."""
    return sum(_DEPTH.get(token, 0) for token in _BRACKET_OR_QUOTED.findall(text)) > 0


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside of brackets."""
    start, depth = 0, 0
    for found in _SEPARATOR.finditer(text):
        depth += _DEPTH.get(found[0], 0)
        if found[0] == ',' and depth == 0:
            if text[start : found.start()].strip():
                yield text[start : found.start()]
            start = found.end()
    if text[start:].strip():
        yield text[start:]


def _frames(tables: Mapping[str, list[str]]) -> dict[int, tuple[Frame, int]]:
    """Stack frame number -> the frame and the number of the one outside it."""
    files, functions = (
        {int(number): name[1:-1] for number, _, name in (line.partition(' ') for line in tables.get(key, []))}
        for key in ('FileNames', 'FunctionNames')
    )
    places = {}
    for number, fields in _records(tables.get('FileLocations', [])):
        file, function = files.get(fields['file_name_id'], ''), functions.get(fields['function_name_id'], '')
        names = _unescaped(file), _unescaped(function)
        places[number] = Frame(*names, fields['line'])
    # The number of the parent is written one too high; 0 means that there is none.
    return {
        number: (places[fields['file_location_id']], fields['parent_frame_id'] - 1)
        for number, fields in _records(tables.get('StackFrames', []))
    }


def _unescaped(text: str) -> str:
    """Quoted text of a program, in which other bytes than those of ASCII are written as in C."""
    return text.encode().decode('unicode_escape').encode('latin-1').decode() if '\\' in text else text


def _records(lines: list[str]) -> Iterator[tuple[int, dict[str, int]]]:
    """Lines of the form ``3 {line=7 column=2}``."""
    for line in lines:
        number, _, rest = line.partition(' ')
        yield int(number), {key: int(value) for key, value in re.findall(r'(\w+)=(-?\d+)', rest)}
