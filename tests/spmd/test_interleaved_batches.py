"""Reshapes that flatten a batch which is not the major dimension, as in time-major models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import (
    FSDP,
    HSDP,
    P,
    assert_equal,
    collectives,
    partitioned,
    state_spec,
    with_gradients,
)

pytestmark = pytest.mark.medium

STEPS, EXAMPLES, WIDTH = 6, 16, 8  # the steps are not divisible by the devices


def array(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype('float32')


W = {'up': array(WIDTH, 32), 'down': array(32, WIDTH), 'cell': array(WIDTH, WIDTH), 'layers': array(2, 8, 8)}
X = array(STEPS, EXAMPLES, WIDTH)
TOKENS = np.random.default_rng(0).integers(0, 32, (STEPS, EXAMPLES))


def mlp(w, x):
    return jax.nn.relu(x @ w['up']) @ w['down']


def layer(w, x):
    """A dense layer on flattened examples."""
    return mlp(w, x.reshape(-1, WIDTH)).reshape(x.shape)


def recurrent(w, x):
    def cell(h, x):
        h = jnp.tanh(h @ w['cell'] + x)
        return h, h

    _, y = lax.scan(cell, jnp.zeros((EXAMPLES, WIDTH)), layer(w, x))
    return jnp.mean(jax.nn.logsumexp(y.reshape(-1, WIDTH) @ w['up'], -1))


def scanned_layers(w, x):
    def block(x, kernel):
        return x + jnp.tanh(x @ kernel), None

    return lax.scan(jax.checkpoint(block), x.reshape(-1, WIDTH), w['layers'])[0].reshape(x.shape)


def embeddings(w, tokens):
    rows = w['down'][tokens.reshape(-1)]
    logits = jnp.tanh(rows) @ w['up']
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens.reshape(-1, 1), -1)
    return -jnp.mean(chosen), jnp.max(logits, 0)


def frames(w, x):
    """A convolution of frames, whose pixels are then flattened too."""
    images = jnp.repeat(x.reshape(-1, 1, WIDTH), 4, 1)
    kernel = w['cell'][None]
    y = lax.conv_general_dilated(images, kernel, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))
    return mlp(w, y.reshape(-1, WIDTH)).reshape(STEPS, EXAMPLES, -1)


def depthwise(w, x):
    images = jnp.repeat(x.reshape(-1, 1, WIDTH), 4, 1)
    names, kernel = ('NWC', 'WIO', 'NWC'), w['cell'][:1, None]
    y = lax.conv_general_dilated(
        images, kernel, (1,), 'SAME', dimension_numbers=names, feature_group_count=WIDTH
    )
    return y.mean(1).reshape(x.shape)


def batch_norm(w, x):
    y = x.reshape(-1, WIDTH) @ w['cell']
    return ((y - y.mean(0)) * lax.rsqrt(y.var(0) + 1e-3)).reshape(x.shape)


def dropout(w, x):
    y = mlp(w, x.reshape(-1, WIDTH))
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, y.shape), y, 0).reshape(x.shape)


def positions(w, x):
    flat = x.reshape(-1, WIDTH)
    return (flat * jnp.arange(flat.shape[0])[:, None]).reshape(x.shape)


def chosen_actions(w, x):
    """Looks up by the index of the example, as in policy gradients."""
    log_probs = jax.nn.log_softmax(x.reshape(-1, WIDTH) @ w['cell'])
    actions = jnp.argmax(log_probs, -1)
    return log_probs[jnp.arange(STEPS * EXAMPLES), actions].reshape(STEPS, EXAMPLES)


def branches_and_loops(w, x):
    y = x.reshape(-1, WIDTH)
    y = lax.cond(w['up'][0, 0] > 0, jnp.sin, jnp.cos, y)
    y = lax.fori_loop(0, 3, lambda i, y: y / (1 + jnp.abs(y)), y)
    return lax.top_k(y, 2)[0].reshape(STEPS, EXAMPLES, 2)


def heads(w, x):
    """Two more dimensions are merged, in the same reshape."""
    y = (x @ w['up']).reshape(STEPS, EXAMPLES, 4, 8)
    return jnp.sin(y.reshape(-1, 32) @ w['down']).reshape(x.shape)


def chunks(w, x):
    """The batch is between two dimensions that are merged with it."""
    y = (x @ w['up']).reshape(STEPS, EXAMPLES, 4, 8)
    return mlp(w, y.reshape(-1, 8)).reshape(STEPS * EXAMPLES, 4, 8).sum(1).reshape(x.shape)


def microbatches(w, x):
    """The batch is split into microbatches."""
    parts = jnp.moveaxis(x.reshape(STEPS, 2, EXAMPLES // 2, WIDTH), 1, 0)
    return lax.map(lambda x: layer(w, x).sum(1), parts)


PROGRAMS = {
    'a dense layer': (layer, X),
    'a recurrent cell': (recurrent, X),
    'layers in a scan': (scanned_layers, X),
    'embeddings': (embeddings, TOKENS),
    'a convolution': (frames, X),
    'a depthwise convolution': (depthwise, X),
    'a batch norm': (batch_norm, X),
    'dropout': (dropout, X),
    'positions': (positions, X),
    'chosen actions': (chosen_actions, X),
    'branches and loops': (branches_and_loops, X),
    'heads': (heads, X),
    'chunks': (chunks, X),
}


def with_weight_gradients(fun):
    return lambda w, x: jax.grad(lambda w: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(w, x))))(w)


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['FSDP', 'HSDP'])
@pytest.mark.parametrize('name', PROGRAMS)
def test_examples_stay_on_their_devices(name, mesh):
    fun, batch = PROGRAMS[name]
    fun = with_weight_gradients(fun) if fun is embeddings else with_gradients(fun)
    step, run = partitioned(fun, W, batch, mesh, batch_dim=1)
    assert not [row for row in step.collective_rows if row.what == 'examples']
    assert_equal(run(), jax.jit(fun)(W, batch), tolerance=1e-4)


def test_a_batch_that_the_step_creates():
    def fun(w, key, spec=None):
        start = jax.random.normal(key, (EXAMPLES, WIDTH))
        start = start if spec is None else lax.with_sharding_constraint(start, spec)
        _, states = lax.scan(lambda x, _: (jnp.sin(x @ w['cell']),) * 2, start, None, length=STEPS)
        return jnp.mean(mlp(w, states.reshape(-1, WIDTH)))

    key = jax.random.key(0)
    step, run = partitioned(
        lambda s, _: fun(*s, P('fsdp')), (W, key), (), specs=[*map(_spec, jax.tree.leaves(W)), P()]
    )
    assert not [row for row in step.collective_rows if row.what == 'examples']
    assert_equal(run(), fun(W, key))


def _spec(array):
    return state_spec(array.shape)


def test_a_device_reshapes_its_own_examples():
    step, _ = partitioned(layer, W, X, batch_dim=1)
    assert 'all_to_all' not in str(step.jaxpr)
    shapes = [x.outvars[0].aval.shape for x in step.jaxpr.eqns if x.primitive.name == 'transpose']
    assert all(1 in shape for shape in shapes)  # which moves no element


def test_microbatches_of_a_time_major_batch():
    step, run = partitioned(microbatches, W, X, batch_dim=1)
    assert_equal(run(), microbatches(W, X))
    # Only the split into microbatches moves examples.
    assert [row.array for row in step.collective_rows if row.what == 'examples'] == ['float32[6,16,8]']


def flat_result(w, x):
    return mlp(w, x.reshape(-1, WIDTH))


def cumulative_sum(w, x):
    return jnp.cumsum(x.reshape(-1, WIDTH), 0).reshape(x.shape)


def constants(w, x):
    return (x.reshape(-1, WIDTH) * array(STEPS * EXAMPLES, WIDTH)).reshape(x.shape)


def shuffled(w, x):
    flat = x.reshape(-1, WIDTH)
    return jnp.sin(flat[jax.random.permutation(jax.random.key(0), flat.shape[0])]).reshape(x.shape)


def reversed_examples(w, x):
    return jnp.sin(x.reshape(-1, WIDTH)[::-1]).reshape(x.shape)


def first_of_all(w, x):
    flat = jnp.sin(x.reshape(-1, WIDTH))
    return flat[0], jnp.argmax(flat[:, 0])


def other_split(w, x):
    return jnp.sin(x.reshape(-1, WIDTH)).reshape(EXAMPLES, STEPS, WIDTH)


def loop_condition(w, x):
    flat = lax.while_loop(lambda y: y[1, 0] > 0.1, lambda y: y / 2, jnp.abs(x.reshape(-1, WIDTH)))
    return flat.reshape(x.shape)


def loop_over_all(w, x):
    return lax.scan(lambda h, x: (jnp.sin(h + x), h), jnp.zeros(WIDTH), x.reshape(-1, WIDTH))[1].reshape(
        x.shape
    )


def groups(w, x):
    sizes = jnp.array([30, STEPS * EXAMPLES - 30])
    return lax.ragged_dot(x.reshape(-1, WIDTH), w['layers'], sizes).reshape(x.shape)


def last_writes(w, x):
    return jnp.zeros((4, WIDTH)).at[jnp.arange(STEPS * EXAMPLES) % 4].set(x.reshape(-1, WIDTH))


def channels(w, x):
    """Flattened examples are the channels of a grouped convolution."""
    images, names = x.reshape(1, -1, WIDTH), ('NCW', 'OIW', 'NCW')
    kernel = array(2 * WIDTH, STEPS * EXAMPLES // 2, 3)
    return lax.conv_general_dilated(
        images, kernel, (1,), 'SAME', dimension_numbers=names, feature_group_count=2
    )


def keys(w, x):
    flat, split_keys = x.reshape(-1, WIDTH), jax.random.split(jax.random.key(0), STEPS * EXAMPLES)
    return (flat * jax.vmap(jax.random.normal)(split_keys)[:, None]).reshape(x.shape)


ORDERED = [
    *(flat_result, cumulative_sum, constants, shuffled, reversed_examples, first_of_all),
    *(other_split, loop_condition, loop_over_all, groups, last_writes, channels, keys),
]


@pytest.mark.parametrize('fun', ORDERED, ids=lambda fun: fun.__name__)
def test_where_the_order_matters_it_is_kept(fun):
    step, run = partitioned(fun, W, X, batch_dim=1)
    assert_equal(run(), jax.jit(fun)(W, X), tolerance=1e-4)
    assert collectives(step)


def test_flattened_arguments_are_in_their_order():
    def fun(w, batch):
        return jnp.sum(mlp(w, batch[0].reshape(-1, WIDTH)) * batch[1], 1).mean()

    batch = X, array(STEPS * EXAMPLES, WIDTH)
    specs = [P(None, 'fsdp'), P('fsdp')]
    _, run = partitioned(with_gradients(fun), W, batch, batch_specs=specs)
    assert_equal(run(), jax.jit(with_gradients(fun))(W, batch))


@pytest.mark.parametrize('dtype', ['float32', 'int32'])
def test_random_values_of_flattened_examples_are_those_of_one_device(dtype):
    def fun(w, x):
        draw = (
            jax.random.normal
            if dtype == 'float32'
            else functools.partial(jax.random.randint, minval=0, maxval=9)
        )
        drawn = draw(jax.random.key(3), shape=(STEPS * EXAMPLES, WIDTH), dtype=dtype)
        return (x.reshape(-1, WIDTH) + drawn).reshape(x.shape)

    step, run = partitioned(fun, W, X, batch_dim=1)
    assert not collectives(step)
    assert f'{dtype[0]}{dtype[-2:]}[{STEPS * EXAMPLES},{WIDTH}]' not in str(step.jaxpr)
    np.testing.assert_array_equal(run()[0], jax.jit(fun)(W, X))
