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


def beside_others(fun, small, x):
    """The results of a function of rows, in a program that gathers another weight."""
    return fun(x) + jnp.sum(x @ small)


@pytest.mark.parametrize('name', PRODUCTS)
def test_what_moves(name):
    """Half a weight of 64 x 64 is as many elements as 64 / 8 columns, and 64 of the result, of 28.4 rows."""
    step = HELPER.sjit(PRODUCTS[name], in_shardings=(RULE, P('fsdp')))
    few, many = (step.followed(STACK, like(rows, SIZE)) for rows in (24, 32))
    assert few.moved
    assert 'rows are few' in few.reason and not few.kept  # all products agree
    assert not many.moved
    assert many.kept


@pytest.mark.parametrize('name', PRODUCTS)
@pytest.mark.parametrize('rule', [P(None, 'fsdp'), P(None, None, 'fsdp')], ids=['summed', 'columns'])
def test_the_same_values(name, rule):
    def fun(w, small, x):
        return beside_others(lambda x: PRODUCTS[name](w, x), small, x)

    step = HELPER.sjit(fun, in_shardings=(rule, P('fsdp'), P('fsdp')), batch_argnums=2)
    random = np.random.default_rng(0)
    shapes = STACK.shape, (SIZE, 1), (16, SIZE)
    args = [random.normal(size=shape).astype('float32') / 8 for shape in shapes]
    followed = step.followed(*args)
    assert followed.moved and followed.kept
    with jax.default_matmul_precision('highest'):
        found, expected = step(*args), jax.jit(fun)(*args)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('rule', [P('fsdp'), P(None, 'fsdp')], ids=['summed', 'columns'])
def test_no_weight_is_gathered_where_rows_move(rule):
    step = HELPER.sjit(
        lambda w, small, x: beside_others(lambda x: jnp.tanh(x @ w), small, x),
        in_shardings=(rule, P('fsdp'), P('fsdp')),
        batch_argnums=2,
    )
    found = HELPER.plan(step, like(256, 256), like(256, 1), like(8, 256)).collectives
    assert found
    assert sum(row.bytes * row.count for row in found) < 256 * 256


def test_it_is_told():
    step = HELPER.sjit(lambda w, x: jnp.tanh(x @ w), in_shardings=(RULE, P('fsdp')))
    followed = step.followed(like(256, 256), like(8, 256))
    assert [(each.primitive, each.array, each.bytes) for each in followed.moved] == [
        ('dot_general', 'float32[256,256]', 256 * 256 * 4)
    ]
    assert str(followed).startswith('<lambda> follows no batch: rows are few. ')


def test_each_product_decides_for_itself():
    """One head of few rows, behind layers of many."""

    def model(w, x):
        x = jnp.tanh(x @ w['layer'])
        return x[::64] @ w['head']

    w = {'layer': like(64, 64), 'head': like(64, 4096)}
    step = HELPER.sjit(model, in_shardings=(RULE, P('fsdp')))
    followed = step.followed(w, like(8 * 64 * 8, 64))
    assert [each.array for each in followed.moved] == ['float32[64,4096]']
    assert any(each.array == 'float32[4096,64]' for each in followed.kept)


def test_what_is_smaller_in_its_dtype_moves():
    """A weight of bytes is smaller than rows of four."""
    step = HELPER.sjit(
        lambda w, x: lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type='float32'),
        in_shardings=(RULE, P('fsdp')),
    )
    rows = like(16, SIZE)
    assert step.followed(like(SIZE, SIZE), rows).moved
    assert not step.followed(like(SIZE, SIZE, dtype='int8'), rows).moved


def test_a_weight_that_a_loop_gathers_once_counts_once():
    def cell(w, x):
        return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros_like(x[0]), x)[0]

    step = HELPER.sjit(cell, in_shardings=(RULE, P(None, 'fsdp')))
    rows = 8
    assert rows < FEW_ROWS
    assert step.followed(like(SIZE, SIZE), like(3, rows, SIZE)).moved  # 24 rows, as above
    assert not step.followed(like(SIZE, SIZE), like(4, rows, SIZE)).moved
    assert step.followed(like(SIZE, SIZE), like(4, rows, SIZE)).kept


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
    assert not step.followed(STACK, like(8, SIZE)).moved, why


def recurrent(w, x):
    return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros_like(x[0]), x)[0]


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
    step = helper.sjit(
        lambda w, small, x: beside_others(lambda x: x @ w, small, x),
        in_shardings=(rule, P('fsdp'), P('fsdp')),
        batch_argnums=2,
    )
    w, small, x = (np.ones(shape, 'float32') for shape in ((SIZE, 8 * SIZE), (SIZE, 1), (16, SIZE)))
    assert ((16, SIZE), spec) in constraints(step.trace(w, small, x).jaxpr)
    np.testing.assert_allclose(step(w, small, x), x @ w + np.sum(x @ small))


def test_look_ups_are_no_products():
    step = HELPER.sjit(lambda w, x: w[x], in_shardings=(RULE, P('fsdp')))
    assert step.followed(like(4096, SIZE), like(8, dtype='int32')).kept


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
