"""Input by Grain: each process reads only the examples it needs, and an interrupted run continues exactly.

    python -m examples.grain_input
    python -m examples.grain_input --checkpoints=runs/grain --stop_after=30   # then again, to continue
    python -m examples.launch.local --devices=4 -- -m examples.grain_input    # on two processes

The network and its training step are from `digits.py`. In addition, the digits of a batch are a function of
(seed, step) for any number of processes, each process loads only its own examples, and the position in the
data is saved with the parameters, so that no digit is repeated or skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import contextlib

import grain
import jax
import numpy as np
from absl import app, flags

from examples import digits
from examples.devices import choose_devices, quiet_logs
from scalax import distributed
from scalax.checkpoint import Checkpointer
from scalax.sharding import MeshShardingHelper, PartitionSpec

BATCH_SIZE = 128
SAVE_EVERY = 20
REPLICATED = PartitionSpec()


class Digits:
    """The data source of Grain: an object with a length, and an example for each index."""

    def __init__(self, examples: dict[str, np.ndarray]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples['label'])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: values[index] for name, values in self._examples.items()}


def process_batches(
    source: Digits, batch_size: int, examples: slice | np.ndarray, steps: int, seed: int
) -> grain.DatasetIterator:
    """Returns an iterator over this process's `examples` of `steps` batches of `batch_size`.

    The digits are reshuffled in each epoch. Example i of step n has index n * batch_size + i in that order,
    so all processes together load exactly the batch that a single process would load.
    """
    shuffled = grain.MapDataset.source(source).shuffle(seed).repeat()
    local = np.arange(batch_size)[examples]
    count = len(local)
    indices = grain.MapDataset.range(steps * count)
    loaded = indices.map(lambda i: shuffled[i // count * batch_size + int(local[i % count])])
    return iter(loaded.batch(count).to_iter_dataset())


def main(
    steps: int = 60, checkpoints: str | None = None, stop_after: int | None = None, seed: int = 0
) -> str:
    """Trains to the last step, from the last checkpoint, and returns a summary."""
    helper = MeshShardingHelper([-1], ['dp'], devices=choose_devices())
    step_fun = helper.sjit(
        lambda state, batch: pack(*digits.train_step(*state, batch)),
        in_shardings=(REPLICATED, PartitionSpec('dp')),
        out_shardings=REPLICATED,
        donate_argnums=0,
    )
    train, test = digits.load_data(seed)
    source = process_batches(Digits(train), BATCH_SIZE, helper.process_examples(BATCH_SIZE), steps, seed)
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(Checkpointer(checkpoints, save_every=SAVE_EVERY)) if checkpoints else None
        done = saved.latest_step() if saved else None
        if saved and done is not None:
            state = saved.restore(helper, REPLICATED, init, data=source)  # also moves the iterator
        else:
            state, done = helper.sjit(init, out_shardings=REPLICATED)(), 0
        started, loss = done, np.nan
        # Loads some batches ahead. `get_state` is the state after the current batch of the loop.
        batches = stack.enter_context(helper.prefetch(source, local_batch='addressable'))
        for batch in batches:
            state, loss = step_fun(state, batch)
            done += 1
            stopping = distributed.should_stop(done) or done == stop_after
            if saved:
                saved.save(done, state, data=batches, force=stopping or done == steps)
            if stopping:
                break
            float(loss)  # blocks, so that the host does not queue all steps at once
    predictions = helper.sjit(digits.predict, out_shardings=REPLICATED)(state[0], test['image'])
    accuracy = float(np.mean(np.asarray(predictions) == test['label']))
    last = f'loss {float(loss):.6f}' if done > started else 'nothing was left to do'
    return f'steps {started} to {done}: {last}, test accuracy {accuracy:.2%}'


def init() -> tuple:
    params = digits.init_params(jax.random.key(0))
    return params, digits.OPTIMIZER.init(params)


def pack(params: digits.Params, opt_state: object, loss: jax.Array) -> tuple[tuple, jax.Array]:
    return (params, opt_state), loss


def run(argv: list[str]) -> None:
    quiet_logs()
    distributed.initialize()
    summary = main(STEPS.value, CHECKPOINTS.value, STOP_AFTER.value)
    if jax.process_index() == 0:
        print(summary)


if __name__ == '__main__':
    STEPS = flags.DEFINE_integer('steps', 60, 'Training steps.', lower_bound=1)
    CHECKPOINTS = flags.DEFINE_string('checkpoints', None, 'Folder to save in, and to continue from.')
    STOP_AFTER = flags.DEFINE_integer('stop_after', None, 'Save and end after this step.', lower_bound=1)
    app.run(run)
