"""The call tree of an HLO program: every instance of a computation, and how often it runs.

Execution counts are the trip counts of loops, multiplied along the calls. A trip count is known if the
integers that decide it follow from constants of the program.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from scalax._jaxpr.static_integers import INTEGER_OPS, IntegerValues, evaluate
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.hlo import Computation, Instruction, Module
from scalax._planning.program.phases import Phase, phase_of
from scalax._planning.program.trip_count import State, simulated_trip_count

_TYPES = {f'{sign}{bits}': f'{sign}int{bits}'.lstrip('s') for sign in 'su' for bits in (8, 16, 32, 64)}
_TYPES['pred'] = 'bool'
_FORWARDING_OPS = ('bitcast', 'broadcast', 'convert', 'copy', 'copy-done', 'copy-start', 'reshape')
_WORD = re.compile(r'-?\d+|true|false')
_MAX_DEPTH = 30  # operations in sequence that an integer may be computed by
_TRIP_COUNT = re.compile(r'known_trip_count.*?"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class ComputationInstance:
    """A computation at one node of the call tree.

    Attributes:
        computation: the computation.
        count: how often this instance runs in one call of the program.
        exactness: the exactness of the count.
        caller: the instruction that calls it; None for the entry.
        parent: the instance that contains the caller.
        scope: the `op_name` of the enclosing calls. Op names inside are relative to it.
    """

    computation: Computation
    count: int
    exactness: Exactness
    caller: Instruction | None = None
    parent: ComputationInstance | None = None
    scope: str = ''

    def op_name(self, instruction: Instruction) -> str:
        """Returns the full op name of an instruction, with those of the enclosing calls; or ''.

        Instructions that the compiler itself put into a call have a full name already.
        """
        op_name = instruction.op_name
        is_full = not op_name or not self.scope or f'{op_name}/'.startswith(f'{self.scope}/')
        return op_name if is_full else f'{self.scope}/{op_name}'

    def phase_of(self, instruction: Instruction) -> Phase:
        """Returns the phase of an instruction, from its op name."""
        return phase_of(self.op_name(instruction) or self.scope)


Measure = Callable[[ComputationInstance, Instruction], int]
"""A cost of one execution of an instruction, such as its FLOPs."""


def computation_instances(module: Module, measure: Measure | None = None) -> Iterator[ComputationInstance]:
    """Yields every computation that runs, once for each call site.

    Args:
        module: the program.
        measure: selects the branch of a conditional with the largest sum of this measure. Its count is an
            upper bound, or exact if all branches have the same sum. FLOPs and collectives have measures of
            their own, so that different branches may count for them. By default all branches are yielded,
            with upper bounds.
    """
    entry = ComputationInstance(module.computations[module.entry], 1, Exactness.EXACT)
    return _instances(module, measure, entry)


def measured_instructions(
    module: Module, measure: Measure
) -> Iterator[tuple[ComputationInstance, Instruction, int]]:
    """Yields each instruction with a nonzero measure, with the sum over all executions of its instance.

    Args:
        module: the program.
        measure: as for `computation_instances`.
    """
    for instance in computation_instances(module, measure):
        for instruction in instance.computation.instructions.values():
            if amount := measure(instance, instruction):
                yield instance, instruction, instance.count * amount


def _instances(
    module: Module, measure: Measure | None, outer: ComputationInstance
) -> Iterator[ComputationInstance]:
    yield outer
    for instruction in outer.computation.calling:
        # The op name of a fusion is that of one of its instructions, and others may be of another phase.
        scope = outer.op_name(instruction) if instruction.opcode == 'call' else ''
        branches = []
        for computation, count, exactness in _calls(module, outer.computation, instruction):
            inner = ComputationInstance(
                computation,
                outer.count * count,
                outer.exactness.combine(exactness),
                instruction,
                outer,
                scope or outer.scope,
            )
            branches.append([*_instances(module, measure, inner)] if count else [])
        if instruction.opcode == 'conditional':
            branches = _counted_branches(branches, measure)
        yield from itertools.chain.from_iterable(branches)


def _counted_branches(
    branches: list[list[ComputationInstance]], measure: Measure | None
) -> list[list[ComputationInstance]]:
    """Returns the branch with the largest measure, or all branches if there is no measure."""
    if measure is not None:
        sums = [
            sum(
                instance.count * measure(instance, instruction)
                for instance in branch
                for instruction in instance.computation.instructions.values()
            )
            for branch in branches
        ]
        branches = [branches[sums.index(max(sums))]]
        if len(set(sums)) == 1:
            return branches
    return [
        [
            dataclasses.replace(instance, exactness=instance.exactness.combine(Exactness.AT_MOST))
            for instance in branch
        ]
        for branch in branches
    ]


def _calls(
    module: Module, outer: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, int, Exactness]]:
    """Yields the computations that an instruction calls, with the number of calls and its exactness."""
    if instruction.opcode == 'while':
        trip_count, exactness = _trip_count(module, outer, instruction)
        yield from ((body, trip_count, exactness) for body in module.called(instruction, 'body'))
        # The condition runs once more than the body.
        yield from ((test, trip_count + 1, exactness) for test in module.called(instruction, 'condition'))
    else:
        is_custom_call = instruction.opcode == 'custom-call'
        exactness = Exactness.APPROXIMATE if is_custom_call else Exactness.EXACT
        yield from ((computation, 1, exactness) for computation in module.calls(instruction))


def _trip_count(module: Module, outer: Computation, loop: Instruction) -> tuple[int, Exactness]:
    """Returns the trip count of a loop, and its exactness.

    XLA writes trip counts into programs (``known_trip_count``), but late, and not on every platform.
    """
    if match := _TRIP_COUNT.search(loop.attributes):
        return int(match[1]), Exactness.EXACT
    [condition], [body] = module.called(loop, 'condition'), module.called(loop, 'body')
    scalars = [index for index, array in enumerate(loop.arrays) if not array.dims]

    def integers_in(computation: Computation, state: State) -> Integers:
        return Integers(
            module,
            computation,
            lambda instruction, index: state.get(index) if instruction.opcode == 'parameter' else None,
        )

    def state_of(integers: Integers, operand: str) -> State:
        return {index: integers.values(f'{operand}#{index}') for index in scalars}

    start = state_of(Integers(module, outer), loop.operands[0])
    trip_count = _trip_count_of_range(module, condition, body, start)
    if trip_count is not None:
        return trip_count, Exactness.EXACT
    return simulated_trip_count(
        start,
        lambda state: integers_in(condition, state).values(condition.root),
        lambda state: state_of(integers_in(body, state), body.root),
    )


def _trip_count_of_range(
    module: Module, condition: Computation, body: Computation, start: State
) -> int | None:
    """Returns the trip count of ``while i < n: i += k``, or None for other loops.

    JAX writes scans in this form. They may have too many iterations to simulate.
    """
    test, result = condition.instructions[condition.root], body.instructions[body.root]
    if test.attribute('direction') != 'LT' or result.opcode != 'tuple':
        return None
    index = _state_index(condition, test.operands[0])
    first = None if index is None else start.get(index)
    if index is None or first is None:
        return None
    increment = body.instructions.get(result.operands[index])
    if increment is None or increment.opcode != 'add' or _state_index(body, increment.operands[0]) != index:
        return None
    end = Integers(module, condition).values(test.operands[1])
    step = Integers(module, body).values(increment.operands[1])
    # A counter that overflows its type would wrap around.
    if end is None or step is None or step <= 0 or int(end) + int(step) > np.iinfo(first.dtype).max:
        return None
    return len(range(int(first), int(end), int(step)))


def _state_index(computation: Computation, operand: str) -> int | None:
    """Returns which element of the loop state an operand is; None if it is not part of the state."""
    name, _, element = operand.partition('#')
    instruction = computation.instructions.get(name)
    if instruction is not None and instruction.opcode == 'get-tuple-element':
        element = instruction.attribute('index') or ''
        instruction = computation.instructions.get(instruction.operands[0])
    is_state = instruction is not None and instruction.opcode == 'parameter'
    return int(element) if is_state and element.isdigit() else None


class Integers:
    """The integers of a computation that follow from constants.

    Args:
        module: the program.
        computation: one of its computations.
        known_value: returns the value of an instruction's result, given the index of the element if that is
            a tuple; None if the value is unknown.
    """

    def __init__(
        self,
        module: Module,
        computation: Computation,
        known_value: Callable[[Instruction, int], IntegerValues | None] = lambda *_: None,
    ) -> None:
        self._module, self._computation, self._known_value = module, computation, known_value
        self._cache: dict[str, IntegerValues | None] = {}

    def values(self, operand: str, depth: int = 0) -> IntegerValues | None:
        """Returns the value of an operand (``name#2`` is an element of a tuple); None if it is unknown."""
        if operand not in self._cache and depth < _MAX_DEPTH:
            self._cache[operand] = self._read(operand, depth + 1)
        return self._cache.get(operand)

    def _read(self, operand: str, depth: int) -> IntegerValues | None:
        name, _, element = operand.partition('#')
        instruction = self._computation.instructions.get(name)
        if instruction is None or '#' in element:  # nested tuples are not supported
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
        if (value := self._known_value(instruction, index)) is not None:
            return value
        if opcode == 'constant':
            return self._constant(operands[0], dtype, dims)
        if opcode in ('call', 'fusion'):
            return self._returned(instruction, index, depth)
        if opcode == 'compare':
            opcode = instruction.attribute('direction') or ''
        if opcode not in (*INTEGER_OPS, *_FORWARDING_OPS, 'dynamic-slice'):
            return None
        values = [self.values(operand, depth) for operand in operands]
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
        integers = [words[word] if word in words else int(word) for word in _WORD.findall(text)]
        if len(dims) > 1 or len(integers) != math.prod(dims):  # XLA does not print long lists
            return None
        return np.array(integers, _TYPES[dtype]).reshape(dims)

    def _returned(self, call: Instruction, index: int, depth: int) -> IntegerValues | None:
        """Returns an element of the result of a called computation."""
        [called] = self._module.calls(call)

        def argument(parameter: Instruction, element: int) -> IntegerValues | None:
            if parameter.opcode != 'parameter':
                return None
            operand = call.operands[int(parameter.operands[0])]
            return self.values(f'{operand}#{element}' if element else operand, depth)

        return Integers(self._module, called, argument).values(f'{called.root}#{index}', depth)
