"""Integers of a jaxpr that are known before it runs: rounds, numbers of rows, what is computed of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scalax._jax.equations import (
    CALLS,
    Literal,
    call_jaxpr,
    open_jaxpr,
    permutes_elements,
    producers_of,
    shape_of,
    size_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import ELEMENTWISE, SHAPE_OPS

IntegerValues = npt.NDArray[Any]
"""Integers or truth values, in one row. A single one is that of all elements, or of all rounds of a loop."""


def _quotient(dividend: IntegerValues, divisor: IntegerValues) -> IntegerValues:
    """Rounded towards zero, where numpy rounds down."""
    return (dividend - np.fmod(dividend, divisor)) // divisor


def _selected(which: IntegerValues, *cases: IntegerValues) -> IntegerValues:
    return np.select([which == i for i in range(len(cases))], cases, cases[-1])


_OPERATIONS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ('abs', np.abs),
    ('add', np.add),
    ('and', np.bitwise_and),
    ('clamp', lambda least, values, most: np.minimum(np.maximum(least, values), most)),
    ('div divide', _quotient),
    ('eq EQ', np.equal),
    ('ge GE', np.greater_equal),
    ('gt GT', np.greater),
    ('le LE', np.less_equal),
    ('lt LT', np.less),
    ('max maximum', np.maximum),
    ('min minimum', np.minimum),
    ('mul multiply', np.multiply),
    ('ne NE', np.not_equal),
    ('neg negate', np.negative),
    ('not', np.invert),
    ('or', np.bitwise_or),
    ('rem remainder', np.fmod),
    ('select', np.where),
    ('select_n', _selected),
    ('sign', np.sign),
    ('sub subtract', np.subtract),
    ('xor', np.bitwise_xor),
)
INTEGER_OPS = {name: function for names, function in _OPERATIONS for name in names.split()}
"""Operations on integers, by the names of JAX and of XLA (https://openxla.org/xla/operation_semantics)."""
_SAME = SHAPE_OPS | {'name', 'optimization_barrier', 'sharding_constraint'}
_DIVISIONS = ('div', 'divide', 'rem', 'remainder')
_DEEP = 50  # operations, one after the other, that an integer may be computed in: they are read recursively
# More elements are not numbered.
_MOST = 2**20


def evaluate(operation: str, values: Sequence[IntegerValues | None]) -> IntegerValues | None:
    """The result of one of `INTEGER_OPS`; None if it is not known, as of divisions by zero.

    Example:
        >>> computed('and', [None, np.array([False])])
        array([False])
    """
    if operation in ('and', 'or'):
        for value in values:
            if value is not None and value.dtype == np.bool_ and (value == (operation == 'or')).all():
                return value  # whatever the other one is
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len({value.shape for value in known if value.size != 1}) > 1:
        return None
    if operation in _DIVISIONS and not known[1].all():
        return None
    with np.errstate(over='ignore'):  # integers begin again at the other end of their type
        return np.asarray(INTEGER_OPS[operation](*known))


class StaticIntegers:
    """The integers of a jaxpr, computed where they are asked for, of those that are given.

    In a round of a loop a value of one element may have many: those of all rounds, in the order of stacks.

    Args:
        jaxpr: the jaxpr, without its constants. Without one, only literals are known.
        iotas: whether results of `iota` are known. If not, each element depends on what is given at its place
            alone, and not on where that is.
    """

    def __init__(self, jaxpr: Any, *, iotas: bool = False) -> None:
        self._made = {} if jaxpr is None else producers_of(jaxpr)
        self._iotas = iotas
        self._known: dict[int, IntegerValues | None] = {}

    def reset(self, variables: Sequence[Any], values: Sequence[IntegerValues | None]) -> None:
        """Sets the integers of variables, and forgets what was computed of others."""
        self._known.clear()
        self.set(variables, values)

    def set(self, variables: Sequence[Any], values: Sequence[IntegerValues | None]) -> None:
        """Sets the integers of variables."""
        self._known.update(zip(map(id, variables), values, strict=True))

    def of(self, atom: Any, depth: int = 0) -> IntegerValues | None:
        """The integers of a variable or literal; None if it has none, or they are not known."""
        dtype = getattr(atom.aval, 'dtype', None)
        if getattr(dtype, 'kind', 'V') not in 'biu':  # dtypes of PRNG keys are of no kind
            return None
        if isinstance(atom, Literal):
            return np.asarray(atom.val, dtype).reshape(-1)
        if id(atom) not in self._known and id(atom) in self._made and depth < _DEEP:
            found = self._read(atom, self._made[id(atom)], depth + 1)
            self._known[id(atom)] = None if found is None else found.astype(dtype)
        return self._known.get(id(atom))

    def _read(self, var: Any, equation: Any, depth: int) -> IntegerValues | None:
        name, operands, shape = primitive_name(equation), equation.invars, shape_of(var)
        place = next(i for i, out in enumerate(equation.outvars) if out is var)
        if name == 'iota':
            return np.arange(*shape) if self._iotas and len(shape) == 1 and shape[0] <= _MOST else None
        if name in CALLS:
            inner = open_jaxpr(call_jaxpr(equation))
            inside = StaticIntegers(inner, iotas=self._iotas)
            inside.reset(inner.invars, [self.of(operand, depth) for operand in operands])
            return inside.of(inner.outvars[place], depth)
        if name in _SAME:
            values, size = self.of(operands[place], depth), size_of(var)
            is_moved = name == 'transpose' or (name == 'reshape' and permutes_elements(equation))
            is_same = size_of(operands[place]) == size and (not is_moved or size == max(shape, default=1))
            return values if is_same or values is None or values.size == 1 else None
        if name not in ELEMENTWISE or name not in INTEGER_OPS:
            return None
        every = [self.of(operand, depth) for operand in operands]
        pairs = zip(every, map(shape_of, operands), strict=True)
        fit = all(values is None or values.size == 1 or own == shape for values, own in pairs)
        return evaluate(name, every) if fit else None
