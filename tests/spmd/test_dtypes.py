"""Values of all dtypes are gathered, exchanged, reduced and joined as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.sharding import BatchPartitioning, FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.partitioned import assert_equal

pytestmark = pytest.mark.medium

RNG = np.random.default_rng(0)
HELPER = MeshShardingHelper([8], ['fsdp'], partitioning=BatchPartitioning())
BESIDE = MeshShardingHelper([4, 2], ['fsdp', 'tp'], partitioning=BatchPartitioning())
RULE = FSDPShardingRule(min_fsdp_size=1)
EXACT = ('int4', 'uint4', 'int8', 'uint16', 'bool')
ROUNDED = ('bfloat16', 'float16', 'float8_e4m3fn', 'complex64')


def values(dtype, *shape):
    numbers = RNG.integers(-4, 4, shape)
    if dtype == 'complex64':
        numbers = numbers + 1j * RNG.integers(-4, 4, shape)
    if dtype == 'bool':
        numbers = numbers > 0
    return jnp.asarray(abs(numbers) if dtype.startswith('u') else numbers).astype(dtype)


def gathered(w, x):
    """Operations that mix examples, and operations on examples and state."""
    return x[::-1], jnp.concatenate([x, w]), jnp.concatenate([x, x], 1), jnp.stack([x, w]), jnp.where(x, w, x)


def put(w, x):
    numbers = jnp.arange(16) // 3
    return (
        w[numbers],
        x[numbers],
        x.at[numbers[:4]].set(w[:4]),
        jnp.pad(x, ((1, 1), (0, 0))),
        x.reshape(4, -1),
    )


def compared(w, x):
    return x.max(0), x.min(), x.max(1), (x == w).any(), (x != 0).all(0), jnp.argmax(x != 0, 0)


def added(w, x):
    """Sums that are exact in narrow dtypes."""
    small = x[:, :2] * jnp.asarray([1, 0], x.dtype)
    return small.sum(0), lax.cumsum(small, 1), (w[:2, :2] * small[:2]).sum()


def run(fun, w, x, helper=HELPER):
    step = helper.sjit(fun, in_shardings=(RULE, P('fsdp')), batch_argnums=1)
    results = jax.tree.leaves(step(w, x))
    assert step.explain_propagation(w, x).axes
    return results


@pytest.mark.parametrize('dtype', [*EXACT, *ROUNDED])
@pytest.mark.sampled(3)
def test_gathers_and_joins(dtype):
    w, x = values(dtype, 16, 8), values(dtype, 16, 8)

    def fun(w, x):
        return gathered(w, x), put(w, x), compared(w, x)

    for a, b in zip(run(fun, w, x), jax.tree.leaves(jax.jit(fun)(w, x)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize('dtype', ['int8', 'uint16', *ROUNDED])
@pytest.mark.sampled(3)
def test_sums(dtype):
    w, x = values(dtype, 16, 8), values(dtype, 16, 8)
    wide = 'complex64' if dtype == 'complex64' else 'float32'
    results, expected = run(added, w, x), jax.tree.leaves(jax.jit(added)(w, x))
    assert [a.dtype for a in results] == [b.dtype for b in expected]
    assert_equal([a.astype(wide) for a in results], [b.astype(wide) for b in expected], 0.1)


def test_the_largest_complex_number_of_all_examples():
    """No collective computes a maximum of complex numbers."""
    x = values('complex64', 16, 8)
    [largest, _] = run(lambda w, x: (x.max(0), w), x, x)
    np.testing.assert_array_equal(largest, jnp.max(x, 0))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_sums_with_other_axes(dtype):
    """XLA for CPUs aborts if it adds bfloat16 over only some of the mesh axes."""
    w, x = values(dtype, 8, 8), values(dtype, 16, 8)

    def fun(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
        return value, gradient, x.T @ x, (x @ w).sum(0)

    results, expected = run(fun, w, x, BESIDE), jax.tree.leaves(jax.jit(fun)(w, x))
    assert_equal([a.astype('f') for a in results], [b.astype('f') for b in expected], 0.03)


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_keys(impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 16)

    def fun(keys, others):
        mixed = jnp.concatenate([keys, others]), others[::-1], jnp.where(jnp.arange(16) > 3, keys, others)
        drawn = jax.vmap(lambda key: jax.random.normal(key, (2,)))(others)
        looped = lax.scan(lambda key, other: (other, jax.random.key_data(key)), keys[0], others)
        return (
            jax.tree.map(jax.random.key_data, (mixed, looped[0])),
            looped[1],
            drawn,
            keys.reshape(2, 8)[0, 0],
        )

    results = run(lambda *x: jax.tree.leaves(fun(*x))[:-1], keys, keys[::-1])
    assert_equal(results, jax.tree.leaves(jax.jit(fun)(keys, keys[::-1]))[:-1])


def test_gradients_of_integers():
    """Such gradients have dtype float0, and use no memory."""

    def fun(w, x):
        value, gradients = jax.value_and_grad(
            lambda w, n: jnp.mean((x * w) ** 2) * n.sum(), argnums=(0, 1), allow_int=True
        )(w, jnp.int32(x))
        return value, gradients

    w, x = values('float16', 16, 8).astype('f'), values('float16', 16, 8).astype('f')
    step = HELPER.sjit(fun, in_shardings=(RULE, P('fsdp')), batch_argnums=1)
    results, expected = step(w, x), jax.jit(fun)(w, x)
    assert results[1][1].dtype == expected[1][1].dtype == jax.dtypes.float0
    np.testing.assert_allclose(results[1][0], expected[1][0], rtol=1e-5)
