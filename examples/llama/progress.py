"""Checkpoints of the progress of a run: its state and its losses.

A batch is a function of (seed, step), and the state contains the root of all random keys. The next step
depends on nothing else, so a continued run has the losses of an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from etils import epath

from examples.llama.options import Options
from examples.llama.trainer import REPLICATED, Trainer
from examples.llama.training import TrainState
from scalax.checkpoint import Checkpointer


@dataclasses.dataclass
class Progress:
    """The progress of a run."""

    state: TrainState
    untrained: float  # validation loss before the first step
    losses: list[jax.Array | float]  # of each completed step

    @property
    def step(self) -> int:
        return len(self.losses)


class Checkpoints:
    """The checkpoints of a run: a folder with `steps/`, and with `run.json`, which identifies the run."""

    def __init__(self, folder: str, trainer: Trainer, options: Options) -> None:
        self._trainer, self._steps, self._every = trainer, options.optimizer.steps, options.save_every
        require_same(epath.Path(folder) / 'run.json', options.run)
        self._checkpointer = Checkpointer(epath.Path(folder) / 'steps')

    def restore(self) -> Progress | None:
        """Returns the progress at the last saved step, or None if there is none."""
        if self._checkpointer.latest_step() is None:
            return None
        like = {
            'state': self._trainer.abstract_state(),
            'untrained': 0.0,
            'losses': jax.ShapeDtypeStruct((self._steps,), jnp.float32),
        }
        rules = {'state': self._trainer.strategy.state, 'untrained': REPLICATED, 'losses': REPLICATED}
        tree = self._checkpointer.restore(self._trainer.helper, rules, like)
        losses = np.asarray(tree['losses'])[: int(tree['state'].step)]
        return Progress(tree['state'], tree['untrained'], losses.tolist())

    def save(self, progress: Progress, now: bool = False) -> None:
        """Saves at each interval, or `now`. Files are written while the next steps run."""
        if not now and progress.step % self._every:
            return
        losses = np.zeros(self._steps, np.float32)
        losses[: progress.step] = [float(loss) for loss in progress.losses]
        tree = {
            'state': progress.state,
            'untrained': progress.untrained,
            'losses': self._trainer.helper.shard(losses, REPLICATED),
        }
        self._checkpointer.save(progress.step, tree)

    def close(self) -> None:
        """Waits until all files are written."""
        self._checkpointer.close()


def require_same(file: epath.Path, run: dict[str, Any]) -> None:
    """Raises an error if a file identifies another run, and creates the file if it does not exist."""
    try:
        before = json.loads(file.read_text())
    except FileNotFoundError:
        if jax.process_index() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Written under another name first, so that a reader never sees half of it, even after a kill.
            unfinished = file.with_suffix('.unfinished')
            unfinished.write_text(json.dumps(run, indent=2) + '\n')
            unfinished.replace(file)
        return
    if differing := [name for name in run if run[name] != before.get(name)]:
        changes = [f'  {name} is {run[name]}, and was {before.get(name)}' for name in differing]
        raise app.UsageError(
            '\n'.join(
                [
                    f'--checkpoints {file.parent} holds another run:',
                    *changes,
                    'Give the flags of that run to continue it, or another folder to start a new one.',
                ]
            )
        )
