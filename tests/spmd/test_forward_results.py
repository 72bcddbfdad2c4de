"""Results of the forward pass are finished before the first loop of the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._jax.equations import open_jaxpr
from tests.support.partitioned import P, assert_equal, collectives, partitioned, state_spec

pytestmark = pytest.mark.medium


SHAPES = (3, 16, 16), (16, 32)


def array(*shape):
    return np.asarray(np.random.default_rng(shape).normal(size=shape) / 4, 'float32')


def layers(w, x):
    return lax.scan(lambda x, p: (jnp.tanh(x @ p), None), x, w)[0]


def layers_loss(w, x):
    return jnp.mean(layers(w, x))


def apart(w, x):
    """A loss over logits with an untied output weight."""
    logits = layers(w['layers'], x) @ w['out']
    return jnp.mean(jax.nn.logsumexp(logits, -1)) / jnp.sum(jnp.abs(logits))


def tied(w, x):
    """The same with the embedding as output weight, whose gradient has two terms."""
    return jnp.mean(jax.nn.logsumexp(layers(w['layers'], x @ w['in']) @ w['in'].T, -1))


def squared(loss):
    """A step that computes gradients twice."""

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - g * jnp.abs(g), w, gradient), value

    return step


def with_momentum(loss):
    """A step that adds gradients to state, or to functions of state."""

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda w, g: 0.9 * w + g, w, gradient), value

    return step


def eqns_before_the_last_loop(step):
    eqns = open_jaxpr(step.jaxpr).eqns
    names = [eqn.primitive.name for eqn in eqns]
    last = len(names) - 1 - names[::-1].index('scan')
    return eqns[:last], eqns[last]


@pytest.mark.parametrize('optimized', [squared, with_momentum])
def test_the_loss_and_the_gradient_of_the_last_weight_are_before_the_loop(optimized):
    state, batch = {'layers': array(*SHAPES[0]), 'out': array(*SHAPES[1])}, array(16, 16)
    step, run = partitioned(optimized(apart), state, batch, result_specs=[*map(state_spec, SHAPES), P()])
    before, loop = eqns_before_the_last_loop(step)
    [reduced] = [eqn for eqn in before if eqn.primitive.name == 'reduce_scatter']
    *_, tie = before
    assert tie.primitive.name == 'optimization_barrier'
    # The cotangent that the loop begins with, the loss, and the reduced gradient.
    assert any(x is y for x in tie.outvars for y in loop.invars)
    assert any(x is reduced.outvars[0] for x in tie.invars)
    assert () in [x.aval.shape for x in tie.invars]
    assert_equal(run(), jax.jit(optimized(apart))(state, batch))


def test_a_key_for_the_next_step_is_finished_before_the_loop():
    def step(w, x):
        key, kept = jax.random.split(jax.random.key(w['seed'][0].astype('uint32')))
        x = x + jax.random.normal(key, x.shape)
        return jax.grad(layers_loss)(w['layers'], x), jax.random.key_data(kept), kept

    state, batch = {'layers': array(3, 16, 16), 'seed': np.ones(1, 'float32')}, array(16, 16)
    _, run = partitioned(step, state, batch)
    gradient, data, _ = run()
    expected, expected_data, _ = jax.jit(step)(state, batch)
    assert_equal([gradient, data], [expected, expected_data])


def test_a_gradient_of_two_terms_is_reduced_once_after_the_loop():
    state, batch = {'layers': array(3, 16, 16), 'in': array(16, 16)}, array(16, 16)
    step, run = partitioned(squared(tied), state, batch)
    before, _ = eqns_before_the_last_loop(step)
    assert not any(eqn.primitive.name == 'reduce_scatter' for eqn in before)
    assert collectives(step)["reduce_scatter gradient of ['in']"] == 1
    assert_equal(run(), jax.jit(squared(tied))(state, batch))


def test_results_of_the_backward_pass_may_be_computed_after_its_next_loop():
    def two(w, x):
        return jnp.mean(layers(w['last'], jnp.tanh(layers(w['first'], x) @ w['between'])))

    state = {'first': array(3, 16, 16), 'between': array(16, 16), 'last': array(2, 16, 16)}
    step, run = partitioned(squared(two), state, array(16, 16))
    before, _ = eqns_before_the_last_loop(step)
    barriers = [eqn for eqn in before if eqn.primitive.name == 'optimization_barrier']
    # The weight in between is gathered again after a separate barrier.
    assert sorted(len(eqn.invars) for eqn in barriers) == [1, 2]
    assert_equal(run(), jax.jit(squared(two))(state, array(16, 16)))
