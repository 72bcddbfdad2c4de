"""Which collectives of a partitioned program move rows of the batch: activations, not weights.

Rows are followed from the arguments through all operations, loops and calls, as the partitioner has left
them. A product of rows and weights has rows; the gradient of weights, a sum over rows, has none. So a
collective moves rows if its operand has some.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from scalax._plan.collective_runs import KINDS
from scalax._plan.hlo import Computation, Frame, Instruction, Module
from scalax._plan.row_rules import Operand, Rows, has_rows, joined, no_rows, passed_on

RowsMoved = Literal['', 'moved', 'asked for']
Value = tuple[Rows, ...]
"""The rows of a value: of each array of a tuple."""

_ROUNDS = 8  # loops settle after two or three
_SENDS = tuple(f'{kind}{start}' for kind in KINDS for start in ('', '-start'))
# What may stand between a value and the result of the program.
_FORWARDS = (
    *('bitcast', 'convert', 'copy', 'dynamic-slice', 'get-tuple-element', 'reshape', 'slice', 'transpose'),
    'tuple',
)
_CONSTRAINT = '/sharding_constraint'
_TUPLES = ('opt-barrier', 'optimization-barrier')


class RowsOfProgram:
    """The rows in the values of a program.

    Args:
        module: the program after SPMD partitioning.
        given: argument, by its op name -> the dimensions that have rows.
    """

    def __init__(self, module: Module, given: Mapping[str, Sequence[int]]) -> None:
        self._module = module
        self._known: dict[tuple[str, tuple[Value, ...]], dict[str, Value]] = {}
        self._moved: dict[tuple[str, str], bool] = {}
        entry = module.computations[module.entry]
        arguments = {}
        for instruction in entry.instructions.values():
            if instruction.opcode == 'parameter' and instruction.op_name in given:
                [array], dims = instruction.arrays, given[instruction.op_name]
                rows = tuple(((size, True),) if i in dims else () for i, size in enumerate(array.dims))
                arguments[int(instruction.operands[0])] = (rows,)
        if arguments:
            most = max(arguments) + 1
            self._note(entry, tuple(arguments.get(i, ()) for i in range(most)))

    def moved_by(self, computation: Computation, instruction: Instruction) -> RowsMoved:
        """Whether a collective moves rows; in a computation that is called several times, each time."""
        if not self._moved.get((computation.name, instruction.name), False):
            return ''
        return 'asked for' if self._is_asked_for(computation, instruction) else 'moved'

    def _values(self, computation: Computation, given: tuple[Value, ...]) -> dict[str, Value]:
        """The instructions of a computation whose values have rows, if its arguments have these."""
        key = computation.name, given
        if key not in self._known:
            found: dict[str, Value] = {}
            self._known[key] = found
            for instruction in computation.instructions.values():
                value = self._value(computation, instruction, given, found)
                # Elements of a tuple in a tuple are not told apart: of them nothing is known.
                if any(map(has_rows, value)) and _sizes(value) == _sizes(_none(instruction)):
                    found[instruction.name] = value
        return self._known[key]

    def _value(
        self,
        computation: Computation,
        instruction: Instruction,
        given: tuple[Value, ...],
        found: Mapping[str, Value],
    ) -> Value:
        opcode = instruction.opcode
        if opcode == 'parameter':
            place = int(instruction.operands[0])
            return given[place] if place < len(given) else ()
        if opcode == 'constant' or not any(
            operand.partition('#')[0] in found for operand in instruction.operands
        ):
            return ()
        if opcode in ('tuple', *_TUPLES):
            values = self._given_to(computation, instruction, found)
            return tuple(itertools.chain.from_iterable(values))
        if opcode == 'get-tuple-element':
            [value] = self._given_to(computation, instruction, found)
            place = int(instruction.attribute('index') or 0)
            return value[place : place + 1]
        if opcode == 'while':
            return self._settled(computation, instruction, found)
        if opcode in ('call', 'conditional'):
            results = [
                self._values(called, values).get(called.root, _none(instruction))
                for called, values in self._calls(computation, instruction, found)
            ]
            return _all_joined(results)
        operands = [
            Operand(array, rows)
            for array, value in zip(
                computation.operands_of(instruction),
                self._given_to(computation, instruction, found),
                strict=True,
            )
            for rows in value[:1]
        ]
        return tuple(passed_on(instruction, operands))

    def _given_to(
        self, computation: Computation, instruction: Instruction, found: Mapping[str, Value]
    ) -> list[Value]:
        """The rows of the operands."""
        values = []
        for operand in instruction.operands:
            name, _, element = operand.partition('#')
            maker = computation.instructions[name]
            value = found.get(name) or _none(maker)
            values.append(value[int(element) : int(element) + 1] if element else value)
        return values

    def _calls(
        self, computation: Computation, instruction: Instruction, found: Mapping[str, Value]
    ) -> list[tuple[Computation, tuple[Value, ...]]]:
        """What a call or a conditional calls, and the rows of the arguments."""
        values = self._given_to(computation, instruction, found)
        if instruction.opcode == 'call':
            return [(called, tuple(values)) for called in self._module.called(instruction, 'to_apply')]
        branches = self._module.called(
            instruction, 'branch_computations', 'true_computation', 'false_computation'
        )
        return [(called, (value,)) for called, value in zip(branches, values[1:], strict=True)]

    def _settled(self, computation: Computation, loop: Instruction, found: Mapping[str, Value]) -> Value:
        """The rows of the state of a loop: as it begins, or as a round returns it."""
        [state] = self._given_to(computation, loop, found)
        [body] = self._module.called(loop, 'body')
        for _ in range(_ROUNDS):
            returned = self._values(body, (state,)).get(body.root, _none(loop))
            grown = _all_joined([state, returned])
            if grown == state:
                break
            state = grown
        return state

    def _note(self, computation: Computation, given: tuple[Value, ...]) -> None:
        """Notes which collectives move rows, in a computation and in those that it calls."""
        found = self._values(computation, given)
        for instruction in computation.instructions.values():
            if instruction.opcode in _SENDS:
                key = computation.name, instruction.name
                given_to = itertools.chain.from_iterable(self._given_to(computation, instruction, found))
                moved = any(map(has_rows, given_to))
                self._moved[key] = self._moved.get(key, True) and moved
            elif instruction.opcode == 'while':
                for body in self._module.called(instruction, 'body'):
                    self._note(body, (found.get(instruction.name) or _none(instruction),))
            elif instruction.opcode in ('call', 'conditional'):
                for called, values in self._calls(computation, instruction, found):
                    self._note(called, values)

    def _is_asked_for(self, computation: Computation, instruction: Instruction) -> bool:
        """Whether a constraint of the user's, or the sharding of an output, says where the rows go."""
        constrained = {name for inside, name in self._constrained if inside == computation.name}
        root = computation.root if computation.name == self._module.entry else None

        def comes_from_there(instruction: Instruction) -> bool:
            makers = computation.makers_of(instruction)
            return instruction.name in constrained or (
                instruction.opcode in (*_FORWARDS, *_SENDS)
                and len(makers) == 1
                and comes_from_there(makers[0])
            )

        def goes_there(instruction: Instruction) -> bool:
            if instruction.name in constrained or instruction.name == root:
                return True
            users = computation.users.get(instruction.name, [])
            return bool(users) and all(
                user.name in constrained or (user.opcode in _FORWARDS and goes_there(user)) for user in users
            )

        return comes_from_there(instruction) or goes_there(instruction)

    @functools.cached_property
    def _constrained(self) -> set[tuple[str, str]]:
        """The values that the user has constrained, each with its computation.

        What is followed is constrained at the place of an operation, which other instructions have, too.
        """
        constraints: list[tuple[Frame | None, tuple[str, str]]] = []
        operations = set()
        for computation in self._module.computations.values():
            for each in computation.instructions.values():
                place = next(self._module.stack(each.frame), None)
                if each.op_name.endswith(_CONSTRAINT):
                    constraints.append((place, (computation.name, each.name)))
                elif place is not None:
                    operations.add(place)
        return {names for place, names in constraints if place not in operations}


def _sizes(value: Value) -> list[int]:
    return list(map(len, value))


def _none(instruction: Instruction) -> Value:
    return tuple(map(no_rows, instruction.arrays))


def _all_joined(values: Iterable[Value]) -> Value:
    return tuple(_joined_rows(each) for each in zip(*values, strict=True))


def _joined_rows(rows: Sequence[Rows]) -> Rows:
    found = rows[0]
    for other in rows[1:]:
        found = joined(found, other)
    return found
