"""How many rounds does a while loop of a jaxpr make? ``for (i = start; i < stop; i += step)`` of constants.

``jax.lax.fori_loop`` over Python integers is a scan already, whose length is written down; this is for
loops that count themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def rounds_of(equation: Any) -> int | None:
    """How many rounds a ``while`` equation makes; None if that depends on data.

    Example:
        >>> import jax
        >>> loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1]), (1, x))
        >>> [rounds_of(equation) for equation in jax.jit(loop).trace(0.0).jaxpr.eqns]
        [4]
    """
    params = equation.params
    asked, body = params['cond_jaxpr'].jaxpr, params['body_jaxpr'].jaxpr
    first, constants = params['cond_nconsts'], params['body_nconsts']
    if len(asked.eqns) != 1 or asked.eqns[0].primitive.name != 'lt':
        return None
    test = asked.eqns[0]
    if test.outvars[0] is not asked.outvars[0]:
        return None
    index, bound = (_place(var, asked.invars, first) for var in test.invars)
    if index is None or index < 0:
        return None
    state = equation.invars[first + constants :]
    start = _constant(state[index])
    if bound is None:
        stop = _constant(test.invars[1])
    elif bound >= 0 and body.outvars[bound] is body.invars[constants + bound]:
        stop = _constant(state[bound])
    else:
        return None
    step = _step(body, body.invars[constants + index], body.outvars[index])
    if start is None or stop is None or step is None or step <= 0:
        return None
    return max(0, -(-(stop - start) // step))


def _place(var: Any, arguments: list[Any], constants: int) -> int | None:
    """Which element of a loop's state a variable is; negative for a constant, None for neither."""
    return next((i - constants for i, other in enumerate(arguments) if other is var), None)


def _step(body: Any, before: Any, after: Any) -> int | None:
    """What one round adds to an element of the state."""
    for equation in body.eqns:
        if after is equation.outvars[0] and equation.primitive.name == 'add':
            others = [var for var in equation.invars if var is not before]
            return _constant(others[0]) if len(others) == 1 else None
    return None


def _constant(var: Any) -> int | None:
    """The value of a literal integer; None for anything else."""
    value = getattr(var, 'val', None)
    if value is None or np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.integer):
        return None
    return int(value)
