"""The training step of the adapters and the decoding step: pure functions, without mesh or devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.lora.model import DecoderConfig, Tree, forward, init_adapters


def make_init(
    params: Tree, optimizer: optax.GradientTransformation, targets: Sequence[str], rank: int
) -> Callable[[jax.Array], Tree]:
    """Returns `init(key) -> state`, which makes adapters for the weights `params`."""
    layers = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params['layers'])

    def init(key: jax.Array) -> Tree:
        adapters = init_adapters(key, layers, targets, rank)
        return {'adapters': adapters, 'opt_state': optimizer.init(adapters), 'step': 0}

    return init


def make_step(
    config: DecoderConfig, optimizer: optax.GradientTransformation
) -> Callable[[Tree, Tree, jax.Array], tuple[Tree, jax.Array]]:
    """Returns `step(state, params, tokens [B, S + 1]) -> (state, loss [])`, which trains the adapters."""

    def mean_loss(adapters: Tree, params: Tree, tokens: jax.Array) -> jax.Array:
        logits, _ = forward(params, adapters, tokens[:, :-1], config)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype('float32'), tokens[:, 1:])
        return losses.mean()

    def step(state: Tree, params: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(state['adapters'], params, tokens)
        updates, opt_state = optimizer.update(gradients, state['opt_state'], state['adapters'])
        adapters = optax.apply_updates(state['adapters'], updates)
        return {'adapters': adapters, 'opt_state': opt_state, 'step': state['step'] + 1}, loss

    return step


def make_decode(
    config: DecoderConfig,
) -> Callable[[Tree, Tree, jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]:
    """Returns `decode(params, adapters, cache, tokens [B, S], start) -> (next tokens [B, 1], cache)`."""

    def decode(
        params: Tree, adapters: Tree, cache: jax.Array, tokens: jax.Array, start: int
    ) -> tuple[jax.Array, jax.Array]:
        logits, cache = forward(params, adapters, tokens, config, cache, start)
        return jnp.argmax(logits[:, -1:], axis=-1), cache

    return decode


def new_cache(config: DecoderConfig, sequences: int, length: int, dtype: Any) -> jax.Array:
    """Returns an empty cache [L, 2, B, T, G, K] of keys and values."""
    return jnp.zeros((config.layers, 2, sequences, length, config.kv_heads, config.head_size), dtype)
