"""Abstract interpreter for jaxprs: computes with abstract values, through calls, loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from scalax._jax import equations
from scalax._jax.equations import CALLS, WITH_JAXPRS, loop_of, open_jaxpr
from scalax._jax.primitives import primitive_name

AbstractValue = TypeVar('AbstractValue')


class LoopValues(NamedTuple, Generic[AbstractValue]):
    """The abstract values in an iteration of a loop.

    Attributes:
        consts: the abstract values of the loop-invariant constants.
        carry: the abstract values of the carry.
        xs: the abstract values of one element of each scanned-over input.
        ys: the abstract values of one element of each stacked output.
    """

    consts: Sequence[AbstractValue]
    carry: Sequence[AbstractValue]
    xs: Sequence[AbstractValue]
    ys: Sequence[AbstractValue]


class AbstractInterpreter(Generic[AbstractValue]):
    """Computes the abstract values of a jaxpr from the abstract values of its arguments.

    Subclasses implement `eval_primitive`, for equations without inner jaxprs, and `join`. Abstract values are
    compared and hashed. There must be finitely many of them, because loops run until a fixpoint.

    Args:
        bottom: the abstract value of literals, constants and everything else of which nothing is known.
    """

    def __init__(self, bottom: AbstractValue) -> None:
        self._bottom = bottom
        self._results: dict[Any, list[AbstractValue]] = {}
        self._values: dict[int, AbstractValue] = {}  # by the ids of variables: literals are not hashable

    def eval_primitive(
        self, name: str, equation: Any, operands: Sequence[AbstractValue]
    ) -> Sequence[AbstractValue]:
        """Returns the abstract results of an equation that is neither a call, nor a loop or a `cond`."""
        raise NotImplementedError

    def join(self, values: Sequence[AbstractValue]) -> AbstractValue:
        """Returns the abstract value of a variable that may have any of several abstract values.

        They are the values of different branches, or of different iterations of a loop.
        """
        raise NotImplementedError

    def element_of(self, stack: AbstractValue) -> AbstractValue:
        """Returns the abstract value of one element of a scanned-over array."""
        return stack

    def stack_of(self, element: AbstractValue) -> AbstractValue:
        """Returns the abstract value of an array that stacks the results of all iterations."""
        return element

    def of(self, atom: Any) -> AbstractValue:
        """Returns the abstract value of a variable, joined over all calls of its jaxpr."""
        return self._values.get(id(atom), self._bottom)

    def record(self, values: dict[int, AbstractValue]) -> None:
        """Records the abstract values of one evaluation of a jaxpr, by the ids of its variables."""
        if self._values.keys().isdisjoint(values):  # most jaxprs are evaluated once
            self._values.update(values)
            return
        for var, value in values.items():
            previous = self._values.setdefault(var, value)
            if previous is not value:
                self._values[var] = self.join([previous, value])

    def eval_jaxpr(self, jaxpr: Any, arguments: Sequence[AbstractValue]) -> list[AbstractValue]:
        """Returns the abstract results of a jaxpr, open or closed."""
        key = open_jaxpr(jaxpr), tuple(arguments)
        if key not in self._results:
            self._results[key] = self._eval_equations(*key)
        return self._results[key]

    def _eval_equations(self, jaxpr: Any, arguments: Sequence[AbstractValue]) -> list[AbstractValue]:
        bottom = self._bottom
        values = {id(var): x for var, x in zip(jaxpr.invars, arguments, strict=True) if x != bottom}
        known_vars = values.keys()
        for equation in jaxpr.eqns:
            ids = [*map(id, equation.invars)]
            if known_vars.isdisjoint(ids):
                continue
            results = self.eval_equation(equation, [values.get(i, bottom) for i in ids])
            for var, result in zip(equation.outvars, results, strict=False):
                if result != bottom:
                    values[id(var)] = result
        self.record(values)
        return [values.get(id(atom), bottom) for atom in jaxpr.outvars]

    def eval_equation(self, equation: Any, operands: Sequence[AbstractValue]) -> Sequence[AbstractValue]:
        """Returns the abstract results of an equation."""
        name = primitive_name(equation)
        if name not in WITH_JAXPRS:
            return self.eval_primitive(name, equation, operands)
        if name in CALLS:
            return self.eval_jaxpr(equations.call_jaxpr(equation), operands)
        if name == 'cond':
            return self.eval_branches(equation, operands)
        return self.eval_loop(equation, operands)

    def eval_branches(self, equation: Any, operands: Sequence[AbstractValue]) -> Sequence[AbstractValue]:
        """Returns the abstract results of a `cond`."""
        branch_results = [self.eval_jaxpr(branch, operands[1:]) for branch in equations.branches(equation)]
        results = [*map(self.join, zip(*branch_results, strict=True))]
        return self.control_dependence(equation, lambda: operands[0], results)

    def eval_loop(self, equation: Any, operands: Sequence[AbstractValue]) -> Sequence[AbstractValue]:
        """Returns the abstract results of a `scan` or a `while`."""
        values, loop = self.loop_fixpoint(equation, operands), loop_of(equation)
        if loop.cond is None:
            return [*values.carry, *map(self.stack_of, values.ys)]
        cond_operands = [*operands[: loop.num_cond_consts], *values.carry]
        return self.control_dependence(
            equation, lambda: self.eval_jaxpr(loop.cond, cond_operands)[0], values.carry
        )

    def control_dependence(
        self, equation: Any, predicate: Callable[[], AbstractValue], results: Sequence[AbstractValue]
    ) -> Sequence[AbstractValue]:
        """Returns the abstract results of a `cond` or a `while`, which also depend on a predicate.

        This implementation ignores the predicate.

        Args:
            equation: the equation.
            predicate: returns the abstract value of the predicate, or of the index of the branch.
            results: the results, if the predicate is ignored.
        """
        return results

    def loop_fixpoint(self, equation: Any, operands: Sequence[AbstractValue]) -> LoopValues[AbstractValue]:
        """Returns the abstract values that hold in every iteration of a loop."""
        loop = loop_of(equation)
        consts, init, stacks = loop.split(operands)
        carry, xs = list(init), [*map(self.element_of, stacks)]
        while True:
            results = self.eval_jaxpr(loop.body, [*consts, *carry, *xs])
            next_carry = [*map(self.join, zip(carry, results, strict=False))]
            if next_carry == carry:
                return LoopValues(consts, carry, xs, results[len(carry) :])
            carry = next_carry
