"""Pipelines: loops over layers that lie over a mesh axis run where the layers are."""
