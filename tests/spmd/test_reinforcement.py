"""Reinforcement learning: environments that reset inside, scans over time, shuffled minibatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, P, assert_equal, batch_spec, partitioned, state_spec

pytestmark = pytest.mark.medium

ENVIRONMENTS, STEPS, OBSERVED, ACTIONS, WIDTH = 16, 8, 4, 3, 16


def weights():
    random = np.random.default_rng(0)
    shapes = {'in': (OBSERVED, WIDTH), 'policy': (WIDTH, 8), 'value': (WIDTH, 8)}
    return {name: random.normal(size=shape).astype('float32') / 4 for name, shape in shapes.items()}


def network(w, x):
    h = jnp.tanh(x @ w['in'])
    return jax.nn.log_softmax((h @ w['policy'])[..., :ACTIONS]), (h @ w['value']).mean(-1)


def reset(key):
    return jax.random.normal(key, (OBSERVED,))


def advance(state, action, key):
    """Returns a new state, a reward, and whether the episode is over; then the environment is reset."""
    state = 0.9 * state + 0.1 * jnp.sin(state[::-1] * (1 + action))
    # Loops until it is in a box; the number of iterations depends on the environment.
    state = lax.while_loop(lambda s: jnp.abs(s).max() > 2, lambda s: s / 2, state)
    ends = jnp.abs(state).sum() < 1.5
    return jnp.where(ends, reset(key), state), -jnp.square(state).sum(), ends


def rollout(w, key, states):
    def step(states, key):
        log_probs, values = network(w, states)
        act, again = jax.random.split(key)
        actions = jax.random.categorical(act, log_probs)
        chosen_actions = jnp.take_along_axis(log_probs, actions[:, None], -1)[:, 0]
        after, rewards, ends = jax.vmap(advance)(states, actions, jax.random.split(again, ENVIRONMENTS))
        return after, (states, actions, chosen_actions, values, rewards, ends)

    return lax.scan(step, states, jax.random.split(key, STEPS))


def advantages(rewards, values, ends, last):
    def back(later, now):
        reward, value, end, following = now
        going = 0.99 * (1 - end)
        later = reward + going * following - value + 0.95 * going * later
        return later, later

    following = jnp.concatenate([values[1:], last[None]])
    return lax.scan(back, jnp.zeros_like(last), (rewards, values, ends, following), reverse=True)[1]


def loss(w, part):
    states, actions, before, gains, targets = part
    log_probs, values = network(w, states)
    ratio = jnp.exp(jnp.take_along_axis(log_probs, actions[:, None], -1)[:, 0] - before)
    gains = (gains - gains.mean()) / (gains.std() + 1e-3)
    gain = jnp.minimum(ratio * gains, jnp.clip(ratio, 0.8, 1.2) * gains)
    return jnp.mean(jnp.square(values - targets) - gain)


def ppo(minibatches, spec):
    """A step of PPO; without *minibatches*, on all experience at once."""

    def step(state, _):
        w, key = state
        start, run, shuffle = jax.random.split(key, 3)
        states = jax.vmap(reset)(jax.random.split(start, ENVIRONMENTS))
        states = states if spec is None else lax.with_sharding_constraint(states, spec)
        after, (states, actions, chosen_actions, values, rewards, ends) = rollout(w, run, states)
        gains = advantages(rewards, values, ends, network(w, after)[1])
        batch = states, actions, chosen_actions, gains, gains + values
        batch = jax.tree.map(lambda x: x.reshape(STEPS * ENVIRONMENTS, *x.shape[2:]), batch)
        if not minibatches:
            value, gradients = jax.value_and_grad(loss)(w, batch)
            return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradients), value

        def epoch(w, key):
            order = jax.random.permutation(key, STEPS * ENVIRONMENTS)
            parts = jax.tree.map(lambda x: x[order].reshape(minibatches, -1, *x.shape[1:]), batch)

            def update(w, part):
                value, gradients = jax.value_and_grad(loss)(w, part)
                return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradients), value

            return lax.scan(update, w, parts)

        w, losses = lax.scan(epoch, w, jax.random.split(shuffle, 2))
        return w, losses.mean()

    return step


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('minibatches', [0, 4, 8])
@pytest.mark.sampled(6)
def test_a_step_that_resets_its_environments(minibatches, mesh):
    w, key = weights(), jax.random.key(0)
    specs = [state_spec(leaf.shape, size=mesh['fsdp']) for leaf in jax.tree.leaves(w)]
    with jax.default_matmul_precision('highest'):
        fun = ppo(minibatches, batch_spec(mesh))
        step, run = partitioned(fun, (w, key), (), mesh, result_specs=[*specs, P()])
        assert_equal(run(), jax.jit(ppo(minibatches, None))((w, key), ()), 1e-4)
    moved = {row.primitive for row in step.collective_rows if row.what == 'examples'}
    # Steps and environments are merged. A shuffle gathers all experience, and each device keeps a shard.
    shuffled = {0: set(), 4: {'gather', 'reshape'}, 8: {'gather', 'scan'}}
    assert moved == {'reshape'} | shuffled[minibatches]
    # The loops over time use weights that are gathered once, before them.
    before_loops = [
        row for row in step.collective_rows if row.reason.startswith('weight') and row.primitive == 'scan'
    ]
    assert [row.count for row in before_loops] == [1, 1, 1]


def test_a_shuffle_shards_its_result():
    x = np.random.default_rng(0).normal(size=(64, 8)).astype('float32')

    def fun(key, x):
        return jnp.tanh(x[jax.random.permutation(key, 64)])

    key = jax.random.key(1)
    step, run = partitioned(fun, key, x)
    assert_equal(run(), jax.jit(fun)(key, x))
    assert step.out_specs == (P('fsdp'),)
    assert [(row.kind, row.primitive, row.bytes) for row in step.collective_rows] == [
        ('all_gather', 'gather', x.nbytes)
    ]
