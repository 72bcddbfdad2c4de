"""equinox: modules that are pytrees, written for one example and mapped over the batch by `jax.vmap`."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from examples.frameworks import sizes
from examples.frameworks.model import OPTIMIZER, Program, mean_loss
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    mlp_norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(sizes.HEADS, sizes.WIDTH, key=first)
        self.mlp = eqx.nn.MLP(
            sizes.WIDTH, sizes.WIDTH, sizes.HIDDEN, depth=1, activation=jax.nn.gelu, key=second
        )
        self.attention_norm, self.mlp_norm = eqx.nn.LayerNorm(sizes.WIDTH), eqx.nn.LayerNorm(sizes.WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y, jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    unembed: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3 + sizes.LAYERS)
        self.embed = eqx.nn.Embedding(sizes.VOCABULARY, sizes.WIDTH, key=keys[0])
        self.positions = eqx.nn.Embedding(sizes.SEQUENCE, sizes.WIDTH, key=keys[1])
        self.unembed = eqx.nn.Linear(sizes.WIDTH, sizes.VOCABULARY, key=keys[2])
        self.blocks = [Block(key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(sizes.WIDTH)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens) + jax.vmap(self.positions)(jnp.arange(len(tokens)))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.unembed)(jax.vmap(self.norm)(x))


# The leaves that are not arrays, such as the activation of the MLP, are the same in all steps.
STATIC = eqx.filter(
    eqx.filter_eval_shape(Transformer, jax.random.key(0)),
    lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct),
)


def init(key: jax.Array) -> Any:
    arrays = eqx.filter(Transformer(key), eqx.is_array)
    return {'model': arrays, 'optimizer': OPTIMIZER.init(arrays)}


def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    def loss(arrays: Any) -> jax.Array:
        return mean_loss(jax.vmap(eqx.combine(arrays, STATIC))(tokens[:, :-1]), tokens)

    value, grads = jax.value_and_grad(loss)(state['model'])
    updates, optimizer = OPTIMIZER.update(grads, state['optimizer'], state['model'])
    return {'model': eqx.apply_updates(state['model'], updates), 'optimizer': optimizer}, value


PROGRAM = Program(
    init,
    train_step,
    logits=lambda state, tokens: jax.vmap(eqx.combine(state['model'], STATIC))(tokens),
    rule=TreePathShardingRule(  # matrices are (out, in)
        ('(query|key|value)_proj/weight', P('tp', 'fsdp')),
        ('output_proj/weight', P('fsdp', 'tp')),
        ('mlp/layers/0/weight', P('tp', 'fsdp')),
        ('mlp/layers/1/weight', P('fsdp', 'tp')),
        ('unembed/weight', P('tp', 'fsdp')),
        ('embed/weight', P('fsdp', 'tp')),
        ('.*', P()),
    ),
)
