"""Pipelines: a step of LLaMA-3 with hand-written stages, and its communication and memory."""
