"""The rounds of a loop, from the integers that decide whether there is another one.

Both jaxprs and HLO programs are read as functions from the integers of a loop's state: they compute whether
there is another round, and the integers of that round. What depends on data is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scalax._plan.formulas import Counted

Values = npt.NDArray[Any]
"""An integer or truth value, or an array of them."""
State = Mapping[int, Values | None]
"""Index of an element of a loop's state -> its value; None if that is not known."""


def _quotient(dividend: Values, divisor: Values) -> Values:
    """Rounded towards zero, where numpy rounds down."""
    return (dividend - np.fmod(dividend, divisor)) // divisor


_OPERATIONS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ('abs', np.abs),
    ('add', np.add),
    ('and', np.bitwise_and),
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
    ('select_n', lambda which, first, second: np.where(which, second, first)),
    ('sign', np.sign),
    ('sub subtract', np.subtract),
    ('xor', np.bitwise_xor),
)
OPERATIONS = {name: function for names, function in _OPERATIONS for name in names.split()}
"""Operations on integers, by the names of JAX and of XLA (https://openxla.org/xla/operation_semantics)."""
_DIVISIONS = ('div', 'divide', 'rem', 'remainder')
_MOST_ROUNDS = 10_000
_MOST_OPEN_ROUNDS = 1_000  # after which data may have ended the loop


def computed(operation: str, values: Sequence[Values | None]) -> Values | None:
    """The result of one of `OPERATIONS`; None if it is not known, as of divisions by zero.

    Example:
        >>> computed('and', [None, np.array([False])])
        array([False])
    """
    if operation in ('and', 'or'):
        for value in values:
            if value is not None and value.dtype == np.bool_ and (value == (operation == 'or')).all():
                return value  # whatever the other one is
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len({value.shape for value in known}) != 1:
        return None
    if operation in _DIVISIONS and not known[1].all():
        return None
    with np.errstate(over='ignore'):  # integers begin again at the other end of their type
        return np.asarray(OPERATIONS[operation](*known))


def solved_rounds(
    state: State, test: Callable[[State], Values | None], following: Callable[[State], State]
) -> tuple[int, Counted]:
    """How often the body of a loop runs: at least once, if it does not end within 10,000 rounds.

    At most so often, if something that depends on data may end it before; that is tried for 1,000 rounds.

    Args:
        state: the state at the start.
        test: whether there is another round; None if that is not known.
        following: the state in the next round.

    Example:
        >>> up = lambda state: {0: state[0] + 2}
        >>> solved_rounds({0: np.array([1])}, lambda state: state[0] <= 7, up)
        (4, <Counted.EXACTLY: 'exactly'>)
    """
    counted = Counted.EXACTLY
    for rounds in range(_MOST_ROUNDS):
        more = test(state)
        if more is None:
            if rounds == _MOST_OPEN_ROUNDS:
                break
            counted = Counted.AT_MOST
        elif not more:
            return rounds, counted if rounds else Counted.EXACTLY
        before, state = state, following(state)
        if state == before:
            break  # for ever, or as data decide
    return 1, Counted.AT_LEAST
