"""Dimensions of weights that stay split over the axes of the batch, with rows gathered in front."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from scalax._follow.dimensions import WholeDimensions
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.following import constraints

HELPER = MeshShardingHelper([8], ['fsdp'])
OPEN = P.UNCONSTRAINED
ROWS = NamedSharding(HELPER.mesh, P('fsdp', None))
WIDTH, HIDDEN, WORDS = 16, 256, 512


def feed_forward(w, x):
    return (jax.nn.silu(x @ w['gate']) * (x @ w['up'])) @ w['down']


def head(w, x, labels):
    """The loss of a large vocabulary, whose table is the last matrix too."""
    logits = jnp.tanh(w['table'][labels] + x) @ w['table'].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)
    return -jnp.mean(picked)


BLOCK = {'gate': P(None, 'fsdp'), 'up': P(None, 'fsdp'), 'down': P('fsdp')}
TABLE = {'table': P('fsdp')}


def arrays(*shapes):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype('float32') / 4 for shape in shapes]


def block_arguments(rows):
    gate, up, down, x = arrays((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (rows, WIDTH))
    return {'gate': gate, 'up': up, 'down': down}, x


def head_arguments(rows):
    table, x = arrays((WORDS, WIDTH), (rows, WIDTH))
    return {'table': table}, x, np.random.default_rng(1).integers(0, WORDS, rows)


def gradient(fun):
    def with_loss(w, *batch):
        return jax.value_and_grad(lambda w: jnp.mean(fun(w, *batch) ** 2))(w)

    return with_loss


def step_of(fun, rule, helper=HELPER, rows='fsdp', count=1):
    return helper.sjit(
        fun,
        in_shardings=(rule, *[P(rows)] * count),
        out_shardings=(P(), rule),
        batch_argnums=tuple(range(1, 1 + count)),
    )


def specs(step, *args):
    return constraints(step.trace(*args).jaxpr)


def test_columns_of_a_block_stay_split_and_its_rows_are_gathered_once():
    step, args = step_of(gradient(feed_forward), BLOCK), block_arguments(64)
    found = specs(step, *args)
    assert ((64, HIDDEN), P(None, 'fsdp')) in found
    assert ((64, HIDDEN), P('fsdp', None)) not in found
    # What comes into the block, and its gradient from behind.
    assert found.count(((64, WIDTH), P(None, OPEN))) == 2


def test_logits_of_a_large_vocabulary_stay_split():
    step, args = step_of(gradient(head), TABLE, count=2), head_arguments(64)
    found = specs(step, *args)
    assert ((64, WORDS), P(None, 'fsdp')) in found
    assert not any(shape == (64, WORDS) and 'fsdp' in spec[:1] for shape, spec in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('fun', 'rule', 'arguments', 'count'),
    [(feed_forward, BLOCK, block_arguments, 1), (head, TABLE, head_arguments, 2)],
    ids=['a block', 'a head'],
)
@pytest.mark.parametrize('rows', [64, 4096], ids=['few', 'many'])
def test_what_is_sent_and_the_values(fun, rule, arguments, count, rows):
    """Few rows: less than to gather the weights once. Many: the weights are gathered."""
    args = arguments(rows)
    step = step_of(gradient(fun), rule, count=count)
    with jax.default_matmul_precision('highest'):
        found, expected = step(*args), jax.jit(gradient(fun))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    moved = sum(row.bytes * row.count for row in HELPER.plan(step, *args).collectives)
    weights = sum(x.nbytes for x in jax.tree.leaves(args[0]))
    assert (moved < 1.5 * weights) is (rows == 64)
    assert any('fsdp' in spec[1:] for _, spec in specs(step, *args)) is (rows == 64)


def test_it_is_told():
    followed = step_of(gradient(feed_forward), BLOCK).followed(*block_arguments(64))
    assert {each.array for each in followed.moved} == {'float32[16,256]', 'float32[256,16]'}


SLICES = MeshShardingHelper([2, 4], ['data', 'fsdp'])


@pytest.mark.medium
@pytest.mark.parametrize(('first', 'is_split'), [(True, True), (False, False)], ids=['first', 'second'])
def test_further_axes_in_the_dimension_of_rows(first, is_split):
    """XLA scatters sums over it if it is the first one; else it may add them up on all devices."""
    rows = P(('data', 'fsdp'), None) if first else P(None, ('data', 'fsdp'))
    w, x = block_arguments(768)
    args = w, x[:, None] if first else x[None]
    shardings = {'in_shardings': (BLOCK, rows), 'out_shardings': (P(), BLOCK)}
    step = SLICES.sjit(gradient(feed_forward), **shardings, batch_argnums=1)
    assert any('fsdp' in spec[2:] for _, spec in specs(step, *args)) is is_split
    with jax.default_matmul_precision('highest'):
        found, expected = step(*args), jax.jit(gradient(feed_forward))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_gradients_count_where_rows_and_time_are_one_dimension():
    """The weights alone would be less than what rows send."""

    def fun(w, x):
        return feed_forward(w, x.reshape(-1, WIDTH)).reshape(x.shape)

    w, x = block_arguments(384)
    shardings = {'in_shardings': (BLOCK, P(None, 'fsdp')), 'out_shardings': (P(), BLOCK)}
    step = HELPER.sjit(gradient(fun), **shardings, batch_argnums=1)
    assert ((384, HIDDEN), P(None, 'fsdp')) in specs(step, w, x.reshape(4, -1, WIDTH))


@pytest.mark.parametrize('hidden', [256, 2**17], ids=['few columns', 'many'])
def test_sums_are_whole_before_they_are_scattered(hidden):
    """Else XLA for TPUs scatters them in a ring, nine parts for seven. It may beside a long product."""
    rule = {'up': P(None, 'fsdp'), 'down': P('fsdp')}
    shapes = {'up': (WIDTH, hidden), 'down': (hidden, WIDTH)}
    w = {name: jax.ShapeDtypeStruct(shape, 'float32') for name, shape in shapes.items()}
    step = HELPER.sjit(
        lambda w, x: jnp.tanh(x @ w['up']) @ w['down'], in_shardings=(rule, P('fsdp')), batch_argnums=1
    )
    found = specs(step, w, jax.ShapeDtypeStruct((64, WIDTH), 'float32'))
    assert found[-1] == ((64, WIDTH), P('fsdp', None))
    assert (((64, WIDTH), P()) in found) is (hidden == 256)


WHOLE = {
    'a sum of the columns before': lambda y: jnp.cumsum(y, 1),
    'a part of them': lambda y: jnp.concatenate([y[:, : HIDDEN // 2], y[:, HIDDEN // 2 :]], 1),
    'sorted': lambda y: jnp.sort(y, 1),
    'placed by the user': lambda y: lax.with_sharding_constraint(y, ROWS),
    'placed by a jit': lambda y: jax.jit(jnp.tanh, out_shardings=ROWS)(y),
    'transformed': lambda y: jnp.fft.fft(y, axis=1).real,
}


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('between', WHOLE.values(), ids=WHOLE)
def test_columns_of_which_all_are_needed_do_not_stay_split(between):
    def fun(w, x):
        return between(x @ w['up']) @ w['down']

    args = block_arguments(64)
    step = step_of(gradient(fun), BLOCK)
    assert not any('fsdp' in spec[1:] for shape, spec in specs(step, *args) if shape == (64, HIDDEN))
    with jax.default_matmul_precision('highest'):
        found, expected = step(*args), jax.jit(gradient(lambda w, x: between(x @ w['up']) @ w['down']))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


THROUGH = {
    'a jit': lambda w, x: jax.jit(feed_forward)(w, x),
    'remat': lambda w, x: jax.checkpoint(feed_forward)(w, x),
    'a branch': lambda w, x: lax.cond(x[0, 0] > 0, feed_forward, lambda w, x: 2 * feed_forward(w, x), w, x),
    'vmap': lambda w, x: jax.vmap(lambda row: feed_forward(w, row))(x),
    'merged and split': lambda w, x: (
        jnp.tanh((x @ w['up']).reshape(-1, 8, HIDDEN // 8)).reshape(-1, HIDDEN) @ w['down']
    ),
}


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('fun', THROUGH.values(), ids=THROUGH)
def test_through_what_a_block_is_followed(fun):
    args = block_arguments(64)
    step = step_of(gradient(fun), BLOCK)
    assert ((64, HIDDEN), P(None, 'fsdp')) in specs(step, *args)
    with jax.default_matmul_precision('highest'):
        found, expected = step(*args), jax.jit(gradient(fun))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize('checkpoint', [True, False], ids=['remat', 'stacks of what is saved'])
def test_layers_in_a_loop(checkpoint):
    rule = {name: P(None, *spec) for name, spec in BLOCK.items()}

    def fun(w, x):
        def layer(x, w):
            return x + feed_forward(w, jnp.tanh(x)), None

        return lax.scan(jax.checkpoint(layer) if checkpoint else layer, x, w)[0]

    w, x = block_arguments(64)
    w = jax.tree.map(lambda a: np.stack([a, a + 0.125, a - 0.125]), w)
    step = step_of(gradient(fun), rule)
    assert ((64, HIDDEN), P(None, 'fsdp')) in specs(step, w, x)
    with jax.default_matmul_precision('highest'):
        found, expected = step(w, x), jax.jit(gradient(fun))(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_a_loop_without_rounds():
    """As of layers that are left behind the groups that another loop takes: what it sends is no matter."""

    def fun(w, x):
        return feed_forward(w, lax.scan(lambda c, _: (feed_forward(w, c), None), x, None, length=0)[0])

    assert ((64, HIDDEN), P(None, 'fsdp')) in specs(step_of(gradient(fun), BLOCK), *block_arguments(64))


def test_columns_that_send_nothing_either_way_do_not_stay_split():
    """Those of a bias are in no product: to split them saves nothing, and would gather its rows."""

    def fun(w, x, y):
        placed = lax.with_sharding_constraint(x @ w['up'], ROWS) @ w['down']
        return placed, lax.scan(lambda y, _: (jnp.tanh(y + w['bias']), None), y, None, length=3)[0]

    rule = {'up': BLOCK['up'], 'down': BLOCK['down'], 'bias': P('fsdp')}
    weights, x = block_arguments(64)
    weights = {'up': weights['up'], 'down': weights['down'], 'bias': np.ones(40, 'float32')}
    step = HELPER.sjit(fun, in_shardings=(rule, P('fsdp'), P('fsdp')), batch_argnums=(1, 2))
    found = specs(step, weights, x, np.ones((64, 40), 'float32'))
    assert {spec for shape, spec in found if shape == (64, 40)} == {P('fsdp', OPEN)}


def test_a_weight_that_has_the_dimension_twice_is_gathered():
    """A residual as wide as the matrix: its rows and its columns are one dimension."""

    def fun(w, x):
        return x + jnp.tanh(x @ w['square'])

    step = step_of(gradient(fun), {'square': P('fsdp')})
    args = {'square': np.ones((HIDDEN, HIDDEN), 'float32')}, np.ones((128, HIDDEN), 'float32')
    assert not any(spec == P(None, 'fsdp') for _, spec in specs(step, *args))


def test_which_dimensions_are_one():
    def fun(w, x, table):
        def body(c, row):
            return jnp.tanh(c @ w) @ w.T, row * 2

        c, rows = lax.scan(body, x, table)
        return jax.jit(lambda y: y.reshape(2, -1, 4))(c).sum(0), rows

    jaxpr = jax.make_jaxpr(fun)(jnp.ones((4, 16)), jnp.ones((6, 4)), jnp.ones((3, 5)))
    dims = WholeDimensions(jaxpr, 2)
    w, x, table = map(dims.classes_of, jaxpr.jaxpr.invars)
    assert w[0] == x[1] != w[1]
    assert table[0] != table[1] == dims.classes_of(jaxpr.jaxpr.outvars[1])[1]
    assert not {*w} & {*table}


def test_a_stack_that_a_loop_makes_of_constants():
    """Nothing is known of what its rounds give, and each dimension of the stack has a number all the same."""

    def fun(w, x):
        zeros = lax.scan(lambda c, _: (c, jnp.zeros(HIDDEN)), 0, None, length=64)[1]
        return jnp.tanh(x @ w['up'] + zeros) @ w['down']

    step = step_of(gradient(fun), BLOCK)
    assert ((64, HIDDEN), P(None, 'fsdp')) in specs(step, *block_arguments(64))
