"""The optimizer, the loss and the interface that the five models share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from scalax.sharding import ShardingRule

FRAMEWORKS = ('plain', 'linen', 'nnx', 'equinox', 'haliax')
OPTIMIZER = optax.adamw(3e-3)


@dataclasses.dataclass(frozen=True)
class Program:
    """A model and its training step, for one device, and the rule that shards its state.

    Attributes:
        init: key -> state, a pytree.
        train_step: (state, tokens [B, S + 1]) -> (state, loss []).
        logits: (state, tokens [B, S]) -> [B, S, V].
        rule: the rule for the state, over the mesh axes fsdp and tp.
    """

    init: Callable[[jax.Array], Any]
    train_step: Callable[[Any, jax.Array], tuple[Any, jax.Array]]
    logits: Callable[[Any, jax.Array], jax.Array]
    rule: ShardingRule


def mean_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of logits [..., S, V] for tokens [..., S + 1], in nats per byte."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:]))
