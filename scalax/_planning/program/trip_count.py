"""The rounds of a loop, from the integers that decide whether there is another one.

Both jaxprs and HLO programs are read as functions from the integers of a loop's state: they compute whether
there is another round, and the integers of that round. What depends on data is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scalax._jaxpr.static_integers import IntegerValues
from scalax._planning.program.counting import Exactness

State = Mapping[int, IntegerValues | None]
"""Index of an element of a loop's state -> its value; None if that is not known."""


_MOST_ROUNDS = 10_000
_MOST_OPEN_ROUNDS = 1_000  # after which data may have ended the loop


def solved_rounds(
    state: State, test: Callable[[State], IntegerValues | None], following: Callable[[State], State]
) -> tuple[int, Exactness]:
    """How often the body of a loop runs: at least once, if it does not end within 10,000 rounds.

    At most so often, if something that depends on data may end it before; that is tried for 1,000 rounds.

    Args:
        state: the state at the start.
        test: whether there is another round; None if that is not known.
        following: the state in the next round.

    Example:
        >>> import numpy as np
        >>> up = lambda state: {0: state[0] + 2}
        >>> solved_rounds({0: np.array([1])}, lambda state: state[0] <= 7, up)
        (4, <Exactness.EXACT: 'exact'>)
    """
    exactness = Exactness.EXACT
    for rounds in range(_MOST_ROUNDS):
        more = test(state)
        if more is None:
            if rounds == _MOST_OPEN_ROUNDS:
                break
            exactness = Exactness.AT_MOST
        elif not more:
            return rounds, exactness if rounds else Exactness.EXACT
        before, state = state, following(state)
        if state == before:
            break  # for ever, or as data decide
    return 1, Exactness.AT_LEAST
