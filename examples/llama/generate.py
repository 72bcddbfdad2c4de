"""Sampling from a trained model, one byte after another from a sliding window."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from examples.llama.model import ModelConfig, Params, forward


def make_generate(
    model: ModelConfig, length: int = 256, temperature: float = 0.7
) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """Returns `generate(params, prompts [B, S], key) -> bytes [B, length]`.

    The bytes continue the prompts. At every step the model recomputes the last S bytes, which is short code,
    but S times the work of a decoder with a key/value cache.
    """

    def generate(params: Params, prompts: jax.Array, key: jax.Array) -> jax.Array:
        def write_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = forward(params, window, model)[:, -1]
            byte = jax.random.categorical(key, logits / temperature).astype(window.dtype)
            return jnp.concatenate([window[:, 1:], byte[:, None]], axis=1), byte

        _, written = jax.lax.scan(write_byte, prompts, jax.random.split(key, length))
        return written.T

    return generate
