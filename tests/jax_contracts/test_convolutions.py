"""Tests that `xla_workarounds/grouped_convolutions` corrects gradients of grouped convolutions."""

import subprocess
import sys

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


_SHARDED_CHANNELS = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

jax.config.update('jax_num_cpu_devices', 8)
mesh = jax.make_mesh((4, 2), ('x', 'y'), axis_types=(AxisType.Auto,) * 2)
numbers = jax.lax.ConvDimensionNumbers((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))

def gradient(images, cotangent):
    result = jax.lax.conv_general_dilated(
        images, cotangent, (1, 1), [(1, 1)] * 2, dimension_numbers=numbers, batch_group_count=4
    )
    return jax.lax.with_sharding_constraint(result, P(None, None, 'y'))

x = jnp.ones((16, 6, 6, 8))
with jax.set_mesh(mesh):
    specs = {'in_specs': P('x'), 'out_specs': P(), 'axis_names': {'x'}, 'check_vma': False}
    jax.jit(jax.shard_map(gradient, **specs)).lower(x, x).compile()
"""


@pytest.mark.medium
def test_xla_aborts_if_it_shards_the_channels_of_groups() -> None:
    """If this fails, XLA has fixed the bug, and `kernel_gradient_spec` can be removed."""
    done = subprocess.run([sys.executable, '-c', _SHARDED_CHANNELS], capture_output=True, text=True)
    with contract('aborts the process', 'to constrain these gradients', library='jaxlib'):
        assert done.returncode != 0 and 'ShapeUtil::Compatible' in done.stderr
