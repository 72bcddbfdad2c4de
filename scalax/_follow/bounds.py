"""Updates of slices out of bounds, of which XLA's partitioner writes none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import Literal, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import equation_of


def within_bounds(equation: Any) -> Any:
    """The equation; a `dynamic_update_slice` by numbers within bounds, where XLA minds.

    A `dynamic_update_slice` out of bounds writes the last rows, or the first ones. Where devices have rows of
    the array, XLA writes none. To follow rows may be what puts them there.
    """
    if primitive_name(equation) != 'dynamic_update_slice':
        return equation
    array, update, *numbers = equation.invars
    if not any(map(_may_be_lost, numbers, shape_of(array), shape_of(update))):
        return equation

    def updated(array: Any, update: Any, *numbers: Any) -> Any:
        last = [size - rows for size, rows in zip(array.shape, update.shape, strict=True)]
        kept = [
            jax.lax.clamp(jnp.zeros_like(x), x, jnp.asarray(min(most, jnp.iinfo(x.dtype).max), x.dtype))
            for x, most in zip(numbers, last, strict=True)
        ]
        return jax.lax.dynamic_update_slice(array, update, kept)

    return equation_of(jax.jit(updated), equation)


def _may_be_lost(number: Any, size: int, rows: int) -> bool:
    """Whether XLA may write nothing: one row, or by a constant any number of rows, out of bounds."""
    if isinstance(number, Literal):
        return not 0 <= number.val <= size - rows
    return rows == 1 < size
