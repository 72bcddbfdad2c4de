"""Trip counts of loops, found by simulating the integers of the loop state.

The callers turn the condition and the body of a loop, of a jaxpr or an HLO program, into functions of its
integer state. State that depends on data is unknown. `call_tree` simulates only the loops whose trip count
XLA has not recorded, and that do not count over a simple range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scalax._jaxpr.static_integers import IntegerValues
from scalax._planning.program.exactness import Exactness

State = Mapping[int, IntegerValues | None]
"""Index of an element of the loop state -> its value; None if the value is unknown."""


_MAX_ITERATIONS = 10_000
_MAX_UNCERTAIN_ITERATIONS = 1_000  # after which data may have ended the loop


def simulated_trip_count(
    state: State, test: Callable[[State], IntegerValues | None], next_state: Callable[[State], State]
) -> tuple[int, Exactness]:
    """Returns the trip count of a loop, and its exactness.

    The count is 1, as a lower bound, if the loop does not end within 10,000 iterations. It is an upper bound
    if a condition that depends on data may end the loop earlier; then 1,000 iterations are simulated.

    Args:
        state: the initial state.
        test: returns whether there is another iteration; None if that is unknown.
        next_state: returns the state after one iteration.

    Example:
        >>> import numpy as np
        >>> add_two = lambda state: {0: state[0] + 2}
        >>> simulated_trip_count({0: np.array([1])}, lambda state: state[0] <= 7, add_two)
        (4, <Exactness.EXACT: 'exact'>)
    """
    exactness = Exactness.EXACT
    for iterations in range(_MAX_ITERATIONS):
        continues = test(state)
        if continues is None:
            if iterations == _MAX_UNCERTAIN_ITERATIONS:
                break
            exactness = Exactness.AT_MOST
        elif not continues:
            return iterations, exactness if iterations else Exactness.EXACT
        previous, state = state, next_state(state)
        if state == previous:
            break  # the loop is endless, or ends when data says so
    return 1, Exactness.AT_LEAST
