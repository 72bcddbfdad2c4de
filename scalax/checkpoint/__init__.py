"""Checkpoints of any pytree, restored straight into the shardings that rules give on any mesh.

A `Checkpointer` saves and restores the state of a run. Orbax (``pip install orbax-checkpoint``) writes and
reads its arrays; what it lacks is here: one writer of a directory, processes that all save the same or
nothing, and steps of which every file is known. `load_safetensors` reads the files of the Hugging Face Hub.
"""

from scalax.checkpoint._checkpointer import Checkpointer
from scalax.checkpoint._safetensors import load_safetensors

__all__ = ['Checkpointer', 'load_safetensors']
