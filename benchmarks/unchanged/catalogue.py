"""All models of the table."""

from __future__ import annotations

from benchmarks.unchanged import (
    actor_critic,
    bert,
    contrastive,
    decoders,
    diffusion,
    graph,
    recommender,
    recurrent,
    resnet,
    seq2seq,
    state_space,
    unet,
    vision,
)
from benchmarks.unchanged.model import Model, Size

FILES = (
    decoders,
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
)


def all_models(size: Size) -> list[Model]:
    """Small ones run on simulated devices; large ones are for plans."""
    return [model for file in FILES for model in file.models(size)]
