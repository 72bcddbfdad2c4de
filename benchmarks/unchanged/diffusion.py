"""A diffusion transformer; the loss draws a time and noise for each row from its key."""

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
    'small': Sizes(32, 2, 4, 64, 8, 2, 16, 'float32'),
    'large': Sizes(1152, 28, 16, 4608, 32, 2, 1024, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('inward|time|last_shift', P(None, 'fsdp')),
    ('outward', P('fsdp', None)),
    ('classes', P('tp', 'fsdp')),
    ('output|down', blocks.ROWS),
    ('query|key|value|up', blocks.COLUMNS),
    ('shifts', P(None, 'fsdp', None)),
)
RADIANS = 1000  # the angle at the largest time
HAND = {
    **{name: blocks.HAND[name] for name in ('residual', 'heads', 'hidden')},
    'image': P('batch', None, None, None),
    'row': P('batch', None),
}


def init(key: jax.Array, s: Sizes) -> Tree:
    draw = blocks.Draw(key, s.dtype)
    patch = 4 * s.patch**2
    return {
        'inward': draw.normal(patch, s.width),
        'time1': draw.normal(256, s.width),
        'time2': draw.normal(s.width, s.width),
        'classes': draw.normal(s.classes, s.width),
        'layers': {
            'shifts': draw.normal(s.layers, s.width, 6 * s.width),
            'attention': draw.attention(s.layers, s.width),
            'mlp': draw.feed_forward(s.layers, s.width, s.hidden),
        },
        'last_shift': draw.normal(s.width, 2 * s.width),
        'outward': draw.normal(s.width, patch),
    }


def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalizes, then shifts and scales by values computed from the row's time and class, (B, 1, D)."""
    return blocks.layer_norm(x) * (1 + scale) + shift


def predict(params: Tree, images: jax.Array, times: jax.Array, labels: jax.Array, s: Sizes) -> jax.Array:
    """Maps noisy images (B, H, W, 4), times and labels (B,) to (B, H, W, 4)."""
    rows, side = images.shape[0], s.image // s.patch
    x = images.reshape(rows, side, s.patch, side, s.patch, 4).transpose(0, 1, 3, 2, 4, 5)
    x = with_sharding_annotation(x.reshape(rows, side * side, -1) @ params['inward'], 'residual')
    waves = RADIANS * times[:, None] * jnp.exp(-jnp.linspace(0, 9, 128))
    waves = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1).astype(s.dtype)
    time = with_sharding_annotation(jax.nn.silu(waves @ params['time1']), 'row') @ params['time2']
    conditioning = jax.nn.silu(with_sharding_annotation(time + params['classes'][labels], 'row'))

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        shifts = with_sharding_annotation(conditioning @ w['shifts'], 'row')
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(shifts[:, None], 6, -1)
        x = x + gate1 * blocks.attention(modulated(x, shift1, scale1), w['attention'], s.heads)
        x = with_sharding_annotation(x, 'residual')
        x = x + gate2 * blocks.feed_forward(modulated(x, shift2, scale2), w['mlp'])
        return with_sharding_annotation(x, 'residual'), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params['layers'])
    shift, scale = jnp.split(
        with_sharding_annotation(conditioning @ params['last_shift'], 'row')[:, None], 2, -1
    )
    x = with_sharding_annotation(modulated(x, shift, scale) @ params['outward'], 'residual')
    x = x.reshape(rows, side, side, s.patch, s.patch, 4).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(images.shape)


def loss(params: Tree, batch: Tree, key: jax.Array, s: Sizes) -> jax.Array:
    images = batch['images']
    for_times, for_noise = jax.random.split(key)
    times = jax.random.uniform(for_times, images.shape[:1])
    noise = with_sharding_annotation(jax.random.normal(for_noise, images.shape), 'image')
    share = times[:, None, None, None]
    noisy = with_sharding_annotation((1 - share) * images + share * noise, 'image').astype(s.dtype)
    prediction = with_sharding_annotation(predict(params, noisy, times, batch['labels'], s), 'image')
    return jnp.mean(jnp.square(prediction.astype('float32') - (noise - images)))


def models(size: Size) -> list[Model]:
    """Returns a diffusion transformer."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        return {
            'images': jax.ShapeDtypeStruct((rows, s.image, s.image, 4), 'float32'),
            'labels': jax.ShapeDtypeStruct((rows,), 'int32'),
        }

    return [
        Model(
            'diffusion transformer',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch, key, s),
            columns_and_rows=RULE,
            hand=HAND,
            rows=2,
        )
    ]
