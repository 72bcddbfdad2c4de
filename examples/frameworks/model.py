"""What the five models have in common: their optimizer, their loss, and what `training.py` takes of each."""

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
    """A model and its training, for one device; and the rule that shards it.

    Attributes:
        init: key -> state, a pytree.
        train_step: (state, tokens [B, S + 1]) -> (state, loss []).
        logits: (state, tokens [B, S]) -> [B, S, V].
        rule: by the paths of parameters, or by the names of their dimensions, over the mesh axes fsdp and tp.
    """

    init: Callable[[jax.Array], Any]
    train_step: Callable[[Any, jax.Array], tuple[Any, jax.Array]]
    logits: Callable[[Any, jax.Array], jax.Array]
    rule: ShardingRule


def mean_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss of logits [..., S, V] for tokens [..., S + 1], in nats a byte."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:]))
