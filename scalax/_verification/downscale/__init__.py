"""Downscaling: a small step that stands for a step on a large mesh."""
