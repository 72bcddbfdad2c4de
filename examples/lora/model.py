"""The model: a LLaMA-style decoder with the weights of Hugging Face's checkpoints, adapters and a KV cache.

It covers LLaMA 1 to 3, Mistral without a sliding window, Qwen 2 and Qwen 3. The code is written for one
device and names no mesh axis. Letters in shapes: B sequences, S positions, T positions of the cache, D width,
L layers, H query heads, G key/value heads, K head size, R rank of the adapters, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

Tree = dict[str, Any]

MODEL_TYPES = ('llama', 'mistral', 'qwen2', 'qwen3')
LORA_SCALE = 2.0  # alpha / rank


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """LLaMA 3.1's interpolation of the rotary frequencies, for contexts longer than the original ones."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The sizes and constants of a decoder."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    norm_epsilon: float = 1e-6
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None

    @classmethod
    def read(cls, folder: str | Path) -> DecoderConfig:
        """Reads the `config.json` of a checkpoint.

        Raises:
          ValueError: the model is of a type, or has a setting, that this decoder does not implement.
        """
        values = json.loads((Path(folder) / 'config.json').read_text(encoding='utf-8'))
        rotary = values.get('rope_parameters') or values.get('rope_scaling') or {}  # as of transformers 5; 4
        rotary_type = rotary.get('rope_type', rotary.get('type', 'default'))
        window = values.get('sliding_window') if values.get('use_sliding_window', True) else None
        for name, value, supported in (
            ('model_type', values.get('model_type'), MODEL_TYPES),
            ('hidden_act', values.get('hidden_act', 'silu'), ('silu',)),
            ('rope_type', rotary_type, ('default', 'llama3')),
            ('sliding_window', window, (None,)),
        ):
            if value not in supported:
                expected = ', '.join(map(str, supported))
                raise ValueError(f'{folder}/config.json: {name} {value!r} is not supported, only {expected}')
        scaling = None
        if rotary_type == 'llama3':
            fields = dataclasses.fields(RotaryScaling)
            scaling = RotaryScaling(**{field.name: rotary[field.name] for field in fields})
        heads = values['num_attention_heads']
        return cls(
            layers=values['num_hidden_layers'],
            heads=heads,
            kv_heads=values.get('num_key_value_heads') or heads,
            head_size=values.get('head_dim') or values['hidden_size'] // heads,
            norm_epsilon=values['rms_norm_eps'],
            rotary_base=rotary.get('rope_theta') or values.get('rope_theta', 10_000.0),
            rotary_scaling=scaling,
        )


def forward(
    params: Tree,
    adapters: Tree,
    tokens: jax.Array,
    config: DecoderConfig,
    cache: jax.Array | None = None,
    start: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits [B, S, V] of the token after each of `tokens` [B, S], and the updated cache.

    Args:
      params: the frozen weights.
      adapters: the adapters of some of the linear layers, or {}.
      tokens: the tokens.
      config: the sizes.
      cache: the keys and values [L, 2, B, T, G, K] of the positions before `start`; None for training.
      start: the position of the first token.
    """
    rotation = rotary_angles(start + jnp.arange(tokens.shape[1]), config)
    x = params['embed_tokens']['weight'][tokens]

    @jax.checkpoint  # save only each layer's input; recompute the rest in the backward pass
    def layer(x: jax.Array, scanned: tuple) -> tuple[jax.Array, jax.Array | None]:
        weights, lora, layer_cache = scanned
        normed = rms_norm(x, weights['input_layernorm'], config)
        added, layer_cache = attention(
            normed, weights['self_attn'], lora.get('self_attn', {}), rotation, config, layer_cache, start
        )
        x = x + added
        normed = rms_norm(x, weights['post_attention_layernorm'], config)
        return x + mlp(normed, weights['mlp'], lora.get('mlp', {})), layer_cache

    x, cache = jax.lax.scan(layer, x, (params['layers'], adapters.get('layers', {}), cache))
    x = rms_norm(x, params['norm'], config)
    if 'lm_head' in params:
        return x @ params['lm_head']['kernel'], cache
    return x @ params['embed_tokens']['weight'].T, cache  # tied embeddings


def linear(x: jax.Array, weights: Tree, adapter: Tree | None = None) -> jax.Array:
    """Applies a linear layer, and adds `x A B` of its adapter, without computing the matrix `A B`."""
    y = x @ weights['kernel']
    if 'bias' in weights:
        y = y + weights['bias']
    if adapter is not None:
        a, b = (adapter[name].astype(x.dtype) for name in ('lora_a', 'lora_b'))
        y = y + LORA_SCALE * ((x @ a) @ b)
    return y


def attention(
    x: jax.Array,
    weights: Tree,
    adapters: Tree,
    rotation: tuple[jax.Array, jax.Array],
    config: DecoderConfig,
    cache: jax.Array | None,
    start: jax.Array | int,
) -> tuple[jax.Array, jax.Array | None]:
    """Applies causal attention to `x` [B, S, D], where H/G query heads share a key/value head."""

    def project(name: str) -> jax.Array:
        projected = linear(x, weights[name], adapters.get(name))
        return projected.reshape(*x.shape[:2], -1, config.head_size)

    q, k, v = project('q_proj'), project('k_proj'), project('v_proj')
    if 'q_norm' in weights:  # Qwen 3
        q, k = rms_norm(q, weights['q_norm'], config), rms_norm(k, weights['k_norm'], config)
    q, k = rotate(q, rotation), rotate(k, rotation)
    if cache is None:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    else:
        new = jnp.stack([k, v]).astype(cache.dtype)
        cache = jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=2)
        seen = jnp.arange(cache.shape[2]) <= start + jnp.arange(x.shape[1])[:, None]
        mixed = jax.nn.dot_product_attention(q, *cache, mask=seen)
    mixed = mixed.reshape(*x.shape[:2], -1)
    return linear(mixed, weights['o_proj'], adapters.get('o_proj')), cache


def mlp(x: jax.Array, weights: Tree, adapters: Tree) -> jax.Array:
    """Applies the SwiGLU feed-forward block to `x` [B, S, D]."""
    gate = linear(x, weights['gate_proj'], adapters.get('gate_proj'))
    up = linear(x, weights['up_proj'], adapters.get('up_proj'))
    return linear(jax.nn.silu(gate) * up, weights['down_proj'], adapters.get('down_proj'))


def rms_norm(x: jax.Array, weights: Tree, config: DecoderConfig) -> jax.Array:
    """Scales the vectors in the last dimension of `x` to unit mean square in float32, then by the weights."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_epsilon)
    return weights['weight'] * normed.astype(x.dtype)


def rotary_angles(positions: jax.Array, config: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines [S, 1, K/2] that rotate each pair of a head by its position [S]."""
    frequency = config.rotary_base ** (-jnp.arange(0, config.head_size, 2) / config.head_size)
    if (scaling := config.rotary_scaling) is not None:
        rotations = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = jnp.clip((rotations - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angle = positions[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the heads of `x` [B, S, heads, K] by position."""
    cos, sin = (part.astype(x.dtype) for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def init_adapters(key: jax.Array, layers: Tree, targets: Sequence[str], rank: int) -> Tree:
    """Returns float32 adapters of the linear layers with the names `targets`: A is random, and B is zero.

    Args:
      key: a random key.
      layers: the stacked layers of the model, or their shapes.
      targets: names such as `q_proj`.
      rank: R, the rank of the adapters.
    """
    adapters: Tree = {}
    for block in ('self_attn', 'mlp'):
        for name in sorted(layers[block].keys() & {*targets}):
            key, a_key = jax.random.split(key)
            count, inputs, outputs = layers[block][name]['kernel'].shape
            a = jax.random.normal(a_key, (count, inputs, rank)) / math.sqrt(inputs)
            pair = {'lora_a': a, 'lora_b': jnp.zeros((count, rank, outputs))}
            adapters.setdefault(block, {})[name] = pair
    return {'layers': adapters}


def merge(params: Tree, adapters: Tree) -> Tree:
    """Returns weights with the adapters added, in the dtype of the weights. They are rounded to it once."""

    def added(weights: Tree, lora: Tree) -> Tree:
        if 'lora_a' in lora:
            kernel = weights['kernel']
            delta = LORA_SCALE * (lora['lora_a'] @ lora['lora_b'])
            return {**weights, 'kernel': (kernel + delta).astype(kernel.dtype)}
        return {name: added(value, lora[name]) if name in lora else value for name, value in weights.items()}

    return added(params, adapters)
