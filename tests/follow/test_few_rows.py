"""With fewer rows than weights nothing is followed: to move the rows takes less."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._follow.weights import FEW_ROWS
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.following import constraints, like

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
    'convolutions': lambda w, x: lax.scan(
        lambda c, w: (lax.conv(c[:, :, None], w[:, :, None], (1,), 'SAME')[:, :, 0], None), x, w
    )[0],
    'branches': lambda w, x: lax.cond(w[0, 0, 0] > 0, lambda: x @ w[0], lambda: x @ w[1]),
    'groups': lambda w, x: lax.ragged_dot(x, w, jnp.full(4, len(x) // 4)),
}


def elements(found):
    """The elements of weights and of rows that are compared, where rows are few."""
    numbers = re.search(r'gather ([\d,]+) elements of weights; the compiler can move ([\d,]+)', found.reason)
    return tuple(int(number.replace(',', '')) for number in numbers.groups()) if numbers else ()


@pytest.mark.parametrize('name', PRODUCTS)
def test_what_is_few(name):
    step = HELPER.sjit(PRODUCTS[name], in_shardings=(RULE, P('fsdp')))
    groups = 4 if name == 'groups' else 1  # each row meets one of them, and all are gathered
    few, many = (step.followed(STACK, like(groups * rows, SIZE)) for rows in (SIZE - 8, SIZE))
    weights, rows = elements(few)
    assert weights * (SIZE - 8) == rows * SIZE > 0
    assert not few.kept
    assert 'follows no batch: rows are few' in str(few)
    assert many.kept
    assert not many.reason


def test_few_rows_are_left_to_the_compiler():
    fun = PRODUCTS['its gradient']
    steps = [
        HELPER.sjit(fun, in_shardings=(RULE, P('fsdp')), out_shardings=RULE, **options)
        for options in ({}, {'batch_argnums': ()})
    ]
    followed, plain = (HELPER.plan(step, STACK, like(8, SIZE)) for step in steps)
    assert not constraints(steps[0].trace(STACK, like(8, SIZE)).jaxpr)
    assert followed.totals == plain.totals


def test_the_smaller_side_of_a_product_counts():
    wide = like(SIZE, 4 * SIZE)
    step = HELPER.sjit(lambda w, x: x @ w, in_shardings=(RULE, P('fsdp')))
    assert elements(step.followed(wide, like(SIZE, SIZE))) == (4 * SIZE * SIZE, SIZE * SIZE)


def test_a_weight_that_a_loop_gathers_once_counts_once():
    def cell(w, x):
        return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros_like(x[0]), x)[0]

    step = HELPER.sjit(cell, in_shardings=(RULE, P(None, 'fsdp')))
    rows = 8
    assert rows < FEW_ROWS
    assert not step.followed(like(SIZE, SIZE), like(SIZE // rows - 1, rows, SIZE)).kept
    assert step.followed(like(SIZE, SIZE), like(SIZE // rows, rows, SIZE)).kept


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


def recurrent(w, x):
    return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros_like(x[0]), x)[0]


def test_gradients_that_each_round_of_a_loop_would_add_up_count():
    """The compiler alone sums the gradient of the weight in every time step."""
    x = like(4, 8, SIZE)  # 32 rows in all, for a weight of 64
    shardings = {'in_shardings': (P('fsdp'), P(None, 'fsdp')), 'batch_argnums': 1}
    assert not HELPER.sjit(recurrent, **shardings).followed(like(SIZE, SIZE), x).kept

    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(recurrent(w, x)))(w)

    step = HELPER.sjit(gradient, **shardings, out_shardings=P('fsdp'))
    assert step.followed(like(SIZE, SIZE), x).kept
    plain = HELPER.sjit(gradient, **shardings | {'batch_argnums': ()}, out_shardings=P('fsdp'))
    moved = [
        sum(row.bytes * row.count for row in HELPER.plan(each, like(SIZE, SIZE), x).collectives)
        for each in (step, plain)
    ]
    assert moved[0] < moved[1]


@pytest.mark.parametrize(
    ('rule', 'shards'),
    [(P('fsdp'), 1), (P('fsdp', 'tp'), 2), (P('tp', 'fsdp'), 2)],
    ids=['not over tp', 'columns over tp', 'rows of it over tp'],
)
def test_what_other_axes_shard_counts_once_for_their_devices(rule, shards):
    """Over tp a device gathers its part of the weight; rows move whole, or their products in parts."""
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    step = helper.sjit(lambda w, x: x @ w, in_shardings=(rule, P('fsdp')), batch_argnums=1)
    found = elements(step.followed(like(SIZE, 8 * SIZE), like(16, SIZE)))
    assert found == (8 * SIZE * SIZE // shards, 16 * SIZE)


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


def model(params, batch):
    """Rows that are looked up, and few of them for the layers behind."""

    def loss(params):
        x = params['table'][batch['indices']]
        for weight in params['layers']:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x * batch['y'])

    return jax.grad(loss)(params)


@pytest.mark.parametrize(
    ('table', 'axes', 'kept'),
    [
        (
            2048,
            ('data', 'fsdp'),
            True,
        ),  # 2048 x 16 / 4 elements of its gradient in place of 4 weights of 16 x 16
        (64, ('data', 'fsdp'), False),
        (2048, ('fsdp',), False),
    ],
    ids=['a sum over slices', 'a small one', 'its own axis alone'],
)
def test_gradients_of_tables_count_where_they_would_be_added_up(table, axes, kept):
    helper = MeshShardingHelper([2, 4], ['data', 'fsdp'])
    rule = {'table': P('fsdp'), 'layers': P('fsdp')}
    shardings = {'in_shardings': (rule, P(axes)), 'out_shardings': rule}
    step = helper.sjit(model, **shardings, batch_argnums=1)
    params = {'table': like(table, 16), 'layers': [like(16, 16)] * 4}
    batch = {'indices': like(8, dtype='int32'), 'y': like(8, 16)}
    assert bool(step.followed(params, batch).kept) is kept
    if kept:
        of_data = [row for row in helper.plan(step, params, batch).collectives if 'data' in row.axes]
        assert max(row.bytes for row in of_data if row.kind == 'all-reduce') < table * 16
