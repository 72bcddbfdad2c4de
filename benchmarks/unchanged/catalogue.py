"""All models of the table."""

from __future__ import annotations

from benchmarks.unchanged import bert, decoders, seq2seq, vision
from benchmarks.unchanged.model import Model, Size

FILES = (decoders, seq2seq, bert, vision)


def all_models(size: Size) -> list[Model]:
    """Small ones run on simulated devices; large ones are for plans."""
    return [model for file in FILES for model in file.models(size)]
