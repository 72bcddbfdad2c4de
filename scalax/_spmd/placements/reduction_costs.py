"""Where a partial sum is cheapest to reduce: at once, or after linear operations whose results are smaller.

A partial sum is usually reduced before it gets larger, and before several operations use it. But its terms
may come together again in a smaller sum. An example is the gradient of a recurrence that
``jax.lax.associative_scan`` computes: the gradients of the powers of the decay are padded, added to others,
and summed over time. Reduced one by one, they take many collectives, and more bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from scalax._jax.equations import Literal, open_jaxpr, shape_of
from scalax._jax.primitives import primitive_name
from scalax._spmd.placements.op_rules import bytes_of, is_linear_in, is_zero


class ReductionCosts:
    """The bytes of reducing each variable of a jaxpr as a partial sum, or what linear operations make of it.

    Where partial sums are added, the cost of their sum is divided among them.

    Args:
        jaxpr: the jaxpr, open or closed.
        depends_on_examples: returns whether a variable depends on examples; others are no partial sums.
    """

    def __init__(self, jaxpr: Any, depends_on_examples: Callable[[Any], bool]) -> None:
        inner = open_jaxpr(jaxpr)
        self._depends_on_examples = depends_on_examples
        self._zeros: set[int] = set()
        self._later: dict[int, float] = {}  # the cost of reducing what is computed from a variable
        for equation in inner.eqns:
            if is_zero(equation, [*map(self._is_zero, equation.invars)]):
                self._zeros.update(map(id, equation.outvars))
        for var in inner.outvars:
            self._add(var, bytes_of(var))
        for equation in reversed(inner.eqns):
            linear = self._linear_operands(equation)
            cost = sum(map(self.of, equation.outvars)) / max(1, len(linear))
            for i, atom in enumerate(equation.invars):
                self._add(atom, cost if i in linear else bytes_of(atom))

    def of(self, atom: Any) -> float:
        """Returns the lowest cost of a variable."""
        return min(bytes_of(atom), self.of_results(atom))

    def of_results(self, atom: Any) -> float:
        """Returns the cost of a variable that is not reduced itself, but only what is computed from it."""
        return self._later.get(id(atom), 0)

    def _add(self, atom: Any, cost: float) -> None:
        if not isinstance(atom, Literal):
            self._later[id(atom)] = self._later.get(id(atom), 0) + cost

    def _is_zero(self, atom: Any) -> bool:
        if not isinstance(atom, Literal):
            return id(atom) in self._zeros
        # The gradient of an integer (float0) has no values.
        dtype: Any = getattr(atom.aval, 'dtype', None)
        return not shape_of(atom) and dtype != jax.dtypes.float0 and bool(atom.val == 0)

    def _linear_operands(self, equation: Any) -> Sequence[int]:
        """Returns the operands that may be partial sums if the results are; empty if none may."""
        if is_wider_cast(equation):
            return ()
        terms = [i for i, x in enumerate(equation.invars) if not self._is_zero(x)]
        terms = [i for i in terms if not isinstance(equation.invars[i], Literal)]
        terms = [i for i in terms if self._depends_on_examples(equation.invars[i])]
        zeros = [*map(self._is_zero, equation.invars)]
        return terms if is_linear_in(equation, terms, zeros) else ()


def is_wider_cast(equation: Any) -> bool:
    """Returns whether an equation casts to a wider dtype.

    A gradient is reduced in the dtype in which the backward pass computes it.
    """
    if primitive_name(equation) != 'convert_element_type':
        return False
    [operand], [result] = equation.invars, equation.outvars
    return bytes_of(result) > bytes_of(operand)
