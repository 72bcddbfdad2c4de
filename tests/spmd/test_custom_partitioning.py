"""Operations with custom partitioning use it instead of gathering examples."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from scalax.custom_op import sharded_op
from tests.spmd.test_partition import array
from tests.support.partitioned import FSDP, HSDP, TP, P, assert_equal, collectives, partitioned

pytestmark = pytest.mark.medium


def turned_twice(x):
    """A per-example function that appears to mix examples."""
    return jnp.sort(x[::-1], -1)[::-1]


@sharded_op('b c, -> b c', need_replication_factors=('c',))
def scaled(ctx, x, scale):
    return scale * turned_twice(x)


@sharded_op('b c -> c', reduction_factors=('b',), need_replication_factors=('c',))
def total(ctx, x):
    return ctx.psum(turned_twice(x).sum(0), 'b')


@sharded_op('b c, c d -> b d', reduction_factors=('c',))
def product(ctx, x, w):
    return ctx.psum((x[::-1] ** 2)[::-1] @ w, 'c')


@custom_partitioning
def of_jax(x):
    return turned_twice(x)


def on_blocks(mesh, operands, results):
    sharding = jax.NamedSharding(mesh, P(*operands[0].sharding.spec[:1]))
    return mesh, turned_twice, sharding, (sharding,)


of_jax.def_partition(on_blocks, sharding_rule='b c -> b c', need_replication_factors=('c',))


@custom_partitioning
def without_a_rule(x):
    return turned_twice(x)


without_a_rule.def_partition(on_blocks, sharding_rule='... -> ...')
PROGRAMS = {
    'scaled': lambda w, x: scaled(x @ w, 2.0),
    'vmapped': lambda w, x: jax.vmap(lambda y: scaled(y, 2.0), 1, 1)(jnp.stack([x @ w, x], 1)),
    'total': lambda w, x: total(x @ w),
    'product': lambda w, x: product(x, w),
    'of JAX': lambda w, x: of_jax(x @ w),
}
MESHES = {
    'fsdp': (FSDP, P('fsdp')),
    'hsdp': (HSDP, P('fsdp')),
    'columns over tp': (TP, P('fsdp', 'tp')),
    'rows over tp': (TP, P('tp', 'fsdp')),
}


@pytest.mark.parametrize('name', MESHES)
def test_blocks_of_examples_stay_on_their_devices(name):
    mesh, spec = MESHES[name]

    def run_all(w, x):
        return [fun(w, x) for fun in PROGRAMS.values()]

    w, x = array(16, 16), array(32, 16)
    step, run = partitioned(run_all, w, x, mesh, specs=[spec])
    assert_equal(run(), jax.jit(run_all)(w, x))
    assert not [row for row in step.collective_rows if row.what == 'examples']


def test_without_factors_for_all_dimensions_examples_are_gathered():
    w, x = array(16, 16), array(32, 16)
    step, run = partitioned(lambda w, x: without_a_rule(x @ w), w, x)
    assert_equal(run(), turned_twice(x @ w))
    # In between, each device sorts its examples.
    assert collectives(step)['all_gather examples gathered for rev'] == 2


def test_sums_of_gradients_are_reduced_to_where_weights_are():
    """A function that the partitioner can analyze runs in place, without its rule."""

    @sharded_op('b c, b d -> c d', reduction_factors=('b',))
    def gradient(ctx, x, g):
        return ctx.psum(x.T @ g, 'b')

    w, x = array(16, 16), array(32, 16)
    fun = lambda w, x: w - gradient(x, jnp.tanh(x @ w))  # noqa: E731
    step, run = partitioned(fun, w, x, result_specs=[P('fsdp')])
    assert_equal(run(), jax.jit(fun)(w, x))
    assert [row.kind for row in step.collective_rows] == ['all_gather', 'reduce_scatter']
