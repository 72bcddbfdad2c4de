"""Executions of each computation of an HLO program: trip counts of loops, multiplied along the calls.

A trip count follows from integers of the program, as far as these follow from constants.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from scalax._jaxpr.static_integers import INTEGER_OPS, IntegerValues, evaluate
from scalax._planning.program.counting import Exactness, Phase, phase_of
from scalax._planning.program.hlo import Computation, Instruction, Module
from scalax._planning.program.trip_count import State, solved_rounds

_TYPES = {f'{sign}{bits}': f'{sign}int{bits}'.lstrip('s') for sign in 'su' for bits in (8, 16, 32, 64)}
_TYPES['pred'] = 'bool'
_FORWARDING = ('bitcast', 'broadcast', 'convert', 'copy', 'copy-done', 'copy-start', 'reshape')
_WORD = re.compile(r'-?\d+|true|false')
_DEEP = 30  # operations that a value may be computed in, one after the other
_TRIP_COUNT = re.compile(r'known_trip_count.*?"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Visit:
    """One computation at one place of the call tree.

    Attributes:
        computation: the computation.
        count: how often it runs there.
        exactness: how well that is known.
        caller: the instruction that calls it; None for the entry.
        parent: the visit of the computation of that instruction.
        scope: the `op_name` of the calls that it is inside of, to which its own op names are relative.
    """

    computation: Computation
    count: int
    exactness: Exactness
    caller: Instruction | None = None
    parent: Visit | None = None
    scope: str = ''

    def op_name(self, instruction: Instruction) -> str:
        """The whole op name of an instruction, with those of the calls around it; empty if it has none.

        What the compiler itself puts into a call keeps its whole name.
        """
        own = instruction.op_name
        whole = not own or not self.scope or f'{own}/'.startswith(f'{self.scope}/')
        return own if whole else f'{self.scope}/{own}'

    def phase_of(self, instruction: Instruction) -> Phase:
        """The part of a step that an instruction belongs to."""
        return phase_of(self.op_name(instruction) or self.scope)


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
    return _visits(module, measure, Visit(module.computations[module.entry], 1, Exactness.EXACT))


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
        called = []
        for computation, count, exactness in _calls(module, visit.computation, instruction):
            known = visit.exactness.combine(exactness)
            inside = Visit(computation, visit.count * count, known, instruction, visit, scope or visit.scope)
            called.append([*_visits(module, measure, inside)] if count else [])
        if instruction.opcode == 'conditional':
            called = _counting(called, measure)
        yield from itertools.chain.from_iterable(called)


def _counting(branches: list[list[Visit]], measure: Measure | None) -> list[list[Visit]]:
    """The branches that count: the largest, or all without a measure."""
    if measure is not None:
        sums = [
            sum(
                visit.count * measure(visit, instruction)
                for visit in branch
                for instruction in visit.computation.instructions.values()
            )
            for branch in branches
        ]
        branches = [branches[sums.index(max(sums))]]
        if len(set(sums)) == 1:
            return branches
    return [
        [dataclasses.replace(visit, exactness=visit.exactness.combine(Exactness.AT_MOST)) for visit in branch]
        for branch in branches
    ]


def _calls(
    module: Module, outside: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, int, Exactness]]:
    """What an instruction calls: (computation, how often, how well that is known)."""
    if instruction.opcode == 'while':
        rounds, known = _trip_count(module, outside, instruction)
        yield from ((body, rounds, known) for body in module.called(instruction, 'body'))
        # The condition runs once more than the body.
        yield from ((test, rounds + 1, known) for test in module.called(instruction, 'condition'))
    else:
        known = Exactness.APPROXIMATE if instruction.opcode == 'custom-call' else Exactness.EXACT
        yield from ((computation, 1, known) for computation in module.calls(instruction))


def _trip_count(module: Module, outside: Computation, loop: Instruction) -> tuple[int, Exactness]:
    """How often the body of a loop runs, and how well that is known.

    XLA writes it down (``known_trip_count``) late, and not on every platform.
    """
    if written := _TRIP_COUNT.search(loop.attributes):
        return int(written[1]), Exactness.EXACT
    [condition], [body] = module.called(loop, 'condition'), module.called(loop, 'body')
    scalars = [place for place, array in enumerate(loop.arrays) if not array.dims]

    def integers(computation: Computation, state: State) -> Integers:
        return Integers(
            module,
            computation,
            lambda instruction, index: state.get(index) if instruction.opcode == 'parameter' else None,
        )

    def elements(reader: Integers, operand: str) -> State:
        return {place: reader.values(f'{operand}#{place}') for place in scalars}

    start = elements(Integers(module, outside), loop.operands[0])
    rounds = _rounds_of_a_range(module, condition, body, start)
    if rounds is not None:
        return rounds, Exactness.EXACT
    return solved_rounds(
        start,
        lambda state: integers(condition, state).values(condition.root),
        lambda state: elements(integers(body, state), body.root),
    )


def _rounds_of_a_range(module: Module, condition: Computation, body: Computation, start: State) -> int | None:
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
    end = Integers(module, condition).values(test.operands[1])
    step = Integers(module, body).values(grown.operands[1])
    # A number that leaves its type would begin again at the other end.
    if end is None or step is None or step <= 0 or int(end) + int(step) > np.iinfo(first.dtype).max:
        return None
    return len(range(int(first), int(end), int(step)))


def _element_of_the_state(computation: Computation, operand: str) -> int | None:
    """Which element of a loop's state an operand is."""
    name, _, element = operand.partition('#')
    instruction = computation.instructions.get(name)
    if instruction is not None and instruction.opcode == 'get-tuple-element':
        element = instruction.attribute('index') or ''
        instruction = computation.instructions.get(instruction.operands[0])
    is_state = instruction is not None and instruction.opcode == 'parameter'
    return int(element) if is_state and element.isdigit() else None


class Integers:
    """The integers of a computation.

    Args:
        module: the program.
        computation: one of its computations.
        given: (instruction, element of its tuple) -> its value; None where it is not given.
    """

    def __init__(
        self,
        module: Module,
        computation: Computation,
        given: Callable[[Instruction, int], IntegerValues | None] = lambda *_: None,
    ) -> None:
        self._module, self._computation, self._given = module, computation, given
        self._known: dict[str, IntegerValues | None] = {}

    def values(self, operand: str, depth: int = 0) -> IntegerValues | None:
        """The value of an operand (``name#2`` is an element of a tuple); None if it is not known."""
        if operand not in self._known and depth < _DEEP:
            self._known[operand] = self._read(operand, depth + 1)
        return self._known.get(operand)

    def _read(self, operand: str, depth: int) -> IntegerValues | None:
        name, _, element = operand.partition('#')
        instruction = self._computation.instructions.get(name)
        if instruction is None or '#' in element:  # an element of an element is not followed
            return None
        opcode, operands, index = instruction.opcode, instruction.operands, int(element or 0)
        if opcode == 'get-tuple-element':
            return self.values(f'{operands[0]}#{instruction.attribute("index")}', depth)
        if opcode == 'opt-barrier':
            return self.values(f'{operands[0]}#{index}', depth)
        if opcode == 'tuple':
            return self.values(operands[index], depth)
        dtype, dims, _ = instruction.arrays[index]
        if dtype not in _TYPES:
            return None
        if (given := self._given(instruction, index)) is not None:
            return given
        if opcode == 'constant':
            return self._constant(operands[0], dtype, dims)
        if opcode in ('call', 'fusion'):
            return self._returned(instruction, index, depth)
        if opcode == 'compare':
            opcode = instruction.attribute('direction') or ''
        if opcode not in (*INTEGER_OPS, *_FORWARDING, 'dynamic-slice'):
            return None
        values = [self.values(part, depth) for part in operands]
        if opcode in INTEGER_OPS:
            return evaluate(opcode, values)
        first = values[0]
        if first is None:
            return None
        if opcode == 'dynamic-slice':
            start = values[1]
            if dims != (1,) or first.ndim != 1 or start is None:
                return None
            return first[[np.clip(int(start), 0, first.size - 1)]]
        return first.reshape(dims).astype(_TYPES[dtype]) if first.size == math.prod(dims) else None

    def _constant(self, text: str, dtype: str, dims: tuple[int, ...]) -> IntegerValues | None:
        words = {'true': 1, 'false': 0}
        numbers = [words[word] if word in words else int(word) for word in _WORD.findall(text)]
        if len(dims) > 1 or len(numbers) != math.prod(dims):  # a long list is not printed
            return None
        return np.array(numbers, _TYPES[dtype]).reshape(dims)

    def _returned(self, call: Instruction, index: int, depth: int) -> IntegerValues | None:
        """What a called computation returns."""
        [called] = self._module.calls(call)

        def argument(parameter: Instruction, element: int) -> IntegerValues | None:
            if parameter.opcode != 'parameter':
                return None
            operand = call.operands[int(parameter.operands[0])]
            return self.values(f'{operand}#{element}' if element else operand, depth)

        inside = Integers(self._module, called, argument)
        return inside.values(f'{called.root}#{index}', depth)
