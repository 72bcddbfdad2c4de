"""Small slices of sharded dimensions: a few examples of a batch, or a few rows of state.

Each device takes the elements in its local shard, with zeros for the elements of other devices, so that the
sum over devices is the slice. This sends only the slice, whereas a gather would send the entire operand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax.equations import shape_of, slice_bounds

_MIN_SIZE_RATIO = 4
"""The least ratio of the sizes of operand and slice: a sum sends twice the bytes, so 2 would gain nothing."""
MAX_SENT_SLICES = 2
"""The largest number of slices of a value that are sent one by one; more slices share one gather."""


def is_small_slice(equation: Any) -> bool:
    """Returns whether summing a `slice` over devices is much cheaper than gathering its operand."""
    [operand], [result] = equation.invars, equation.outvars
    dtype = result.aval.dtype
    # Adding zeros does not change values of these dtypes, and devices can sum them.
    is_number = jnp.issubdtype(dtype, jnp.integer) or dtype in ('float16', 'bfloat16', 'float32', 'float64')
    sizes = [math.prod(shape_of(atom)) for atom in (operand, result)]
    return bool(is_number) and sizes[0] >= _MIN_SIZE_RATIO * sizes[1]


def local_slice(
    equation: Any, axes: Mapping[int, Sequence[str]], shape: Sequence[int]
) -> tuple[Callable[[Any], Any], Any]:
    """Returns the function that slices local shards, and the function's cache key.

    Args:
        equation: a `slice`.
        axes: the sliced dimensions that are sharded, and the mesh axes that shard them.
        shape: the local shape of its operand.
    """
    bounds = []
    for dim, (start, limit, stride) in enumerate(slice_bounds(equation)):
        is_whole = (start, limit, stride) == (0, shape_of(equation.invars[0])[dim], 1)
        bounds.append((0, shape[dim], 1) if is_whole else (start, limit, stride))
    params = tuple(bounds), tuple([(dim, tuple(names)) for dim, names in axes.items()])
    return functools.partial(_slice, *params), ('slice_blocks', *params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _slice(
    bounds: tuple[tuple[int, int, int], ...], axes: tuple[tuple[int, tuple[str, ...]], ...], x: Any
) -> Any:
    """Takes the local elements of a slice, and zeros."""
    for dim, names in axes:
        indices = jnp.arange(*bounds[dim]) - jax.lax.axis_index(names) * x.shape[dim]
        is_local = (indices >= 0) & (indices < x.shape[dim])
        elements = jnp.take(x, jnp.clip(indices, 0, x.shape[dim] - 1), dim)
        is_local = jax.lax.broadcast_in_dim(is_local, elements.shape, [dim])
        x = jnp.where(is_local, elements, jnp.zeros_like(elements))
    sharded_dims = dict(axes)
    remaining_bounds = [
        (0, x.shape[dim], 1) if dim in sharded_dims else bound for dim, bound in enumerate(bounds)
    ]
    return jax.lax.slice(x, *zip(*remaining_bounds, strict=True))
