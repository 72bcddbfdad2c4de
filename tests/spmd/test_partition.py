"""Partitioned steps: their collectives match an expert's, and their results match one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._jax.equations import all_equations, shape_of
from scalax._spmd.values import CannotPartition
from tests.support.partitioned import FSDP, HSDP, P, assert_equal, collectives, partitioned, state_spec

pytestmark = pytest.mark.medium


def array(*shape, dtype='float32'):
    seed = sum(size * 7**i for i, size in enumerate(shape))
    return np.asarray(np.random.default_rng(seed).normal(size=shape) / 4, dtype)


def sgd(loss):
    """A step of stochastic gradient descent."""

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, g: a - g.astype(a.dtype) * 0.1, w, gradient), value

    return step


def router(w, x):
    chances, places = lax.top_k(jax.nn.softmax(x @ w['r']), 2)
    return jnp.mean(jnp.tanh(chances) * places)


def depthwise(w, x):
    def conv(k, x):
        numbers = ('NWC', 'WIO', 'NWC')
        return lax.conv_general_dilated(
            x, k, (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=x.shape[-1]
        )

    def block(x, p):
        return x + jax.nn.silu(conv(p['conv'], x @ p['up'])) @ p['down'], None

    return jnp.mean(lax.scan(jax.checkpoint(block), x, w)[0] ** 2)


def grouped(w, x):
    y = lax.conv_general_dilated(
        jnp.sin(x), w['k'], (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'), feature_group_count=4
    )
    return jnp.mean(jnp.tanh(y) ** 2)


def linear(w, x):
    return (jnp.tanh(jnp.tanh(x @ w['a']) @ w['b']) @ w['c']).sum()


def codebook(w, x):
    distances = jnp.sum((jnp.sin(x)[:, None] - w['c']) ** 2, -1)
    return jnp.mean(jnp.tanh(jnp.min(distances, -1)))


def recurrent(w, x):
    def cell(c, x):
        h = jnp.tanh(x @ w['i'] + c @ w['h'])
        return h, h

    _, ys = lax.scan(cell, jnp.zeros((x.shape[0], w['h'].shape[0])), x.swapaxes(0, 1))
    return jnp.square(ys).mean()


def batch_norm(w, x):
    y = x @ w['a']
    y = (y - y.mean(0)) * lax.rsqrt(y.var(0) + 1e-3)
    return jnp.mean(jnp.tanh(y * w['scale']))


def dropout(w, x):
    keep = jax.random.bernoulli(jax.random.key(3), 0.7, (x.shape[0], 16))
    return jnp.mean(jnp.tanh(jnp.where(keep, x @ w['a'], 0.0)))


def lookup(w, x):
    return jnp.mean(jnp.tanh(w['table'][jnp.int32(jnp.abs(x) * 8) % 24]) ** 2)


def tied(w, x):
    tokens = jnp.int32(jnp.abs(x) * 8) % 24
    return jnp.mean(jnp.tanh(w['table'][tokens] @ w['table'].T))


def narrow(w, x):
    return jnp.mean(jnp.tanh(x.astype('bfloat16') @ w['a'].astype('bfloat16')).astype('float32'))


A = {'a': array(8, 16)}
CASES = {
    'router': (router, {'r': array(16, 8)}, array(16, 16)),
    'depthwise': (
        depthwise,
        {'conv': array(2, 4, 1, 8), 'up': array(2, 8, 8), 'down': array(2, 8, 8)},
        array(8, 6, 8),
    ),
    'grouped': (grouped, {'k': array(3, 3, 2, 8)}, array(8, 4, 4, 8)),
    'linear': (linear, {'a': array(8, 16), 'b': array(16, 16), 'c': array(16, 8)}, array(64, 8)),
    'codebook': (codebook, {'c': array(16, 4)}, array(16, 4)),
    'recurrent': (recurrent, {'i': array(4, 8), 'h': array(8, 8)}, array(8, 5, 4)),
    'batch_norm': (batch_norm, {'a': array(8, 16), 'scale': array(16)}, array(16, 8)),
    'dropout': (dropout, A, array(16, 8)),
    'lookup': (lookup, {'table': array(24, 8)}, array(8, 5)),
    'tied': (tied, {'table': array(24, 8)}, array(8, 5)),
    'narrow': (narrow, A, array(16, 8)),
}


def fsdp(weights, others=()):
    """Returns the collectives of FSDP: the gathers of each weight by primitive, and one scatter.

    A weight is gathered in the forward pass, and again in the backward pass if that uses it and at least as
    many bytes of other weights were gathered in between.
    """
    counts = {'all_reduce sum over examples for a result': 1, **dict(others)}
    for name, gathers, times in weights:
        for primitive, count in gathers.items():
            counts[f"all_gather weight ['{name}'] for {primitive}"] = count
        counts[f"reduce_scatter gradient of ['{name}']"] = times
    return counts


EXPECTED = {
    'router': fsdp([('r', {'dot_general': 1}, 1)]),
    # Two layers, whose forward pass is recomputed in the backward pass.
    'depthwise': fsdp(
        [
            ('up', {'dot_general': 4}, 2),
            ('conv', {'conv_general_dilated': 6}, 2),
            ('down', {'dot_general': 4}, 2),
        ]
    ),
    'grouped': fsdp([('k', {'conv_general_dilated': 1}, 1)]),
    # The backward pass does not use the first layer's weight, and starts with the last one, which is smaller
    # than the one before.
    'linear': fsdp(
        [('a', {'dot_general': 1}, 1), ('b', {'dot_general': 1}, 1), ('c', {'dot_general': 1}, 1)]
    ),
    'codebook': fsdp([('c', {'sub': 1}, 1)]),
    # Gathered before the loop over time, kept for the loop of the backward pass, and reduced after it.
    'recurrent': fsdp([('i', {'scan': 1}, 1), ('h', {'scan': 1}, 1)]),
    # The moments of a batch, and their gradients, are reduced before they are broadcast.
    'batch_norm': fsdp(
        [('a', {'dot_general': 1}, 1), ('scale', {'mul': 1}, 1)],
        {
            'all_reduce sum over examples for sub': 2,
            'all_reduce sum over examples for select_n': 1,
            'all_reduce sum over examples': 3,
        },
    ),
    'dropout': fsdp([('a', {'dot_general': 1}, 1)]),
    'lookup': fsdp([('table', {'gather': 1}, 1)]),
    'tied': fsdp([('table', {'gather': 1}, 1)]),
    'narrow': fsdp([('a', {'dot_general': 1}, 1)]),
}


@pytest.mark.parametrize('name', CASES)
def test_collectives_match_an_expert(name):
    loss, state, batch = CASES[name]
    specs = [state_spec(leaf.shape) for leaf in jax.tree.leaves(state)]
    step, _ = partitioned(sgd(loss), state, batch, result_specs=[*specs, P()])
    assert collectives(step) == EXPECTED[name]


def run_case(name, mesh):
    loss, state, batch = CASES[name]
    specs = [state_spec(leaf.shape, size=mesh['fsdp']) for leaf in jax.tree.leaves(state)]
    step, run = partitioned(sgd(loss), state, batch, mesh, result_specs=[*specs, P()])
    return step, run(), jax.jit(sgd(loss))(state, batch)


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('name', CASES)
@pytest.mark.sampled(4)
def test_values_match_one_device(name, mesh):
    _, results, expected = run_case(name, mesh)
    assert_equal(results, expected, 5e-3 if name == 'narrow' else 1e-5)


def bytes_of(step, kind):
    return {row.reason: row.bytes for row in step.collective_rows if row.kind == kind}


def test_gradients_are_reduced_before_they_are_widened():
    loss, state, batch = CASES['narrow']
    step, _ = partitioned(sgd(loss), state, batch, result_specs=[state_spec((8, 16)), P()])
    assert bytes_of(step, 'all_gather') == {"weight ['a'] for dot_general": 2 * 8 * 16}
    assert bytes_of(step, 'reduce_scatter') == {"gradient of ['a']": 2 * 8 * 16}


def test_shards_are_reduced_along_the_slow_axis():
    loss, state, batch = CASES['router']
    step, _ = partitioned(sgd(loss), state, batch, HSDP, result_specs=[state_spec((16, 8), size=4), P()])
    gradients = [
        (row.kind, row.axes, row.bytes) for row in step.collective_rows if row.reason == "gradient of ['r']"
    ]
    assert gradients == [('reduce_scatter', ('fsdp',), 512), ('all_reduce', ('replica',), 128)]


def test_gradients_of_layers_are_reduced_in_their_iteration():
    loss, state, batch = CASES['depthwise']
    step, _ = partitioned(sgd(loss), state, batch)
    inside = [
        eqn
        for scan in all_equations(step.jaxpr)
        if scan.primitive.name == 'scan'
        for eqn in scan.params['jaxpr'].eqns
    ]
    reduced = {id(eqn.outvars[0]) for eqn in inside if eqn.primitive.name == 'reduce_scatter'}
    users = [eqn.primitive.name for eqn in inside for x in eqn.invars if id(x) in reduced]
    assert users == ['optimization_barrier'] * len(state)


def test_replicated_weights_are_reduced_once():
    loss, state, batch = CASES['linear']
    specs = [P()] * 4
    step, run = partitioned(sgd(loss), state, batch, result_specs=specs, replicate=True)
    assert collectives(step) == {
        **{f"all_reduce gradient of ['{name}']": 1 for name in 'abc'},
        'all_reduce sum over examples for a result': 1,
    }
    assert_equal(run(), jax.jit(sgd(loss))(state, batch))


# Operations that mix examples gather all of them, and the report names these operations.
MIXING = {
    'sort': lambda w, x: jnp.sort(x, 0) @ w,
    'cumsum': lambda w, x: jnp.cumsum(x, 0) @ w,
    'gather': lambda w, x: x[jnp.argmax(w, 0)] @ w,
    'scan': lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c + r), c), jnp.zeros(8), x)[1] @ w,
    'dot_general': lambda w, x: x @ x.T,
    'argmax': lambda w, x: jnp.argmax(x, 0) @ w,
}


@pytest.mark.parametrize('name', MIXING)
def test_mixed_examples_are_reported(name):
    w, x = array(8, 8), array(16, 8)
    step, run = partitioned(MIXING[name], w, x)
    assert collectives(step)[f'all_gather examples gathered for {name}'] == 1
    assert_equal(run(), jax.jit(MIXING[name])(w, x))


def branches(w, x):
    return lax.cond(w[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: x), lax.cond(
        w[0, 1] > 0, lambda: x.sum(), lambda: 1.0
    )


def until(w, x):
    def ends(c):
        return jnp.logical_and(jnp.any(jnp.abs(c[1]) > 0.1), c[0] < 5)

    return lax.while_loop(ends, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))


def accumulated(w, x):
    """Accumulates gradients of microbatches."""
    parts = x.reshape(16, 2, 4).swapaxes(0, 1)

    def add(total, part):
        return total + jax.grad(lambda w: jnp.square(part @ w).sum())(w), None

    return lax.scan(add, jnp.zeros_like(w), parts)[0]


def ending_apart(w, x):
    """A loop with a separate end for each example."""

    def until(row):
        return lax.while_loop(lambda c: jnp.abs(c).sum() > 1, lambda c: jnp.tanh(c @ w) / 2, row)

    return jax.vmap(until)(x)


def solved(w, x):
    return jax.scipy.sparse.linalg.cg(lambda v: v * 3, x @ w)[0]


CONTROL = {
    'ending_apart': (ending_apart, array(8, 8), array(16, 8)),
    'solved': (solved, array(8, 8), array(16, 8)),
    'branches': (branches, array(8, 8), array(16, 8)),
    'until': (until, array(8, 8), array(16, 8)),
    'accumulated': (accumulated, array(4, 8), array(16, 8)),
}


@pytest.mark.parametrize('name', CONTROL)
def test_loops_and_branches(name):
    fun, w, x = CONTROL[name]
    _, run = partitioned(fun, w, x)
    assert_equal(run(), jax.jit(fun)(w, x))


def test_constraints_convert_values():
    """A constraint that replicates examples gathers them; one that shards a value slices it."""

    def fun(w, x, at=lax.with_sharding_constraint):
        return at(jnp.cumsum(at(jnp.tanh(x @ w), P()), 0), P('fsdp'))

    w, x = array(8, 8), array(16, 8)
    step, run = partitioned(fun, w, x)
    assert collectives(step) == {
        'all_gather state gathered for dot_general': 1,
        'all_gather examples gathered for sharding_constraint': 1,
    }
    assert step.out_specs == (P('fsdp'),)
    assert_equal(run(), fun(w, x, lambda value, spec: value))


def test_two_devices_exchange_half_zeros():
    """XLA for CPUs rejects such an exchange if it sees the zeros."""

    def fun(w, x, at=lax.with_sharding_constraint):
        y = at((x.T @ (x @ w)).T, P('fsdp'))
        return at(jnp.concatenate([y, jnp.zeros_like(y)], 1), P(None, 'fsdp'))

    w, x = array(16, 16), array(16, 16)
    step, run = partitioned(fun, w, x, {'fsdp': 2})
    assert collectives(step)['all_to_all examples moved for sharding_constraint'] == 1
    assert_equal(run(), fun(w, x, lambda value, spec: value))


def test_gradients_of_microbatches_are_reduced_once():
    fun, w, x = CONTROL['accumulated']
    step, _ = partitioned(fun, w, x, result_specs=[state_spec(w.shape)])
    assert [(row.kind, row.count) for row in step.collective_rows if 'gradient' in row.reason] == [
        ('reduce_scatter', 1)
    ]


def accumulated(layers):
    """A loop over microbatches of a network, whose layers are unrolled."""

    def step(w, x):
        def loss(w, x):
            for _ in range(layers):
                x = jnp.tanh(x @ w.pop())
            return jnp.mean(x)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)([*w], part)), None

        return lax.scan(add, jax.tree.map(jnp.zeros_like, w), x.reshape(4, 8, 8))[0]

    return step, [array(8, 8) for _ in range(layers)], array(32, 8)


def test_microbatches_of_a_small_network_keep_gathered_weights():
    fun, w, x = accumulated(2)
    step, run = partitioned(fun, w, x, result_specs=[state_spec((8, 8))] * 2)
    assert collectives(step) == {
        **{f'all_gather weight [{i}] for scan': 1 for i in range(2)},
        **{f'reduce_scatter gradient of [{i}]': 1 for i in range(2)},
        'all_gather examples gathered for reshape': 1,
    }
    assert_equal(run(), jax.jit(fun)(w, x))


def test_microbatches_of_a_large_network_keep_no_gathered_weights():
    fun, w, x = accumulated(6)
    step, run = partitioned(fun, w, x, result_specs=[state_spec((8, 8))] * 6)
    # The backward pass starts with the last layer, and does not use the first layer's weight.
    gathers = [1, *[2] * 4, 1]
    assert collectives(step) == {
        **{f'all_gather weight [{i}] for dot_general': 4 * gathers[i] for i in range(6)},
        **{f'reduce_scatter gradient of [{i}]': 4 for i in range(6)},
        'all_gather examples gathered for reshape': 1,
    }
    assert_equal(run(), jax.jit(fun)(w, x))


def test_constants_of_microbatches_are_computed_for_the_examples_of_a_device():
    """They have a microbatch dimension, which comes from splitting the batch dimension."""

    def fun(w, x):
        def add(total, part):
            noise = jax.random.normal(jax.random.key(0), (8, 16)) * 2
            return total + jnp.mean(jnp.tanh(part @ w + noise)), None

        return lax.scan(add, 0.0, x.reshape(4, 8, 8))[0]

    w, x = array(8, 16), array(32, 8)
    step, run = partitioned(fun, w, x)
    equations = [eqn for eqn in all_equations(step.jaxpr) if eqn.primitive.name != 'all_gather']
    assert (8, 16) not in {shape_of(eqn.outvars[0]) for eqn in equations}
    assert_equal(run(), fun(w, x))


FAILURES = {
    'uneven': (
        lambda w, x: lax.with_sharding_constraint(x[:12], P('fsdp')) @ w,
        re.escape(f'{P("fsdp")} splits (12, 8) into blocks of different sizes'),
    ),
    'effects': (
        lambda w, x: jax.new_ref(jnp.tanh(x @ w))[...],
        r'it changes an array in place \(jax.new_ref\)',
    ),
    'indices of a device': (
        lambda w, x: x @ w + lax.rng_uniform(0.0, 1.0, (8,)),
        'it draws different random numbers on each device',
    ),
}


@pytest.mark.parametrize('name', FAILURES)
def test_unsupported_equations_are_rejected(name):
    fun, why = FAILURES[name]
    with pytest.raises(CannotPartition) as caught:
        partitioned(fun, array(8, 8), array(16, 8))
    assert re.fullmatch(why, caught.value.reason)
    assert caught.value.equation.primitive.name in ('sharding_constraint', 'new_ref', 'rng_uniform')


def test_a_step_that_returns_a_sum_is_partitioned_once():
    step, _ = partitioned(sgd(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)), array(16, 8), array(8, 16))
    # Collectives of an earlier attempt would have had the first indices.
    assert sorted(collective.id for collective in step.collectives) == [1, 2, 3]
