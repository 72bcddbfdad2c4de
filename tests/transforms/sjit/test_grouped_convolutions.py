"""Gradients of grouped convolutions, which XLA adds up wrongly on meshes of several axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.errors import ArgumentError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
RANDOM = np.random.default_rng(0)


def convolved(x, w, groups):
    numbers = ('NHWC', 'HWIO', 'NHWC')
    return lax.conv_general_dilated(
        x, w, (1, 1), 'SAME', dimension_numbers=numbers, feature_group_count=groups
    )


def gradients(w, x, groups):
    return jax.grad(lambda w, x: jnp.sum(jnp.sin(convolved(x, w, groups))), (0, 1))(w, x)


def arrays(groups, rows=16, features=16):
    draw = RANDOM.standard_normal
    return draw((3, 3, 16 // groups, features), 'float32'), draw((rows, 8, 8, 16), 'float32')


def assert_right(fun, *args, **options):
    found = HELPER.sjit(fun, static_argnums=2, **options)(*args)
    for a, b in zip(*map(jax.tree.leaves, (found, fun(*args))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('groups, features', [(16, 16), (4, 16), (16, 32), (1, 16)])
@pytest.mark.parametrize('batch', [P('fsdp'), P('tp'), P(('fsdp', 'tp')), P('fsdp', None, None, 'tp')])
@pytest.mark.parametrize('options', [{}, {'batch_argnums': ()}, {'batch_argnums': 1}])
def test_gradients_are_those_of_one_device(groups, features, batch, options):
    w, x = arrays(groups, features=features)
    assert_right(gradients, w, x, groups, in_shardings=(P(), batch), out_shardings=P(), **options)


def test_rows_that_not_all_axes_divide():
    w, x = arrays(4, rows=4)
    assert_right(gradients, w, x, 4, in_shardings=(P(), P('fsdp')), batch_argnums=())
    w, x = arrays(4, rows=3)
    assert_right(gradients, w, x, 4, in_shardings=(P(), P()))


def inside(w, x, groups):
    """A gradient in a scan, under remat, in a branch."""

    @jax.checkpoint
    def loss(w, x):
        return jnp.sum(jnp.sin(convolved(x, w, groups)))

    def step(w, x):
        grad = lax.cond(x[0, 0, 0, 0] > 1e9, lambda: w, lambda: jax.grad(loss)(w, x))
        return w - 1e-3 * grad, None

    return lax.scan(step, w, x.reshape(2, -1, *x.shape[1:]))[0]


def test_jaxprs_inside():
    w, x = arrays(4)
    assert_right(inside, w, x, 4, in_shardings=(P(), P('fsdp')), out_shardings=P())


def test_the_users_code_runs_once_and_placed_arrays_give_the_same():
    times = []

    def step(w, x):
        times.append(1)
        return gradients(w, x, 4)

    w, x = arrays(4)
    fun = HELPER.sjit(step, in_shardings=(P(), P('fsdp')), out_shardings=P())
    for _ in range(2):
        np.testing.assert_allclose(fun(w, x)[0], gradients(w, x, 4)[0], rtol=1e-4, atol=1e-3)
    placed = HELPER.shard((w, x), (P(), P('fsdp')))
    np.testing.assert_allclose(fun(*placed)[0], gradients(w, x, 4)[0], rtol=1e-4, atol=1e-3)
    assert times == [1]


def test_a_function_that_closes_over_an_outer_trace_is_refused():
    w, x = arrays(4)

    @jax.jit
    def outer(w, x):
        return HELPER.sjit(lambda x: gradients(w, x, 4), in_shardings=P('fsdp'))(x)

    with pytest.raises(ArgumentError, match='pass the arrays that it closes over as arguments'):
        outer(w, x)
