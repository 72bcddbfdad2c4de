"""Maxima and minima over examples: NaN, infinities and zeros are the same as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

pytestmark = pytest.mark.medium


def numbers():
    """Returns a batch with NaN of either sign, infinities and zeros in some of its columns."""
    x = np.random.default_rng(0).normal(size=(16, 8)).astype('f')
    x[3, 0] = np.nan
    x[15, 1], x[0, 1] = -np.nan, np.inf
    x[:, 2] = -np.inf
    x[5, 3], x[6, 3] = np.inf, -np.inf
    x[:, 4], x[9, 4] = -0.0, 0.0
    x[:, 5] = np.nan
    x[:, 6] = np.finfo('f').tiny / 8
    return x


def on_devices(function, *batch, helper=None):
    helper = helper or MeshShardingHelper([8], ['fsdp'])
    spec = P(helper.mesh.axis_names[0])
    argnums = tuple(range(len(batch)))
    return helper.sjit(function, in_shardings=(spec,) * len(batch), batch_argnums=argnums)


def extremes(x):
    return {
        'max': x.max(0),
        'min': x.min(0),
        'of all': (x.max(), x.min()),
        'of each': (x.max(1), x.min(1)),
        'argmax': (jnp.argmax(x, 0), jnp.argmin(x, 0)),
        'cumulative': (jax.lax.cummax(x, 0), jax.lax.cummin(x, 0)),
        'segments': jax.ops.segment_max(x, jnp.arange(16) % 3, 3),
        'nanmax': jnp.nanmax(x, axis=0),
        'softmax': jax.nn.softmax(x, 0),
    }


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'float8_e5m2'])
def test_maxima_match_one_device(dtype):
    x = jnp.asarray(numbers(), dtype)
    function = extremes if dtype != 'float8_e5m2' else lambda x: (x.max(0), x.min(0))
    expected = jax.jit(function)(x)
    actual = on_devices(function, x)(x)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.dtype == b.dtype
        # Subnormal numbers may be flushed to zero, and devices sum in another order.
        a, b = np.asarray(a, 'f'), np.asarray(b, 'f')
        np.testing.assert_allclose(a, b, rtol=2e-2 if dtype != 'float32' else 1e-6, atol=1e-37)


def test_a_maximum_is_one_reduction():
    x = numbers()
    text = on_devices(lambda x: (x.max(0), x.min(0)), x).lower(x).as_text()
    assert text.count('"stablehlo.all_reduce"') == 2
    assert 'all_gather' not in text


def test_gradients_of_maxima_match_one_device():
    x = numbers()
    gradient = jax.grad(lambda x: (x.max(0) * jnp.arange(8.0)).sum() + x.min())
    np.testing.assert_allclose(on_devices(gradient, x)(x), jax.jit(gradient)(x), rtol=1e-6)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_maxima_along_two_batch_axes_with_tensor_parallelism(dtype):
    x = jnp.asarray(numbers(), dtype)
    helper = MeshShardingHelper([2, 2, 2], ['dp', 'fsdp', 'tp'])
    spec = P(('dp', 'fsdp'), 'tp')
    step = helper.sjit(lambda x: (x.max(0), x.min(0)), in_shardings=(spec,), batch_argnums=0)
    for a, b in zip(step(x), (x.max(0), x.min(0)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, 'f'), np.asarray(b, 'f'))


def test_bits_and_booleans_are_reduced():
    bits = np.random.default_rng(1).integers(0, 64, (16, 6)).astype('int32')

    def reductions(bits):
        ufuncs = jnp.bitwise_or, jnp.bitwise_and, jnp.bitwise_xor
        return [ufunc.reduce(bits) for ufunc in ufuncs], (bits > 40).any(0), (bits > 20).all(0), bits.max(0)

    expected = jax.jit(reductions)(bits)
    actual = on_devices(reductions, bits)(bits)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
