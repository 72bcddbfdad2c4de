"""The training that `faults.py` disturbs: tiny, and with every kind of state that a run restores.

    python scripts/faults_training.py FOLDER [--steps=FOLDER] [--job=NUMBER] [--keep=STEPS] [--pause=SECONDS]
                                      [--any-number]

Parameters and Adam's moments are sharded over all devices of all processes, the state is donated and contains
a PRNG key, and data are prefetched in shuffled epochs from an iterator with a state. It runs until the step
in FOLDER/goal, and saves every few steps. Process 0 writes every loss exactly to FOLDER/losses. Some arrays
of the state hold the number of the job, and nothing depends on them: a step written by two jobs would contain
two numbers.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalax import distributed
from scalax.checkpoint import Checkpointer
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, PartitionSpec

SAVE_EVERY = 3
ROWS, WIDTH, EXAMPLES = 24, 48, 120  # five batches per epoch, all divisible by 8, 6, 4 and 2 devices
JOIN_S = 60
MARKS = ('mark', 'marks')  # the arrays with the number of the job

optimizer = optax.adam(1e-2)


class Epochs(Iterator[np.ndarray]):
    """Examples in a different order in each epoch: the `rows` of every batch."""

    def __init__(self, rows: slice) -> None:
        self.rows, self.batch = rows, 0
        self.examples = np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)

    def __next__(self) -> np.ndarray:
        epoch, batch_index = divmod(self.batch, EXAMPLES // ROWS)
        order = np.random.default_rng((1, epoch)).permutation(EXAMPLES)
        self.batch += 1
        return self.examples[order[batch_index * ROWS : (batch_index + 1) * ROWS][self.rows]]

    def get_state(self) -> dict[str, int]:
        return {'batch': self.batch}

    def set_state(self, state: dict[str, int]) -> None:
        self.batch = state['batch']


def init() -> dict[str, Any]:
    first, second, key = jax.random.split(jax.random.key(2), 3)
    params = {
        'up': jax.random.normal(first, (WIDTH, 4 * WIDTH)) / 8,
        'down': jax.random.normal(second, (4 * WIDTH, WIDTH)) / 16,
    }
    return {'params': params, 'adam': optimizer.init(params), 'key': key, 'step': jnp.zeros((), jnp.int32)}


def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    noise = jax.random.normal(jax.random.fold_in(state['key'], state['step']), batch.shape)

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        outputs = jax.nn.gelu((batch + 0.1 * noise) @ params['up']) @ params['down']
        return jnp.mean(jnp.square(outputs - batch))

    value, gradients = jax.value_and_grad(loss)(state['params'])
    updates, adam = optimizer.update(gradients, state['adam'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {**state, 'params': params, 'adam': adam, 'step': state['step'] + 1}, value


def marked(state: dict[str, Any], job: int) -> dict[str, Any]:
    """Returns the state of a job with that number."""
    return {**state, 'mark': jnp.full(WIDTH, job), 'marks': {'mark': jnp.full((4, WIDTH), job)}}


def job_of(marks: Any) -> int:
    """Returns the number of the job that saved all of a step."""
    numbers = {int(number) for leaf in jax.tree.leaves(marks) for number in np.unique(leaf)}
    if len(numbers) > 1:
        raise SystemExit(f'mixed: a step is of the jobs {sorted(numbers)}')
    return numbers.pop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=Path)
    parser.add_argument('--steps', type=Path, help='where the checkpoints are; FOLDER/steps by default')
    parser.add_argument('--job', type=int, default=0)
    parser.add_argument('--keep', type=int, default=4, help='a checkpoint more than usual, to be found')
    parser.add_argument('--pause', type=float, default=0.01, help='how much longer each step takes')
    parser.add_argument(
        '--any-number', action='store_true', help='goes on from what another number of processes has saved'
    )
    options = parser.parse_args()
    folder = options.folder
    distributed.initialize(initialization_timeout=JOIN_S)
    print('joined', flush=True)
    goal = int((folder / 'goal').read_text())
    helper = MeshShardingHelper([-1], ['fsdp'])
    rule = FSDPShardingRule(min_fsdp_size=0)
    step_fun = helper.sjit(
        train_step,
        in_shardings=(rule, PartitionSpec('fsdp')),
        out_shardings=(rule, PartitionSpec()),
        donate_argnums=0,
    )
    rows = helper.process_examples(ROWS)
    assert isinstance(rows, slice)
    epochs = Epochs(rows)
    start = functools.partial(marked, job=options.job)
    checkpoints = Checkpointer(options.steps or folder / 'steps', keep=options.keep, save_every=SAVE_EVERY)
    if checkpoints.latest_step() is None:
        state = helper.sjit(lambda: start(init()), out_shardings=rule)()
    else:
        # The state of an iterator depends on the number of processes that saved it.
        data = None if options.any_number else epochs
        state = checkpoints.restore(helper, rule, lambda: start(init()), data=data, verify=True)
        marks = helper.gather([state[name] for name in MARKS])
        print(f'step {int(state["step"])} is of job {job_of(marks)}', flush=True)
        state = helper.sjit(start, in_shardings=(rule,), out_shardings=rule)(state)
    first = epochs.batch = int(state['step'])
    print('restored', flush=True)
    with (
        (folder / 'losses').open('a') as log,
        helper.prefetch(epochs, local_batch='addressable', size=3) as batches,
    ):
        if jax.process_index() == 0:
            print(f'{first} resumed', file=log, flush=True)
        for step in range(first + 1, goal + 1):
            state, loss = step_fun(state, next(batches))
            checkpoints.save(step, state, data=batches, force=step == goal)
            value = float(loss)
            if jax.process_index() == 0:
                print(f'{step} {value.hex()}', file=log, flush=True)
                if step == first + 1:
                    print(f'step {step} on {jax.process_count()} processes', flush=True)
            time.sleep(options.pause)
    checkpoints.close()
    digest = float(jax.jit(optax.tree.norm)(state['params']))
    if jax.process_index() == 0:
        print(f'the norm of the parameters is {digest.hex()} after step {goal}', flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
