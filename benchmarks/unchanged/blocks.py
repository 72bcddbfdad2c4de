"""Code that several transformers share: weights, norms, attention, feed-forward layers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged.model import Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import with_sharding_annotation

# Specs of stacked layers: (layers, in, out).
COLUMNS = P(None, 'fsdp', 'tp')
ROWS = P(None, 'tp', 'fsdp')
HAND = {
    'residual': P('batch', None, None),
    'heads': P('batch', None, 'tp', None),
    'hidden': P('batch', None, 'tp'),
    'logits': P('batch', None, 'tp'),
}


class Draw:
    """Draws weights, each with a separate key."""

    def __init__(self, key: jax.Array, dtype: Any) -> None:
        self.key, self.dtype, self.count = key, dtype, 0

    def normal(self, *shape: int) -> jax.Array:
        """Draws a matrix, or several, (..., in, out)."""
        return self._scaled(shape, shape[-2])

    def kernel(self, size: int, inputs: int, outputs: int) -> jax.Array:
        """Draws the kernel of a convolution over images: (size, size, in, out)."""
        return self._scaled((size, size, inputs, outputs), size * size * inputs)

    def attention(self, layers: int, width: int, context: int | None = None) -> Tree:
        """Draws four matrices: queries come from *width* features, keys and values from *context*."""
        context = width if context is None else context
        return {
            'query': self.normal(layers, width, width),
            'key': self.normal(layers, context, width),
            'value': self.normal(layers, context, width),
            'output': self.normal(layers, width, width),
        }

    def feed_forward(self, layers: int, width: int, hidden: int, gated: bool = False) -> Tree:
        """Draws two matrices, or three."""
        gate = {'gate': self.normal(layers, width, hidden)} if gated else {}
        return {**gate, 'up': self.normal(layers, width, hidden), 'down': self.normal(layers, hidden, width)}

    def norm(self, *shape: int) -> Tree:
        """Returns a scale and a bias."""
        return {'scale': jnp.ones(shape, self.dtype), 'bias': jnp.zeros(shape, self.dtype)}

    def _scaled(self, shape: tuple[int, ...], inputs: int) -> jax.Array:
        self.count += 1
        key = jax.random.fold_in(self.key, self.count)
        return jax.random.normal(key, shape, self.dtype) / math.sqrt(inputs)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalizes the last dimension in float32."""
    mean = jnp.mean(jnp.square(x.astype('float32')), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def layer_norm(x: jax.Array, w: Tree | None = None) -> jax.Array:
    """Normalizes the last dimension in float32, and scales and shifts it if there are weights."""
    y = x.astype('float32')
    y = y - jnp.mean(y, -1, keepdims=True)
    y = (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)).astype(x.dtype)
    return y if w is None else y * w['scale'] + w['bias']


def attention(
    x: jax.Array, w: Tree, heads: int, bias: Any = 0.0, context: jax.Array | None = None
) -> jax.Array:
    """Maps (B, Q, D) to (B, Q, D); *bias* is added to the scores, (B, H, Q, K)."""
    context = x if context is None else context

    def split(y: jax.Array) -> jax.Array:
        return with_sharding_annotation(y.reshape(*y.shape[:2], heads, -1), 'heads')

    q, k, v = split(x @ w['query']), split(context @ w['key']), split(context @ w['value'])
    scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax((scores + bias).astype('float32')).astype(x.dtype)
    mixed = with_sharding_annotation(jnp.einsum('bhqk,bkhd->bqhd', weights, v), 'heads')
    return mixed.reshape(*mixed.shape[:2], -1) @ w['output']


def feed_forward(x: jax.Array, w: Tree) -> jax.Array:
    """Maps (B, S, D) to (B, S, D), gated if there is a gate."""
    hidden = jax.nn.gelu(x @ w['gate']) * (x @ w['up']) if 'gate' in w else jax.nn.gelu(x @ w['up'])
    return with_sharding_annotation(hidden, 'hidden') @ w['down']


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the loss of each label: logits (..., V), labels (...)."""
    log_probs = jax.nn.log_softmax(logits.astype('float32'))
    return -jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
