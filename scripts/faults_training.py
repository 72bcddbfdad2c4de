"""The training that `faults.py` disturbs: tiny, and with all that a run has to take up again.

    python scripts/faults_training.py FOLDER

Parameters and Adam's moments are sharded over all devices of all processes, the state is donated, noise is
drawn from a key in it, data come in shuffled epochs from an iterator with a state, loaded ahead. It goes on
until the step that stands in FOLDER/goal, and saves every few steps in FOLDER/steps. Process 0 writes every
loss, to the last bit, into FOLDER/losses.
"""

from __future__ import annotations

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
ROWS, WIDTH, EXAMPLES = 16, 64, 80  # five batches an epoch
PAUSE_S = 0.01  # a step takes as long as it takes, and this

optimizer = optax.adam(1e-2)


class Epochs(Iterator[np.ndarray]):
    """Examples in another order in each epoch: `rows` of every batch."""

    def __init__(self, rows: slice) -> None:
        self.rows, self.batch = rows, 0
        self.examples = np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)

    def __next__(self) -> np.ndarray:
        epoch, place = divmod(self.batch, EXAMPLES // ROWS)
        order = np.random.default_rng((1, epoch)).permutation(EXAMPLES)
        self.batch += 1
        return self.examples[order[place * ROWS : (place + 1) * ROWS][self.rows]]

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
        found = jax.nn.gelu((batch + 0.1 * noise) @ params['up']) @ params['down']
        return jnp.mean(jnp.square(found - batch))

    value, gradients = jax.value_and_grad(loss)(state['params'])
    updates, adam = optimizer.update(gradients, state['adam'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {**state, 'params': params, 'adam': adam, 'step': state['step'] + 1}, value


def main(folder: Path) -> int:
    distributed.initialize()
    goal = int((folder / 'goal').read_text())
    helper = MeshShardingHelper([-1], ['fsdp'])
    rule = FSDPShardingRule(min_fsdp_size=0)
    step_fun = helper.sjit(
        train_step,
        in_shardings=(rule, PartitionSpec('fsdp')),
        out_shardings=(rule, PartitionSpec()),
        donate_argnums=0,
    )
    rows = helper.process_rows(ROWS)
    assert isinstance(rows, slice)
    epochs = Epochs(rows)
    # `faults.py` watches the folder: a checkpoint more than usual is kept for it to find.
    checkpoints = Checkpointer(folder / 'steps', keep=4, save_every=SAVE_EVERY)
    if checkpoints.latest_step() is None:
        state = helper.sjit(init, out_shardings=rule)()
    else:
        state = checkpoints.restore(helper, rule, init, data=epochs, verify=True)
    first = int(state['step'])
    with (folder / 'losses').open('a') as log, helper.prefetch(epochs, rows='needed', size=3) as batches:
        if jax.process_index() == 0:
            print(f'{first} resumed', file=log, flush=True)
        for step in range(first + 1, goal + 1):
            state, loss = step_fun(state, next(batches))
            checkpoints.save(step, state, data=batches, force=step == goal)
            value = float(loss)
            if jax.process_index() == 0:
                print(f'{step} {value.hex()}', file=log, flush=True)
            time.sleep(PAUSE_S)
    checkpoints.close()
    digest = float(jax.jit(optax.tree.norm)(state['params']))
    if jax.process_index() == 0:
        print(f'the norm of the parameters is {digest.hex()} after step {goal}', flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main(Path(sys.argv[1])))
