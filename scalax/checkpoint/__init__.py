"""Checkpoints of any pytree, restored straight into the shardings that these rules give on this mesh.

A thin layer on Orbax, which is imported where it is used: ``pip install orbax-checkpoint``.
"""

from scalax.checkpoint._checkpointer import Checkpointer
from scalax.checkpoint._describe import Description, LeafDescription
from scalax.checkpoint._safetensors import load_safetensors

__all__ = ['Checkpointer', 'Description', 'LeafDescription', 'load_safetensors']
