"""A LLaMA-style decoder trained on real text, with its sharding chosen by a flag.

Read it in this order:

- `model.py`: the decoder, in plain JAX. It names its activations and knows no mesh.
- `strategies.py`: the sharding strategies, one table; the only file that names mesh axes.
- `training.py`: the train state and the pure functions that make and advance it.
- `trainer.py`: where those functions, a strategy and a mesh meet.
- `train.py`: the entry point.

Around these: `data.py` (text to batches), `generate.py` (sampling), `options.py` (the flags),
`settings.py` (which flags go together), `progress.py` (checkpoints), `interrupt.py` (Ctrl-C), `report.py`
(what a run leaves).
"""
