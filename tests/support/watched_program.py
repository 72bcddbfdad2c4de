"""A training of several processes that gets stuck after step 12, in the way named by its argument.

    python tests/support/watched_program.py HOW [step_timeout]

HOW is one of: loading, python, callback, exit, slow, nothing.
"""

import sys
import time
from collections.abc import Iterator

import jax
import numpy as np

from scalax import distributed
from scalax._diagnostics.watchdog import watch
from scalax.sharding import MeshShardingHelper, PartitionSpec

HOW, LAST, STUCK = sys.argv[1], 12, 600.0
reached = 0


def read_shard() -> Iterator[np.ndarray]:
    while True:
        if HOW == 'loading' and reached >= LAST and jax.process_index() == 1:
            time.sleep(STUCK)
        yield np.ones(2, np.float32)


def look_up(x: np.ndarray) -> np.ndarray:
    if HOW == 'callback' and reached > LAST:
        time.sleep(STUCK)
    return x


def train_step(x: jax.Array) -> jax.Array:
    total = x.sum()
    if HOW == 'callback':  # runs on the first process
        total = jax.pure_callback(look_up, jax.ShapeDtypeStruct((), np.float32), total)
    return total


def report() -> None:
    if HOW == 'slow' and reached == LAST:
        time.sleep(6)  # ten times as long as a step, and healthy
    if HOW == 'python' and reached == LAST and jax.process_index() == 1:
        time.sleep(STUCK)
    if HOW == 'exit' and reached == LAST and jax.process_index() == 1:
        raise SystemExit(3)


def main() -> None:
    global reached
    watch._PERIOD = 0.2
    timeout = int(sys.argv[2]) if len(sys.argv) > 2 else None
    distributed.initialize(step_timeout=timeout, heartbeat_timeout=100, shutdown_timeout=100)
    helper = MeshShardingHelper([-1], ['data'])
    step_fun = helper.sjit(train_step, in_shardings=PartitionSpec('data'), out_shardings=PartitionSpec())
    with helper.prefetch(read_shard(), size=1) as batches:
        for reached, batch in enumerate(batches, 1):
            float(step_fun(batch))
            if distributed.should_stop(reached):
                raise SystemExit(distributed.PREEMPTED)
            print('did', reached, flush=True)
            time.sleep(0.2)
            report()


if __name__ == '__main__':
    main()
