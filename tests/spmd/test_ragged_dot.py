"""Grouped matmuls on local shards: each device multiplies its local rows, or the rows of its examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmd.test_partition import array
from tests.support.partitioned import FSDP, HSDP, TP, P, assert_equal, collectives, partitioned, state_spec

pytestmark = pytest.mark.medium

WEIGHTS = {'up': array(3, 8, 16), 'down': array(3, 16, 8)}
ROWS = array(48, 8)
# Groups end between devices and inside them; one is empty, and the last rows belong to no group.
SIZES = [(7, 20, 21), (48, 0, 0), (0, 0, 48), (5, 0, 30)]


def layer(w, rows, sizes):
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(rows, w['up'], sizes)), w['down'], sizes)


def with_gradients(fun):
    def both(w, *batch):
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(fun(w, x, *batch[1:]))), (0, 1))(w, batch[0])

    return both


EXPECTED = {
    "all_gather weight ['up'] for ragged_dot_general": 2,
    "all_gather weight ['down'] for ragged_dot_general": 1,  # the forward pass ends with it
    "reduce_scatter gradient of ['up']": 1,
    "reduce_scatter gradient of ['down']": 1,
}
RESULTS = [state_spec((3, 16, 8)), state_spec((3, 8, 16)), P('fsdp')]


@pytest.mark.parametrize('sizes', SIZES, ids=str)
@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.sampled(4)
def test_rows_of_all_devices_in_groups(sizes, mesh):
    fun = with_gradients(lambda w, rows: layer(w, rows, jnp.asarray(sizes, 'int32')))
    step, run = partitioned(fun, WEIGHTS, ROWS, mesh, result_specs=RESULTS if mesh == FSDP else None)
    if mesh == FSDP:
        assert collectives(step) == EXPECTED
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), jax.jit(fun)(WEIGHTS, ROWS))


def test_group_sizes_of_dtype_uint8():
    rows, sizes = array(320, 8), np.asarray([200, 20, 100], 'uint8')
    _, run = partitioned(lambda w, x: layer(w, x, jnp.asarray(sizes)), WEIGHTS, rows)
    assert_equal(run(), layer(WEIGHTS, rows, jnp.asarray(sizes, 'int32')))


def sorted_by_expert(w, rows):
    """Sorts rows by their experts, and restores their order."""
    gates, expert = lax.top_k(jax.nn.softmax(rows @ w['up'][..., 0].T), 2)
    order = jnp.argsort(expert.reshape(-1))
    out = layer(w, rows[order // 2], jnp.bincount(expert.reshape(-1), length=3))
    return jnp.einsum('rkd,rk->rd', out[jnp.argsort(order)].reshape(len(rows), 2, -1), gates)


# Loops over examples of six rows, each with separate groups.
MAPPED = {
    'values': lambda w, x: lax.map(lambda rows: sorted_by_expert(w, rows), x),
    'remat': lambda w, x: lax.map(jax.checkpoint(lambda rows: sorted_by_expert(w, rows)), x),
    'sum': lambda w, x: lax.scan(
        lambda total, rows: (total + jnp.sum(sorted_by_expert(w, rows) ** 2), None), 0.0, x
    )[0],
    'weights per example': lambda w, x: lax.map(
        lambda rows: lax.ragged_dot(rows, w['up'] * rows[0, 0], jnp.asarray([1, 0, 5])), x
    ),
}


@pytest.mark.parametrize('mesh', [FSDP, pytest.param(HSDP, marks=pytest.mark.slow)], ids=['fsdp', 'hsdp'])
def test_groups_of_each_example_in_a_loop(mesh):
    def run_all(w, x):
        return [with_gradients(fun)(w, x) for fun in MAPPED.values()]

    step, run = partitioned(run_all, WEIGHTS, array(8, 6, 8), mesh)
    assert not any(row.what == 'examples' for row in step.collective_rows)
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), jax.jit(run_all)(WEIGHTS, array(8, 6, 8)))


@pytest.mark.parametrize('spec', [P('tp'), P('tp', 'fsdp'), P(('fsdp', 'tp'))], ids=str)
@pytest.mark.sampled(3)
def test_groups_over_another_axis(spec):
    def fun(w, rows):
        return jnp.tanh(lax.ragged_dot(rows, w, jnp.asarray([5, 1, 7, 20, 0, 11, 0, 4])))

    w = array(8, 8, 16)
    step, run = partitioned(with_gradients(fun), w, ROWS, TP, specs=[spec])
    assert not any(row.what == 'examples' for row in step.collective_rows)
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), jax.jit(with_gradients(fun))(w, ROWS))


OF_EXAMPLES = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), [1], [0])


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
def test_groups_of_each_example(mesh):
    ends = np.sort(np.random.default_rng(0).integers(0, 7, (8, 2)), -1)
    sizes = np.diff(ends, prepend=0, append=6).astype('int32')

    def fun(w, batch):
        return lax.ragged_dot_general(batch[0], w['up'], batch[1], OF_EXAMPLES)

    rows = array(8, 6, 8)
    step, run = partitioned(fun, WEIGHTS, [rows, sizes], mesh)
    assert collectives(step) == {"all_gather weight ['up'] for ragged_dot_general": 1}
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), jax.jit(fun)(WEIGHTS, [rows, sizes]))


def test_groups_and_weights_of_each_example():
    def fun(w, batch):
        rows, weights = batch
        product = jax.vmap(lax.ragged_dot, (0, 0, 0))
        return product(rows, weights, jnp.tile(jnp.asarray([2, 4]), (8, 1))) + w['up'][0, 0, 0]

    step, run = partitioned(fun, WEIGHTS, [array(8, 6, 8), array(8, 2, 8, 4)], replicate=True)
    assert not collectives(step)
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), jax.jit(fun)(WEIGHTS, [array(8, 6, 8), array(8, 2, 8, 4)]))


def random_ragged(random):
    """Returns a grouped matmul of random dimensions, and its operands."""
    groups, size = int(random.integers(1, 5)), 8 * int(random.integers(1, 4))
    k, n = random.integers(1, 6, 2)
    mode = random.choice(['rows', 'contracted'])
    ends = np.sort(random.integers(0, size + 1, groups))
    sizes = np.diff(ends, prepend=0).astype('int32')
    if mode == 'rows':
        numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
        return numbers, array(size, k), array(groups, k, n), sizes
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return numbers, array(size, k), array(size, n), sizes


@pytest.mark.parametrize('seed', range(8))
@pytest.mark.sampled(3)
def test_random_products(seed):
    numbers, left, right, sizes = random_ragged(np.random.default_rng(seed))
    is_batch = not numbers.rhs_group_dimensions

    def fun(w, batch):
        return lax.ragged_dot_general(batch[0], batch[1] if is_batch else w, jnp.asarray(sizes), numbers)

    batch = [left, right] if is_batch else [left]
    step, run = partitioned(fun, right, batch, replicate=True)
    assert not any(row.what == 'examples' for row in step.collective_rows)
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), jax.jit(fun)(right, batch))
