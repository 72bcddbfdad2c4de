"""An actor-critic on time-major experience; a scan backward in time computes the advantages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged.blocks import Draw, layer_norm
from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation


@dataclasses.dataclass(frozen=True)
class Sizes:
    observed: int
    width: int
    hidden: int
    layers: int
    actions: int
    steps: int
    dtype: str


SIZES = {
    'small': Sizes(8, 16, 32, 2, 8, 6, 'float32'),
    'large': Sizes(512, 2048, 8192, 12, 64, 32, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('inward', P(None, 'fsdp')),
    ('up', P(None, 'fsdp', 'tp')),
    ('down', P(None, 'tp', 'fsdp')),
    ('norm', P()),
    ('policy|value', P('fsdp', None)),
)
# FSDP x TP sends more bytes than the plain program by the plan's count, in a third of the time: gradients are
# reduced in rings that overlap with matmuls, and the plan counts each ring step as an entire array.
HAND = {
    'residual': P(None, 'batch', None),
    'hidden': P(None, 'batch', 'tp'),
    'numbers': P(None, 'batch'),
}


def init(key: jax.Array, s: Sizes) -> Tree:
    draw = Draw(key, s.dtype)
    return {
        'inward': draw.normal(s.observed, s.width),
        'layers': {
            'norm': draw.norm(s.layers, s.width),
            'up': draw.normal(s.layers, s.width, s.hidden),
            'down': draw.normal(s.layers, s.hidden, s.width),
        },
        'norm': draw.norm(s.width),
        'policy': draw.normal(s.width, s.actions),
        'value': draw.normal(s.width, 1),
    }


def network(params: Tree, observed: jax.Array, s: Sizes) -> tuple[jax.Array, jax.Array]:
    """Maps (..., observed) to log probabilities (..., actions) and values (...)."""

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        hidden = with_sharding_annotation(jax.nn.relu(layer_norm(x, w['norm']) @ w['up']), 'hidden')
        return with_sharding_annotation(x + hidden @ w['down'], 'residual'), None

    x = with_sharding_annotation(observed.astype(s.dtype) @ params['inward'], 'residual')
    x, _ = jax.lax.scan(layer, x, params['layers'])
    x = with_sharding_annotation(layer_norm(x, params['norm']), 'residual')
    logits = with_sharding_annotation(x @ params['policy'], 'residual').astype('float32')
    return jax.nn.log_softmax(logits), (x @ params['value'])[..., 0].astype('float32')


def advantages(rewards: jax.Array, ends: jax.Array, values: jax.Array) -> jax.Array:
    """Returns generalized advantages: rewards and ends (T, B), values (T + 1, B) -> (T, B)."""
    going = 0.99 * (1 - ends)
    errors = with_sharding_annotation(rewards + going * values[1:] - values[:-1], 'numbers')

    def back(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        error, going = now
        later = error + 0.95 * going * later
        return later, later

    _, estimates = jax.lax.scan(back, jnp.zeros_like(errors[0]), (errors, going), reverse=True)
    return with_sharding_annotation(estimates, 'numbers')


def surrogate(log_probs: jax.Array, values: jax.Array, batch: Tree) -> jax.Array:
    """Returns the clipped policy loss and the squared value loss, over (T, B)."""
    advantage = jax.lax.stop_gradient(advantages(batch['rewards'], batch['ends'], batch['values']))
    targets = advantage + batch['values'][:-1]
    advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-6)
    action_log_probs = jnp.take_along_axis(log_probs, batch['actions'][..., None], -1)[..., 0]
    ratio = jnp.exp(with_sharding_annotation(action_log_probs, 'numbers') - batch['log_probs'])
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
    return jnp.mean(0.5 * jnp.square(values - targets) - gain - 0.01 * entropy)


def loss(params: Tree, batch: Tree, s: Sizes) -> jax.Array:
    """Merges steps and rows into one dimension for the network, (T * B, ...), as is usual."""
    observed = batch['observed']
    log_probs, values = network(params, observed.reshape(-1, s.observed), s)
    shape = observed.shape[:2]
    return surrogate(log_probs.reshape(*shape, -1), values.reshape(shape), batch)


def hand_loss(params: Tree, batch: Tree, s: Sizes) -> jax.Array:
    """Keeps steps and rows as two dimensions: if merged, the rows of a device would not be contiguous."""
    log_probs, values = network(params, with_sharding_annotation(batch['observed'], 'residual'), s)
    return surrogate(log_probs, values, batch)


def models(size: Size) -> list[Model]:
    """Returns an actor-critic."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        numbers = jax.ShapeDtypeStruct((s.steps, rows), 'float32')
        return {
            'observed': jax.ShapeDtypeStruct((s.steps, rows, s.observed), 'float32'),
            'actions': jax.ShapeDtypeStruct((s.steps, rows), 'int32'),
            'rewards': numbers,
            'ends': numbers,
            'log_probs': numbers,
            'values': jax.ShapeDtypeStruct((s.steps + 1, rows), 'float32'),
        }

    return [
        Model(
            'actor-critic',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch, s),
            columns_and_rows=RULE,
            hand=HAND,
            hand_loss=lambda params, batch, key, axes: hand_loss(params, batch, s),
            rows=16,
            batch_dim=1,
        )
    ]
