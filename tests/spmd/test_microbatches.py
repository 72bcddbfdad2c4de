"""Loops over microbatches: each device has a shard of each, and options decide when gradients are reduced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalax
from scalax._spmd.options import DEFAULT, BatchPartitioning
from tests.support.partitioned import FSDP, HSDP, P, assert_equal, collectives, partitioned, state_spec

pytestmark = pytest.mark.medium

WIDTH = 16
TOKENS = np.random.default_rng(0).integers(0, 24, (64, 5)).astype('int32')
SEVERAL = {'fsdp': FSDP, 'hsdp': HSDP}


def weights(dtype='float32'):
    random = np.random.default_rng(1)
    shapes = {'embed': (24, WIDTH), 'up': (3, WIDTH, 32), 'down': (3, 32, WIDTH), 'head': (WIDTH, 24)}
    return {name: jnp.asarray(random.normal(size=shape) / 4, dtype) for name, shape in shapes.items()}


def loss(w, tokens):
    def block(x, p):
        return x + jnp.tanh(x @ p['up']) @ p['down'], None

    x, _ = lax.scan(jax.checkpoint(block), w['embed'][tokens], {name: w[name] for name in ('up', 'down')})
    return -jnp.mean(jax.nn.log_softmax(x @ w['head'])[..., 0].astype('float32'))


def added_up(count):
    """Gradients of microbatches, accumulated in float32."""

    def step(w, tokens):
        def add(total, part):
            value, gradients = jax.value_and_grad(loss)(w, part)
            gradients = jax.tree.map(lambda g: g.astype('float32'), gradients)
            return jax.tree.map(jnp.add, total, (gradients, value)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), w), 0.0
        parts = tokens.reshape(count, -1, *tokens.shape[1:])
        (gradients, value), _ = lax.scan(add, zeros, parts)
        return jax.tree.map(lambda a, g: a - (g / count).astype(a.dtype), w, gradients), value / count

    return step


def by_helper(count):
    def step(w, tokens):
        value, gradients = scalax.microbatch(jax.value_and_grad(loss), count)(w, tokens)
        return jax.tree.map(lambda a, g: a - g, w, gradients), value

    return step


def by_number(count):
    """Microbatches that are read by their index."""

    def step(w, tokens):
        size = len(tokens) // count

        def add(i, total):
            part = lax.dynamic_slice_in_dim(tokens, i * size, size)
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, part))

        gradients = lax.fori_loop(0, count, add, jax.tree.map(jnp.zeros_like, w))
        return jax.tree.map(lambda a, g: a - g / count, w, gradients), jnp.zeros(())

    return step


def mean_loss(count):
    """The gradient of a mean over microbatches."""

    def step(w, tokens):
        def mean(w):
            parts = tokens.reshape(count, -1, *tokens.shape[1:])
            add = jax.checkpoint(lambda total, part: (total + loss(w, part), None))
            return lax.scan(add, 0.0, parts)[0] / count

        value, gradients = jax.value_and_grad(mean)(w)
        return jax.tree.map(lambda a, g: a - g, w, gradients), value

    return step


def run(fun, mesh=FSDP, options=DEFAULT, *, replicate=False, dtype='float32'):
    w = weights(dtype)
    specs = [P() if replicate else state_spec(leaf.shape, size=mesh['fsdp']) for leaf in jax.tree.leaves(w)]
    with jax.default_matmul_precision('highest'):
        step, on_mesh = partitioned(
            fun, w, TOKENS, mesh, result_specs=[*specs, P()], replicate=replicate, options=options
        )
        assert_equal(on_mesh(), jax.jit(fun)(w, TOKENS), 2e-2 if dtype == 'bfloat16' else 1e-5)
    return step


def reductions(step, kind='reduce_scatter'):
    rows = [row for row in step.collective_rows if row.kind == kind and row.reason.startswith('gradient')]
    return {row.reason.removeprefix('gradient of '): row.count for row in rows if row.bytes > 4}


def examples(step):
    return {f'{row.kind} {row.reason}' for row in step.collective_rows if row.what == 'examples'}


NAMES = ["['down']", "['embed']", "['head']", "['up']"]
LAYERS = {"['down']": 3, "['up']": 3}
FUNCTIONS = {'added up': added_up, 'helper': by_helper, 'by index': by_number, 'mean': mean_loss}


# With few microbatches, the shard of a device is part of one, so it is gathered; otherwise it is exchanged.
MOVED = {4: 'all_gather examples gathered for reshape', 8: 'all_to_all examples moved for scan'}


@pytest.mark.parametrize('mesh, count', [('fsdp', 4), ('fsdp', 8), ('hsdp', 8)])
@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.sampled(6)
def test_each_device_has_a_shard_of_each_microbatch(name, count, mesh):
    step = run(FUNCTIONS[name](count), SEVERAL[mesh])
    assert examples(step) == (set() if name == 'helper' else {MOVED[count]})
    expected = dict.fromkeys(NAMES, count) | {layer: times * count for layer, times in LAYERS.items()}
    assert reductions(step) == expected
    if mesh == 'hsdp':  # once along the replica axis
        assert reductions(step, 'all_reduce') == dict.fromkeys(NAMES, 1)


def test_gradient_finished_before_the_backward_loop_is_reduced_over_replicas_once():
    assert reductions(run(by_helper(8), HSDP), 'all_reduce')["['head']"] == 1


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.sampled(4)
def test_gradients_may_be_held_until_all_microbatches_have_run(name, dtype):
    step = run(FUNCTIONS[name](4), options=BatchPartitioning(reduce_per_microbatch=False), dtype=dtype)
    assert reductions(step) == dict.fromkeys(NAMES, 1)
    assert not [row for row in step.collective_rows if row.kind == 'all_reduce' and row.bytes > 4]


@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.sampled(4)
def test_gradients_of_replicated_weights_are_reduced_once(name):
    step = run(FUNCTIONS[name](8), replicate=True)
    assert not reductions(step)
    assert reductions(step, 'all_reduce') == dict.fromkeys(NAMES, 1)


def one_weight(w, x):
    def add(total, part):
        return total + jax.grad(lambda w: jnp.square(part @ w).sum())(w), None

    return lax.scan(add, jnp.zeros_like(w), x.reshape(4, 16, -1))[0]


@pytest.mark.parametrize('option, times', [(None, 1), (False, 1), (True, 4)])
def test_few_gradients_stay_partial_until_the_end(option, times):
    w, x = np.ones((8, 8), 'float32'), np.ones((64, 8), 'float32')
    step, on_mesh = partitioned(
        one_weight,
        w,
        x,
        result_specs=[state_spec(w.shape)],
        options=BatchPartitioning(reduce_per_microbatch=option),
    )
    assert_equal(on_mesh(), one_weight(w, x))
    assert collectives(step)['reduce_scatter gradient of '] == times


def test_a_sum_with_a_nonzero_initial_value_is_reduced_once():
    """Its initial value counts once, too."""

    def fun(w, x):
        def add(total, part):
            return total + jax.grad(lambda w: jnp.square(part @ w).sum())(w), None

        return lax.scan(add, 2 * w, x.reshape(4, 16, -1))[0]

    w, x = np.eye(8, dtype='float32'), np.ones((64, 8), 'float32')
    step, on_mesh = partitioned(fun, w, x, result_specs=[P()], replicate=True)
    assert_equal(on_mesh(), fun(w, x))
    assert reductions(step, 'all_reduce') == {'': 1}


def test_a_map_in_batches_keeps_examples_on_their_devices():
    def fun(w, x):
        return lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=8)

    w, x = np.eye(8, dtype='float32'), np.random.default_rng(0).normal(size=(64, 8)).astype('float32')
    step, on_mesh = partitioned(fun, w, x)
    assert_equal(on_mesh(), fun(w, x))
    assert collectives(step) == {'all_gather state gathered for scan': 1}


def dropped(w, tokens):
    """Microbatches with random bits, with clipped gradients, and with moments."""

    def add(total, part_and_key):
        part, key = part_and_key

        def mean(w):
            x = w['embed'][part]
            x = x * jax.random.bernoulli(key, 0.5, x.shape)
            x = (x - x.mean((0, 1))) / (x.std((0, 1)) + 0.1)
            return jnp.square(x @ w['head']).mean()

        gradients = jax.grad(mean)(w)
        norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda t, g: t + g / (1 + norm), total, gradients), norm

    parts = tokens.reshape(8, 8, -1), jax.random.split(jax.random.key(0), 8)
    total, norms = lax.scan(add, jax.tree.map(jnp.zeros_like, w), parts)
    return total, norms.sum()


@pytest.mark.parametrize('mesh', SEVERAL)
@pytest.mark.parametrize('hold', [None, False])
@pytest.mark.sampled(2)
def test_microbatches_match_one_device(mesh, hold):
    run(dropped, SEVERAL[mesh], BatchPartitioning(reduce_per_microbatch=hold))


def updated_each_round(w, tokens):
    """An optimizer step for each microbatch."""

    def step(w, part):
        value, gradients = jax.value_and_grad(loss)(w, part)
        return jax.tree.map(lambda a, g: a - 0.01 * g, w, gradients), value

    w, values = lax.scan(step, w, tokens.reshape(8, 8, -1))
    return w, values.sum()


def test_a_loop_that_updates_weights_shards_its_microbatches():
    step = run(updated_each_round)
    assert examples(step) == {'all_to_all examples moved for scan'}
    assert reductions(step)["['head']"] == 8
