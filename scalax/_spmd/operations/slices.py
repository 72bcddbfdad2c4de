"""Slices of a dimension of which each device has a block: a few examples of a batch, or a few rows of state.

Each device takes what is in its own block. What another device has counts as zero, so the sum over devices is
the slice. That sends the slice alone, where a gather would send all of what it is taken from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import shape_of, slice_bounds

_LEAST = 4
"""How many times larger than its slice a value has to be for the slice to be sent, as a sum is sent twice."""
MAX_SENT_SLICES = 2
"""Of how many slices of a value each is sent. If there are more, the value is gathered, once."""


def is_small_slice(equation: Any) -> bool:
    """Returns whether a `slice` is so small that devices add up what they have of it."""
    [operand], [result] = equation.invars, equation.outvars
    dtype = result.aval.dtype
    # Zeros add nothing to these, and devices add them up.
    is_number = jnp.issubdtype(dtype, jnp.integer) or dtype in ('float16', 'bfloat16', 'float32', 'float64')
    sizes = [math.prod(shape_of(atom)) for atom in (operand, result)]
    return bool(is_number) and sizes[0] >= _LEAST * sizes[1]


def local_slice(
    equation: Any, axes: Mapping[int, Sequence[str]], shape: Sequence[int]
) -> tuple[Callable[[Any], Any], Any]:
    """Returns the function of one operation that slices blocks, and its key.

    Args:
        equation: a `slice`.
        axes: the dimensions of which devices add up what they have, and the mesh axes along which devices
            have blocks of them.
        shape: the local shape of its operand.
    """
    bounds = []
    for dim, (start, limit, stride) in enumerate(slice_bounds(equation)):
        is_whole = (start, limit, stride) == (0, shape_of(equation.invars[0])[dim], 1)
        bounds.append((0, shape[dim], 1) if is_whole else (start, limit, stride))
    known = tuple(bounds), tuple([(dim, tuple(names)) for dim, names in axes.items()])
    return functools.partial(_slice, *known), ('slice_blocks', *known)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _slice(
    bounds: tuple[tuple[int, int, int], ...], axes: tuple[tuple[int, tuple[str, ...]], ...], x: Any
) -> Any:
    """What a device has of a slice, and zeros."""
    for dim, names in axes:
        rows = jnp.arange(*bounds[dim]) - jax.lax.axis_index(names) * x.shape[dim]
        is_here = (rows >= 0) & (rows < x.shape[dim])
        found = jnp.take(x, jnp.clip(rows, 0, x.shape[dim] - 1), dim)
        is_here = jax.lax.broadcast_in_dim(is_here, found.shape, [dim])
        x = jnp.where(is_here, found, jnp.zeros_like(found))
    added = dict(axes)
    others = [(0, x.shape[dim], 1) if dim in added else each for dim, each in enumerate(bounds)]
    return jax.lax.slice(x, *zip(*others, strict=True))
