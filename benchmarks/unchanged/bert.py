"""BERT: padded rows, dropout, and a loss over the masked positions of each row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    masked: int
    dtype: str


SIZES = {
    'small': Sizes(32, 2, 4, 64, 64, 8, 2, 'float32'),
    'large': Sizes(1024, 24, 16, 4096, 30_528, 512, 80, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('tokens', P('tp', 'fsdp')),
    ('places|kinds', P(None, 'fsdp')),
    ('transform', P('fsdp', None)),
    ('output|down', blocks.ROWS),
    ('query|key|value|up', blocks.COLUMNS),
    ('norm|bias', P()),
)


def init(key: jax.Array, s: Sizes) -> Tree:
    draw = blocks.Draw(key, s.dtype)
    return {
        'tokens': draw.normal(s.vocabulary, s.width),
        'places': draw.normal(s.sequence, s.width),
        'kinds': draw.normal(2, s.width),
        'first_norm': draw.norm(s.width),
        'layers': {
            'attention': draw.attention(s.layers, s.width),
            'mlp': draw.feed_forward(s.layers, s.width, s.hidden),
            'norm1': draw.norm(s.layers, s.width),
            'norm2': draw.norm(s.layers, s.width),
        },
        'transform': draw.normal(s.width, s.width),
        'last_norm': draw.norm(s.width),
        'bias': jnp.zeros(s.vocabulary, s.dtype),
    }


def dropout(x: jax.Array, key: jax.Array, rate: float = 0.1) -> jax.Array:
    """Zeros random elements; each element needs one random bit."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def loss(params: Tree, batch: Tree, key: jax.Array, s: Sizes) -> jax.Array:
    tokens = batch['tokens']
    bias = jnp.where(batch['mask'] > 0, 0.0, -1e9)[:, None, None, :]
    first, rest = jax.random.split(key)

    x = params['tokens'][tokens] + params['places'] + params['kinds'][batch['kinds']]
    x = with_sharding_annotation(dropout(blocks.layer_norm(x, params['first_norm']), first), 'residual')

    def layer(x: jax.Array, inputs: tuple[Tree, jax.Array]) -> tuple[jax.Array, None]:
        w, key = inputs
        attention_key, mlp_key = jax.random.split(key)
        y = with_sharding_annotation(blocks.attention(x, w['attention'], s.heads, bias), 'residual')
        x = with_sharding_annotation(blocks.layer_norm(x + dropout(y, attention_key), w['norm1']), 'residual')
        y = with_sharding_annotation(blocks.feed_forward(x, w['mlp']), 'residual')
        x = blocks.layer_norm(x + dropout(y, mlp_key), w['norm2'])
        return with_sharding_annotation(x, 'residual'), None

    keys = jax.random.split(rest, s.layers)
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, (params['layers'], keys))
    masked = with_sharding_annotation(jnp.take_along_axis(x, batch['places'][:, :, None], 1), 'residual')
    y = blocks.layer_norm(jax.nn.gelu(masked @ params['transform']), params['last_norm'])
    y = with_sharding_annotation(y, 'residual')
    logits = with_sharding_annotation(y @ params['tokens'].T + params['bias'], 'logits')
    weights = batch['weights']
    return jnp.sum(blocks.cross_entropy(logits, batch['labels']) * weights) / (jnp.sum(weights) + 1e-5)


def models(size: Size) -> list[Model]:
    """Returns BERT."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        tokens = jax.ShapeDtypeStruct((rows, s.sequence), 'int32')
        masked = jax.ShapeDtypeStruct((rows, s.masked), 'int32')
        weights = jax.ShapeDtypeStruct((rows, s.masked), 'float32')
        return {
            'tokens': tokens,
            'mask': tokens,
            'kinds': tokens,
            'places': masked,
            'labels': masked,
            'weights': weights,
        }

    def example(rows: int) -> Tree:
        rng = np.random.default_rng(1)
        lengths = 4 + np.arange(rows) % (s.sequence - 3)
        mask = (np.arange(s.sequence) < lengths[:, None]).astype('int32')
        tokens = rng.integers(0, s.vocabulary, (rows, s.sequence), 'int32') * mask
        return {
            'tokens': tokens,
            'mask': mask,
            'kinds': tokens % 2,
            'places': rng.integers(0, 4, (rows, s.masked), 'int32'),
            'labels': rng.integers(0, s.vocabulary, (rows, s.masked), 'int32'),
            'weights': (rng.random((rows, s.masked)) < 0.8).astype('float32'),
        }

    return [
        Model(
            'BERT',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch, key, s),
            columns_and_rows=RULE,
            hand=blocks.HAND,
            example=example,
        )
    ]
