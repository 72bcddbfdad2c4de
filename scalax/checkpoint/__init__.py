"""Checkpoints of any pytree, restored into the shardings that rules give on any mesh.

A `Checkpointer` saves and restores the state of a run. Orbax (``pip install orbax-checkpoint``) writes and
reads the arrays. scalax adds what Orbax lacks: one writer per directory, agreement of the processes on what
they save, and a manifest of the files of each step. `load_safetensors` reads files of the Hugging Face Hub.
"""

from scalax.checkpoint._checkpointer import Checkpointer
from scalax.checkpoint._safetensors import load_safetensors

__all__ = ['Checkpointer', 'load_safetensors']
