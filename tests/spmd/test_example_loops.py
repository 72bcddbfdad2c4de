"""Loops over examples: each device runs the iterations of its examples, with the results of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, P, assert_equal, collectives, partitioned, state_spec

pytestmark = pytest.mark.medium

W = np.random.default_rng(0).normal(size=(16, 16)).astype('float32') / 4
X = np.random.default_rng(1).normal(size=(32, 16)).astype('float32')
ZEROS = jnp.zeros(16)


def layers(w, row):
    return jnp.tanh(jnp.tanh(row @ w) @ w)


def noisy(w, row_and_key):
    row, key = row_and_key
    return layers(w, row + jax.random.normal(key, row.shape))


def until_small(w, row):
    """Each example needs a different number of iterations."""
    return lax.while_loop(lambda r: jnp.max(jnp.abs(r)) > 0.1, lambda r: 0.5 * jnp.tanh(r @ w), row)


def branched(w, row):
    return lax.cond(row[0] > 0, lambda r: jnp.sqrt(r[0]) * (r @ w), jnp.sin, row)


def keys(generator='threefry2x32'):
    return jax.random.split(jax.random.key(0, impl=generator), len(X))


def loss(fun):
    return lambda w, x: jnp.sum(lax.map(lambda row: fun(w, row).sum(), x))


def clipped(w, row):
    gradient = jax.grad(lambda w: layers(w, row).sum())(w)
    return gradient / (1 + jnp.linalg.norm(gradient))


def histogram(w, x):
    return lax.scan(lambda c, row: (c.at[jnp.int32(jnp.abs(row))].add(row @ w), None), ZEROS, x)[0]


def called_back(row):
    return jax.pure_callback(np.sin, row, row, vmap_method='sequential')


def beam_search(w, x):
    """Each step selects beams by index among the beams of the same example."""

    def step(beams, _):
        scores = jnp.einsum('btd,de->bte', beams, w).sum(-1)
        _, places = lax.top_k(scores, 4)
        return jnp.tanh(jnp.take_along_axis(beams, places[..., None], 1)), places

    beams = x[:, None] * jnp.arange(1.0, 5.0)[:, None]
    return lax.scan(step, beams, None, length=3)


GATHERED = {'all_gather state gathered for scan': 1}
SUM = {**GATHERED, 'all_reduce sum over examples for a result': 1}
MAXIMUM = {**GATHERED, 'all_reduce maximum over examples for a result': 1}
MINIMUM = {**GATHERED, 'all_reduce minimum over examples for a result': 1}
# In the gradients, values computed from two weights are gathered twice.
LOOPS = {
    'map': (lambda w, x: lax.map(lambda row: layers(w, row), x), GATHERED),
    'keys': (lambda w, x: lax.map(lambda pair: noisy(w, pair), (x, keys())), GATHERED),
    'rbg': (lambda w, x: lax.map(lambda pair: noisy(w, pair), (x, keys('rbg'))), GATHERED),
    'vectorize': (lambda w, x: jnp.vectorize(lambda row: layers(w, row), signature='(n)->(n)')(x), None),
    'batch_size': (lambda w, x: lax.map(lambda row: layers(w, row), x, batch_size=2), GATHERED),
    'sum': (lambda w, x: lax.scan(lambda c, row: (c + layers(w, row), row * 2), ZEROS, x), SUM),
    'difference': (lambda w, x: lax.scan(lambda c, row: (c - row @ w, None), ZEROS + 1, x)[0], SUM),
    'maximum': (
        lambda w, x: lax.scan(lambda c, row: (jnp.maximum(c, row @ w), None), ZEROS, x)[0],
        MAXIMUM,
    ),
    'minimum': (
        lambda w, x: lax.scan(lambda c, row: (jnp.minimum(c, row @ w), None), ZEROS + 1, x)[0],
        MINIMUM,
    ),
    'any': (lambda w, x: lax.scan(lambda c, row: (c | (row @ w > 1), None), ZEROS > 0, x)[0], MAXIMUM),
    'all': (lambda w, x: lax.scan(lambda c, row: (c & (row @ w > -2), None), ZEROS == 0, x)[0], MINIMUM),
    'count': (
        lambda w, x: lax.scan(lambda c, row: (c + (row @ w > 0), None), jnp.ones(16, int), x)[0],
        SUM,
    ),
    'histogram': (histogram, SUM),
    'two sums': (
        lambda w, x: lax.scan(lambda c, row: ((c[0] + row + layers(w, row), c[1] + 1), None), (ZEROS, 0), x)[
            0
        ],
        {**GATHERED, 'all_reduce sum over examples for a result': 2},
    ),
    'backwards': (lambda w, x: lax.scan(lambda c, row: (c + row, row @ w), ZEROS, x, reverse=True), SUM),
    'unrolled': (lambda w, x: lax.scan(lambda c, row: (c, row @ w), ZEROS, x, unroll=2), GATHERED),
    'until': (lambda w, x: lax.map(lambda row: until_small(w, row), x), GATHERED),
    'branches': (lambda w, x: lax.map(lambda row: branched(w, row), x), GATHERED),
    'sums in checkpoints': (
        lambda w, x: lax.scan(jax.checkpoint(lambda c, row: (c + jax.jit(layers)(w, row), row)), ZEROS, x),
        SUM,
    ),
    'sums in loops': (
        lambda w, x: lax.scan(
            lambda c, row: (lax.fori_loop(0, 3, lambda _, c: c + layers(w, row), c), None), ZEROS, x
        )[0],
        SUM,
    ),
    'clipped gradients': (
        lambda w, x: lax.scan(lambda c, row: (c + clipped(w, row), None), jnp.zeros_like(w), x)[0],
        SUM,
    ),
    'other examples': (
        lambda w, x: lax.map(lambda row: jax.nn.softmax(x @ row) @ x @ w, x),
        {**GATHERED, 'all_gather examples gathered for scan': 1},
    ),
    'callback': (lambda w, x: lax.map(lambda row: called_back(row @ w), x), GATHERED),
    'beams': (beam_search, {'all_gather state gathered for scan': 1}),
}


@pytest.mark.parametrize('name', LOOPS)
def test_each_device_runs_the_iterations_of_its_own_examples(name):
    fun, expected = LOOPS[name]
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(fun, W, X, HSDP if len(name) % 2 else FSDP)
        assert_equal(run(), jax.jit(fun)(W, X))
    if expected is not None:
        assert collectives(step) == expected


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('fun', [layers, branched, lambda w, row: jax.checkpoint(layers)(w, row)])
def test_gradients_of_a_map_are_reduced_once(fun, mesh):
    fun = jax.grad(loss(fun))
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(fun, W, X, mesh, result_specs=[state_spec(W.shape, size=mesh['fsdp'])])
        assert_equal(run(), jax.jit(fun)(W, X))
    gradients = [(row.kind, row.count) for row in step.collective_rows if row.reason.startswith('gradient')]
    assert gradients == [('reduce_scatter', 1), ('all_reduce', 1)][: len(mesh)]
    assert not [row for row in step.collective_rows if row.what == 'examples']


def test_examples_shard_one_axis_and_features_another():
    """Devices along an axis that shards features run the same number of iterations."""

    def fun(w, x):
        x = lax.with_sharding_constraint(x, P('replica', 'fsdp'))
        return lax.scan(lambda c, row: (c + row.sum(), jnp.tanh(row) + w[0]), 0.0, x)

    step, run = partitioned(fun, W, X, HSDP)
    assert_equal(
        run(),
        jax.jit(lambda w, x: lax.scan(lambda c, row: (c + row.sum(), jnp.tanh(row) + w[0]), 0.0, x))(W, X),
    )
    assert step.out_specs[1] == P('replica', 'fsdp')


# Iterations that depend on each other.
IN_ORDER = {
    'state': lambda w, x: lax.scan(lambda c, row: (jnp.tanh(c + row @ w), None), ZEROS, x)[0],
    'running sums': lambda w, x: lax.scan(lambda c, row: ((t := c + row @ w), t), ZEROS, x),
    'a sum that is read': lambda w, x: lax.scan(lambda c, row: (c + row @ w, c.sum()), ZEROS, x),
    'a sum with an initial value': lambda w, x: lax.scan(lambda c, row: (row @ w - c, None), ZEROS, x)[0],
    'a product': lambda w, x: lax.scan(lambda c, row: (c * (row @ w), None), ZEROS + 1, x)[0],
    'a sum and a maximum': lambda w, x: lax.scan(
        lambda c, row: (jnp.maximum(c + row @ w, 0), None), ZEROS, x
    )[0],
    'a doubled sum': lambda w, x: lax.scan(lambda c, row: (c + c * row, None), ZEROS, x)[0],
    'two that swap': lambda w, x: lax.scan(lambda c, row: ((c[1] + row, c[0]), None), (ZEROS, ZEROS), x)[0],
}


@pytest.mark.parametrize('name', IN_ORDER)
def test_dependent_iterations_stay_in_order(name):
    fun = IN_ORDER[name]
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(fun, W, X)
        assert_equal(run(), jax.jit(fun)(W, X))
    assert collectives(step)['all_gather examples gathered for scan'] == 1


@jax.custom_batching.sequential_vmap
def in_order(row):
    return jnp.sin(row)


def halved(row):
    return lax.while_loop(lambda r: jnp.max(r) > 0.1, lambda r: r / 2, row)


GUARDED = {
    'a branch': lambda row: lax.cond(jnp.isfinite(row[0]), halved, jnp.zeros_like, row),
    'a loop': lambda row: lax.while_loop(lambda r: jnp.isfinite(r[0]) & (r[0] > 0.1), halved, row),
    'no rule for vmap': in_order,
}


@pytest.mark.parametrize('name', GUARDED)
def test_an_example_skips_the_same_iterations_as_on_one_device(name):
    """Half of infinity is infinity."""
    x = np.where(np.arange(32)[:, None] == 5, np.inf, X).astype('float32')
    step, run = partitioned(lambda w, x: lax.map(GUARDED[name], x), W, x)
    np.testing.assert_array_equal(run()[0], jax.jit(lambda x: lax.map(GUARDED[name], x))(x))
    assert not step.collective_rows
