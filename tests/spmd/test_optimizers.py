"""Optimizers on shards: gradients are reduced once, and an update gathers neither weights nor moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from tests.support.partitioned import FSDP, P, assert_equal, partitioned, state_spec

pytestmark = pytest.mark.medium

LAYERS, WIDTH, HIDDEN = 2, 16, 32
SHAPES = {'up': (LAYERS, WIDTH, HIDDEN), 'down': (LAYERS, HIDDEN, WIDTH), 'scale': (WIDTH,)}
# The bytes of row and column statistics, which an update may exchange.
STATISTICS = 4 * LAYERS * HIDDEN


def initial():
    rng = np.random.default_rng(0)
    return {name: (rng.normal(size=shape) / 4).astype('float32') for name, shape in SHAPES.items()}


def loss(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w['up']) @ w['down'], None

    layers = {name: params[name] for name in ('up', 'down')}
    return jnp.mean((jax.lax.scan(layer, x, layers)[0] * params['scale']) ** 2)


def accumulated():
    return optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation()


def clipped(clip):
    return optax.chain(clip, optax.sgd(0.1))


def frozen():
    """One kind of weights is not trained."""
    labels = {'up': 'frozen', 'down': 'trained', 'scale': 'trained'}
    return optax.partition({'trained': optax.adamw(1e-2), 'frozen': optax.set_to_zero()}, labels)


OPTIMIZERS = {
    'adamw': lambda: optax.adamw(1e-2),
    'lion': lambda: optax.lion(1e-2),
    'adafactor': lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    'lamb': lambda: optax.lamb(1e-2),
    'lars': lambda: optax.lars(1e-2),
    'sm3': lambda: optax.sm3(1e-2),
    'novograd': lambda: optax.novograd(1e-2),
    'momentum': lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    'global norm': lambda: clipped(optax.clip_by_global_norm(0.1)),
    'block rms': lambda: clipped(optax.clip_by_block_rms(0.1)),
    'adaptive clip': lambda: clipped(optax.adaptive_grad_clip(0.1)),
    'centralized': lambda: clipped(optax.centralize()),
    'finite': lambda: optax.apply_if_finite(optax.adamw(1e-2), 3),
    'accumulated': accumulated,
    'schedule free': lambda: contrib.schedule_free_adamw(1e-2),
    'average': lambda: clipped(optax.ema(0.9)),
    'prodigy': lambda: contrib.prodigy(),
    'masked decay': lambda: optax.adamw(1e-2, mask={'up': True, 'down': True, 'scale': False}),
    'frozen': frozen,
}


def training_step(optimizer):
    def step(state, x):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def partitioned_step(optimizer):
    step, params = training_step(optimizer), initial()
    state = params, optimizer.init(params)
    x = np.random.default_rng(1).normal(size=(16, WIDTH)).astype('float32')
    specs = [state_spec(leaf.shape) for leaf in jax.tree.leaves(state)]
    step_on_mesh, run = partitioned(step, state, x, FSDP, result_specs=[*specs, P()])
    return step_on_mesh, run, lambda: jax.jit(step)(state, x)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_updates_gather_nothing(name):
    """Except weights of layers, only row and column statistics, and norms, leave a device."""
    step, _, _ = partitioned_step(OPTIMIZERS[name]())
    matrices = [row for row in step.collective_rows if row.bytes * LAYERS > STATISTICS]
    gathers = [row for row in matrices if row.kind == 'all_gather']
    assert all(row.primitive == 'dot_general' for row in gathers)
    assert sum(row.count for row in gathers) == 4 * LAYERS
    # The backward pass reduces a gradient of each layer.
    reductions = [row for row in matrices if row.kind != 'all_gather']
    assert {row.kind for row in reductions} == {'reduce_scatter'}
    trained = 1 if name == 'frozen' else 2
    assert sum(row.count for row in reductions) == trained * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_values_match_one_device(name):
    _, run, one_device = partitioned_step(OPTIMIZERS[name]())
    assert_equal(run(), one_device(), 2e-5)
