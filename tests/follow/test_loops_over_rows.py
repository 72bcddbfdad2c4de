"""Loops over the rows of a batch run on each device's own rows, with the same values."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

RULE = FSDPShardingRule('fsdp', min_fsdp_size=1)
W = np.random.default_rng(0).normal(size=(16, 16)).astype('float32') / 4
X = np.random.default_rng(1).normal(size=(32, 16)).astype('float32')
NONE = jnp.zeros(16)


def layers(w, row):
    return jnp.tanh(jnp.tanh(row @ w) @ w.T)


def noisy(w, row_and_key):
    row, key = row_and_key
    return layers(w, row + jax.random.normal(key, row.shape))


def until_small(w, row):
    """Each row takes a number of rounds of its own."""
    return lax.while_loop(lambda r: jnp.max(jnp.abs(r)) > 0.1, lambda r: 0.5 * jnp.tanh(r @ w), row)


def branched(w, row):
    return lax.cond(row[0] > 0, lambda r: layers(w, r), lambda r: r, row)


def keys(generator='threefry2x32'):
    return jax.random.split(jax.random.key(0, impl=generator), len(X))


LOOPS = {
    'a map': lambda w, x: lax.map(lambda row: layers(w, row), x),
    'a map and keys': lambda w, x: lax.map(lambda each: noisy(w, each), (x, keys())),
    'a sum': lambda w, x: lax.scan(lambda c, row: (c + layers(w, row), row * 2), NONE, x),
    'two sums': lambda w, x: lax.scan(
        lambda c, row: ((c[0] + row + layers(w, row), c[1] + 1), None), (NONE, 0), x
    )[0],
    'backwards': lambda w, x: lax.scan(lambda c, row: (c + row, row @ w), NONE, x, reverse=True),
    'unrolled': lambda w, x: lax.scan(lambda c, row: (c, row @ w), NONE, x, unroll=2),
    'a loop in a loop': lambda w, x: lax.map(
        lambda row: lax.fori_loop(0, 3, lambda _, r: jnp.tanh(r @ w), row), x
    ),
    'as many rounds as needed': lambda w, x: lax.map(lambda row: until_small(w, row), x),
    'branches by a weight': lambda w, x: lax.map(
        lambda row: lax.cond(w[0, 0] > 0, lambda r: layers(w, r), lambda r: r, row), x
    ),
    'one loop behind another': lambda w, x: lax.map(
        lambda row: row @ w, lax.map(lambda row: layers(w, row), x)
    ),
    'a gradient': jax.grad(lambda w, x: jnp.sum(lax.map(lambda row: layers(w, row).sum(), x))),
    'in a loop that carries rows': jax.grad(
        lambda w, x: jnp.sum(
            lax.fori_loop(0, 3, lambda _, x: lax.map(lambda row: layers(w, row), x), x)
            + lax.fori_loop(0, 3, lambda _, x: lax.map(lambda i: x[i] @ w, jnp.arange(32)), x)
        )
    ),
    'sums in checkpoints': lambda w, x: lax.scan(
        jax.checkpoint(lambda c, row: (c + jax.jit(layers)(w, row), row)), NONE, x
    ),
    'a gradient of checkpoints': jax.grad(
        lambda w, x: lax.scan(jax.checkpoint(lambda c, row: (c + layers(w, row).sum(), None)), 0.0, x)[0]
    ),
    'gradients of rows, clipped': lambda w, x: lax.scan(
        lambda c, row: (
            c + (g := jax.grad(lambda w: layers(w, row).sum())(w)) / (1 + jnp.linalg.norm(g)),
            None,
        ),
        jnp.zeros_like(w),
        x,
    )[0],
}


def on_devices(fun, **options):
    helper = MeshShardingHelper([8], ['fsdp'])
    return helper.sjit(fun, in_shardings=(RULE, P('fsdp')), **options)


@pytest.mark.medium
@pytest.mark.sampled(5)
@pytest.mark.parametrize('fun', LOOPS.values(), ids=LOOPS)
def test_each_device_runs_over_its_own_rows(fun):
    with jax.default_matmul_precision('highest'):
        step = on_devices(fun)
        found, expected = step(W, X), jax.jit(fun)(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    assert not step.followed(W, X).lost


# Rounds that depend on each other.
ONE_AFTER_THE_OTHER = {
    'a state': lambda w, x: lax.scan(lambda c, row: (jnp.tanh(c + row @ w), None), NONE, x)[0],
    'running sums': lambda w, x: lax.scan(lambda c, row: ((t := c + row @ w), t), NONE, x),
    'a sum that is read': lambda w, x: lax.scan(lambda c, row: (c + row @ w, c.sum()), NONE, x),
    'a largest value': lambda w, x: lax.scan(lambda c, row: (jnp.maximum(c, row @ w), None), NONE, x)[0],
    'a difference': lambda w, x: lax.scan(lambda c, row: (row @ w - c, None), NONE, x)[0],
}


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('fun', ONE_AFTER_THE_OTHER.values(), ids=ONE_AFTER_THE_OTHER)
def test_rounds_that_depend_on_each_other_stay_in_order(fun):
    with jax.default_matmul_precision('highest'):
        step = on_devices(fun)
        found, expected = step(W, X), jax.jit(fun)(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    assert [each.primitive for each in step.followed(W, X).lost] == ['scan']


@pytest.mark.slow
@pytest.mark.parametrize('generator', ['rbg', 'unsafe_rbg'])
def test_generators_that_draw_otherwise_of_many_keys_draw_of_one_after_the_other(generator):
    def fun(w, x):
        return lax.map(lambda each: noisy(w, each), (x, keys(generator)))

    with jax.default_matmul_precision('highest'):
        found, expected = on_devices(fun)(W, X), jax.jit(fun)(W, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@jax.custom_batching.sequential_vmap
def in_order(row):
    return jnp.sin(row)


def called_back(row):
    return jax.pure_callback(np.sin, row, row, vmap_method='sequential')


@pytest.mark.medium
@pytest.mark.parametrize('fun', [in_order, called_back])
def test_what_runs_one_after_the_other_stays_in_its_loop(fun):
    def mapped(w, x):
        return lax.map(lambda row: fun(row @ w), x)

    with jax.default_matmul_precision('highest'):
        step = on_devices(mapped)
        np.testing.assert_allclose(step(W, X), jax.jit(mapped)(W, X), rtol=1e-5, atol=1e-5)
    assert [each.primitive for each in step.followed(W, X).lost] == ['scan']


def halved(row):
    return lax.while_loop(lambda r: jnp.max(r) > 0.1, lambda r: r / 2, row)


GUARDED = {
    'a branch': lambda row: lax.cond(jnp.isfinite(row[0]), halved, jnp.zeros_like, row),
    'a loop': lambda row: lax.while_loop(lambda r: jnp.isfinite(r[0]) & (r[0] > 0.1), halved, row),
}


@pytest.mark.medium
@pytest.mark.parametrize('fun', GUARDED.values(), ids=GUARDED)
def test_a_row_that_skips_a_loop_skips_it(fun):
    """Half of infinity is infinity."""
    x = np.where(np.arange(32)[:, None] == 5, np.inf, X)
    step = on_devices(lambda w, x: lax.map(fun, x))
    assert [each.primitive for each in step.followed(W, x).lost] == ['scan']
    np.testing.assert_array_equal(step(W, x), jax.jit(lambda x: lax.map(fun, x))(x))


BRANCHED = {
    'a branch': branched,
    'a root': lambda w, r: lax.cond(r[0] > 0, lambda r: jnp.sqrt(r[0]) * (r @ w), jnp.sin, r),
    'a switch': lambda w, r: lax.switch(jnp.argmax(r[:3]), [lambda r: r @ w, jnp.sin, lambda r: 1 / r], r),
    'one in another': lambda w, r: lax.cond(r[0] > 0, lambda r: branched(w, r[::-1]), jnp.sin, r),
    'in a loop': lambda w, r: lax.fori_loop(
        0, 3, lambda i, c: lax.cond(r[i] > 0, lambda c: jnp.tanh(c @ w), lambda c: c * 2, c), r
    ),
    'of no operands': lambda w, r: lax.cond(r[0] > 0, lambda: 1.0, lambda: 2.0) * (r @ w),
}


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('name', BRANCHED)
@pytest.mark.parametrize('is_gradient', [False, True], ids=['values', 'gradient'])
def test_a_loop_whose_rows_choose_branches_stays(name, is_gradient):
    """Else all rows would take all branches, and their gradient, which may be infinite, times zero."""

    def fun(w, x):
        return lax.map(lambda row: BRANCHED[name](w, row), x)

    if is_gradient:
        values, fun = fun, jax.grad(lambda w, x: jnp.sum(jnp.sin(values(w, x))))
    with jax.default_matmul_precision('highest'):
        step = on_devices(fun)
        np.testing.assert_allclose(step(W, X), jax.jit(fun)(W, X), rtol=1e-5, atol=1e-5)
    assert {each.primitive for each in step.followed(W, X).lost} == {'scan'}


@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason='compiles for TPUs')
def test_weights_are_gathered_once_before_the_loop():
    helper = MeshShardingHelper.from_topology('v5p:2x2x2', [-1], ['fsdp'])
    w, x = jax.ShapeDtypeStruct((256, 256), 'float32'), jax.ShapeDtypeStruct((512, 256), 'float32')
    step = helper.sjit(LOOPS['a gradient'], in_shardings=(RULE, P('fsdp')), out_shardings=RULE)
    plan = helper.plan(step, w, x, quick=True)
    assert sum(row.count * row.bytes for row in plan.collectives) < 4 * 256 * 256 * 4


@jax.custom_vjp
def added(total, row):
    return total + row


added.defvjp(lambda total, row: (total + row, None), lambda _, gradient: (1.1 * gradient, 3 * gradient))


@pytest.mark.medium
def test_sums_with_a_gradient_of_their_own_keep_it():
    """Also where it is taken of the whole function, from outside: it grows in each round."""

    def fun(w, x):
        return lax.scan(lambda c, row: (added(c, row @ w), None), NONE, x)[0]

    step = on_devices(fun)
    with jax.default_matmul_precision('highest'):
        found, expected = (jax.grad(lambda *args: each(*args).sum(), (0, 1))(W, X) for each in (step, fun))  # noqa: B023
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
