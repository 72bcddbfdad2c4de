"""Pipelines: a step of LLaMA-3 whose stages an expert has written, and what it moves and needs."""
