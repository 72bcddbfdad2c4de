"""Text decoders: layers in a scan, with and without remat, with multi-head or grouped-query attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

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
    kv_heads: int
    hidden: int
    vocabulary: int
    sequence: int


SIZES = {
    'small': Sizes(64, 2, 4, 2, 128, 128, 16),
    'large': Sizes(2048, 16, 32, 8, 8192, 32_768, 2048),
}
RULE = TreePathShardingRule(
    ('output|down', P(None, 'tp', 'fsdp')),
    ('query|key|value|gate|up', P(None, 'fsdp', 'tp')),
    ('unembed', P('fsdp', 'tp')),
    ('embed', P('tp', 'fsdp')),
    ('norm', P()),
)
HAND = {
    'residual': P('batch', None, None),
    'heads': P('batch', None, 'tp', None),
    'hidden': P('batch', None, 'tp'),
    'logits': P('batch', None, 'tp'),
}


def init(key: jax.Array, s: Sizes) -> Tree:
    keys = iter(jax.random.split(key, 9))
    size = s.width // s.heads

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) / math.sqrt(shape[-2])

    return {
        'embed': normal(s.vocabulary, s.width),
        'layers': {
            'query': normal(s.layers, s.width, s.heads * size),
            'key': normal(s.layers, s.width, s.kv_heads * size),
            'value': normal(s.layers, s.width, s.kv_heads * size),
            'output': normal(s.layers, s.heads * size, s.width),
            'gate': normal(s.layers, s.width, s.hidden),
            'up': normal(s.layers, s.width, s.hidden),
            'down': normal(s.layers, s.hidden, s.width),
            'attention_norm': jnp.ones((s.layers, s.width), jnp.bfloat16),
            'mlp_norm': jnp.ones((s.layers, s.width), jnp.bfloat16),
        },
        'final_norm': jnp.ones(s.width, jnp.bfloat16),
        'unembed': normal(s.width, s.vocabulary),
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x.astype('float32')), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def attention(x: jax.Array, w: Tree, s: Sizes) -> jax.Array:
    batch, length, _ = x.shape
    size = s.width // s.heads
    q = with_sharding_annotation((x @ w['query']).reshape(batch, length, s.heads, size), 'heads')
    k = with_sharding_annotation((x @ w['key']).reshape(batch, length, s.kv_heads, size), 'heads')
    v = with_sharding_annotation((x @ w['value']).reshape(batch, length, s.kv_heads, size), 'heads')
    q = q.reshape(batch, length, s.kv_heads, -1, size)
    scores = jnp.einsum('bqghk,btgk->bghqt', q, k) / math.sqrt(size)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum('bghqt,btgk->bqghk', jax.nn.softmax(scores), v)
    mixed = with_sharding_annotation(mixed.reshape(batch, length, s.heads, size), 'heads')
    return mixed.reshape(batch, length, -1) @ w['output']


def loss(params: Tree, batch: Tree, key: jax.Array, s: Sizes, remat: bool) -> jax.Array:
    tokens = batch['tokens']

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = with_sharding_annotation(x + attention(norm(x, w['attention_norm']), w, s), 'residual')
        y = norm(x, w['mlp_norm'])
        hidden = with_sharding_annotation(jax.nn.silu(y @ w['gate']) * (y @ w['up']), 'hidden')
        return with_sharding_annotation(x + hidden @ w['down'], 'residual'), None

    x = with_sharding_annotation(params['embed'][tokens[:, :-1]], 'residual')
    x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params['layers'])
    logits = norm(x, params['final_norm']) @ params['unembed']
    logits = with_sharding_annotation(logits, 'logits').astype('float32')
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))


def decoder(name: str, size: Size, grouped: bool, remat: bool = True) -> Model:
    s = SIZES[size]
    if not grouped:
        s = dataclasses.replace(s, kv_heads=s.heads)

    def batch(rows: int) -> dict[str, Any]:
        return {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')}

    return Model(
        name,
        init=lambda key: init(key, s),
        batch=batch,
        loss=lambda params, batch, key: loss(params, batch, key, s, remat),
        columns_and_rows=RULE,
        hand=HAND,
    )


def models(size: Size) -> list[Model]:
    """Returns the decoders of the table."""
    return [
        decoder('decoder, many heads', size, grouped=False),
        decoder('decoder, grouped heads', size, grouped=True),
    ]
