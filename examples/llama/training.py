"""The train state and the training step: pure functions, without mesh or devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.llama.model import ModelConfig, Params, forward, init_params
from scalax.sharding import with_sharding_annotation


class TrainState(NamedTuple):
    """The state of a run between steps."""

    step: jax.Array  # [] int32: number of completed steps
    params: Params
    opt_state: optax.OptState
    rng: jax.Array  # [] typed PRNG key: step n uses its n-th fold


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warmup, cosine decay to a tenth, and clipping by the global norm."""

    steps: int
    learning_rate: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the optimizer of `config`."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.steps, config.warmup + 1),
        end_value=config.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay),
    )


def make_init(
    model: ModelConfig, optimizer: optax.GradientTransformation
) -> Callable[[jax.Array], TrainState]:
    """Returns `init(key) -> state`, the state before the first step."""

    def init(key: jax.Array) -> TrainState:
        params_key, rng = jax.random.split(key)
        params = init_params(params_key, model)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), rng)

    return init


def make_train_step(
    model: ModelConfig, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]:
    """Returns `train_step(state, tokens [B, S + 1]) -> (state, loss [])`; losses in nats per byte."""

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        dropout_key = jax.random.fold_in(state.rng, state.step)

        def mean_loss(params: Params) -> jax.Array:
            return jnp.mean(sequence_losses(params, tokens, model, dropout_key))

        loss, gradients = jax.value_and_grad(mean_loss)(state.params)
        gradients = with_sharding_annotation(gradients, 'gradients')
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, state.rng), loss

    return train_step


def sequence_losses(
    params: Params, tokens: jax.Array, model: ModelConfig, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Returns the loss [B] of each sequence of `tokens` [B, S + 1], in nats per byte."""
    logits = forward(params, tokens[:, :-1], model, dropout_key)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses, axis=-1)
