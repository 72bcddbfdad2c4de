"""haliax: arrays with named axes, sharded by name. Version 1.4.dev453 runs only on JAX 0.10."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import optax

from examples.frameworks import sizes
from examples.frameworks.model import OPTIMIZER, Program, mean_loss
from scalax.sharding import LogicalAxisShardingRule

Vocab, Embed, Mlp = hax.make_axes(vocab=sizes.VOCABULARY, embed=sizes.WIDTH, mlp=sizes.HIDDEN)
Heads, HeadSize = hax.make_axes(heads=sizes.HEADS, head_size=sizes.WIDTH // sizes.HEADS)
Pos, Layers = hax.make_axes(position=sizes.SEQUENCE, layers=sizes.LAYERS)


class Block(eqx.Module):
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    out: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    attention_norm: hnn.LayerNorm
    mlp_norm: hnn.LayerNorm

    @staticmethod
    def init(*, key: jax.Array) -> Block:
        keys = jax.random.split(key, 6)
        return Block(
            query=hnn.Linear.init(Embed, (Heads, HeadSize), key=keys[0]),
            key=hnn.Linear.init(Embed, (Heads, HeadSize), key=keys[1]),
            value=hnn.Linear.init(Embed, (Heads, HeadSize), key=keys[2]),
            out=hnn.Linear.init((Heads, HeadSize), Embed, key=keys[3]),
            up=hnn.Linear.init(Embed, Mlp, key=keys[4]),
            down=hnn.Linear.init(Mlp, Embed, key=keys[5]),
            attention_norm=hnn.LayerNorm.init(Embed),
            mlp_norm=hnn.LayerNorm.init(Embed),
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        normed = self.attention_norm(x)
        key_position = x.resolve_axis('position').alias('key_position')
        query = self.query(normed)
        key, value = (part(normed).rename({'position': 'key_position'}) for part in (self.key, self.value))
        mask = hnn.attention.causal_mask(x.resolve_axis('position'), key_position)
        x = x + self.out(hnn.attention.dot_product_attention(key_position, HeadSize, query, key, value, mask))
        return x + self.down(hnn.gelu(self.up(self.mlp_norm(x))))


class Transformer(eqx.Module):
    embed: hnn.Embedding
    positions: hnn.Embedding
    blocks: hnn.Stacked[Block]
    norm: hnn.LayerNorm
    unembed: hnn.Linear

    @staticmethod
    def init(*, key: jax.Array) -> Transformer:
        keys = jax.random.split(key, 4)
        return Transformer(
            embed=hnn.Embedding.init(Vocab, Embed, key=keys[0]),
            positions=hnn.Embedding.init(Pos, Embed, key=keys[1]),
            blocks=hnn.Stacked.init(Layers, Block)(key=jax.random.split(keys[2], sizes.LAYERS)),
            norm=hnn.LayerNorm.init(Embed),
            unembed=hnn.Linear.init(Embed, Vocab, key=keys[3]),
        )

    def __call__(self, tokens: hax.NamedArray) -> hax.NamedArray:
        x = self.embed(tokens) + self.positions(hax.arange(tokens.resolve_axis('position')))
        return self.unembed(self.norm(self.blocks.fold(x)))


def forward(model: Transformer, tokens: jax.Array) -> jax.Array:
    return model(hax.named(tokens, ('batch', 'position'))).rearrange(('batch', 'position', 'vocab')).array


# The leaves that are not arrays are the same in all steps.
STATIC = eqx.filter(
    eqx.filter_eval_shape(lambda key: Transformer.init(key=key), jax.random.key(0)),
    lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct),
)


def init(key: jax.Array) -> Any:
    arrays = eqx.filter(Transformer.init(key=key), eqx.is_array)
    return {'model': arrays, 'optimizer': OPTIMIZER.init(arrays)}


def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    def loss(arrays: Any) -> jax.Array:
        return mean_loss(forward(eqx.combine(arrays, STATIC), tokens[:, :-1]), tokens)

    value, grads = jax.value_and_grad(loss)(state['model'])
    updates, optimizer = OPTIMIZER.update(grads, state['optimizer'], state['model'])
    return {'model': optax.apply_updates(state['model'], updates), 'optimizer': optimizer}, value


PROGRAM = Program(
    init,
    train_step,
    logits=lambda state, tokens: forward(eqx.combine(state['model'], STATIC), tokens),
    # The names are in the tree. Counters of the optimizer have no names.
    rule=LogicalAxisShardingRule({'embed': 'fsdp', 'heads': 'tp', 'mlp': 'tp', 'vocab': 'tp'}, strict=False),
)
