"""Lookups and updates at the index of the example: each device runs them on its local examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from scalax._jax.equations import all_equations
from scalax._spmd.rewrites.indices_by_example import LOOKUPS, batch_example_indices
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

pytestmark = pytest.mark.medium

B, T, D = 16, 5, 3
RNG = np.random.default_rng(0)
CACHE = np.asarray(RNG.normal(size=(B, T, D)), 'f')
KEYS = np.asarray(RNG.normal(size=(B, D)), 'f')
# Some are out of bounds, and some are negative.
AT = np.asarray(RNG.integers(-T - 2, T + 3, (B,)), 'i')
HELPER = MeshShardingHelper([8], ['fsdp'])


def windows(cache, keys, at):
    return cache[jnp.arange(B)[:, None], at[:, None] + jnp.arange(2)]


def layers(cache, keys, at):
    """A loop over layers, differentiated: its backward pass reuses the indices of the forward pass."""

    def loss(cache, keys):
        def layer(carry, scale):
            updated = jnp.tanh(carry).at[jnp.arange(B), at].set(keys * scale)
            return updated, updated[jnp.arange(B), (at + 1) % T].sum(1)

        carry, values = lax.scan(layer, cache, jnp.arange(1.0, 4.0))
        return carry, values

    (carry, values), pull = jax.vjp(loss, cache, keys)
    return carry, values, pull((jnp.cos(carry), jnp.sin(values)))


PROGRAMS = {
    'set': lambda c, k, at: c.at[jnp.arange(B), at].set(k),
    'set, dropped': lambda c, k, at: c.at[jnp.arange(B), at].set(k, mode='drop'),
    'set, clipped': lambda c, k, at: c.at[jnp.arange(B), at].set(k, mode='clip'),
    'add': lambda c, k, at: c.at[jnp.arange(B), at].add(k),
    'max': lambda c, k, at: c.at[jnp.arange(B), at].max(k),
    'take': lambda c, k, at: c[jnp.arange(B), at % T],
    'take, filled': lambda c, k, at: c.at[jnp.arange(B), at].get(mode='fill', fill_value=7),
    'take an element': lambda c, k, at: c[jnp.arange(B), at % T, at % D],
    'take along the last dimension': lambda c, k, at: c[jnp.arange(B), :, at % D],
    'take windows': windows,
    'along an axis': lambda c, k, at: jnp.take_along_axis(c, (at % T)[:, None, None], 1),
    'mapped update': lambda c, k, at: jax.vmap(lambda c, k, i: lax.dynamic_update_slice(c, k[None], (i, 0)))(
        c, k, at
    ),
    'mapped slice': lambda c, k, at: jax.vmap(lambda c, i: lax.dynamic_slice(c, (i, 0), (2, D)))(c, at),
    'gradient': lambda c, k, at: jax.grad(lambda c: (c[jnp.arange(B), at % T] ** 2).sum())(c),
    'layers': layers,
}


@pytest.mark.parametrize('name', PROGRAMS)
def test_each_device_has_its_own_examples(name):
    step = HELPER.sjit(PROGRAMS[name], in_shardings=(P('fsdp'),) * 3, batch_argnums=(0, 1, 2))
    expected = jax.jit(PROGRAMS[name])(CACHE, KEYS, AT)
    for a, b in zip(*map(jax.tree.leaves, (step(CACHE, KEYS, AT), expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    text = step.lower(CACHE, KEYS, AT).as_text()
    assert not any(x in text for x in ('all_gather', 'all_to_all', 'all_reduce', 'reduce_scatter'))


OTHERS = {
    'in another order': lambda c, k, at: c.at[jnp.arange(B)[::-1], at].set(k),
    'shifted': lambda c, k, at: c[(jnp.arange(B) + 1) % B, at % T],
    'of some examples': lambda c, k, at: c[jnp.arange(B // 2), at[: B // 2] % T],
    'of indices that restart': lambda c, k, at: c[jnp.arange(B) % 8, at % T],
    'of an argument': lambda c, k, at: c[jnp.abs(at), at % T],
    'all elements': lambda c, k, at: c[:, :, 0][at % T, at % T],
}


@pytest.mark.parametrize('name', OTHERS)
def test_other_indices_stay_indices(name):
    jaxpr = jax.make_jaxpr(OTHERS[name])(CACHE, KEYS, AT)
    assert batch_example_indices(jaxpr, None) is jaxpr
    step = HELPER.sjit(OTHERS[name], in_shardings=(P('fsdp'),) * 3, batch_argnums=(0, 1, 2))
    expected = jax.jit(OTHERS[name])(CACHE, KEYS, AT)
    np.testing.assert_allclose(step(CACHE, KEYS, AT), expected, rtol=1e-6)


@pytest.mark.parametrize('seed', range(8))
@pytest.mark.sampled(4)
def test_rewritten_look_ups_of_random_shapes_have_equal_values(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(map(int, rng.integers(2, 5, rng.integers(2, 5))))
    counted = sorted(rng.choice(len(shape), rng.integers(1, len(shape)), replace=False).tolist())
    sizes = (*[shape[dim] for dim in counted], int(rng.integers(1, 4)))
    others = {dim: rng.integers(-size, size, sizes) for dim, size in enumerate(shape) if dim not in counted}

    def numbers(dim):
        if dim in others:
            return jnp.asarray(others[dim])
        position = counted.index(dim)
        return jnp.arange(shape[dim]).reshape([-1 if i == position else 1 for i in range(len(sizes))])

    def lookup(x, updates):
        index = tuple([numbers(dim) for dim in range(len(shape))])
        return x[index], x.at[index].add(updates)

    x, updates = jnp.asarray(rng.normal(size=shape), 'f'), jnp.asarray(rng.normal(size=sizes), 'f')
    rewritten = batch_example_indices(jax.make_jaxpr(lookup)(x, updates), None)
    lookups = [equation for equation in all_equations(rewritten) if equation.primitive.name in LOOKUPS]
    assert len(lookups) == 2
    for equation in lookups:
        assert (*equation.params['dimension_numbers'].operand_batching_dims,) == (*counted,)
    for a, b in zip(jaxpr_as_fun(rewritten)(x, updates), lookup(x, updates), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
