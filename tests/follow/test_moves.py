"""Rows move to a weight that is larger than what moves; it is gathered for others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._follow.weights import FEW_ROWS
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.following import constraints, like

UNCONSTRAINED = P.UNCONSTRAINED

HELPER = MeshShardingHelper([8], ['fsdp'])
RULE = FSDPShardingRule(min_fsdp_size=1)
SIZE = 64
STACK = like(4, SIZE, SIZE)

# Products with four weights. Each has as many elements as the rows if there are 64 of these.
PRODUCTS = {
    'a scan over weights': lambda w, x: lax.scan(lambda c, w: (c @ w, None), x, w)[0],
    'its gradient': lambda w, x: jax.grad(
        lambda w: jnp.sum(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0])
    )(w),
    'weights one by one': lambda w, x: x @ w[0] @ w[1] @ w[2] @ w[3],
    'a loop over their numbers': lambda w, x: lax.fori_loop(
        0, 4, lambda i, c: c @ lax.dynamic_index_in_dim(w, i, keepdims=False), x
    ),
    'transposed, in another dtype': lambda w, x: lax.scan(
        lambda c, w: (c @ w.T.astype('float32'), None), x, w.astype('bfloat16')
    )[0],
    'scaled': lambda w, x: lax.scan(lambda c, w: (c @ (w.astype('int8') * w[:1]), None), x, w)[0],
    'under remat': lambda w, x: jax.checkpoint(lambda w: lax.scan(lambda c, w: (c @ w, None), x, w)[0])(w),
    'under vmap': lambda w, x: jax.vmap(lambda r: lax.scan(lambda c, w: (c @ w, None), r, w)[0])(x),
    'branches': lambda w, x: lax.cond(w[0, 0, 0] > 0, lambda: x @ w[0], lambda: x @ w[1]),
}


MANY = like(4096, SIZE)
SMALL = like(SIZE, SIZE)


def beside_many(fun):
    """A function of a weight and of few rows, in a program that multiplies many others."""
    return lambda w, small, x, many: fun(w, x) + jnp.sum(many @ small)


def step_of(fun, rule, helper=HELPER):
    rows = P('fsdp')
    return helper.sjit(beside_many(fun), in_shardings=(rule, rows, rows, rows), batch_argnums=(2, 3))


@pytest.mark.parametrize('name', PRODUCTS)
def test_what_moves(name):
    """Half a weight of 64 x 64 is as many elements as 64 / 8 columns, and 64 of the result, of 28.4 rows."""
    step = step_of(PRODUCTS[name], RULE)
    few, many = (step.followed(STACK, SMALL, like(rows, SIZE), MANY) for rows in (24, 32))
    assert few.moved and few.kept
    assert not many.moved


@pytest.mark.parametrize(('rows', 'kept'), [(64, 0), (512, 2)], ids=['few', 'many'])
def test_the_compiler_decides_about_convolutions_of_few_rows(rows, kept):
    """A kernel of 64 x 64 is twice gathered as many elements as 128 rows."""

    def fun(w, x):
        y = lax.conv(x[:, :, None], w[0][:, :, None], (1,), 'SAME')
        return lax.conv(jnp.tanh(y), w[1][:, :, None], (1,), 'SAME')

    step = HELPER.sjit(fun, in_shardings=(RULE, P('fsdp')))
    assert len(step.followed(STACK, like(rows, SIZE)).kept) == kept


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('name', PRODUCTS)
@pytest.mark.parametrize('rule', [P(None, 'fsdp'), P(None, None, 'fsdp')], ids=['summed', 'columns'])
def test_the_same_values(name, rule):
    random = np.random.default_rng(0)
    shapes = STACK.shape, SMALL.shape, (16, SIZE), MANY.shape
    args = [random.normal(size=shape).astype('float32') / 8 for shape in shapes]
    fun, weights = PRODUCTS[name], P(None, 'fsdp')
    step = HELPER.sjit(
        beside_many(fun), in_shardings=(rule, weights, P('fsdp'), P('fsdp')), batch_argnums=(2, 3)
    )
    assert step.followed(*args).moved
    with jax.default_matmul_precision('highest'):
        found, expected = step(*args), jax.jit(beside_many(fun))(*args)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize('rule', [P('fsdp'), P(None, 'fsdp')], ids=['summed', 'columns'])
def test_no_weight_is_gathered_where_rows_move(rule):
    step = step_of(lambda w, x: jnp.tanh(x @ w), rule)
    found = HELPER.plan(step, like(256, 256), SMALL, like(8, 256), MANY).collectives
    assert found
    assert sum(row.bytes * row.count for row in found) < 256 * 256


def test_it_is_told():
    step = step_of(lambda w, x: jnp.tanh(x @ w), RULE)
    followed = step.followed(like(256, 256), SMALL, like(8, 256), MANY)
    assert [(each.primitive, each.array, each.bytes) for each in followed.moved] == [
        ('dot_general', 'float32[256,256]', 256 * 256 * 4)
    ]
    assert 'Examples move at:' in str(followed)


def test_each_product_decides_for_itself():
    """One head of few rows, behind layers of many."""

    def model(w, x):
        x = jnp.tanh(x @ w['layer'])
        return x[::1024] @ w['head']

    w = {'layer': like(64, 64), 'head': like(64, 4096)}
    step = HELPER.sjit(model, in_shardings=(RULE, P('fsdp')))
    followed = step.followed(w, like(64 * 512, 64))
    assert [each.array for each in followed.moved] == ['float32[64,4096]']
    assert any(each.array == 'float32[32768,64]' for each in followed.kept)


def test_what_is_smaller_in_its_dtype_stays():
    """A weight of bytes is smaller than rows of four."""

    def fun(w, x):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type='float32')

    step, rows = step_of(fun, RULE), like(16, SIZE)
    assert step.followed(like(SIZE, SIZE), SMALL, rows, MANY).moved
    assert not step.followed(like(SIZE, SIZE, dtype='int8'), SMALL, rows, MANY).moved


def recurrent(w, x):
    return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros_like(x[0]), x)[0]


def test_a_weight_that_a_loop_gathers_once_counts_once():
    step, rows = HELPER.sjit(recurrent, in_shardings=(RULE, P(None, 'fsdp'))), 8
    assert rows < FEW_ROWS
    assert step.followed(like(SIZE, SIZE), like(1, rows, SIZE)).moved
    assert not step.followed(like(SIZE, SIZE), like(SIZE, rows, SIZE)).moved


@pytest.mark.medium
def test_gradients_that_each_round_of_a_loop_would_add_up():
    """The compiler alone sums the gradient of the weight in every time step."""

    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(recurrent(w, x)))(w)

    x = like(4, 8, SIZE)
    shardings = {'in_shardings': (P('fsdp'), P(None, 'fsdp')), 'out_shardings': P('fsdp')}
    moved = [
        sum(row.bytes * row.count for row in HELPER.plan(each, like(SIZE, SIZE), x).collectives)
        for each in (HELPER.sjit(gradient, **shardings, batch_argnums=batch) for batch in (1, ()))
    ]
    assert moved[0] < moved[1]


@pytest.mark.parametrize(
    ('rule', 'why'),
    [
        (P(), 'each device has them'),
        (P(None, None, 'tp'), 'other axes than those of the batch shard them'),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_weights_that_are_not_gathered_do_not_count(rule, why):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    step = helper.sjit(PRODUCTS['a scan over weights'], in_shardings=(rule, P('fsdp')), batch_argnums=1)
    assert step.followed(STACK, like(8, SIZE)).kept, why


@pytest.mark.medium
@pytest.mark.parametrize(
    ('rule', 'spec'),
    [
        (P('fsdp'), P(None, 'fsdp')),
        (P('fsdp', 'tp'), P(None, 'fsdp')),
        (P('tp', 'fsdp'), P(None, UNCONSTRAINED)),
    ],
    ids=['not over tp', 'columns over tp', 'rows of it over tp'],
)
def test_rows_move_along_the_axes_of_the_batch_alone(rule, spec):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    step = step_of(lambda w, x: x @ w, rule, helper)
    shapes = (SIZE, 8 * SIZE), (SIZE, SIZE), (16, SIZE), MANY.shape
    args = w, small, x, many = [np.ones(shape, 'float32') for shape in shapes]
    assert ((16, SIZE), spec) in constraints(step.trace(*args).jaxpr)
    np.testing.assert_allclose(step(*args), x @ w + np.sum(many @ small))


def test_look_ups_are_no_products():
    step = HELPER.sjit(lambda w, x: w[x], in_shardings=(RULE, P('fsdp')))
    assert step.followed(like(4096, SIZE), like(8, dtype='int32')).kept


@pytest.mark.medium
@pytest.mark.parametrize(('rows', 'moves'), [(64, True), (2048, False)], ids=['few', 'many'])
def test_rows_move_to_a_table_with_more_elements(rows, moves):
    helper = MeshShardingHelper([2, 4], ['data', 'fsdp'])
    table = like(1024, 16)

    def gradient(table, i, y):
        return jax.grad(lambda table: jnp.sum(jnp.tanh(table[i]) * y))(table)

    def summed(batch):
        """The bytes of the table's gradient that are added up."""
        shardings = {'in_shardings': (P('fsdp'), *[P(('data', 'fsdp'))] * 2), 'out_shardings': P('fsdp')}
        step = helper.sjit(gradient, **shardings, batch_argnums=batch)
        found = helper.plan(step, table, like(rows, dtype='int32'), like(rows, 16)).collectives
        return sum(row.bytes * row.count for row in found if row.kind == 'all-reduce' and 'data' in row.axes)

    assert summed(()) >= table.size * table.dtype.itemsize // 4
    assert (summed((1, 2)) == 0) is moves


@pytest.mark.medium
@pytest.mark.parametrize(
    ('rows', 'moved'),
    [(32, P(None, 'fsdp')), (128, None)],
    ids=['few', 'many'],
)
def test_rows_become_columns_of_a_table_whose_columns_their_axis_shards(rows, moved):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])

    def gradient(table, i, y):
        return jax.grad(lambda table: jnp.sum(jnp.tanh(table[i]) * y))(table)

    shardings = {'in_shardings': (P('tp', 'fsdp'), P('fsdp'), P('fsdp')), 'batch_argnums': (1, 2)}
    step = helper.sjit(gradient, **shardings, out_shardings=P('tp', 'fsdp'))
    random = np.random.default_rng(1)
    table, y = (random.normal(size=shape).astype('float32') for shape in ((64, 16), (rows, 16)))
    i = random.integers(0, 64, rows)
    found = [(shape, spec) for shape, spec in constraints(step.trace(table, i, y).jaxpr) if None in spec]
    last = [((rows, 1), P(None, None)), ((rows, 16), moved)] if moved else []
    assert found[1:] == last  # the first one is behind the look-up
    np.testing.assert_allclose(step(table, i, y), jax.jit(gradient)(table, i, y), rtol=1e-5, atol=1e-5)
