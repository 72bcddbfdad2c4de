"""Executions of each computation of an HLO program: trip counts of loops, multiplied along the calls."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from scalax._plan.formulas import Counted, Part, part_of
from scalax._plan.hlo import CALLS, Computation, Instruction, Module
from scalax._plan.hlo_integers import Integers
from scalax._plan.loop_rounds import State, solved_rounds


@dataclasses.dataclass(frozen=True)
class Visit:
    """One computation at one place of the call tree.

    Attributes:
        computation: the computation.
        count: how often it runs there.
        counted: how well that is known.
        caller: the instruction that calls it; None for the entry.
        parent: the visit of the computation of that instruction.
        scope: the `op_name` of the calls that it is inside of, to which its own op names are relative.
    """

    computation: Computation
    count: int
    counted: Counted
    caller: Instruction | None = None
    parent: Visit | None = None
    scope: str = ''

    @property
    def outside(self) -> Computation | None:
        """The computation of the caller."""
        return None if self.parent is None else self.parent.computation

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


Measure = Callable[[Visit, Instruction], int]
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


def executed(module: Module, measure: Measure) -> Iterator[tuple[Visit, Instruction, int]]:
    """What takes anything of a measure: each instruction with the sum of all its executions in a visit.

    Args:
        module: the program.
        measure: as for `visits`.
    """
    for visit in visits(module, measure):
        for instruction in visit.computation.instructions.values():
            if amount := measure(visit, instruction):
                yield visit, instruction, visit.count * amount


def _visits(module: Module, measure: Measure | None, visit: Visit) -> Iterator[Visit]:
    yield visit
    for instruction in visit.computation.calling:
        # A fusion has the name of one of its instructions, which may be of another part than the others.
        scope = visit.op_name(instruction) if instruction.opcode == 'call' else ''
        called = [
            _visits(
                module,
                measure,
                Visit(
                    computation,
                    visit.count * count,
                    visit.counted.along(counted),
                    instruction,
                    visit,
                    scope or visit.scope,
                ),
            )
            for computation, count, counted in _calls(module, visit.computation, instruction)
            if count
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
    module: Module, outside: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, int, Counted]]:
    """What an instruction calls: (computation, how often, how well that is known)."""
    if instruction.opcode == 'while':
        rounds, known = _trip_count(module, outside, instruction)
        yield from ((body, rounds, known) for body in module.called(instruction, 'body'))
        # The condition runs once more than the body.
        yield from ((test, rounds + 1, known) for test in module.called(instruction, 'condition'))
    else:
        known = Counted.UNKNOWN if instruction.opcode == 'custom-call' else Counted.EXACTLY
        called = module.called(instruction, *CALLS[instruction.opcode])
        yield from ((computation, 1, known) for computation in called)


def _trip_count(module: Module, outside: Computation, loop: Instruction) -> tuple[int, Counted]:
    """How often the body of a loop runs, and how well that is known.

    XLA writes it down (``known_trip_count``) late, and not on every platform.
    """
    if 'known_trip_count' in loop.attributes:
        text = loop.attributes.partition('known_trip_count')[2]
        digits = text.partition('"n":"')[2].partition('"')[0]
        if digits.isdigit():
            return int(digits), Counted.EXACTLY
    [condition], [body] = module.called(loop, 'condition'), module.called(loop, 'body')

    def integers(computation: Computation, state: State) -> Integers:
        return Integers(
            computation,
            lambda instruction, index: state.get(index) if instruction.opcode == 'parameter' else None,
            computations=module.computations,
        )

    def elements(computation: Computation, operand: str, places: Iterable[int], state: State) -> State:
        reader = integers(computation, state)
        return {place: reader.values(f'{operand}#{place}') for place in places}

    scalars = [place for place, array in enumerate(loop.arrays) if not array.dims]
    start = elements(outside, loop.operands[0], scalars, {})
    rounds = _rounds_of_a_range(condition, body, start)
    if rounds is not None:
        return rounds, Counted.EXACTLY
    return solved_rounds(
        start,
        lambda state: integers(condition, state).values(condition.root),
        lambda state: elements(body, body.root, scalars, state),
    )


def _rounds_of_a_range(condition: Computation, body: Computation, start: State) -> int | None:
    """The rounds of ``while i < n: i += k``, as JAX writes scans, which may be too many to run them."""
    test, returned = condition.instructions[condition.root], body.instructions[body.root]
    if test.attribute('direction') != 'LT' or returned.opcode != 'tuple':
        return None
    place = _element_of_the_state(condition, test.operands[0])
    first = None if place is None else start.get(place)
    if place is None or first is None:
        return None
    grown = body.instructions.get(returned.operands[place])
    if grown is None or grown.opcode != 'add' or _element_of_the_state(body, grown.operands[0]) != place:
        return None
    end, step = _constant(condition, test.operands[1]), _constant(body, grown.operands[1])
    # A number that leaves its type would begin again at the other end.
    if end is None or step is None or step <= 0 or end + step > np.iinfo(first.dtype).max:
        return None
    return len(range(int(first[0]), end, step))


def _element_of_the_state(computation: Computation, operand: str) -> int | None:
    """Which element of a loop's state an operand is."""
    name, _, element = operand.partition('#')
    instruction = computation.instructions.get(name)
    if instruction is not None and instruction.opcode == 'get-tuple-element':
        element = instruction.attribute('index') or ''
        instruction = computation.instructions.get(instruction.operands[0])
    is_state = instruction is not None and instruction.opcode == 'parameter'
    return int(element) if is_state and element.isdigit() else None


def _constant(computation: Computation, operand: str) -> int | None:
    values = Integers(computation, lambda *_: None).values(operand)
    return None if values is None else int(values[0])
