"""Loops over layers that run as pipelines over an axis of stages."""
