"""An MLP-Mixer for one device: a model without existing sharding rules (docs/auto_sharding.md).

Usage: ``python -m scalax autoshard examples/mixer.py:make_step --topology v5e:2x4 --batch 1 --donate 0``.

Source: Tolstikhin et al., "MLP-Mixer: An all-MLP Architecture for Vision", NeurIPS 2021 (arXiv:2105.01601).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def init(key: jax.Array, layers: int, patches: int, channels: int, classes: int = 1024) -> Any:
    """Returns the weights of blocks, each with a pair of matrices over patches and a pair over channels."""
    keys = iter(jax.random.split(key, 4))

    def pair(width: int) -> dict[str, jax.Array]:
        shapes = {'up': (layers, width, 4 * width), 'down': (layers, 4 * width, width)}
        return {
            name: jax.random.normal(next(keys), shape) / shape[1] ** 0.5 for name, shape in shapes.items()
        }

    blocks = {'patches': pair(patches), 'channels': pair(channels)}
    return {'blocks': blocks, 'head': jnp.zeros((channels, classes))}


def loss(params: Any, batch: Any) -> jax.Array:
    """Returns the mean loss of images as patches, (batch, patches, channels), with labels, (batch,)."""

    def mix(x: jax.Array, weights: Any) -> jax.Array:
        return x + jax.nn.gelu(x @ weights['up']) @ weights['down']

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        x = mix(x.swapaxes(1, 2), weights['patches']).swapaxes(1, 2)
        return mix(x, weights['channels']), None

    x, _ = jax.lax.scan(jax.checkpoint(block), batch['images'], params['blocks'])
    log_probs = jax.nn.log_softmax(x.mean(1) @ params['head'])
    return -jnp.mean(jnp.take_along_axis(log_probs, batch['labels'][:, None], -1))


def train_step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Returns the weights after a step of gradient descent, and the loss."""
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def shapes(batch_size: int, layers: int, patches: int, channels: int) -> tuple[Any, Any]:
    """Returns the shapes of the arguments of `train_step`."""
    params = jax.eval_shape(lambda key: init(key, layers, patches, channels), jax.random.key(0))
    images = jax.ShapeDtypeStruct((batch_size, patches, channels), 'float32')
    return params, {'images': images, 'labels': jax.ShapeDtypeStruct((batch_size,), 'int32')}


def make_step() -> tuple[Any, tuple[Any, Any]]:
    """Returns the step and its arguments for ``python -m scalax autoshard``: 24 layers, 816M weights."""
    return train_step, shapes(batch_size=256, layers=24, patches=256, channels=2048)
