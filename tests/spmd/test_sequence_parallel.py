"""Sequence parallelism: a second batch axis shards time, and results match one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    TreePathShardingRule,
    with_sharding_constraint,
)
from tests.spmd import test_step as decoder
from tests.support.partitioned import P, assert_equal, collectives, partitioned

pytestmark = pytest.mark.medium

SEQ = {'data': 2, 'seq': 4}
TOKENS, WIDTH, HEADS = 8, 16, 2


def array(*shape, dtype='float32'):
    seed = sum(size * 7**i for i, size in enumerate(shape))
    return np.asarray(np.random.default_rng(seed).normal(size=shape) / 4, dtype)


def run(fun, weights, *batch, specs=None, result_specs=None, mesh=SEQ):
    batch_specs = [P('data', 'seq')] * len(batch)
    specs = specs or [P()] * len(jax.tree.leaves(weights))
    step, compute = partitioned(
        *(lambda w, batch: fun(w, *batch), weights, batch, mesh),
        specs=specs,
        batch_specs=batch_specs,
        batch_axes=['data', 'seq'],
        result_specs=result_specs,
    )
    assert_equal(compute(), jax.jit(fun)(weights, *batch))
    return step


def attention(w, x):
    shape = (*x.shape[:2], HEADS, -1)
    query, key, value = [(x @ w[name]).reshape(shape) for name in ('query', 'key', 'value')]
    return jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)


WEIGHTS = {name: array(WIDTH, WIDTH + i)[:, :WIDTH] for i, name in enumerate(('query', 'key', 'value'))}


def test_attention_gathers_keys_and_values():
    step = run(attention, WEIGHTS, array(4, TOKENS, WIDTH))
    assert step.out_specs == (P('data', 'seq'),)
    # All keys and all values of the examples of a device.
    rows = [(row.kind, row.axes, row.bytes, row.count) for row in step.collective_rows]
    assert rows == [('all_gather', ('seq',), 4 * 2 * TOKENS * WIDTH, 2)]


def test_gradients_of_attention():
    def loss(w, x):
        return jax.value_and_grad(lambda w: jnp.mean(attention(w, x) ** 2))(w)

    step = run(loss, WEIGHTS, array(4, TOKENS, WIDTH), result_specs=[None, P(), P(), P()])
    reduced = [row for row in step.collective_rows if row.array == f'float32[{WIDTH},{WIDTH}]']
    assert sum(row.count for row in reduced if row.kind == 'all_reduce') == 3


def test_positions_are_global_positions():
    def fun(w, x):
        positions = jnp.arange(x.shape[1])
        return x * w + jnp.sin(positions)[:, None], x + w[positions]

    step = run(fun, array(TOKENS, WIDTH), array(4, TOKENS, WIDTH))
    assert step.out_specs == (P('data', 'seq'),) * 2
    assert not step.collective_rows


@pytest.mark.parametrize(
    'fun, count',
    [
        (lambda w, x: jnp.cumsum(x * w, 1), 1),
        (lambda w, x: lax.associative_scan(jnp.maximum, x * w, axis=1), None),
        (lambda w, x: jnp.flip(x * w, 1), 1),
        (lambda w, x: jnp.sort(x * w, 1), 1),
        (lambda w, x: jnp.roll(x * w, 1, 1), None),
        (lambda w, x: x[:, :-1] * w, 1),
        (lambda w, x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] * w, None),
        (lambda w, x: lax.scan(lambda c, x: (c * w + x,) * 2, x[:, 0], x.swapaxes(0, 1))[1], None),
        (lambda w, x: x[:, jnp.arange(x.shape[1])[::-1]] * w, None),
        (lambda w, x: jnp.take_along_axis(x, jnp.argsort(x * w, 1), 1), None),
    ],
)
def test_operations_along_time_gather_and_are_reported(fun, count):
    step = run(fun, np.float32(0.5), array(4, TOKENS, 3))
    counts = collectives(step)
    assert counts
    assert all('along' not in reason or 'examples' in reason for reason in counts)
    if count is not None:
        assert sum(counts.values()) == count


def test_a_recurrence_over_time_runs_on_all_tokens():
    def fun(w, x):
        def cell(c, x):
            c = jnp.tanh(x @ w + c)
            return c, c

        return lax.scan(cell, jnp.zeros((x.shape[0], x.shape[2])), x.swapaxes(0, 1))[1].swapaxes(0, 1)

    step = run(fun, array(WIDTH, WIDTH), array(4, TOKENS, WIDTH))
    assert [(row.kind, row.axes) for row in step.collective_rows] == [('all_gather', ('seq',))]


def test_a_loss_over_tokens_of_different_weights():
    def fun(w, x, mask):
        return jnp.sum(jnp.tanh(x @ w) * mask[..., None]) / jnp.sum(mask)

    mask = (np.arange(4 * TOKENS) % 3 > 0).astype('float32').reshape(4, TOKENS)
    step = run(fun, array(WIDTH, WIDTH), array(4, TOKENS, WIDTH), mask)
    assert {row.kind for row in step.collective_rows} == {'all_reduce'}


def test_random_bits_match_one_device():
    def fun(w, x):
        return jnp.where(jax.random.bernoulli(jax.random.key(3), 0.7, x.shape), x * w, 0.0)

    step = run(fun, np.float32(2.0), array(4, TOKENS, 4))
    assert not step.collective_rows


def test_dimensions_that_only_divide_by_their_axes():
    """Two examples and four blocks of time: neither dimension is divisible by all eight devices."""
    step = run(lambda w, x: jnp.tanh(x.reshape(2, 4, 2, 8) * w), np.float32(2.0), array(2, 4, 16))
    assert step.out_specs == (P('data', 'seq'),)
    assert not step.collective_rows


@pytest.mark.parametrize(
    'fun',
    [
        lambda w, x: x + x.T,
        lambda w, x: x @ x,
        lambda w, x: jnp.tanh(x.reshape(-1)),
        lambda w, x: x.T.reshape(2, 8) * w,
        lambda w, x: lax.scan(lambda c, row: (c + row, c * row), x[0], x)[1],
        lambda w, x: jnp.concatenate([x, x.T]),
        lambda w, x: lax.fori_loop(0, 3, lambda i, y: y.T * w, x),
        lambda w, x: jnp.where(x > 0, x, x.T[::-1]).sum(0),
    ],
)
def test_dimensions_that_meet_are_never_split_unevenly(fun):
    """Four examples of four tokens: if both axes would shard one dimension, one of them gathers."""
    run(fun, np.float32(2.0), array(4, 4))


OPTIMIZER = decoder.OPTIMIZER


@pytest.mark.parametrize('state', [P(), FSDPShardingRule('seq', min_fsdp_size=1)], ids=['replicated', 'FSDP'])
@pytest.mark.sampled(2)
def test_a_decoder(state):
    def loss(params, inputs, targets):
        x = params['embed'][inputs]
        x, _ = lax.scan(lambda x, p: (jax.checkpoint(decoder.block)(x, p), None), x, params['layers'])
        logits = decoder.normalized(x, params['norm']) @ params['unembed']
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def training_step(state, inputs, targets):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    helper = MeshShardingHelper([2, 4], ['data', 'seq'])
    batch = P('data', 'seq')
    step = helper.sjit(
        training_step,
        in_shardings=(state, batch, batch),
        out_shardings=(state, P()),
        batch_argnums=(1, 2),
    )
    values, tokens = decoder.arguments()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    (params, _), value = step(values, inputs, targets)
    (other, _), other_value = jax.jit(training_step)(values, inputs, targets)
    np.testing.assert_allclose(value, other_value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def columns(w, x):
    """A feed-forward block whose hidden features are sharded over the axis that otherwise shards time."""
    x = with_sharding_constraint(jnp.tanh(x), P('data'))
    hidden = with_sharding_constraint(jnp.tanh(x @ w['up']), P('data', None, 'seq'))
    return with_sharding_constraint(hidden @ w['down'], P('data', 'seq'))


def heads(w, x):
    """Attention with heads, which no weight has, sharded over the axis that otherwise shards time."""
    x = (x @ w['up']).reshape(*x.shape[:2], 16, 4).swapaxes(2, 3)
    x = with_sharding_constraint(x, P('data', None, 'seq'))
    x = jax.nn.dot_product_attention(x, x, x, is_causal=True).swapaxes(2, 3).reshape(*x.shape[:2], 64)
    return with_sharding_constraint(x, P('data', 'seq')) @ w['down']


def gathered(w, x):
    return with_sharding_constraint(jnp.tanh(x), P('data')) @ w['up'] @ w['down']


def sharded_gradients(fun):
    def step(w, x):
        gradients = jax.grad(lambda w: jnp.sum(fun(w, x) ** 2))(w)
        gradients = {
            'up': with_sharding_constraint(gradients['up'], P(None, 'seq')),
            'down': with_sharding_constraint(gradients['down'], P('seq')),
        }
        return fun(w, x) + 1e-3 * (gradients['up'].sum() + gradients['down'].sum())

    return step


MEGATRON = TreePathShardingRule(('up', P('data', 'seq')), ('down', P('seq', 'data')))


@pytest.mark.parametrize(
    'fun, rule, batch, axes',
    [
        (columns, MEGATRON, P('data', 'seq'), ['data']),
        (sharded_gradients(columns), MEGATRON, P('data', 'seq'), ['data']),
        (columns, TreePathShardingRule(('.*', P('data'))), P('data', 'seq'), ['data', 'seq']),
        (heads, MEGATRON, P('data', 'seq'), ['data', 'seq']),
        (gathered, MEGATRON, P('data', 'seq'), ['data', 'seq']),
        (sharded_gradients(gathered), MEGATRON, P('data', 'seq'), ['data', 'seq']),
        (columns, MEGATRON, P('data'), ['data']),
    ],
)
def test_an_axis_that_a_constraint_moves_to_the_columns_of_a_weight_is_left_to_the_compiler(
    fun, rule, batch, axes
):
    helper = MeshShardingHelper([2, 4], ['data', 'seq'])
    w, x = {'up': array(WIDTH, 64), 'down': array(64, WIDTH)}, array(4, TOKENS, WIDTH)
    step = helper.sjit(fun, in_shardings=(rule, batch), out_shardings=batch, batch_argnums=1)
    report = step.explain_propagation(w, x)
    assert [*report.axes] == axes
    np.testing.assert_allclose(step(w, x), jax.jit(fun)(w, x), rtol=1e-5, atol=1e-6)
    if axes == ['data']:
        assert {row.operand_kind for row in report.redundant} <= {'replicated'}
        assert not report.gathered_examples


def test_the_compiler_partitions_a_batch_without_other_axes():
    def fun(w, x):
        hidden = with_sharding_constraint(jnp.tanh(x @ w['up']), P(None, None, 'tp'))
        return with_sharding_constraint(hidden @ w['down'], P(None, 'tp'))

    helper = MeshShardingHelper([8], ['tp'])
    w, x = {'up': array(WIDTH, 64), 'down': array(64, WIDTH)}, array(4, TOKENS, WIDTH)
    rule = TreePathShardingRule(('up', P(None, 'tp')), ('down', P('tp')))
    step = helper.sjit(fun, in_shardings=(rule, P(None, 'tp')), out_shardings=P(None, 'tp'))
    assert (
        'move all mesh axes of its batch to the features of weights' in step.explain_propagation(w, x).reason
    )
    np.testing.assert_allclose(step(w, x), jax.jit(fun)(w, x), rtol=1e-5, atol=1e-6)
