"""The values that a step is run with: those that its arguments may have, and that show errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalax._jax.equations import open_jaxpr
from scalax._verification.input_domains import DomainKind, ValueDomain, domains_by_use, has_dtype

# So few that some are equal: numbers of segments and kinds of tokens are compared with each other.
_FEW = 8
# At step 0 schedules are zero, and so are the averages that corrections for the first steps divide by.
_STEPS = 3, 100


def domains_of(jaxpr: Any) -> list[ValueDomain]:
    """What values each argument of a closed jaxpr may have, by what is done with it."""
    pairs = zip(open_jaxpr(jaxpr).invars, domains_by_use(jaxpr), strict=True)
    return [_role(var.aval, uses) for var, uses in pairs]


def _role(aval: Any, uses: dict[DomainKind, ValueDomain]) -> ValueDomain:
    if has_dtype(aval, jax.dtypes.prng_key):
        return ValueDomain('key')
    if has_dtype(aval, np.bool_):
        return ValueDomain('mask')
    if has_dtype(aval, np.integer):
        return _role_of_integers(uses, alone=not aval.shape)
    return uses.get('fraction') or uses.get('positive') or ValueDomain('number')


def _role_of_integers(uses: dict[DomainKind, ValueDomain], *, alone: bool) -> ValueDomain:
    # The last element of a row, for one, is looked up by the length of the row.
    above = uses.get('length') or uses.get('positive')
    use = uses.get('key') or uses.get('index') or above
    if use is None or (alone and use.kind == 'positive'):
        return ValueDomain('count', _STEPS[1]) if alone else ValueDomain('integer', _FEW)
    if alone or use.kind == 'key':
        return use
    is_length = above is not None and use.bound != 1
    return ValueDomain('length' if is_length else use.kind, use.bound or _FEW, use.reason)


def sample(avals: Sequence[Any], roles: Sequence[ValueDomain], seed: int) -> list[Any]:
    """Values in their roles, the same for each seed and number of the leaf.

    They differ along every dimension, so that a wrong layout shows. Matrices keep the scale of what they are
    multiplied with. What has fewer dimensions, such as the scales of norms, is about 1; and it has one sign,
    so that sums that are missing or doubled do not cancel out.

    Returns:
        Arrays of numpy; numbers of Python where the type is that of one; keys with a dtype of their own are
        arrays of JAX.
    """
    pairs = enumerate(zip(avals, roles, strict=True))
    found = [_drawn(aval, role, np.random.default_rng([seed, i])) for i, (aval, role) in pairs]
    weak = [getattr(aval, 'weak_type', False) and not aval.shape for aval in avals]
    return [value.item() if is_weak else value for value, is_weak in zip(found, weak, strict=True)]


def _drawn(aval: Any, role: ValueDomain, rng: np.random.Generator) -> Any:
    shape, dtype = tuple(aval.shape), aval.dtype
    if role.kind == 'key':
        return _keys(shape, dtype, rng)
    if has_dtype(aval, np.bool_):
        return _mask(shape, rng)
    if has_dtype(aval, np.integer):
        return np.asarray(_integers(shape, role, int(jnp.iinfo(dtype).max), rng)).astype(dtype)
    found = _floats(shape, role.kind, rng)
    if has_dtype(aval, np.complexfloating):
        found = found + 1j * _floats(shape, role.kind, rng)
    return np.asarray(found).astype(dtype)


def _keys(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return rng.integers(0, 2**32, shape, np.uint32).astype(dtype)
    blank = jnp.zeros(shape, dtype)
    bits = rng.integers(0, 2**32, jax.random.key_data(blank).shape, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(bits), impl=jax.random.key_impl(blank))


def _mask(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Three of four are true, and one of each row at least: a mean over none is no number."""
    found = np.asarray(rng.random(shape) < 0.75)
    if found.ndim and found.size:
        np.put_along_axis(found, rng.integers(0, shape[-1], (*shape[:-1], 1)), True, -1)
    return found


def _integers(shape: tuple[int, ...], role: ValueDomain, most: int, rng: np.random.Generator) -> Any:
    bound = min(role.bound or _FEW, most + 1)
    least = {'length': 1, 'count': _STEPS[0]}.get(role.kind, 0)
    return rng.integers(min(least, bound - 1), bound, shape)


def _floats(shape: tuple[int, ...], kind: DomainKind, rng: np.random.Generator) -> Any:
    if kind == 'fraction':
        return rng.uniform(0.1, 0.9, shape)
    if kind == 'positive' or len(shape) < 2:
        return rng.uniform(0.5, 1.5, shape)
    return rng.normal(size=shape) / math.sqrt(max(1, shape[-2]))


def resample(leaves: Sequence[Any], roles: Sequence[ValueDomain], seed: int) -> list[Any]:
    """A user's own arrays for seed 0; for other seeds other values, which are in the same roles if these are.

    Integers and masks stay, and floats keep their signs. Other keys are drawn, and small numbers for floats
    that are all zero, as in a state that has just been initialized: of a product with zero no error is seen.
    """
    if seed == 0:
        return list(leaves)
    pairs = enumerate(zip(leaves, roles, strict=True))
    return [_varied(leaf, role, np.random.default_rng([seed, i])) for i, (leaf, role) in pairs]


def _varied(leaf: Any, role: ValueDomain, rng: np.random.Generator) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        return leaf  # of no dtype: an array would change those of results
    if role.kind == 'key':
        return _keys(leaf.shape, leaf.dtype, rng)
    values = np.asarray(leaf)
    if not has_dtype(values, np.inexact):
        return values
    if not values.any():
        return np.asarray(1e-2 * rng.uniform(0.5, 1.5, values.shape)).astype(values.dtype)
    wide = values.astype(np.complex128 if has_dtype(values, np.complexfloating) else np.float64)
    factors = rng.uniform(0.75, 1.25, values.shape)
    is_fraction = role.kind == 'fraction' and np.all((wide >= 0) & (wide <= 1))
    return np.asarray(wide**factors if is_fraction else wide * factors).astype(values.dtype)
