"""Checkpoints of any pytree, restored straight into the shardings that rules give on any mesh.

A `Checkpointer` saves and restores the state of a run, as a thin layer on Orbax (``pip install
orbax-checkpoint``); `load_safetensors` reads the files of the Hugging Face Hub.
"""

from scalax.checkpoint._checkpointer import Checkpointer
from scalax.checkpoint._description import Description, LeafDescription
from scalax.checkpoint._safetensors import load_safetensors

__all__ = ['Checkpointer', 'Description', 'LeafDescription', 'load_safetensors']
