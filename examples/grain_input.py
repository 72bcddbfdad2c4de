"""Input by Grain: each process reads the rows it needs, and a run goes on where it was ended.

    python -m examples.grain_input
    python -m examples.grain_input --checkpoints=runs/grain --stop_after=30   # then again, to go on
    python -m examples.launch.local --devices=4 -- -m examples.grain_input    # on two processes

The network and its training step are those of `digits.py`. What is new here: which digits are in a batch is
a function of (seed, step), whatever the number of processes, and each of them loads its own rows only; the
place in the data is saved with the parameters, so that no digit is seen twice or left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # started as a file and not by -m: imports are from the root of the clone
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
    """Where Grain reads: anything with a length, and an example for each index."""

    def __init__(self, examples: dict[str, np.ndarray]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples['label'])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: values[index] for name, values in self._examples.items()}


def own_batches(
    source: Digits, size: int, rows: slice | np.ndarray, steps: int, seed: int
) -> grain.DatasetIterator:
    """Returns an iterator over this process's `rows` of `steps` batches of `size`.

    The digits are shuffled anew in each epoch. Row i of step n is at place n * size + i of that order, so
    all processes together bring exactly the batch that one alone would.
    """
    shuffled = grain.MapDataset.source(source).shuffle(seed).repeat()
    own = np.arange(size)[rows]
    places = grain.MapDataset.range(steps * len(own))
    read = places.map(lambda place: shuffled[place // len(own) * size + int(own[place % len(own)])])
    return iter(read.batch(len(own)).to_iter_dataset())


def main(
    steps: int = 60, checkpoints: str | None = None, stop_after: int | None = None, seed: int = 0
) -> str:
    """Trains to the last step, from where the checkpoints end; returns what was reached."""
    helper = MeshShardingHelper([-1], ['dp'], devices=choose_devices())
    step_fun = helper.sjit(
        lambda state, batch: pack(*digits.train_step(*state, batch)),
        in_shardings=(REPLICATED, PartitionSpec('dp')),
        out_shardings=REPLICATED,
        donate_argnums=0,
    )
    train, test = digits.load_data(seed)
    source = own_batches(Digits(train), BATCH_SIZE, helper.process_examples(BATCH_SIZE), steps, seed)
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(Checkpointer(checkpoints, save_every=SAVE_EVERY)) if checkpoints else None
        done = saved.latest_step() if saved else None
        if saved and done is not None:
            state = saved.restore(helper, REPLICATED, init, data=source)  # the iterator stands there now
        else:
            state, done = helper.sjit(init, out_shardings=REPLICATED)(), 0
        started, loss = done, np.nan
        # Ahead of the loop by some batches; `get_state` is the state after the batch that the loop has.
        batches = stack.enter_context(helper.prefetch(source, local_batch='addressable'))
        for batch in batches:
            state, loss = step_fun(state, batch)
            done += 1
            stopping = distributed.should_stop(done) or done == stop_after
            if saved:
                saved.save(done, state, data=batches, force=stopping or done == steps)
            if stopping:
                break
            float(loss)  # waits, so that the host does not queue all steps at once
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
    reached = main(STEPS.value, CHECKPOINTS.value, STOP_AFTER.value)
    if jax.process_index() == 0:
        print(reached)


if __name__ == '__main__':
    STEPS = flags.DEFINE_integer('steps', 60, 'Training steps.', lower_bound=1)
    CHECKPOINTS = flags.DEFINE_string('checkpoints', None, 'Folder to save in, and to continue from.')
    STOP_AFTER = flags.DEFINE_integer('stop_after', None, 'Save and end after this step.', lower_bound=1)
    app.run(run)
