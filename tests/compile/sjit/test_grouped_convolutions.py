"""Gradients of grouped convolutions, which XLA sums over too many devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalax
from scalax.errors import ArgumentError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
LINE = MeshShardingHelper([8], ['fsdp'])
CUBE = MeshShardingHelper([2, 2, 2], ['dp', 'fsdp', 'tp'])
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
    actual = HELPER.sjit(fun, static_argnums=2, **options)(*args)
    for a, b in zip(*map(jax.tree.leaves, (actual, fun(*args))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('groups, features', [(16, 16), (4, 16), (16, 32), (1, 16)])
@pytest.mark.parametrize('batch', [P('fsdp'), P('tp'), P(('fsdp', 'tp')), P('fsdp', None, None, 'tp')])
@pytest.mark.parametrize('options', [{}, {'batch_argnums': ()}, {'batch_argnums': 1}])
def test_gradients_match_one_device(groups, features, batch, options):
    w, x = arrays(groups, features=features)
    assert_right(gradients, w, x, groups, in_shardings=(P(), batch), out_shardings=P(), **options)


@pytest.mark.medium
def test_batches_that_are_not_divisible_by_all_axes():
    w, x = arrays(4, rows=4)
    assert_right(gradients, w, x, 4, in_shardings=(P(), P('fsdp')), batch_argnums=())
    w, x = arrays(4, rows=3)
    assert_right(gradients, w, x, 4, in_shardings=(P(), P()))


@pytest.mark.medium
@pytest.mark.parametrize('batch', [P(), P('fsdp'), P(None, None, None, 'fsdp')])
def test_results_with_another_dimension_order(batch):
    """XLA mixes up the channels, or fails. The gradient of a gradient has this dimension order."""

    def fun(w, x):
        numbers = 'NHWC', 'HWIO', 'NCHW'
        return lax.conv_general_dilated(
            x, w, (1, 1), 'SAME', dimension_numbers=numbers, feature_group_count=16
        )

    w, x = arrays(16)
    for options in ({}, {'batch_argnums': ()}):
        actual = LINE.sjit(fun, in_shardings=(P(None, None, None, 'fsdp'), batch), **options)(w, x)
        np.testing.assert_allclose(actual, fun(w, x), rtol=1e-4, atol=1e-4)


def inside(w, x, groups):
    """A gradient in a scan, under remat, in a branch."""

    @jax.checkpoint
    def loss(w, x):
        return jnp.sum(jnp.sin(convolved(x, w, groups)))

    def step(w, x):
        grad = lax.cond(x[0, 0, 0, 0] > 1e9, lambda: w, lambda: jax.grad(loss)(w, x))
        return w - 1e-3 * grad, None

    return lax.scan(step, w, x.reshape(2, -1, *x.shape[1:]))[0]


@pytest.mark.medium
def test_jaxprs_inside():
    w, x = arrays(4)
    assert_right(inside, w, x, 4, in_shardings=(P(), P('fsdp')), out_shardings=P())


def in_parts(w, x, groups):
    """Parts of a batch such that some devices have no examples of a part."""

    def step(total, rows):
        return total + gradients(w, rows, groups)[0], None

    return lax.scan(step, jnp.zeros_like(w), x.reshape(4, -1, *x.shape[1:]))[0]


def in_dealt_parts(w, x, groups):
    return in_parts(w, x.reshape(-1, 4, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape), groups)


def pooled(w, x, groups):
    return gradients(w, x.reshape(-1, 2, *x.shape[1:]).mean(1), groups)


def annotated(w, x, groups):
    rows = lax.with_sharding_constraint(jnp.sin(x), P(('dp', 'fsdp')))
    return gradients(w, rows, groups)


def microbatched(w, x, groups):
    return scalax.microbatch(lambda w, x: gradients(w, x, groups)[0], 8)(w, x)


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    'helper, fun, batch',
    [
        (LINE, in_parts, P('fsdp')),
        (LINE, pooled, P('fsdp')),
        (LINE, microbatched, P('fsdp')),
        (HELPER, in_parts, P(('fsdp', 'tp'))),
        (HELPER, in_dealt_parts, P(('fsdp', 'tp'))),
        (CUBE, gradients, P('fsdp')),
        (CUBE, annotated, P('dp')),
    ],
)
@pytest.mark.parametrize('options', [{'batch_argnums': ()}, {'batch_argnums': 1}])
def test_batches_over_some_axes_and_several_axes(helper, fun, batch, options):
    w, x = arrays(4, rows=16 if fun is not microbatched else 32)
    step = helper.sjit(fun, static_argnums=2, in_shardings=(P(), batch), out_shardings=P(), **options)
    actual = step(w, x, 4)
    expected = (
        jax.jit(fun, static_argnums=2)(w, x, 4) if fun is not annotated else gradients(w, jnp.sin(x), 4)
    )
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.medium
def test_another_active_mesh():
    w, x = arrays(4)
    step = HELPER.sjit(gradients, static_argnums=2, in_shardings=(P(), P('fsdp')))
    with jax.set_mesh(jax.make_mesh((2, 4), ('p', 'q'), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        np.testing.assert_allclose(step(w, x, 4)[0], gradients(w, x, 4)[0], rtol=1e-4, atol=1e-3)


def test_explicit_axes_are_rejected():
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=jax.sharding.AxisType.Explicit)
    w, x = arrays(4)
    step = helper.sjit(gradients, static_argnums=2, in_shardings=(P(), P('fsdp')))
    with pytest.raises(
        ArgumentError,
        match=r'^gradients takes the.*\(test_grouped_convolutions\.py:\d+ convolved\).*\n.*AxisType\.Auto',
    ):
        step(w, x, 4)


@pytest.mark.medium
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


def test_a_function_that_closes_over_an_outer_trace_is_rejected():
    w, x = arrays(4)

    @jax.jit
    def outer(w, x):
        return HELPER.sjit(lambda x: gradients(w, x, 4), in_shardings=P('fsdp'))(x)

    with pytest.raises(ArgumentError, match='pass the arrays that it closes over as arguments'):
        outer(w, x)
