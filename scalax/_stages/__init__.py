"""Pipelines: loops over layers that are sharded over a mesh axis run where the layers are."""
