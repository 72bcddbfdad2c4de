"""A LLaMA-style decoder trained on real text, with its sharding chosen by a flag.

Read it in this order:

- `model.py`: the decoder, in plain JAX. It names its activations and does not depend on a mesh.
- `strategies.py`: a table of sharding strategies, and the only file that names mesh axes.
- `training.py`: the train state, and the pure functions that create and update it.
- `trainer.py`: these functions, compiled for a strategy and a mesh.
- `train.py`: the entry point.

The other files: `data.py` (text to batches), `generate.py` (sampling), `options.py` (the flags),
`settings.py` (checks of the flags), `mesh_choice.py` (the mesh), `progress.py` (checkpoints), `restart.py`
(time of a restart), `interrupt.py` (Ctrl-C), `report.py` (the results).
"""
