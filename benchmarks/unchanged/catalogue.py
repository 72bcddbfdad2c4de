"""All models of the table."""

from __future__ import annotations

from benchmarks.unchanged import (
    decoders,
    experts,
    flash,
    linen_modules,
    local_global,
    nnx_modules,
    per_example,
    variants,
)
from benchmarks.unchanged.model import Model, Size

FILES = (decoders, local_global, experts, per_example, nnx_modules, linen_modules, variants, flash)


def all_models(size: Size) -> list[Model]:
    """Small ones run on simulated devices; large ones are for plans."""
    return [model for file in FILES for model in file.models(size)]
