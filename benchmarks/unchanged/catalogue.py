"""All models of the table."""

from __future__ import annotations

from benchmarks.unchanged import decoders
from benchmarks.unchanged.model import Model, Size


def all_models(size: Size) -> list[Model]:
    """Small ones run on simulated devices; large ones are for plans."""
    return [model for file in (decoders,) for model in file.models(size)]
