"""Tests that `xla_workarounds/grouped_convolutions` corrects gradients of grouped convolutions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._compile.xla_workarounds.rewrite import apply_workarounds
from scalax._jax import rewriting
from tests.support.contracts import contract


def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        options = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'), 'feature_group_count': 4}
        return jnp.sum(jnp.sin(lax.conv_general_dilated(x, w, (1, 1), 'SAME', **options)))

    return jax.grad(loss)(w)


@pytest.mark.medium
def test_xla_adds_up_the_gradient_of_a_grouped_convolution_over_devices_that_have_the_same_rows() -> None:
    """If this fails, XLA has fixed the bug, and `apply_workarounds` can be removed."""
    mesh = jax.make_mesh((4, 2), ('x', 'y'), axis_types=(AxisType.Auto,) * 2)
    w, x = jnp.ones((3, 3, 4, 16)), jnp.ones((16, 8, 8, 16))
    rows = jax.device_put(x, NamedSharding(mesh, P('x')))
    expected = gradient(w, x)

    def corrected(w: jax.Array, x: jax.Array) -> jax.Array:
        [result] = rewriting.eval_jaxpr(
            apply_workarounds(jax.make_jaxpr(gradient)(w, x), mesh, ['x'], name='f'), [w, x]
        )
        return result

    with contract('adds it up twice', 'to work around it', library='jaxlib'):
        np.testing.assert_allclose(jax.jit(gradient)(w, rows), 2 * expected, rtol=1e-4, atol=1e-4)
    with contract('adds it up rightly inside of shard_map', 'to work around it', library='jaxlib'):
        np.testing.assert_allclose(jax.jit(corrected)(w, rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.medium
def test_xla_mixes_up_the_channels_of_a_grouped_convolution_laid_out_unlike_its_images() -> None:
    """If this fails, XLA has fixed the bug, and `_laid_out_as_images` can be removed."""
    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Auto,))
    w = jax.random.normal(jax.random.key(0), (3, 3, 1, 16))
    x = jax.random.normal(jax.random.key(1), (16, 8, 8, 16))

    def depthwise(w: jax.Array, x: jax.Array) -> jax.Array:
        options = {'dimension_numbers': ('NHWC', 'HWIO', 'NCHW'), 'feature_group_count': 16}
        return lax.conv_general_dilated(x, w, (1, 1), 'SAME', **options)

    def corrected(w: jax.Array, x: jax.Array) -> jax.Array:
        jaxpr = apply_workarounds(jax.make_jaxpr(depthwise)(w, x), mesh, ['x'], name='f')
        [result] = rewriting.eval_jaxpr(jaxpr, [w, x])
        return result

    expected = depthwise(w, x)
    split = jax.device_put(w, NamedSharding(mesh, P(None, None, None, 'x')))
    with contract('mixes up their channels', 'to work around it', library='jaxlib'):
        assert not np.allclose(jax.jit(depthwise)(split, x), expected, rtol=1e-2, atol=1e-2)
    with contract('keeps them where the result is transposed', 'to work around it', library='jaxlib'):
        np.testing.assert_allclose(jax.jit(corrected)(split, x), expected, rtol=1e-4, atol=1e-4)
