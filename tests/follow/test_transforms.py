"""Transformations around a function that follows its batch, and what runs inside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([8], ['fsdp'])
RULES = FSDPShardingRule(min_fsdp_size=1), P('fsdp')
W = np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)
X = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16) ** 2


def followed(fun, **options):
    return HELPER.sjit(fun, in_shardings=RULES, **options)


def assert_equal(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def layer(w, x):
    return jnp.tanh(x @ w)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def steps(w, x):
    return jax.lax.scan(lambda c, _: (doubled(jax.checkpoint(layer)(w, c)), None), x, None, length=2)[0]


AROUND = {
    'jit': lambda f: jax.jit(f)(W, X),
    'grad': lambda f: jax.grad(lambda w, x: f(w, x).sum(), argnums=(0, 1))(W, X),
    'vmap': lambda f: jax.vmap(f, in_axes=(None, 0))(W, jnp.stack([X, 2 * X])),
    'vmap of grad': lambda f: jax.vmap(jax.grad(lambda x: f(W, x).sum()))(jnp.stack([X, 2 * X])),
    'vjp': lambda f: jax.vjp(f, W, X)[1](X),
    'linearize': lambda f: jax.linearize(lambda x: f(W, x).sum(), X)[0],
    'checkpoint': lambda f: jax.grad(lambda w: jax.checkpoint(f)(w, X).sum())(W),
    'scan': lambda f: jax.lax.scan(lambda c, _: (f(W, c), None), X, None, length=2)[0],
    'eval_shape': lambda f: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, W, X)),
}


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('around', AROUND.values(), ids=AROUND)
def test_transformed_from_outside(around):
    assert_equal(around(followed(steps)), around(steps))


def test_jvp_from_outside():
    assert_equal(jax.jvp(followed(layer), (W, X), (W, X)), jax.jvp(layer, (W, X), (W, X)))


@pytest.mark.medium
@pytest.mark.parametrize('name', ['jit', 'grad', 'vmap'])
def test_closed_over_values_of_an_outer_trace(name):
    """They are constants of the jaxpr that is followed, and no arguments."""

    def total(scale, fun=None):
        def scaled(w, x):
            return jnp.tanh(x @ w * scale) + jnp.arange(16.0)

        return (followed(scaled) if fun is None else scaled)(W, X).sum()

    transform = {'jit': jax.jit, 'grad': jax.grad, 'vmap': jax.vmap}[name]
    scale = jnp.arange(3.0) if name == 'vmap' else 2.0
    assert_equal(transform(total)(scale), transform(lambda s: total(s, fun=layer))(scale))
