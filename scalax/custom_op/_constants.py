"""How may the function of an operation use arrays that are not its operands?

JAX's ``custom_partitioning`` takes no function that closes over arrays, such as a table of numbers. So they
are made operands, which every device has whole: traced once on whole arrays, the function shows which they
are; traced again on blocks, it is given them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from scalax.errors import RuleError


@dataclasses.dataclass(frozen=True)
class Constants:
    """The arrays that a function closes over.

    Attributes:
        values: the arrays, in the order in which JAX found them.
    """

    values: tuple[Any, ...]

    @classmethod
    def of(cls, fun: Callable[..., Any], operands: Sequence[Any]) -> Constants:
        """Those that a function uses when it is called with *operands*."""
        return cls(tuple(jax.make_jaxpr(fun)(*operands).consts))

    def given_to(self, fun: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        """The function as one of its own operands and, behind them, of the constants."""
        if not self.values:
            return fun

        def call(*operands: Any) -> tuple[Any, ...]:
            own, given = operands[: -len(self.values)], operands[-len(self.values) :]
            closed = jax.make_jaxpr(fun)(*own)
            consts = [given[self._index(value)] for value in closed.consts]
            return tuple(jaxpr_as_fun(closed.replace(consts=consts))(*own))

        return call

    def _index(self, value: Any) -> int:
        for i, known in enumerate(self.values):
            if value is known or _equal(value, known):
                return i
        raise RuleError(
            f'an array ({value.dtype}{list(value.shape)}) that the function of a sharded_op makes outside of '
            'JAX depends on the blocks that it is given: compute it with jax.numpy from ctx.index and '
            'ctx.size, or make it an operand'
        )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return False
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    return same and bool(np.array_equal(np.asarray(one), np.asarray(other)))
