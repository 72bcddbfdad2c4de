"""flax linen: modules with `nn.compact`, and a `TrainState`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

from examples.frameworks import sizes
from examples.frameworks.model import OPTIMIZER, Program, mean_loss
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(sizes.HEADS, name='attention')(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(sizes.HIDDEN, name='up')(nn.LayerNorm()(x)))
        return x + nn.Dense(sizes.WIDTH, name='down')(hidden)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(sizes.VOCABULARY, sizes.WIDTH, name='embed')(tokens)
        x = x + nn.Embed(sizes.SEQUENCE, sizes.WIDTH, name='positions')(positions)
        for _ in range(sizes.LAYERS):
            x = Block()(x, nn.make_causal_mask(tokens))
        return nn.Dense(sizes.VOCABULARY, name='unembed')(nn.LayerNorm()(x))


MODEL = Transformer()


def init(key: jax.Array) -> TrainState:
    params = MODEL.init(key, jnp.zeros((1, sizes.SEQUENCE), jnp.int32))['params']
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return mean_loss(state.apply_fn({'params': params}, tokens[:, :-1]), tokens)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


PROGRAM = Program(
    init,
    train_step,
    logits=lambda state, tokens: state.apply_fn({'params': state.params}, tokens),
    rule=TreePathShardingRule(
        ('(query|key|value)/kernel', P('fsdp', 'tp')),
        ('out/kernel', P('tp', None, 'fsdp')),
        ('(up|unembed)/kernel', P('fsdp', 'tp')),
        ('down/kernel', P('tp', 'fsdp')),
        ('embed/embedding', P('fsdp', 'tp')),
        ('.*', P()),
    ),
)
