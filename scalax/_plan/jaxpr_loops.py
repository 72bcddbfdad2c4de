"""Rounds of the loops of a jaxpr whose state decides when they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from scalax._plan.formulas import Counted
from scalax._plan.loop_rounds import (
    COMPARED,
    COMPUTED,
    ONE_OPERAND,
    Element,
    Scalar,
    constant_of,
    solved_rounds,
)

# JAX's names -> XLA's. Comparisons are written in small letters here.
_NAMES = {
    **{name: name for name in (*COMPUTED, *ONE_OPERAND)},
    **{name.lower(): name for name in COMPARED},
    'convert_element_type': 'convert',
    'div': 'divide',
    'max': 'maximum',
    'min': 'minimum',
    'mul': 'multiply',
    'neg': 'negate',
    'rem': 'remainder',
    'sub': 'subtract',
}
_FORWARDING = (
    'broadcast_in_dim',
    'copy',
    'optimization_barrier',
    'reshape',
    'sharding_constraint',
    'squeeze',
)
_CALLS = ('jit', 'pjit', 'closed_call', 'core_call')
_DEEP = 30  # operations from the test of a loop to its state
_Given = Callable[[int], Scalar | None]


def rounds_of_while(equation: Any, outside: Any = None) -> tuple[int, Counted]:
    """How often the body of a ``while`` equation runs, and how well that is known.

    (``jax.lax.fori_loop`` over Python integers is a scan, whose length is known.)

    Args:
        equation: the equation.
        outside: the jaxpr that it is in, where the loop's state may begin as a constant.

    Example:
        >>> import jax
        >>> loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1]), (1, x))
        >>> [rounds_of_while(equation) for equation in jax.jit(loop).trace(0.0).jaxpr.eqns]
        [(4, <Counted.EXACTLY: 'exactly'>)]
    """
    params = equation.params
    asked, body = params['cond_jaxpr'], params['body_jaxpr']
    of_test, of_body = params['cond_nconsts'], params['body_nconsts']
    around = _Scalars(outside)
    constants = equation.invars[: of_test + of_body]
    begin = equation.invars[of_test + of_body :]

    def given(first: int, count: int) -> _Given:
        """The arguments of the test or of the body: constants, and then the state."""

        def argument(index: int) -> Scalar | None:
            if index < count:
                return around.scalar(constants[first + index])
            return _typed(begin[index - count], 'element', number=index - count)

        return argument

    test = _Scalars(asked.jaxpr, given(0, of_test)).scalar(asked.jaxpr.outvars[0])
    following = _Scalars(body.jaxpr, given(of_test, of_body))

    def state(index: int) -> Element:
        start = constant_of(around.scalar(begin[index]))
        return Element(start, following.scalar(body.jaxpr.outvars[index]))

    return solved_rounds(test, state)


class _Scalars:
    """The integers of a jaxpr.

    Args:
        jaxpr: the jaxpr; None for one in which only literals are known.
        given: index of an argument -> its value; by default none is known.
    """

    def __init__(self, jaxpr: Any, given: _Given = lambda index: None) -> None:
        self.given = given
        self.equations, self.arguments = {}, {}
        if jaxpr is not None:
            self.equations = {id(var): equation for equation in jaxpr.eqns for var in equation.outvars}
            self.arguments = {id(var): index for index, var in enumerate(jaxpr.invars)}
        self.known: dict[int, Scalar | None] = {}

    def scalar(self, var: Any, depth: int = 0) -> Scalar | None:
        """The value of a variable or literal; None if it is no integer, or is not known."""
        if hasattr(var, 'val'):
            return _literal(var)
        if id(var) not in self.known and depth < _DEEP:
            self.known[id(var)] = self._read(var, depth + 1)
        return self.known.get(id(var))

    def _read(self, var: Any, depth: int) -> Scalar | None:
        if id(var) in self.arguments:
            return self.given(self.arguments[id(var)])
        equation = self.equations.get(id(var))
        if equation is None or not _type(var.aval):
            return None
        name, operands = equation.primitive.name, equation.invars
        if name in _FORWARDING:
            place = next(i for i, out in enumerate(equation.outvars) if out is var)
            return self.scalar(operands[place], depth)
        if name in _CALLS:
            jaxpr = equation.params['jaxpr' if 'jaxpr' in equation.params else 'call_jaxpr']
            jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
            inner = _Scalars(jaxpr, lambda index: self.scalar(operands[index], depth))
            place = next(i for i, out in enumerate(equation.outvars) if out is var)
            return inner.scalar(jaxpr.outvars[place], depth)
        parts = tuple(self.scalar(operand, depth) for operand in operands)
        if name == 'select_n' and len(parts) == 3:
            return _typed(var, 'select', (parts[0], parts[2], parts[1]))
        return _typed(var, _NAMES[name], parts) if name in _NAMES else None


def _literal(var: Any) -> Scalar | None:
    return _typed(var, 'constant', number=int(var.val)) if _type(var.aval) and not np.ndim(var.val) else None


def _typed(
    var: Any, operation: str, operands: tuple[Scalar | None, ...] = (), number: int = 0
) -> Scalar | None:
    type_ = _type(var.aval)
    return Scalar(type_, operation, operands, number) if type_ else None


def _type(aval: Any) -> str:
    """XLA's name of the type of an integer or truth value; empty for anything else."""
    if getattr(aval, 'shape', None) != ():
        return ''
    if jnp.issubdtype(aval.dtype, jnp.bool_):
        return 'pred'
    signed = jnp.issubdtype(aval.dtype, jnp.signedinteger)
    integer = jnp.issubdtype(aval.dtype, jnp.integer)
    return f'{"s" if signed else "u"}{8 * aval.dtype.itemsize}' if integer else ''
