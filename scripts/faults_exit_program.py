"""A program of two processes that ends right after it has started a transfer.

    python scripts/faults_exit_program.py FOLDER MOVE [OPTION ...]

MOVE is a key of `MOVES`. With the option `dropped` the program drops the results of the transfer; with `jax`
the processes join by `jax.distributed.initialize`. With `late`, process 1 starts the transfer when process 0
is at its end; with `never`, process 1 waits until it is killed. Both need a move of `NOT_AGREED`. A number is
the shutdown_timeout.

At its end a process prints whether the other has started the transfer. With `late`, this shows that the exit
waited for the data.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

FOLDER, MOVE, *OPTIONS = sys.argv[1:]
LONGEST_S = 200


# Before scalax is imported: it runs after the handler of scalax, and before that of JAX.
@atexit.register
def say() -> None:
    print('has waited' if Path(FOLDER, 'moves-1').exists() else 'has not waited', flush=True)


import numpy as np  # noqa: E402

from scalax import distributed  # noqa: E402
from scalax.checkpoint import Checkpointer  # noqa: E402
from scalax.sharding import MeshShardingHelper, PartitionSpec  # noqa: E402

ROWS = np.arange(32, dtype=np.float32).reshape(8, 4)


def alternating() -> MeshShardingHelper:
    """Returns a mesh whose devices alternate between the processes, so that rows have to move."""
    half = jax.device_count() // 2
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return MeshShardingHelper(
        [-1], ['data'], devices=[devices[i % 2 * half + i // 2] for i in range(2 * half)]
    )


def rows(helper: MeshShardingHelper) -> jax.Array:
    sharding = helper.match_sharding_rule(PartitionSpec('data'), ROWS)
    return jax.make_array_from_callback(ROWS.shape, sharding, lambda index: ROWS[index])


def batch(helper: MeshShardingHelper) -> jax.Array:
    # Processes that agree first are already connected when the rows move.
    return helper.local_data_to_global_array(ROWS, check=False)


def prefetch(helper: MeshShardingHelper) -> jax.Array:
    return next(helper.prefetch(iter([ROWS] * 10), size=2, check=False))


def step(helper: MeshShardingHelper) -> jax.Array:
    return helper.sjit(lambda x: x.sum(0), out_shardings=PartitionSpec())(rows(helper))


def save(helper: MeshShardingHelper) -> Checkpointer:
    checkpoints = Checkpointer(Path(FOLDER, 'steps'))
    checkpoints.save(1, {'batch': batch(helper)})
    return checkpoints


MOVES: dict[str, Callable[[MeshShardingHelper], Any]] = {
    'local_data_to_global_array': batch,
    'prefetch': prefetch,
    'step': step,
    'shard': lambda helper: helper.shard(rows(helper), PartitionSpec(None, 'data')),
    'reshard': lambda helper: helper.reshard(rows(helper), PartitionSpec(None, 'data')),
    'save': save,
}
NOT_AGREED = ('local_data_to_global_array', 'prefetch', 'step')


def wait_for_process_0() -> None:
    end = time.monotonic() + LONGEST_S
    while not Path(FOLDER, 'ends-0').exists() and time.monotonic() < end:
        time.sleep(0.02)
    while 'never' in OPTIONS:
        time.sleep(LONGEST_S)
    time.sleep(0.5)


def main() -> None:
    timeout = next((int(option) for option in OPTIONS if option.isdecimal()), 60)
    if 'jax' in OPTIONS:
        address, count, index = (
            os.environ[f'JAX_{name}'] for name in ('COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID')
        )
        jax.distributed.initialize(address, int(count), int(index), shutdown_timeout_seconds=timeout)
    else:
        heartbeat = 8 if 'never' in OPTIONS else 20
        distributed.initialize(heartbeat_timeout=heartbeat, shutdown_timeout=timeout)
    helper, process = alternating(), jax.process_index()
    if process and not {'late', 'never'}.isdisjoint(OPTIONS):
        wait_for_process_0()
    Path(FOLDER, f'moves-{process}').touch()
    moved = MOVES[MOVE](helper)
    if 'dropped' in OPTIONS:
        del moved
    else:
        globals()['kept'] = moved
    Path(FOLDER, f'ends-{process}').touch()


if __name__ == '__main__':
    main()
