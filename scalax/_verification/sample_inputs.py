"""Sampling of arguments for a step: values that it accepts, and that reveal errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalax._jax.equations import open_jaxpr
from scalax._verification.input_domains import DomainKind, ValueDomain, domains_by_use, has_dtype

# Few enough that some values are equal: a step may compare segment ids or token kinds with each other.
_INTEGER_BOUND = 8
# Not step 0, where schedules are zero, and so are the terms that bias corrections divide by.
_STEP_COUNTS = 3, 100


def domains_of(jaxpr: Any) -> list[ValueDomain]:
    """Returns the value domain of each argument of a closed jaxpr, derived from its uses."""
    pairs = zip(open_jaxpr(jaxpr).invars, domains_by_use(jaxpr), strict=True)
    return [_domain(var.aval, uses) for var, uses in pairs]


def _domain(aval: Any, uses: dict[DomainKind, ValueDomain]) -> ValueDomain:
    if has_dtype(aval, jax.dtypes.prng_key):
        return ValueDomain('key')
    if has_dtype(aval, np.bool_):
        return ValueDomain('mask')
    if has_dtype(aval, np.integer):
        return _integer_domain(uses, is_scalar=not aval.shape)
    return uses.get('fraction') or uses.get('positive') or ValueDomain('number')


def _integer_domain(uses: dict[DomainKind, ValueDomain], *, is_scalar: bool) -> ValueDomain:
    # An index may also be a length: the last element of a sequence is looked up by the sequence's length.
    nonzero = uses.get('length') or uses.get('positive')
    use = uses.get('key') or uses.get('index') or nonzero
    if use is None or (is_scalar and use.kind == 'positive'):
        return ValueDomain('count', _STEP_COUNTS[1]) if is_scalar else ValueDomain('integer', _INTEGER_BOUND)
    if is_scalar or use.kind == 'key':
        return use
    is_length = nonzero is not None and use.bound != 1
    return ValueDomain('length' if is_length else use.kind, use.bound or _INTEGER_BOUND, use.reason)


def sample(avals: Sequence[Any], domains: Sequence[ValueDomain], seed: int) -> list[Any]:
    """Samples a value in the domain of each argument; a seed and an index always give the same value.

    Values vary along every dimension, so that a wrong layout changes the result. Matrices preserve the scale
    of their other operand. Vectors and scalars, such as the scales of norms, are about 1 and positive, so
    that missing or doubled terms of a sum do not cancel out.

    Returns:
        NumPy arrays; Python scalars for weak types; JAX arrays for PRNG keys.
    """
    values = [
        _sample_one(aval, domain, np.random.default_rng([seed, i]))
        for i, (aval, domain) in enumerate(zip(avals, domains, strict=True))
    ]
    weak = [getattr(aval, 'weak_type', False) and not aval.shape for aval in avals]
    return [value.item() if is_weak else value for value, is_weak in zip(values, weak, strict=True)]


def _sample_one(aval: Any, domain: ValueDomain, rng: np.random.Generator) -> Any:
    shape, dtype = tuple(aval.shape), aval.dtype
    if domain.kind == 'key':
        return _keys(shape, dtype, rng)
    if has_dtype(aval, np.bool_):
        return _mask(shape, rng)
    if has_dtype(aval, np.integer):
        return np.asarray(_integers(shape, domain, int(jnp.iinfo(dtype).max), rng)).astype(dtype)
    values = _floats(shape, domain.kind, rng)
    if has_dtype(aval, np.complexfloating):
        values = values + 1j * _floats(shape, domain.kind, rng)
    return np.asarray(values).astype(dtype)


def _keys(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return rng.integers(0, 2**32, shape, np.uint32).astype(dtype)
    blank = jnp.zeros(shape, dtype)
    bits = rng.integers(0, 2**32, jax.random.key_data(blank).shape, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(bits), impl=jax.random.key_impl(blank))


def _mask(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Returns a mask that is true with probability 0.75, and at least once along the last dimension.

    The mean over a mask without a true element is NaN.
    """
    mask = np.asarray(rng.random(shape) < 0.75)
    if mask.ndim and mask.size:
        np.put_along_axis(mask, rng.integers(0, shape[-1], (*shape[:-1], 1)), True, -1)
    return mask


def _integers(shape: tuple[int, ...], domain: ValueDomain, dtype_max: int, rng: np.random.Generator) -> Any:
    bound = min(domain.bound or _INTEGER_BOUND, dtype_max + 1)
    least = {'length': 1, 'count': _STEP_COUNTS[0]}.get(domain.kind, 0)
    return rng.integers(min(least, bound - 1), bound, shape)


def _floats(shape: tuple[int, ...], kind: DomainKind, rng: np.random.Generator) -> Any:
    if kind == 'fraction':
        return rng.uniform(0.1, 0.9, shape)
    if kind == 'positive' or len(shape) < 2:
        return rng.uniform(0.5, 1.5, shape)
    return rng.normal(size=shape) / math.sqrt(max(1, shape[-2]))


def resample(leaves: Sequence[Any], domains: Sequence[ValueDomain], seed: int) -> list[Any]:
    """Returns a user's arrays for seed 0, and similar values in the same domains for other seeds.

    Integers and masks stay as they are, and floats keep their signs. PRNG keys are sampled again. Floats that
    are all zero, as in a state that has just been initialized, become small numbers: a product with zero
    would hide errors.
    """
    if seed == 0:
        return list(leaves)
    return [
        _resample_one(leaf, domain, np.random.default_rng([seed, i]))
        for i, (leaf, domain) in enumerate(zip(leaves, domains, strict=True))
    ]


def _resample_one(leaf: Any, domain: ValueDomain, rng: np.random.Generator) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        return leaf  # weakly typed: an array would change the dtypes of results
    if domain.kind == 'key':
        return _keys(leaf.shape, leaf.dtype, rng)
    values = np.asarray(leaf)
    if not has_dtype(values, np.inexact):
        return values
    if not values.any():
        return np.asarray(1e-2 * rng.uniform(0.5, 1.5, values.shape)).astype(values.dtype)
    wide = values.astype(np.complex128 if has_dtype(values, np.complexfloating) else np.float64)
    factors = rng.uniform(0.75, 1.25, values.shape)
    is_fraction = domain.kind == 'fraction' and np.all((wide >= 0) & (wide <= 1))
    return np.asarray(wide**factors if is_fraction else wide * factors).astype(values.dtype)
