"""A decoder with local and global attention layers; a flag in the scanned layers selects which."""

from __future__ import annotations

import dataclasses
import functools
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
    head: int
    hidden: int
    vocabulary: int
    sequence: int
    window: int
    dtype: str


SIZES = {
    'small': Sizes(64, 4, 8, 4, 16, 128, 128, 16, 4, 'float32'),
    'large': Sizes(2048, 18, 8, 4, 256, 8192, 131_072, 2048, 512, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('embed', P('tp', 'fsdp')),
    ('output|down', P(None, 'tp', 'fsdp')),
    ('query|key|value|gate|up', P(None, 'fsdp', 'tp')),
    ('norm', P()),
)
HAND = {
    'residual': P('batch', None, None),
    'heads': P('batch', None, 'tp', None),
    'hidden': P('batch', None, 'tp'),
    'logits': P('batch', None, 'tp'),
}


def init(key: jax.Array, s: Sizes) -> Tree:
    """Draws the parameters; the embedding is also the output matrix."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, s.dtype) / math.sqrt(shape[-2])

    return {
        'embed': jax.random.normal(next(keys), (s.vocabulary, s.width), s.dtype) / math.sqrt(s.width),
        'layers': {
            'query': normal(s.layers, s.width, s.heads * s.head),
            'key': normal(s.layers, s.width, s.kv_heads * s.head),
            'value': normal(s.layers, s.width, s.kv_heads * s.head),
            'output': normal(s.layers, s.heads * s.head, s.width),
            'gate': normal(s.layers, s.width, s.hidden),
            'up': normal(s.layers, s.width, s.hidden),
            'down': normal(s.layers, s.hidden, s.width),
            'norms': jnp.zeros((s.layers, 4, s.width), s.dtype),
        },
        'final_norm': jnp.zeros(s.width, s.dtype),
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalizes by the root mean square, with one added to the scale."""
    mean = jnp.mean(jnp.square(x.astype('float32')), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * (1 + scale)


def rotate(x: jax.Array) -> jax.Array:
    """Rotates by positions: (B, S, H, D)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None].astype(x.dtype), jnp.cos(angles)[:, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attends with queries (B, Q, H, D), keys and values (B, K, G, D), and a mask."""
    batch, length, heads, size = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, size)
    scores = jnp.einsum('bqghd,bkgd->bghqk', q, k).astype('float32') / math.sqrt(size)
    scores = jnp.where(mask[:, None, None], 50 * jnp.tanh(scores / 50), -1e9)
    mixed = jnp.einsum('bghqk,bkgd->bqghd', jax.nn.softmax(scores).astype(v.dtype), v)
    return mixed.reshape(batch, length, heads, size)


def far(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attends to all earlier tokens."""
    length = q.shape[1]
    return attend(q, k, v, jnp.tril(jnp.ones((1, length, length), bool)))


def near(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    """Attends to a window: a block of tokens attends to itself and the block before it."""
    batch, length, heads, size = q.shape
    blocks = length // window

    def with_previous(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, blocks, window, *x.shape[2:])
        before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
        return jnp.concatenate([before, x], axis=2).reshape(batch * blocks, 2 * window, *x.shape[3:])

    ago = jnp.arange(window)[:, None] + window - jnp.arange(2 * window)
    mask = (ago >= 0) & (ago < window)
    first = jnp.arange(batch * blocks) % blocks == 0
    mask = mask & ~(first[:, None, None] & (jnp.arange(2 * window) < window))
    out = attend(q.reshape(batch * blocks, window, heads, size), with_previous(k), with_previous(v), mask)
    return out.reshape(batch, length, heads, size)


def loss(params: Tree, batch: Tree, key: jax.Array, s: Sizes) -> jax.Array:
    tokens = batch['tokens']

    def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, None]:
        w, is_near = scanned
        y = norm(x, w['norms'][0])

        def split(matrix: jax.Array) -> jax.Array:
            return with_sharding_annotation((y @ matrix).reshape(*y.shape[:2], -1, s.head), 'heads')

        q, k, v = rotate(split(w['query'])), rotate(split(w['key'])), split(w['value'])
        mixed = jax.lax.cond(is_near, functools.partial(near, window=s.window), far, q, k, v)
        mixed = with_sharding_annotation(mixed, 'heads').reshape(*x.shape[:2], -1)
        x = with_sharding_annotation(x + norm(mixed @ w['output'], w['norms'][1]), 'residual')
        y = norm(x, w['norms'][2])
        hidden = with_sharding_annotation(jax.nn.gelu(y @ w['gate']) * (y @ w['up']), 'hidden')
        return with_sharding_annotation(x + norm(hidden @ w['down'], w['norms'][3]), 'residual'), None

    x = with_sharding_annotation(params['embed'][tokens[:, :-1]] * math.sqrt(s.width), 'residual')
    is_near = jnp.arange(s.layers) % 2 == 0
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, (params['layers'], is_near))
    logits = jnp.einsum('bsd,vd->bsv', norm(x, params['final_norm']), params['embed'])
    logits = with_sharding_annotation(logits, 'logits').astype('float32')
    log_probs = jax.nn.log_softmax(30 * jnp.tanh(logits / 30))
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))


def models(size: Size) -> list[Model]:
    """Returns a model like Gemma: every second layer has a window."""
    s = SIZES[size]
    return [
        Model(
            'local and global attention',
            init=lambda key: init(key, s),
            batch=lambda rows: {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')},
            loss=lambda params, batch, key: loss(params, batch, key, s),
            columns_and_rows=RULE,
            hand=HAND,
        )
    ]
