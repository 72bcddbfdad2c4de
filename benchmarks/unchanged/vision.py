"""A vision transformer: patches by a convolution, blocks in a scan."""

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
    image: int
    patch: int
    classes: int
    dtype: str


SIZES = {
    'small': Sizes(32, 2, 4, 64, 16, 4, 16, 'float32'),
    'large': Sizes(1280, 32, 16, 5120, 224, 14, 1024, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('patches', P(None, None, None, 'fsdp')),
    ('first|places', P(None, None, 'fsdp')),
    ('output|down', blocks.ROWS),
    ('query|key|value|up', blocks.COLUMNS),
    ('head', P('fsdp', 'tp')),
    ('norm', P()),
)
HAND = {**blocks.HAND, 'logits': P('batch', 'tp')}


def init(key: jax.Array, s: Sizes) -> Tree:
    draw = blocks.Draw(key, s.dtype)
    return {
        'patches': draw.kernel(s.patch, 3, s.width),
        'first': draw.normal(1, 1, s.width),
        'places': draw.normal(1, (s.image // s.patch) ** 2 + 1, s.width),
        'layers': {
            'attention': draw.attention(s.layers, s.width),
            'mlp': draw.feed_forward(s.layers, s.width, s.hidden),
            'norm1': draw.norm(s.layers, s.width),
            'norm2': draw.norm(s.layers, s.width),
        },
        'norm': draw.norm(s.width),
        'head': draw.normal(s.width, s.classes),
    }


def loss(params: Tree, batch: Tree, s: Sizes) -> jax.Array:
    images = batch['images'].astype(s.dtype)
    x = jax.lax.conv_general_dilated(
        images, params['patches'], (s.patch, s.patch), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    x = with_sharding_annotation(x.reshape(x.shape[0], -1, s.width), 'residual')
    first = jnp.broadcast_to(params['first'], (x.shape[0], 1, s.width))
    x = with_sharding_annotation(jnp.concatenate([first, x], 1) + params['places'], 'residual')

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = x + blocks.attention(blocks.layer_norm(x, w['norm1']), w['attention'], s.heads)
        x = with_sharding_annotation(x, 'residual')
        x = x + blocks.feed_forward(blocks.layer_norm(x, w['norm2']), w['mlp'])
        return with_sharding_annotation(x, 'residual'), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params['layers'])
    logits = blocks.layer_norm(x[:, 0], params['norm']) @ params['head']
    return jnp.mean(blocks.cross_entropy(with_sharding_annotation(logits, 'logits'), batch['labels']))


def models(size: Size) -> list[Model]:
    """Returns a vision transformer."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        return {
            'images': jax.ShapeDtypeStruct((rows, s.image, s.image, 3), 'float32'),
            'labels': jax.ShapeDtypeStruct((rows,), 'int32'),
        }

    return [
        Model(
            'vision transformer',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch, s),
            columns_and_rows=RULE,
            hand=HAND,
            rows=2,
        )
    ]
