"""An encoder-decoder with cross-attention, as in T5."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged import blocks
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
    distances: int
    dtype: str


SIZES = {
    'small': Sizes(32, 2, 4, 64, 64, 8, 4, 'float32'),
    'large': Sizes(1024, 24, 16, 2816, 32_128, 512, 64, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('unembed', P('fsdp', 'tp')),
    ('embed', P('tp', 'fsdp')),
    ('output|down', blocks.ROWS),
    ('query|key|value|gate|up', blocks.COLUMNS),
    ('norm|distance', P()),
)


def init(key: jax.Array, s: Sizes) -> Tree:
    draw = blocks.Draw(key, s.dtype)

    def norm() -> jax.Array:
        return jnp.ones((s.layers, s.width), s.dtype)

    return {
        'embed': draw.normal(s.vocabulary, s.width),
        'encoder': {
            'attention': draw.attention(s.layers, s.width),
            'mlp': draw.feed_forward(s.layers, s.width, s.hidden, gated=True),
            'norm1': norm(),
            'norm2': norm(),
        },
        'decoder': {
            'attention': draw.attention(s.layers, s.width),
            'cross': draw.attention(s.layers, s.width),
            'mlp': draw.feed_forward(s.layers, s.width, s.hidden, gated=True),
            'norm1': norm(),
            'norm2': norm(),
            'norm3': norm(),
        },
        'encoder_distances': draw.normal(2 * s.distances + 1, s.heads),
        'decoder_distances': draw.normal(2 * s.distances + 1, s.heads),
        'encoder_norm': jnp.ones(s.width, s.dtype),
        'decoder_norm': jnp.ones(s.width, s.dtype),
        'unembed': draw.normal(s.width, s.vocabulary),
    }


def by_distance(table: jax.Array, length: int) -> jax.Array:
    """Returns a head's bias for the distance of two positions: (1, H, Q, K)."""
    places, most = jnp.arange(length), table.shape[0] // 2
    distance = jnp.clip(places[None, :] - places[:, None], -most, most) + most
    return table[distance].transpose(2, 0, 1)[None]


def loss(params: Tree, batch: Tree, s: Sizes) -> jax.Array:
    inputs, targets = batch['inputs'], batch['targets']
    seen = jnp.where(inputs > 0, 0.0, -1e9).astype(s.dtype)[:, None, None, :]
    bias = by_distance(params['encoder_distances'], s.sequence) + seen

    def encode(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = x + blocks.attention(blocks.rms_norm(x, w['norm1']), w['attention'], s.heads, bias)
        x = with_sharding_annotation(x, 'residual')
        x = x + blocks.feed_forward(blocks.rms_norm(x, w['norm2']), w['mlp'])
        return with_sharding_annotation(x, 'residual'), None

    x = with_sharding_annotation(params['embed'][inputs], 'residual')
    x, _ = jax.lax.scan(jax.checkpoint(encode), x, params['encoder'])
    encoded = with_sharding_annotation(blocks.rms_norm(x, params['encoder_norm']), 'residual')

    earlier = jnp.where(jnp.tril(jnp.ones((s.sequence, s.sequence), bool)), 0.0, -1e9).astype(s.dtype)
    causal = by_distance(params['decoder_distances'], s.sequence) + earlier

    def decode(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = x + blocks.attention(blocks.rms_norm(x, w['norm1']), w['attention'], s.heads, causal)
        x = with_sharding_annotation(x, 'residual')
        x = x + blocks.attention(blocks.rms_norm(x, w['norm2']), w['cross'], s.heads, seen, encoded)
        x = with_sharding_annotation(x, 'residual')
        x = x + blocks.feed_forward(blocks.rms_norm(x, w['norm3']), w['mlp'])
        return with_sharding_annotation(x, 'residual'), None

    y = with_sharding_annotation(params['embed'][targets[:, :-1]], 'residual')
    y, _ = jax.lax.scan(jax.checkpoint(decode), y, params['decoder'])
    logits = blocks.rms_norm(y, params['decoder_norm']) @ params['unembed']
    logits = with_sharding_annotation(logits, 'logits')
    real = targets[:, 1:] > 0
    return jnp.sum(blocks.cross_entropy(logits, targets[:, 1:]) * real) / jnp.sum(real)


def models(size: Size) -> list[Model]:
    """Returns an encoder-decoder."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        return {
            'inputs': jax.ShapeDtypeStruct((rows, s.sequence), 'int32'),
            'targets': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32'),
        }

    return [
        Model(
            'encoder-decoder',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch, s),
            columns_and_rows=RULE,
            hand=blocks.HAND,
        )
    ]
