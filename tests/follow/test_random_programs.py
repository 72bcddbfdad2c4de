"""Random programs: following changes no value, gives valid specs, and adds nothing the second time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.following import constraints

MESHES = [
    (MeshShardingHelper([8], ['fsdp']), P('fsdp')),
    (MeshShardingHelper([4, 2], ['data', 'fsdp']), P(('data', 'fsdp'))),
    (MeshShardingHelper([4, 2], ['fsdp', 'tp']), P('fsdp', 'tp')),
    (MeshShardingHelper([2, 2, 2], ['data', 'fsdp', 'tp']), P(None, 'data')),
]

# Each takes and gives an array of 16 x 16 between -1 and 1, and takes a matrix.
STEPS = [
    lambda w, x: jnp.tanh(x @ w),
    lambda w, x: jnp.tanh(w @ x),
    lambda w, x: x.T,
    lambda w, x: jnp.sin(x.reshape(4, 4, 16)).reshape(16, 16),
    lambda w, x: x.reshape(16, 2, 8).transpose(2, 1, 0).reshape(16, 16),
    lambda w, x: x[:, ::-1] * w,
    lambda w, x: x[jnp.argsort(w[0])],
    lambda w, x: jnp.take_along_axis(x, jnp.clip(jnp.round(x * 8), 0, 8).astype(int), 1),
    lambda w, x: jnp.zeros_like(x).at[jnp.arange(16) // 2].add(x / 2),
    lambda w, x: x - x.mean(1, keepdims=True),
    lambda w, x: x / 2 - x.mean(0) / 2,
    lambda w, x: jax.nn.softmax(x),
    lambda w, x: jnp.cumsum(x, 1) / 16,
    lambda w, x: jnp.tanh(x @ x.T),
    lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c), jnp.zeros(16), x)[1],
    lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3, reverse=True)[0],
    lambda w, x: lax.cond(w[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: w),
    lambda w, x: jax.vmap(lambda r: jnp.tanh(w @ r))(x),
    lambda w, x: jnp.tanh(jax.grad(lambda x: jnp.sin(x @ w).sum())(x)),
    lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
    lambda w, x: jnp.stack([x[:8], x[8:]], 1).reshape(16, 16),
    # Of channels: XLA for CPUs gives other values where it splits an image, with jax.jit alone too.
    lambda w, x: jnp.tanh(lax.conv(x[:, :, None, None], w[:, :, None, None], (1, 1), 'SAME')[:, :, 0, 0]),
    lambda w, x: jax.random.bernoulli(jax.random.key(3), 0.7, x.shape) * x,
    # The last one has no gradient.
    lambda w, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1],
]


def program(random):
    derived = bool(random.integers(2))
    chosen = [STEPS[i] for i in random.integers(len(STEPS) - derived, size=random.integers(2, 6))]

    def fun(w, x):
        for step in chosen:
            x = step(w, x)
        return x, jnp.isfinite(x).sum()

    def loss(w, x):
        value, count = fun(w, x)
        return (value * jnp.linspace(0, 1, 16)).sum(), count

    return jax.value_and_grad(loss, has_aux=True) if derived else fun


@pytest.mark.medium
@pytest.mark.parametrize(
    'seed', [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(100)]
)
def test_random_programs(seed):
    random = np.random.default_rng(seed)
    helper, spec = MESHES[seed % len(MESHES)]
    w, x = random.uniform(-0.5, 0.5, (2, 16, 16)).astype(np.float32)
    fun, rules = program(random), (FSDPShardingRule(min_fsdp_size=1), spec)
    with jax.default_matmul_precision('highest'):
        step = helper.sjit(fun, in_shardings=rules)
        found, expected = step(w, x), jax.jit(fun)(w, x)
        again = helper.sjit(step, in_shardings=rules)
        once, twice = (_placing(each.trace(w, x).jaxpr) for each in (step, again))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if jnp.issubdtype(b.dtype, jnp.integer):
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for _, each in once:
        named = [axis for entry in each for axis in (entry if isinstance(entry, tuple) else [entry])]
        named = [axis for axis in named if isinstance(axis, str)]
        assert len(named) == len(set(named))
    assert {*map(str, twice)} == {*map(str, once)}
    assert len(twice) == len(once)


def _placing(jaxpr):
    """The constraints that say something: an sjit around another one opens all dimensions of its outputs."""
    return [each for each in constraints(jaxpr) if any(entry is not P.UNCONSTRAINED for entry in each[1])]
