"""Executions of each computation of an HLO program: trip counts of loops, multiplied along the calls."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from scalax._plan.formulas import Counted
from scalax._plan.hlo import Computation, Instruction, Module
from scalax._plan.loop_rounds import OPERATIONS, Element, Scalar, constant_of, solved_rounds
from scalax._plan.parts import Part, part_of


@dataclasses.dataclass(frozen=True)
class Visit:
    """One computation at one place of the call tree.

    Attributes:
        computation: the computation.
        count: how often it runs there.
        counted: how well that is known.
        caller: the instruction that calls it; None for the entry.
        outside: the computation of that instruction.
        scope: the `op_name` of the calls that it is inside of, to which its own op names are relative.
    """

    computation: Computation
    count: int
    counted: Counted
    caller: Instruction | None = None
    outside: Computation | None = None
    scope: str = ''

    def op_name(self, instruction: Instruction) -> str:
        """The whole op name of an instruction, with those of the calls around it; empty if it has none.

        What the compiler itself puts into a call keeps its whole name.
        """
        own = instruction.op_name
        whole = not own or not self.scope or f'{own}/'.startswith(f'{self.scope}/')
        return own if whole else f'{self.scope}/{own}'

    def part_of(self, instruction: Instruction) -> Part:
        """The part of a step that an instruction belongs to."""
        return part_of(self.op_name(instruction) or self.scope)


Measure = Callable[[Visit, Instruction], float]
"""How much of something one execution of an instruction takes, such as its flops."""


def visits(module: Module, measure: Measure | None = None) -> Iterator[Visit]:
    """Every computation that runs, with its number of executions; one that is called twice comes twice.

    Args:
        module: the program.
        measure: of several branches, only the one with the largest sum of this comes. It runs at most as
            often as the visit says, or exactly so if the sums of all branches are equal. Each quantity has
            a measure of its own, so one branch may count for flops, and another for collectives. By default
            all branches come, each of which runs at most so often.
    """
    return _visits(module, measure, Visit(module.computations[module.entry], 1, Counted.EXACTLY))


def _visits(module: Module, measure: Measure | None, visit: Visit) -> Iterator[Visit]:
    yield visit
    for instruction in visit.computation.instructions.values():
        # A fusion has the name of one of its instructions, which may be of another part than the others.
        scope = visit.op_name(instruction) if instruction.opcode == 'call' else ''
        called = [
            _visits(
                module,
                measure,
                Visit(
                    module.computations[name],
                    visit.count * count,
                    visit.counted.along(counted),
                    instruction,
                    visit.computation,
                    scope or visit.scope,
                ),
            )
            for name, count, counted in _calls(module, visit.computation, instruction)
            if count and name in module.computations
        ]
        if instruction.opcode == 'conditional' and measure is not None:
            yield from _largest([list(branch) for branch in called], measure)
        elif instruction.opcode == 'conditional':
            yield from _at_most(itertools.chain.from_iterable(called))
        else:
            yield from itertools.chain.from_iterable(called)


def _largest(branches: list[list[Visit]], measure: Measure) -> Iterable[Visit]:
    sums = [
        sum(
            visit.count * measure(visit, instruction)
            for visit in branch
            for instruction in visit.computation.instructions.values()
        )
        for branch in branches
    ]
    largest = branches[sums.index(max(sums))] if branches else []
    return largest if len(set(sums)) < 2 else _at_most(largest)


def _at_most(branch: Iterable[Visit]) -> Iterator[Visit]:
    for visit in branch:
        yield dataclasses.replace(visit, counted=visit.counted.along(Counted.AT_MOST))


def _calls(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[str, int, Counted]]:
    """The computations that an instruction calls: (name, how often, how well that is known)."""
    if instruction.opcode == 'while':
        rounds, known = trip_count(module, computation, instruction)
        yield from ((name, rounds, known) for name in instruction.called('body'))
        # The condition runs once more than the body.
        yield from ((name, rounds + 1, known) for name in instruction.called('condition'))
    elif instruction.opcode == 'conditional':
        for attribute in ('branch_computations', 'true_computation', 'false_computation'):
            yield from ((name, 1, Counted.EXACTLY) for name in instruction.called(attribute))
    elif instruction.opcode == 'custom-call':
        yield from ((name, 1, Counted.UNKNOWN) for name in instruction.called('called_computations'))
    elif instruction.opcode in ('call', 'fusion', 'async-start'):
        for attribute in ('to_apply', 'calls'):
            yield from ((name, 1, Counted.EXACTLY) for name in instruction.called(attribute))


def trip_count(module: Module, outside: Computation, loop: Instruction) -> tuple[int, Counted]:
    """How often the body of a loop runs, and how well that is known.

    XLA writes it down (``known_trip_count``) late, and not on every platform.
    """
    if 'known_trip_count' in loop.attributes:
        text = loop.attributes.partition('known_trip_count')[2]
        digits = text.partition('"n":"')[2].partition('"')[0]
        if digits.isdigit():
            return int(digits), Counted.EXACTLY
    condition = module.computations[loop.called('condition')[0]]
    body = module.computations[loop.called('body')[0]]
    given, following = _Scalars(module, outside), _Scalars(module, body, _element)

    def state(index: int) -> Element:
        start = constant_of(given.scalar(f'{loop.operands[0]}#{index}'))
        return Element(start, following.scalar(f'{body.root}#{index}'))

    test = _Scalars(module, condition, _element).scalar(condition.root)
    return solved_rounds(test, state)


def _element(number: int, index: int, type_: str) -> Scalar:
    return Scalar(type_, 'element', number=index)


def _nothing(number: int, index: int, type_: str) -> None:
    return None


_FORWARDING = ('bitcast', 'broadcast', 'copy', 'copy-done', 'copy-start', 'reshape')
_DEEP = 30  # operations from the test of a loop to its state


class _Scalars:
    """The integers of one computation."""

    def __init__(
        self,
        module: Module,
        computation: Computation,
        given: Callable[[int, int, str], Scalar | None] = _nothing,
    ) -> None:
        """*given* has the parameters: their number, the element of a tuple, and its type."""
        self.module, self.computation, self.given = module, computation, given
        self.known: dict[str, Scalar | None] = {}

    def scalar(self, operand: str, depth: int = 0) -> Scalar | None:
        """An operand (``name#2`` is an element of a tuple); None if it is no integer, or is not known."""
        if operand not in self.known and depth < _DEEP:
            self.known[operand] = self._read(operand, depth + 1)
        return self.known.get(operand)

    def _read(self, operand: str, depth: int) -> Scalar | None:
        name, _, place = operand.partition('#')
        instruction = self.computation.instructions.get(name)
        if instruction is None or '#' in place:  # an element of an element is not followed
            return None
        opcode, operands, index = instruction.opcode, instruction.operands, int(place or 0)
        if opcode == 'get-tuple-element':
            return self.scalar(f'{operands[0]}#{instruction.attribute("index")}', depth)
        if opcode == 'opt-barrier':
            return self.scalar(f'{operands[0]}#{index}', depth)
        if opcode == 'tuple':
            return self.scalar(operands[index], depth)
        type_, dims, _ = instruction.arrays[index] if index < len(instruction.arrays) else ('', (), 0)
        if dims or not (type_ == 'pred' or re.fullmatch(r'[su]\d+', type_)):
            return None
        if opcode == 'parameter':
            return self.given(int(operands[0]), index, type_)
        if opcode == 'constant':
            text = {'true': '1', 'false': '0'}.get(operands[0].strip(), operands[0].strip())
            return Scalar(type_, 'constant', number=int(text)) if re.fullmatch(r'-?\d+', text) else None
        if opcode in _FORWARDING:
            return self.scalar(operands[0], depth)
        if opcode in ('call', 'fusion'):
            called = self.module.computations.get(
                next((name for key in ('to_apply', 'calls') for name in instruction.called(key)), '')
            )
            if called is None:
                return None
            inner = _Scalars(
                self.module,
                called,
                lambda number, index, _: self.scalar(
                    operands[number] + (f'#{index}' if index else ''), depth
                ),
            )
            return inner.scalar(f'{called.root}#{index}', depth)
        if opcode == 'compare':
            opcode = instruction.attribute('direction') or ''
        known = opcode in OPERATIONS
        parts = tuple(self.scalar(part, depth) for part in operands) if known else ()
        return Scalar(type_, opcode, parts) if known else None
