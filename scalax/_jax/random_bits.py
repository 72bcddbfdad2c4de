"""Random bits of a local shard of an array, equal to the bits of the global array there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp

from scalax._jax.equations import shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import rebind, trace_added_equation


def depends_on_indices(equation: Any) -> bool:
    """Returns whether an equation draws bits that depend only on one key and on their indices.

    Relies on ``jax_threefry_partitionable``, and on ``key<fry>`` being the dtype of threefry keys.
    """
    if primitive_name(equation) != 'random_bits' or shape_of(equation.invars[0]):
        return False
    is_small = math.prod(shape_of(equation.outvars[0])) < 2**32
    return (
        is_small
        and jax.config.jax_threefry_partitionable
        and str(equation.invars[0].aval.dtype) == 'key<fry>'
    )


def gamma_expansion(equation: Any) -> Callable[..., Any] | None:
    """Returns the function of a key and shapes that a `random_gamma` of one key compiles to.

    It splits the key, one for each element, and draws for each key alone. Returns None if the generator of
    the key draws for all keys at once. Relies on `impl` being that function with *use_vmap*, and on
    ``key<fry>`` being the dtype of threefry keys.
    """
    key, _ = equation.invars
    if shape_of(key) or str(key.aval.dtype) != 'key<fry>':
        return None
    return functools.partial(equation.primitive.impl, **equation.params, use_vmap=True)


def random_bits_of_shape(equation: Any, shape: Sequence[int]) -> Any:
    """Returns an equation that draws the random bits of another one in another shape, into a new variable.

    If the bits depend on their indices, they are the same bits. Relies on *shape* being the shape.
    """
    params = {'shape': tuple(shape)}
    return trace_added_equation(lambda key: rebind(equation, key, **params), equation, equation.invars)


def bits_at(key: Any, shape: Sequence[int], local: Sequence[int], starts: Sequence[Any], dtype: Any) -> Any:
    """Returns the random bits of a local shard.

    Relies on `threefry2x32_p` being applied to the index of each element in the global array, in two words of
    32 bits, and on the bits being both words, or the lower bits of their exclusive or.

    Args:
        key: a threefry key.
        shape: the global shape.
        local: the local shape.
        starts: the index of the first element of the local shard in each dimension.
        dtype: the dtype of the bits.
    """
    index, stride = jnp.zeros(local, 'uint32'), 1
    for dim in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota('uint32', local, dim) + jnp.asarray(starts[dim], 'uint32')
        index += along * jnp.uint32(stride)
        stride *= shape[dim]
    words = [jnp.broadcast_to(word, local) for word in jax.random.key_data(key)]
    high, low = jax.extend.random.threefry2x32_p.bind(*words, jnp.zeros(local, 'uint32'), index)
    if jnp.iinfo(dtype).bits == 64:
        return (high.astype(dtype) << 32) | low.astype(dtype)
    return (high ^ low).astype(dtype)
