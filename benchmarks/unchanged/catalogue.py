"""All models of the table."""

from __future__ import annotations

from benchmarks.unchanged import bert, decoders, diffusion, resnet, seq2seq, unet, vision
from benchmarks.unchanged.model import Model, Size

FILES = (decoders, seq2seq, bert, vision, unet, resnet, diffusion)


def all_models(size: Size) -> list[Model]:
    """Small ones run on simulated devices; large ones are for plans."""
    return [model for file in FILES for model in file.models(size)]
