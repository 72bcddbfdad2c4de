"""Two towers, for images and texts, and a loss over all pairs of a batch, as in CLIP."""

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
class Tower:
    width: int
    layers: int
    heads: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    image: Tower
    text: Tower
    pixels: int
    patch: int
    vocabulary: int
    sequence: int
    shared: int
    dtype: str


SIZES = {
    'small': Sizes(Tower(32, 2, 4), Tower(16, 2, 4), 16, 4, 32, 8, 16, 'float32'),
    'large': Sizes(Tower(1024, 24, 16), Tower(768, 12, 12), 224, 14, 49_408, 80, 768, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('patches', P(None, None, None, 'fsdp')),
    ('embed', P('tp', 'fsdp')),
    ('places', P(None, 'fsdp')),
    ('output|down', blocks.ROWS),
    ('query|key|value|up', blocks.COLUMNS),
    ('shared', P('fsdp', None)),
    ('norm|scale', P()),
)
HAND = {
    **{name: blocks.HAND[name] for name in ('residual', 'heads', 'hidden')},
    'vector': P('batch', None),
    'all': P(None, None),
    'pairs': P('batch', None),
}


def tower(draw: blocks.Draw, t: Tower, places: int, shared: int) -> Tree:
    return {
        'places': draw.normal(places, t.width),
        'layers': {
            'attention': draw.attention(t.layers, t.width),
            'mlp': draw.feed_forward(t.layers, t.width, 4 * t.width),
            'norm1': draw.norm(t.layers, t.width),
            'norm2': draw.norm(t.layers, t.width),
        },
        'norm': draw.norm(t.width),
        'shared': draw.normal(t.width, shared),
    }


def init(key: jax.Array, s: Sizes) -> Tree:
    draw = blocks.Draw(key, s.dtype)
    return {
        'patches': draw.kernel(s.patch, 3, s.image.width),
        'embed': draw.normal(s.vocabulary, s.text.width),
        'image': tower(draw, s.image, (s.pixels // s.patch) ** 2, s.shared),
        'text': tower(draw, s.text, s.sequence, s.shared),
        'scale': jnp.array(2.6592, 'float32'),
    }


def run(x: jax.Array, w: Tree, t: Tower, bias: Any = 0.0) -> jax.Array:
    """Maps (B, S, D) to (B, S, D)."""

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = x + blocks.attention(blocks.layer_norm(x, w['norm1']), w['attention'], t.heads, bias)
        x = with_sharding_annotation(x, 'residual')
        x = x + blocks.feed_forward(blocks.layer_norm(x, w['norm2']), w['mlp'])
        return with_sharding_annotation(x, 'residual'), None

    x = with_sharding_annotation(x + w['places'], 'residual')
    return jax.lax.scan(jax.checkpoint(layer), x, w['layers'])[0]


def vector(x: jax.Array, w: Tree) -> jax.Array:
    """Returns rows of unit length, (B, D)."""
    y = with_sharding_annotation(blocks.layer_norm(x, w['norm']) @ w['shared'], 'vector').astype('float32')
    return with_sharding_annotation(y / jnp.linalg.norm(y, axis=-1, keepdims=True), 'vector')


def loss(params: Tree, batch: Tree, s: Sizes) -> jax.Array:
    images, tokens = batch['images'].astype(s.dtype), batch['tokens']
    x = jax.lax.conv_general_dilated(
        images, params['patches'], (s.patch, s.patch), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    x = run(x.reshape(x.shape[0], -1, s.image.width), params['image'], s.image)
    seen = vector(jnp.mean(x, 1), params['image'])

    causal = jnp.where(jnp.tril(jnp.ones((s.sequence, s.sequence), bool)), 0.0, -1e9).astype(s.dtype)
    y = run(params['embed'][tokens], params['text'], s.text, causal)
    last = jnp.argmax(tokens, -1)
    y = with_sharding_annotation(jnp.take_along_axis(y, last[:, None, None], 1)[:, 0], 'vector')
    read = vector(y, params['text'])

    logits = jnp.exp(params['scale']) * seen @ with_sharding_annotation(read, 'all').T
    logits = with_sharding_annotation(logits, 'pairs')
    same = jnp.arange(logits.shape[0])
    return (jnp.mean(blocks.cross_entropy(logits, same)) + jnp.mean(blocks.cross_entropy(logits.T, same))) / 2


def models(size: Size) -> list[Model]:
    """Returns a dual encoder."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        return {
            'images': jax.ShapeDtypeStruct((rows, s.pixels, s.pixels, 3), 'float32'),
            'tokens': jax.ShapeDtypeStruct((rows, s.sequence), 'int32'),
        }

    return [
        Model(
            'dual encoder',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch, s),
            columns_and_rows=RULE,
            hand=HAND,
            rows=8,
        )
    ]
