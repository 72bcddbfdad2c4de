"""A transformer of flax.linen modules, with `nn.scan` over its blocks."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.unchanged.model import Model, Size
from benchmarks.unchanged.nnx_modules import HAND, Sizes
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation

SIZES = {
    'small': Sizes(32, 2, 4, 64, 64, 8, 'float32'),
    'large': Sizes(2048, 16, 16, 8192, 32_768, 2048, 'bfloat16'),
}
# Layers are stacked: (layers, D, H, head), (layers, H, head, D), (layers, D, hidden).
RULE = TreePathShardingRule(
    ('(query|key|value)/kernel', P(None, 'fsdp', 'tp')),
    ('out/kernel', P(None, 'tp', None, 'fsdp')),
    ('up/kernel', P(None, 'fsdp', 'tp')),
    ('down/kernel', P(None, 'tp', 'fsdp')),
    ('unembed/kernel', P('fsdp', 'tp')),
    ('embedding', P('tp', 'fsdp')),
    ('(query|key|value|up)/bias', P(None, 'tp')),
    ('scale|bias|positions', P()),
)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **more: Any) -> jax.Array:
    """Calls linen's attention, with names for its heads: (B, S, H, D)."""
    query, key, value = (with_sharding_annotation(x, 'heads') for x in (query, key, value))
    return with_sharding_annotation(nn.dot_product_attention(query, key, value, **more), 'heads')


class Block(nn.Module):
    """Maps (B, S, D) to (B, S, D)."""

    s: Sizes

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        dtype = jnp.dtype(self.s.dtype)
        y = nn.LayerNorm(param_dtype=dtype, name='attention_norm')(x)
        attention = nn.MultiHeadDotProductAttention(
            self.s.heads, param_dtype=dtype, attention_fn=attend, name='attention'
        )
        x = with_sharding_annotation(x + attention(y, mask=mask), 'residual')
        y = nn.LayerNorm(param_dtype=dtype, name='mlp_norm')(x)
        y = with_sharding_annotation(
            nn.gelu(nn.Dense(self.s.hidden, param_dtype=dtype, name='up')(y)), 'hidden'
        )
        x = x + nn.Dense(self.s.width, param_dtype=dtype, name='down')(y)
        return with_sharding_annotation(x, 'residual'), None


class Transformer(nn.Module):
    """Maps tokens (B, S) to logits (B, S, V)."""

    s: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        s, dtype = self.s, jnp.dtype(self.s.dtype)
        x = nn.Embed(s.vocabulary, s.width, param_dtype=dtype, name='tokens')(tokens)
        x = x + self.param('positions', nn.initializers.normal(0.02), (s.sequence, s.width), dtype)
        x = with_sharding_annotation(x, 'residual')
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={'params': 0},
            split_rngs={'params': True},
            in_axes=nn.broadcast,
            length=s.layers,
        )
        x, _ = blocks(s, name='blocks')(x, nn.make_causal_mask(tokens))
        x = nn.LayerNorm(param_dtype=dtype, name='norm')(x)
        logits = nn.Dense(s.vocabulary, use_bias=False, param_dtype=dtype, name='unembed')(x)
        return with_sharding_annotation(logits, 'logits')


def models(size: Size) -> list[Model]:
    """Returns a transformer."""
    s = SIZES[size]
    module = Transformer(s)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        logits: Any = module.apply({'params': params}, batch['tokens'][:, :-1])
        log_probs = jax.nn.log_softmax(logits.astype('float32'))
        return -jnp.mean(jnp.take_along_axis(log_probs, batch['tokens'][:, 1:, None], -1))

    return [
        Model(
            'flax.linen modules',
            init=lambda key: module.init(key, jnp.zeros((1, s.sequence), 'int32'))['params'],
            batch=lambda rows: {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')},
            loss=loss,
            columns_and_rows=RULE,
            hand=HAND,
        )
    ]
