"""Gradients without a specified result sharding are reduced to the layout of the state that they update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, P, assert_equal, collectives, partitioned

pytestmark = pytest.mark.medium

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def array(*shape):
    return np.asarray(np.random.default_rng(len(shape)).normal(size=shape) / 4, 'float32')


def flat(w, x):
    return jnp.mean(jnp.tanh(x @ w['a']) @ w['b'])


def layers(w, x):
    return jnp.mean(lax.scan(lambda x, p: (jnp.tanh(x @ p['a']) @ p['b'], None), x, w)[0])


def half(w, x):
    """Weights are cast for the loss, and their gradients are cast back."""
    w = jax.tree.map(lambda leaf: leaf.astype('bfloat16'), w)
    return flat(w, x.astype('bfloat16')).astype('float32')


def adam(loss):
    def step(state, x):
        w, optimizer_state = state
        value, gradient = jax.value_and_grad(loss)(w, x)
        updates, optimizer_state = ADAM.update(gradient, optimizer_state, w)
        return (optax.apply_updates(w, updates), optimizer_state), value

    return step


def looped(loss):
    """An optimizer that updates stacked layers in a loop, one at a time."""

    def step(state, x):
        w, moments = state
        value, gradient = jax.value_and_grad(loss)(w, x)

        def update(_, element):
            w, m, g = element
            m = jax.tree.map(lambda m, g: 0.9 * m + g * g, m, g)
            return None, (jax.tree.map(lambda w, m, g: w - g * lax.rsqrt(m + 1e-3), w, m, g), m)

        return lax.scan(update, None, (w, moments, gradient))[1], value

    return step


FLAT = {'a': array(8, 16), 'b': array(16, 8)}
STACKS = {'a': array(3, 8, 16), 'b': array(3, 16, 8)}
CASES = {
    'flat': (adam(flat), (FLAT, ADAM.init(FLAT)), 1),
    'layers': (adam(layers), (STACKS, ADAM.init(STACKS)), 3),
    'half': (adam(half), (FLAT, ADAM.init(FLAT)), 1),
    'looped': (looped(layers), (STACKS, jax.tree.map(np.zeros_like, STACKS)), 3),
}


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('name', CASES)
@pytest.mark.sampled(2)
def test_gradients_are_reduced_to_the_layout_of_state_that_they_meet(name, mesh):
    fun, state, times = CASES[name]
    x = array(128, 8)
    step, run = partitioned(fun, state, x, mesh)
    counts = collectives(step)
    scattered = {reason: count for reason, count in counts.items() if reason.startswith('reduce_scatter')}
    assert [*scattered.values()] == [times, times]
    sums = [row for row in step.collective_rows if row.kind == 'all_reduce' and row.axes[-1] == 'fsdp']
    assert max(row.bytes for row in sums) == 4  # the loss and the global norm
    for spec, leaf in zip(step.out_specs, jax.tree.leaves(state), strict=False):
        assert ('fsdp' in spec) == (leaf.ndim > 0)
    assert_equal(run(), jax.jit(fun)(state, x), 5e-2 if name == 'half' else 1e-5)


def test_specified_result_shardings_override_the_layout_of_state():
    fun, state, _ = CASES['flat']
    count = len(jax.tree.leaves(state))
    step, run = partitioned(fun, state, array(16, 8), result_specs=[P()] * count + [None])
    assert not [reason for reason in collectives(step) if reason.startswith('reduce_scatter')]
    assert step.out_specs[:count] == (P(),) * count
    assert_equal(run(), jax.jit(fun)(state, array(16, 8)))
