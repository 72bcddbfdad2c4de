"""Constant folding of integers in a jaxpr: loop counters, indices, and values computed from them."""

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
"""A flat array of integers or booleans. A single one is the value of all elements, or in all iterations."""


def _quotient(dividend: IntegerValues, divisor: IntegerValues) -> IntegerValues:
    """Returns the quotient rounded towards zero, as in JAX; NumPy rounds down."""
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
_PRESERVES_VALUES = SHAPE_OPS | {'name', 'optimization_barrier', 'sharding_constraint'}
_DIVISIONS = ('div', 'divide', 'rem', 'remainder')
_MAX_DEPTH = 50  # of the chain of operations that compute an integer, which are read recursively
_MAX_IOTA_SIZE = 2**20


def evaluate(operation: str, values: Sequence[IntegerValues | None]) -> IntegerValues | None:
    """Returns the result of one of `INTEGER_OPS`; None if it is unknown, or a division by zero.

    Example:
        >>> evaluate('and', [None, np.array([False])])
        array([False])
    """
    if operation in ('and', 'or'):
        for value in values:
            if value is not None and value.dtype == np.bool_ and (value == (operation == 'or')).all():
                return value  # whatever the other operand is
    known_values = [value for value in values if value is not None]
    if len(known_values) < len(values) or len({value.shape for value in known_values if value.size != 1}) > 1:
        return None
    if operation in _DIVISIONS and not known_values[1].all():
        return None
    with np.errstate(over='ignore'):  # integers wrap around
        return np.asarray(INTEGER_OPS[operation](*known_values))


class StaticIntegers:
    """Evaluates the integers of a jaxpr from the integers of some of its variables, on demand.

    In the body of a loop, a value of one element may have many integers: one for each iteration.

    Args:
        jaxpr: the open jaxpr. Without one, only literals are known.
        iotas: whether results of `iota` are known. If not, each known element depends only on the assigned
            integers at its index, and not on the index.
    """

    def __init__(self, jaxpr: Any, *, iotas: bool = False) -> None:
        self._producers = {} if jaxpr is None else producers_of(jaxpr)
        self._iotas = iotas
        self._values: dict[int, IntegerValues | None] = {}

    def reset(self, variables: Sequence[Any], values: Sequence[IntegerValues | None]) -> None:
        """Assigns integers to variables, and forgets all other integers."""
        self._values.clear()
        self.set(variables, values)

    def set(self, variables: Sequence[Any], values: Sequence[IntegerValues | None]) -> None:
        """Assigns integers to variables."""
        self._values.update(zip(map(id, variables), values, strict=True))

    def of(self, atom: Any, depth: int = 0) -> IntegerValues | None:
        """Returns the integers of a variable or literal; None if they are unknown, or it has none."""
        dtype = getattr(atom.aval, 'dtype', None)
        if getattr(dtype, 'kind', 'V') not in 'biu':  # dtypes of PRNG keys have no kind
            return None
        if isinstance(atom, Literal):
            return np.asarray(atom.val, dtype).reshape(-1)
        if id(atom) not in self._values and id(atom) in self._producers and depth < _MAX_DEPTH:
            values = self._evaluate(atom, self._producers[id(atom)], depth + 1)
            self._values[id(atom)] = None if values is None else values.astype(dtype)
        return self._values.get(id(atom))

    def _evaluate(self, var: Any, equation: Any, depth: int) -> IntegerValues | None:
        name, operands, shape = primitive_name(equation), equation.invars, shape_of(var)
        index = next(i for i, outvar in enumerate(equation.outvars) if outvar is var)
        if name == 'iota':
            return (
                np.arange(*shape) if self._iotas and len(shape) == 1 and shape[0] <= _MAX_IOTA_SIZE else None
            )
        if name in CALLS:
            inner = open_jaxpr(call_jaxpr(equation))
            inner_integers = StaticIntegers(inner, iotas=self._iotas)
            inner_integers.reset(inner.invars, [self.of(operand, depth) for operand in operands])
            return inner_integers.of(inner.outvars[index], depth)
        if name in _PRESERVES_VALUES:
            values, size = self.of(operands[index], depth), size_of(var)
            may_reorder = name == 'transpose' or (name == 'reshape' and permutes_elements(equation))
            is_same = size_of(operands[index]) == size and (not may_reorder or size == max(shape, default=1))
            return values if is_same or values is None or values.size == 1 else None
        if name not in ELEMENTWISE or name not in INTEGER_OPS:
            return None
        all_values = [self.of(operand, depth) for operand in operands]
        pairs = zip(all_values, map(shape_of, operands), strict=True)
        have_shape = all(
            values is None or values.size == 1 or operand_shape == shape for values, operand_shape in pairs
        )
        return evaluate(name, all_values) if have_shape else None
