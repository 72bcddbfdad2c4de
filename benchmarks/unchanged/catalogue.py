"""The models of the table."""

from __future__ import annotations

from benchmarks.unchanged import (
    actor_critic,
    bert,
    contrastive,
    decoders,
    diffusion,
    experts,
    flash,
    graph,
    linen_modules,
    llama,
    local_global,
    nnx_modules,
    optimizers,
    per_example,
    recommender,
    recurrent,
    resnet,
    seq2seq,
    state_space,
    unet,
    variants,
    vision,
)
from benchmarks.unchanged.model import Model, Size

FILES = (
    decoders,
    local_global,
    experts,
    per_example,
    nnx_modules,
    linen_modules,
    variants,
    flash,
    seq2seq,
    bert,
    vision,
    unet,
    resnet,
    diffusion,
    recurrent,
    state_space,
    contrastive,
    recommender,
    graph,
    actor_critic,
    llama,
    optimizers,
)


def all_models(size: Size) -> list[Model]:
    """Returns all models: small ones to run on simulated devices, or large ones to plan."""
    return [model for file in FILES for model in file.models(size)]
