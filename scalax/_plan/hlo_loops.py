"""Executions of each computation of an HLO program: trip counts of loops, multiplied along the calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from scalax._plan.formulas import Counted, at_least_one_round, loop_rounds
from scalax._plan.hlo import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class Visit:
    """One computation at one place of the call tree, and how often it runs there.

    Attributes:
        computation: the computation.
        count: how often it runs.
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


def visits(module: Module) -> Iterator[Visit]:
    """Every computation that runs, with its number of executions; one that is called twice comes twice."""
    todo = [Visit(module.computations[module.entry], 1, Counted.EXACTLY)]
    while todo:
        visit = todo.pop()
        yield visit
        for instruction in visit.computation.instructions.values():
            for name, count, counted in _calls(module, visit.computation, instruction):
                if count and name in module.computations:
                    todo.append(
                        Visit(
                            module.computations[name],
                            visit.count * count,
                            visit.counted.along(counted),
                            instruction,
                            visit.computation,
                            within(visit.scope, instruction.op_name)
                            if instruction.opcode == 'call'
                            else visit.scope,
                        )
                    )


def within(scope: str, op_name: str) -> str:
    """The whole op name of an instruction in a computation that is called from some scope."""
    return '/'.join(part for part in (scope, op_name) if part)


def _calls(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[str, int, Counted]]:
    """The computations that an instruction calls: (name, how often, how well that is known)."""
    if instruction.opcode == 'while':
        rounds, known = at_least_one_round(trip_count(module, computation, instruction))
        yield from ((name, rounds, known) for name in instruction.called('body'))
        # The condition runs once more than the body.
        yield from ((name, rounds + 1, known) for name in instruction.called('condition'))
    elif instruction.opcode == 'conditional':
        for attribute in ('branch_computations', 'true_computation', 'false_computation'):
            yield from ((name, 1, Counted.AT_MOST) for name in instruction.called(attribute))
    elif instruction.opcode == 'custom-call':
        yield from ((name, 1, Counted.UNKNOWN) for name in instruction.called('called_computations'))
    elif instruction.opcode in ('call', 'fusion', 'async-start'):
        for attribute in ('to_apply', 'calls'):
            yield from ((name, 1, Counted.EXACTLY) for name in instruction.called(attribute))


def trip_count(module: Module, outside: Computation, loop: Instruction) -> int | None:
    """The rounds of a loop ``for (i = start; i < stop; i += step)``; None if they are not known.

    XLA writes them down (``known_trip_count``) late, and not on every platform.
    """
    if 'known_trip_count' in loop.attributes:
        text = loop.attributes.partition('known_trip_count')[2]
        digits = text.partition('"n":"')[2].partition('"')[0]
        if digits.isdigit():
            return int(digits)
    condition = module.computations[loop.called('condition')[0]]
    body = module.computations[loop.called('body')[0]]
    test = condition.instructions[condition.root]
    if test.opcode != 'compare' or test.attribute('direction') != 'LT':
        return None
    index, bound = (_element(condition, operand) for operand in test.operands)
    if not isinstance(index, _StateElement):
        return None
    start, stop = _initial(outside, loop, index), None
    if isinstance(bound, int):
        stop = bound
    elif isinstance(bound, _StateElement) and _element(body, _returned(body, bound)) == bound:
        stop = _initial(outside, loop, bound)
    return loop_rounds(start, stop, _increment(body, index))


@dataclasses.dataclass(frozen=True)
class _StateElement:
    """An element of the state of a loop."""

    index: int


_FORWARDING = ('copy', 'convert', 'bitcast', 'reshape')


def _element(computation: Computation, operand: str) -> int | _StateElement | None:
    """An operand as a constant, or an element of the computation's tuple; None for neither."""
    name, _, element = operand.partition('#')
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None
    if instruction.opcode == 'constant':
        digits = instruction.operands[0].strip()
        return int(digits) if digits.removeprefix('-').isdigit() else None
    if instruction.opcode == 'parameter':
        return _StateElement(int(element or 0))
    if instruction.opcode == 'get-tuple-element':
        inner = computation.instructions.get(instruction.operands[0])
        if inner is not None and inner.opcode == 'parameter':
            return _StateElement(int(instruction.attribute('index') or 0))
        return _element(computation, f'{instruction.operands[0]}#{instruction.attribute("index")}')
    if instruction.opcode == 'tuple' and element:
        return _element(computation, instruction.operands[int(element)])
    if instruction.opcode in _FORWARDING and not element:
        return _element(computation, instruction.operands[0])
    return None


def _initial(outside: Computation, loop: Instruction, element: _StateElement) -> int | None:
    """The value of an element when the loop starts."""
    tuple_ = len(loop.arrays) > 1
    operand = f'{loop.operands[0]}#{element.index}' if tuple_ else loop.operands[0]
    found = _element(outside, operand)
    return found if isinstance(found, int) else None


def _returned(body: Computation, element: _StateElement) -> str:
    """The name of the instruction that makes an element for the next round."""
    root = body.instructions[body.root]
    return root.operands[element.index] if root.opcode == 'tuple' else root.name


def _increment(body: Computation, element: _StateElement) -> int | None:
    """The constant that a round adds to an element; None if it does not."""
    instruction = body.instructions.get(_returned(body, element))
    while instruction is not None and instruction.opcode in _FORWARDING:
        instruction = body.instructions.get(instruction.operands[0])
    if instruction is None or instruction.opcode != 'add':
        return None
    parts = [_element(body, operand) for operand in instruction.operands]
    steps = [part for part in parts if isinstance(part, int)]
    return steps[0] if element in parts and len(steps) == 1 else None
