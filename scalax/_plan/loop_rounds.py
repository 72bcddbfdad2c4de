"""The rounds of a loop, solved from the integers that decide whether there is another one.

Jaxprs and HLO programs are both brought into this form: the test of a loop as operations on elements of its
state, and the value of each element at the start and in the next round. A counter that grows by a constant
is solved as a line; other counters are run.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from scalax._plan.formulas import Counted

# Operations on integers, by XLA's names (https://openxla.org/xla/operation_semantics); they take arrays, too.
COMPUTED: Mapping[str, Callable[[Any, Any], Any]] = {
    'add': operator.add,
    'and': operator.and_,
    'divide': operator.floordiv,
    'maximum': np.maximum,
    'minimum': np.minimum,
    'multiply': operator.mul,
    'or': operator.or_,
    'remainder': operator.mod,
    'subtract': operator.sub,
    'xor': operator.xor,
}
COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name.lower()) for name in ('LT', 'LE', 'GT', 'GE', 'EQ', 'NE')
}
ONE_OPERAND: Mapping[str, Callable[[Any], Any]] = {
    'convert': operator.pos,
    'negate': operator.neg,
    'not': operator.invert,
}
OPERATIONS = frozenset({*COMPUTED, *COMPARED, *ONE_OPERAND, 'select'})
_MOST_ROUNDS = 10_000
_ENDLESS = 1 << 128


@dataclasses.dataclass(frozen=True, eq=False)
class Scalar:
    """An integer or truth value in a round of a loop.

    Attributes:
        type: ``'s32'``, ``'u8'``, ``'pred'`` ...
        operation: ``'element'`` of the state, ``'constant'``, ``'select'``, or a key of one of the tables.
        operands: what it is computed from; None for what is not known.
        number: the index of the element, or the value of the constant.
    """

    type: str
    operation: str
    operands: tuple[Scalar | None, ...] = ()
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Element:
    """An element of a loop's state: its value at the start, and what the next round gets; None if unknown."""

    start: int | None
    next: Scalar | None


State = Callable[[int], Element]
"""Index -> the element."""


def solved_rounds(test: Scalar | None, state: State) -> tuple[int, Counted]:
    """How often the body of a loop runs.

    Of conditions joined by *and*, those that can be solved limit the rounds: at most as many. If none can be,
    there is at least one round.

    Args:
        test: whether there is another round; None if that cannot be computed here.
        state: the elements of the state, each asked for when it is needed.

    Example:
        >>> i = Scalar('s32', 'element', number=0)
        >>> two, seven = (Scalar('s32', 'constant', number=n) for n in (2, 7))
        >>> state = lambda index: Element(1, Scalar('s32', 'add', (i, two)))
        >>> solved_rounds(Scalar('pred', 'LE', (i, seven)), state)
        (4, <Counted.EXACTLY: 'exactly'>)
    """
    limits = [_rounds(part, state) for part in _conditions(test)]
    known = [limit for limit in limits if limit is not None]
    rounds = min(known, default=_ENDLESS)
    if rounds == _ENDLESS:
        return 1, Counted.AT_LEAST
    return rounds, Counted.EXACTLY if len(known) == len(limits) or not rounds else Counted.AT_MOST


def constant_of(scalar: Scalar | None) -> int | None:
    """The value of what is computed from constants alone; None for anything else."""
    if scalar is None:
        return None
    try:
        values = _Round(scalar, lambda index: Element(None, None)).values({})
    except _Unknown:
        return None
    return None if values is None else values[scalar]


def _conditions(test: Scalar | None) -> list[Scalar | None]:
    """The conditions that a test joins by *and*; JAX converts truth values to what they are."""
    joins = test is not None and test.type == 'pred' and test.operation in ('and', 'convert')
    if test is None or not joins or any(part and part.type != 'pred' for part in test.operands):
        return [test]
    return [part for operand in test.operands for part in _conditions(operand)]


class _Unknown(Exception):
    """A value depends on data."""


def _rounds(test: Scalar | None, state: State) -> int | None:
    """The rounds until a condition fails; _ENDLESS if it never does, None if that is not known."""
    if test is None:
        return None
    try:
        needed = _Round(test, state)
    except _Unknown:
        return None
    rounds = needed.rounds_of_lines(test)
    return needed.run(test) if rounds is None else rounds


class _Round:
    """What a test needs of a round."""

    def __init__(self, test: Scalar, state: State) -> None:
        self.elements: dict[int, tuple[int, Scalar]] = {}  # their starts, and what the next round gets
        self.order: dict[Scalar, None] = {}  # operands come first
        wanted: list[Scalar] = [test]
        while wanted:
            for scalar in self._needed(wanted.pop()):
                if scalar.operation == 'element' and scalar.number not in self.elements:
                    element = state(scalar.number)
                    if element.start is None or element.next is None:
                        raise _Unknown
                    self.elements[scalar.number] = element.start, element.next
                    wanted.append(element.next)

    def _needed(self, scalar: Scalar | None) -> Iterator[Scalar]:
        """A scalar and all that it is computed from in a round, as far as these are new; operands first."""
        if scalar is None:
            raise _Unknown
        if scalar not in self.order:
            for operand in scalar.operands:
                yield from self._needed(operand)
            self.order[scalar] = None
            yield scalar

    def run(self, test: Scalar) -> int | None:
        """Counts rounds until the test fails; None if that takes too many."""
        current = {index: start for index, (start, _) in self.elements.items()}
        for rounds in range(_MOST_ROUNDS):
            values = self.values(current)
            if values is None:
                return None
            if not values[test]:
                return rounds
            current = {index: values[following] for index, (_, following) in self.elements.items()}
        return None

    def values(self, current: Mapping[int, int]) -> dict[Scalar | None, int] | None:
        """All values in a round in which the state is *current*; None if one is not defined."""
        values: dict[Scalar | None, int] = {}
        for scalar in self.order:
            value = _value(scalar, [values[operand] for operand in scalar.operands], current)
            if value is None:
                return None
            values[scalar] = _wrapped(value, scalar.type)
        return values

    def rounds_of_lines(self, test: Scalar) -> int | None:
        """The rounds of a test that compares two lines; None for other tests."""
        if test.operation not in COMPARED:
            return None
        lines: dict[Scalar | None, _Line | None] = {}
        left, right = (self._line(operand, lines) for operand in test.operands)
        if left is None or right is None:
            return None
        rounds = _first_failure(test.operation, left[0] - right[0], left[1] - right[1])
        # A number that leaves its type begins again at the other end, and is no line.
        last = _MOST_ROUNDS if rounds == _ENDLESS else rounds
        ends = ((scalar, line[0] + line[1] * last) for scalar, line in lines.items() if scalar and line)
        return rounds if all(_wrapped(end, scalar.type) == end for scalar, end in ends) else None

    def _line(self, scalar: Scalar | None, lines: dict[Scalar | None, _Line | None]) -> _Line | None:
        """The value as a line over the rounds; None if it is none."""
        if scalar not in lines:
            lines[scalar] = None  # what depends on itself in another way than counters do is no line
            lines[scalar] = self._new_line(scalar, lines)
        return lines[scalar]

    def _new_line(self, scalar: Scalar | None, lines: dict[Scalar | None, _Line | None]) -> _Line | None:
        assert scalar is not None
        if scalar.operation == 'constant':
            return scalar.number, 0
        if scalar.operation == 'element':
            start, following = self.elements[scalar.number]
            step = self._step(scalar.number, following, lines)
            return None if step is None else (start, step)
        parts = [self._line(operand, lines) for operand in scalar.operands]
        if scalar.operation == 'convert':
            return parts[0]
        if scalar.operation not in ('add', 'subtract', 'multiply') or parts[0] is None or parts[1] is None:
            return None
        (a, slope_a), (b, slope_b) = parts[0], parts[1]
        if scalar.operation == 'multiply':
            return None if slope_a and slope_b else (a * b, a * slope_b + slope_a * b)
        sign = 1 if scalar.operation == 'add' else -1
        return a + sign * b, slope_a + sign * slope_b

    def _step(self, index: int, following: Scalar, lines: dict[Scalar | None, _Line | None]) -> int | None:
        """The constant that a round adds to an element; None if it does not."""
        own = [_is_element(part, index) for part in (following, *following.operands)]
        if own[0]:
            return 0
        if following.operation == 'add' and own[1] != own[2]:
            sign, other = 1, following.operands[1 if own[1] else 0]
        elif following.operation == 'subtract' and own[1] and not own[2]:
            sign, other = -1, following.operands[1]
        else:
            return None
        line = self._line(other, lines)
        return sign * line[0] if line and not line[1] else None


_Line = tuple[int, int]  # at the start, and what each round adds


def _is_element(scalar: Scalar | None, index: int) -> bool:
    return scalar is not None and scalar.operation == 'element' and scalar.number == index


def _first_failure(comparison: str, start: int, step: int) -> int:
    """The first round k in which the comparison of ``start + k * step`` with 0 is false."""
    if comparison in ('GT', 'GE'):
        start, step, comparison = -start, -step, {'GT': 'LT', 'GE': 'LE'}[comparison]
    if comparison == 'EQ':
        return 0 if start else 1 if step else _ENDLESS
    if comparison == 'NE':
        if not start:
            return 0
        hits = step and start % step == 0 and start // step < 0
        return -(start // step) if hits else _ENDLESS
    start -= comparison == 'LE'  # of integers, x <= 0 is x - 1 < 0
    if start >= 0:
        return 0
    return -(start // step) if step > 0 else _ENDLESS


def _value(scalar: Scalar, values: list[int], current: Mapping[int, int]) -> int | None:
    """The value of a scalar before it is cut to its type; None for divisions of negative numbers."""
    operation = scalar.operation
    if operation == 'constant':
        return scalar.number
    if operation == 'element':
        return current[scalar.number]
    if operation == 'select':
        return values[1] if values[0] else values[2]
    if operation == 'convert' and scalar.type == 'pred':
        return values[0] != 0
    if operation in ('divide', 'remainder') and (values[0] < 0 or values[1] <= 0):
        return None
    table: Mapping[str, Callable[..., Any]] = (
        ONE_OPERAND if len(values) == 1 else COMPARED if operation in COMPARED else COMPUTED
    )
    return int(table[operation](*values))


def _wrapped(value: int, type_: str) -> int:
    """An integer as its type holds it: of too many bits the upper ones are lost."""
    if type_ == 'pred':
        return value & 1
    bits = int(type_[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if type_[0] == 's' and value >> (bits - 1) else value
