"""The model: a LLaMA-style decoder over bytes, in plain JAX.

The code is written for one device, without mesh axes. It names its activations with
`with_sharding_annotation`, for strategies that shard them in more dimensions than the batch. `ACTIVATIONS`
lists the names. Letters in shapes: B sequences, S positions, D width, L layers, H query heads, G key/value
heads, K head size, F hidden units of the feed-forward block, V bytes in the vocabulary.

References: LLaMA (arXiv:2302.13971), RMSNorm (arXiv:1910.07467), rotary embeddings
(arXiv:2104.09864), grouped-query attention (arXiv:2305.13245), SwiGLU (arXiv:2002.05202).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from scalax.sharding import with_sharding_annotation

ACTIVATIONS = {
    'residual': ('batch', 'sequence', 'width'),
    'block_input': ('batch', 'sequence', 'width'),
    'query': ('batch', 'sequence', 'heads', 'head_size'),
    'key_value': ('batch', 'sequence', 'kv_heads', 'head_size'),
    'hidden': ('batch', 'sequence', 'hidden'),
    'logits': ('batch', 'sequence', 'vocabulary'),
}
"""The names of activations, and the dimensions of each activation."""

Params = dict[str, Any]  # arrays, and under 'layers' a dict of arrays


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder. The defaults suit a laptop."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 256
    dropout: float = 0.0
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-6

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Units of the feed-forward block: 8/3 of the width, rounded up to a multiple of 64."""
        return 64 * math.ceil(8 * self.width / 3 / 64)


def init_params(key: jax.Array, config: ModelConfig) -> Params:
    """Returns untrained float32 parameters. The parameters of the L layers are stacked for a scan."""
    width, layers, hidden = config.width, config.layers, config.hidden
    query_width = config.heads * config.head_size
    kv_width = config.kv_heads * config.head_size
    keys = iter(jax.random.split(key, 9))

    def normal(*shape: int, gain: float = 1.0) -> jax.Array:
        """Returns weights that preserve the variance of their input, the next-to-last dimension."""
        return jax.random.normal(next(keys), shape) * (gain / math.sqrt(shape[-2]))

    into_residual = 1 / math.sqrt(2 * layers)  # 2L branches are summed in the residual stream
    return {
        'embed': jax.random.normal(next(keys), (config.vocabulary, width)),
        'layers': {
            'attention_norm': jnp.ones((layers, width)),
            'query': normal(layers, width, query_width),
            'key': normal(layers, width, kv_width),
            'value': normal(layers, width, kv_width),
            'output': normal(layers, query_width, width, gain=into_residual),
            'mlp_norm': jnp.ones((layers, width)),
            'gate': normal(layers, width, hidden),
            'up': normal(layers, width, hidden),
            'down': normal(layers, hidden, width, gain=into_residual),
        },
        'final_norm': jnp.ones((width,)),
        'unembed': normal(width, config.vocabulary),
    }


def forward(
    params: Params, tokens: jax.Array, config: ModelConfig, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Returns the logits [B, S, V] of the byte after each of `tokens` [B, S].

    With a `dropout_key`, the outputs of blocks are dropped with the probability `config.dropout`.
    """
    rotation = rotary_angles(tokens.shape[1], config)
    x = params['embed'][tokens]
    x = with_sharding_annotation(x, 'residual')

    @jax.checkpoint  # save only each layer's input; recompute the rest in the backward pass
    def layer(x: jax.Array, scanned: tuple) -> tuple[jax.Array, None]:
        weights, key = scanned
        attention_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        normed = block_input(x, weights['attention_norm'], config)
        added = attention(normed, weights, rotation, config)
        x = with_sharding_annotation(x + drop(added, attention_key, config), 'residual')
        added = mlp(block_input(x, weights['mlp_norm'], config), weights)
        x = with_sharding_annotation(x + drop(added, mlp_key, config), 'residual')
        return x, None

    keys = None if dropout_key is None else jax.random.split(dropout_key, config.layers)
    x, _ = jax.lax.scan(layer, x, (params['layers'], keys))
    logits = block_input(x, params['final_norm'], config) @ params['unembed']
    return with_sharding_annotation(logits, 'logits')


def block_input(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
    """Applies RMSNorm: scales each vector of `x` [B, S, D] to unit mean square, then by `scale` [D]."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    normed = x * jax.lax.rsqrt(mean_square + config.norm_epsilon) * scale
    return with_sharding_annotation(normed, 'block_input')


def rotary_angles(sequence: int, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines [S, 1, K/2] that rotate each pair of a head by position."""
    frequency = config.rotary_base ** (-jnp.arange(0, config.head_size, 2) / config.head_size)
    angle = jnp.arange(sequence)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the heads of `x` [B, S, heads, K] by position, so that q . k depends on distances only."""
    cos, sin = (part.astype(x.dtype) for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attention(
    x: jax.Array,
    weights: dict[str, jax.Array],
    rotation: tuple[jax.Array, jax.Array],
    config: ModelConfig,
) -> jax.Array:
    """Applies causal attention to `x` [B, S, D], where H/G query heads share a key/value head."""
    batch, sequence, _ = x.shape
    groups, size = config.kv_heads, config.head_size
    q = (x @ weights['query']).reshape(batch, sequence, config.heads, size)
    k = (x @ weights['key']).reshape(batch, sequence, groups, size)
    v = (x @ weights['value']).reshape(batch, sequence, groups, size)
    q = with_sharding_annotation(rotate(q, rotation), 'query')
    k = with_sharding_annotation(rotate(k, rotation), 'key_value')
    v = with_sharding_annotation(v, 'key_value')

    q = q.reshape(batch, sequence, groups, config.heads // groups, size)
    scores = jnp.einsum('bqghk,btgk->bghqt', q, k) / math.sqrt(size)
    causal = jnp.tril(jnp.ones((sequence, sequence), bool))
    scores = jnp.where(causal, scores, -jnp.inf)
    mixed = jnp.einsum('bghqt,btgk->bqghk', jax.nn.softmax(scores), v)
    mixed = with_sharding_annotation(mixed.reshape(batch, sequence, config.heads, size), 'query')
    return mixed.reshape(batch, sequence, config.heads * size) @ weights['output']


def mlp(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Applies the SwiGLU feed-forward block to `x` [B, S, D]."""
    hidden = jax.nn.silu(x @ weights['gate']) * (x @ weights['up'])
    hidden = with_sharding_annotation(hidden, 'hidden')
    return hidden @ weights['down']


def drop(x: jax.Array, key: jax.Array | None, config: ModelConfig) -> jax.Array:
    """Applies dropout to `x`. Does nothing without a key."""
    if key is None or config.dropout == 0:
        return x
    keep = 1 - config.dropout
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)
