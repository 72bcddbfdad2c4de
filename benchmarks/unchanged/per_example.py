"""A decoder for one example, as Equinox users write it, batched by `jax.vmap`."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    dtype: str


SIZES = {
    'small': Sizes(32, 2, 4, 64, 64, 8, 'float32'),
    'large': Sizes(2048, 16, 16, 8192, 32_768, 2048, 'bfloat16'),
}
# A Linear's weight is (out, in); layers are stacked.
RULE = TreePathShardingRule(
    ('(query|key|value)_proj/weight|up/weight', P(None, 'tp', 'fsdp')),
    ('output_proj/weight|down/weight', P(None, 'fsdp', 'tp')),
    ('embedding/weight|unembed/weight', P('tp', 'fsdp')),
    ('up/bias', P(None, 'tp')),
    ('norm|bias', P()),
)
# Specs for one example: vmap adds the batch dimension.
HAND = {
    'residual': P(None, None),
    'hidden': P(None, 'tp'),
    'heads': P(None, 'tp', None),
    'logits': P(None, 'tp'),
}


class Block(eqx.Module):
    """Maps (S, D) to (S, D)."""

    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, s: Sizes, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(s.heads, s.width, dtype=s.dtype, key=keys[0])
        self.attention_norm = eqx.nn.LayerNorm(s.width, dtype=s.dtype)
        self.mlp_norm = eqx.nn.LayerNorm(s.width, dtype=s.dtype)
        self.up = eqx.nn.Linear(s.width, s.hidden, dtype=s.dtype, key=keys[1])
        self.down = eqx.nn.Linear(s.hidden, s.width, dtype=s.dtype, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        def heads(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            q, k, v = (with_sharding_annotation(y, 'heads') for y in (q, k, v))
            return q, k, v

        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        y = jax.vmap(self.attention_norm)(x)
        x = with_sharding_annotation(x + self.attention(y, y, y, mask, process_heads=heads), 'residual')
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.mlp_norm)(x)))
        hidden = with_sharding_annotation(hidden, 'hidden')
        return with_sharding_annotation(x + jax.vmap(self.down)(hidden), 'residual')


class Decoder(eqx.Module):
    """Maps tokens (S,) to logits (S, V)."""

    embedding: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.LayerNorm
    unembed: eqx.nn.Linear

    def __init__(self, s: Sizes, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(s.vocabulary, s.width, dtype=s.dtype, key=keys[0])
        self.blocks = eqx.filter_vmap(lambda key: Block(s, key))(jax.random.split(keys[1], s.layers))
        self.norm = eqx.nn.LayerNorm(s.width, dtype=s.dtype)
        self.unembed = eqx.nn.Linear(s.width, s.vocabulary, use_bias=False, dtype=s.dtype, key=keys[2])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def apply(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return eqx.combine(block, static)(x), None

        x = with_sharding_annotation(jax.vmap(self.embedding)(tokens), 'residual')
        x, _ = jax.lax.scan(apply, x, arrays)
        return with_sharding_annotation(jax.vmap(self.unembed)(jax.vmap(self.norm)(x)), 'logits')


def example_loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Returns the loss of one example (S + 1,)."""
    log_probs = jax.nn.log_softmax(model(tokens[:-1]).astype('float32'))
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[1:, None], -1))


def models(size: Size) -> list[Model]:
    """Uses the arrays of a model as parameters, and closes over the rest of it."""
    s = SIZES[size]
    static = eqx.filter_eval_shape(lambda key: Decoder(s, key), jax.random.key(0))
    static = eqx.partition(static, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]

    def loss(params: Tree, batch: Tree, key: jax.Array, axes: tuple[str, ...] | None = None) -> jax.Array:
        model = eqx.combine(params, static)
        over = jax.vmap(lambda tokens: example_loss(model, tokens), spmd_axis_name=axes)
        return jnp.mean(over(batch['tokens']))

    return [
        Model(
            'equinox, one example',
            init=lambda key: eqx.filter(Decoder(s, key), eqx.is_array),
            batch=lambda rows: {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')},
            loss=loss,
            columns_and_rows=RULE,
            hand=HAND,
            # The dimension that vmap adds is sharded over the batch axes.
            hand_loss=loss,
        )
    ]
