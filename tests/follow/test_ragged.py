"""Products of rows in groups are made of each device's own rows, with the same values."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P

ROWS, WIDTH, HIDDEN, EXPERTS = 64, 16, 24, 4
RULE = FSDPShardingRule('fsdp', min_fsdp_size=1)
STRATEGIES = {
    'fsdp': (MeshShardingHelper([8], ['fsdp']), RULE, P('fsdp')),
    'fsdp and tp': (
        MeshShardingHelper([4, 2], ['fsdp', 'tp']),
        TreePathShardingRule(
            ('up', P(None, 'fsdp', 'tp')), ('down', P(None, 'tp', 'fsdp')), ('router', P()), strict=True
        ),
        P('fsdp'),
    ),
    'two axes of rows': (
        MeshShardingHelper([2, 4], ['data', 'fsdp']),
        RULE,
        P(('data', 'fsdp')),
    ),
}


def weights():
    random = np.random.default_rng(0)
    shapes = {
        'router': (WIDTH, EXPERTS),
        'up': (EXPERTS, WIDTH, HIDDEN),
        'down': (EXPERTS, HIDDEN, WIDTH),
    }
    return {name: random.normal(size=shape).astype('float32') / 4 for name, shape in shapes.items()}


def rows():
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype('float32')


def experts(w, x, chosen=2, unsort=True):
    """Rows in the order of the experts that they choose."""
    gates, expert = lax.top_k(jax.nn.softmax(x @ w['router']), chosen)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=len(w['up']))
    hidden = jnp.tanh(lax.ragged_dot(x[order // chosen], w['up'], sizes))
    out = lax.ragged_dot(hidden, w['down'], sizes)
    out = out[jnp.argsort(order)] if unsort else jnp.zeros_like(out).at[order].set(out)
    return jnp.einsum('rkd,rk->rd', out.reshape(len(x), chosen, -1), gates)


def of_sizes(*sizes):
    def fun(w, x):
        return lax.ragged_dot(x, w['up'], jnp.array(sizes))

    return fun


PROGRAMS = {
    'sorted': experts,
    'scattered back': lambda w, x: experts(w, x, unsort=False),
    'the gradient': jax.grad(lambda w, x: jnp.sum(experts(w, x) ** 2)),
    'even groups': of_sizes(16, 16, 16, 16),
    'empty ones': of_sizes(0, 61, 0, 3),
    'rows of no group': of_sizes(5, 1, 7, 20),
    'no rows at all': of_sizes(0, 0, 0, 0),
}


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('name', PROGRAMS)
def test_the_same_values(name, strategy):
    helper, rule, batch = STRATEGIES[strategy]
    step = helper.sjit(PROGRAMS[name], in_shardings=(rule, batch))
    args = weights(), rows()
    with jax.default_matmul_precision('highest'):
        found, expected = step(*args), jax.jit(PROGRAMS[name])(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    assert not step.followed(*args).lost


def test_a_sum_over_devices_is_of_the_dtype_that_it_has():
    """XLA for GPUs exchanges what is summed as it is written: float32 would be twice the bytes."""
    helper, rule, batch = STRATEGIES['fsdp']
    gradient = jax.grad(lambda w, x: jnp.float32(0) + lax.ragged_dot(x, w, jnp.array([40, 24]))[0, 0])
    step = helper.sjit(gradient, in_shardings=(rule, batch))
    args = jnp.ones((2, WIDTH, HIDDEN), 'bfloat16'), jnp.ones((ROWS, WIDTH), 'bfloat16')
    text = step.lower(*args).as_text()
    [dtype] = re.findall(r'stablehlo.add across dimensions = \[0\] : \(tensor<8x2x16x24x(\w+)>', text)
    assert dtype == 'bf16'


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason='compiles for TPUs')
def test_each_device_multiplies_its_own_rows():
    helper = MeshShardingHelper.from_topology('v5p:2x2x2', [-1], ['fsdp'])
    gradient = jax.grad(lambda w, x: jnp.sum(experts(w, x) ** 2))
    # Whatever this JAX makes of such a product, it is made of as many rows.
    by_hand = helper.shard_map(gradient, in_specs=(P(), P('fsdp')), out_specs=P('fsdp'), check_vma=False)
    like = {
        'router': jax.ShapeDtypeStruct((256, 8), 'bfloat16'),
        'up': jax.ShapeDtypeStruct((8, 256, 512), 'bfloat16'),
        'down': jax.ShapeDtypeStruct((8, 512, 256), 'bfloat16'),
    }
    x = jax.ShapeDtypeStruct((2048, 256), 'bfloat16')
    followed, hand = [
        helper.sjit(fun, in_shardings=(RULE, P('fsdp'))).lower(like, x).compile().cost_analysis()['flops']
        for fun in (gradient, by_hand)
    ]
    assert 0 < followed < 1.1 * hand


@pytest.mark.slow
@pytest.mark.parametrize('rule', [P('tp'), P('tp', 'fsdp'), P(('fsdp', 'tp'))], ids=str)
def test_experts_over_another_axis(rule):
    def fun(w, x):
        return lax.ragged_dot(x, w, jnp.array([5, 1, 7, 20, 0, 11, 0, 9]))

    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(fun(w, x))))(w)

    w = np.random.default_rng(0).normal(size=(8, WIDTH, HIDDEN)).astype('float32')
    helper, _, batch = STRATEGIES['fsdp and tp']
    for each in (fun, gradient):
        step = helper.sjit(each, in_shardings=(rule, batch), batch_argnums=1)
        with jax.default_matmul_precision('highest'):
            np.testing.assert_allclose(step(w, rows()), jax.jit(each)(w, rows()), rtol=1e-5, atol=1e-5)
        assert not step.followed(w, rows()).lost


def test_groups_of_products_are_left_alone():
    """The first dimension is one of the product's batch: it is in groups, and there is nothing to choose."""
    dims = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])

    def fun(w, x):
        return lax.ragged_dot_general(x, w, jnp.array([5, 1, 2]), dims)

    random = np.random.default_rng(0)
    w, x = (random.normal(size=shape).astype('float32') for shape in ((8, 16, 24), (8, 5, 16)))
    step = STRATEGIES['fsdp'][0].sjit(fun, in_shardings=(RULE, P('fsdp')))
    with jax.default_matmul_precision('highest'):
        np.testing.assert_allclose(step(w, x), jax.jit(fun)(w, x), rtol=1e-5, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('dtype', ['uint8', 'int16', 'uint32'])
def test_sizes_of_other_dtypes(dtype):
    def fun(w, x):
        return lax.ragged_dot(x, w['up'], jnp.array([200, 30, 10, 7], dtype))

    x = np.repeat(rows(), 4, 0)
    helper, rule, batch = STRATEGIES['fsdp']
    with jax.default_matmul_precision('highest'), jax.numpy_dtype_promotion('strict'):
        found = helper.sjit(fun, in_shardings=(rule, batch))(weights(), x)
        np.testing.assert_allclose(found, jax.jit(fun)(weights(), x), rtol=1e-5, atol=1e-5)


MAPPED = {
    'values': lambda w, x: lax.map(lambda row: experts(w, row), x),
    'gradients': jax.grad(
        lambda w, x: jnp.sum(jnp.sin(lax.map(jax.checkpoint(lambda row: experts(w, row)), x))), (0, 1)
    ),
    'a sum': jax.grad(
        lambda w, x: lax.scan(lambda total, row: (total + jnp.sum(experts(w, row) ** 2), None), 0.0, x)[0]
    ),
}


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('name', MAPPED)
def test_rows_in_a_loop_have_groups_of_their_own(name, strategy):
    helper, rule, batch = STRATEGIES[strategy]
    x = rows().reshape(16, 4, WIDTH)
    step = helper.sjit(MAPPED[name], in_shardings=(rule, batch))
    with jax.default_matmul_precision('highest'):
        found, expected = step(weights(), x), jax.jit(MAPPED[name])(weights(), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    assert not step.followed(weights(), x).lost and not step.followed(weights(), x).moved


@pytest.mark.slow
def test_the_gradient_of_a_loop_over_rows_that_is_taken_outside():
    helper, rule, batch = STRATEGIES['fsdp and tp']
    x = rows().reshape(16, 4, WIDTH)
    step = helper.sjit(MAPPED['values'], in_shardings=(rule, batch))
    with jax.default_matmul_precision('highest'):
        found, expected = (
            jax.grad(lambda w, x, fun=fun: jnp.sum(jnp.sin(fun(w, x))), (0, 1))(weights(), x)
            for fun in (step, MAPPED['values'])
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    assert not step.followed(weights(), x).lost


@pytest.mark.medium
def test_rows_that_have_weights_of_their_own_stay_in_their_loop():
    """No TPU multiplies these at once."""

    def fun(w, x):
        def of_row(row):
            own = w['up'] * row[0, 0]
            return lax.ragged_dot(row, own, jnp.array([1, 0, 2, 1]))

        return lax.map(of_row, x)

    helper, rule, batch = STRATEGIES['fsdp']
    x = rows().reshape(16, 4, WIDTH)
    step = helper.sjit(fun, in_shardings=(rule, batch))
    with jax.default_matmul_precision('highest'):
        np.testing.assert_allclose(step(weights(), x), jax.jit(fun)(weights(), x), rtol=1e-5, atol=1e-5)
    assert [each.primitive for each in step.followed(weights(), x).lost] == ['scan']
