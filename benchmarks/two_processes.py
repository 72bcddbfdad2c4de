"""The cost of host data with several processes: measured in two processes that are joined on localhost.

Each process runs ``python -m benchmarks.two_processes ROUNDS``; the first one prints rows as JSON. The
processes time the same calls in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.timing import Row, compare
from scalax import distributed
from scalax.sharding import MeshShardingHelper, NamedSharding, PartitionSpec

ROOT = Path(__file__).resolve().parent.parent
PROCESSES, DEVICES = 2, 4
LONGEST_S = 900
STEPS = 50  # in a loop that is timed in total
IN_FLIGHT = 8  # simulated devices deadlock if more than 32 programs are queued


def in_processes(rounds: int) -> list[Row]:
    """Starts the processes, and returns the measurements of the first."""
    with socket.socket() as probe:
        probe.bind(('localhost', 0))
        address = f'localhost:{probe.getsockname()[1]}'
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(DEVICES)}
    env |= {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(PROCESSES)}
    command = [sys.executable, '-m', 'benchmarks.two_processes', str(rounds)]
    running: list[subprocess.Popen[str]] = []
    try:
        for index in range(PROCESSES):
            process_env = {**env, 'JAX_PROCESS_ID': str(index)}
            running.append(
                subprocess.Popen(command, cwd=ROOT, env=process_env, text=True, stdout=subprocess.PIPE)
            )
        printed, _ = running[0].communicate(timeout=LONGEST_S)
    finally:
        for process in running:
            if process.poll() is None and process is running[0]:
                process.kill()
            process.communicate(timeout=LONGEST_S)
    line = next(line for line in printed.splitlines() if line.startswith('[{'))
    return [Row(**row) for row in json.loads(line)]


def rows(rounds: int) -> list[Row]:
    """Returns the measurements that each process makes."""
    helper = MeshShardingHelper([-1], ['data'])
    transfers = [*global_arrays(helper, rounds), *steps(helper, rounds), *loading_ahead(helper, rounds)]
    return [*transfers, *naming_the_stuck(rounds)]


def global_arrays(helper: MeshShardingHelper, rounds: int) -> list[Row]:
    """Times shards that are already on the right process: nothing moves."""
    batch = {name: np.zeros((32, 2048), np.int32) for name in ('tokens', 'targets')}

    def ours(check: bool) -> None:
        jax.block_until_ready(helper.local_data_to_global_array(batch, check=check))

    return [
        compare(
            f'local_data_to_global_array{option_text}, 2 x 64 x 2048 tokens, 2 processes',
            functools.partial(ours, check),
            lambda: jax.block_until_ready(by_hand(helper, batch)),
            max(rounds // 10, 5),
            aim,
        )
        for option_text, check, aim in ((', check=False', False, 1.1), ('', True, None))
    ]


def steps(helper: MeshShardingHelper, rounds: int) -> list[Row]:
    """Times a loop of steps that creates batches, to measure the cost of the agreement."""
    step, state = step_of(helper)
    batch = np.ones((256, WIDTH), np.float32)

    def loop(make: Callable[[], jax.Array]) -> None:
        now = state
        for number in range(STEPS):
            now = step(now, make())
            if number % IN_FLIGHT == 0:
                jax.block_until_ready(now)
        jax.block_until_ready(now)

    return [
        compare(
            f'{STEPS} steps with local_data_to_global_array, 2 processes',
            lambda: loop(lambda: helper.local_data_to_global_array(batch)),
            lambda: loop(lambda: by_hand(helper, batch)),
            max(rounds // 200, 2),
            warmup=1,
        )
    ]


def loading_ahead(helper: MeshShardingHelper, rounds: int) -> list[Row]:
    """Times `prefetch` with a loader that takes as long as a step, against the steps alone."""
    step, state = step_of(helper)
    host = np.ones((256, WIDTH), np.float32)
    batch = helper.local_data_to_global_array(host)
    latest = [0.0]  # the latest time of a step alone: the machine may be shared

    def alone() -> None:
        start, now = time.perf_counter(), state
        for _ in range(STEPS):
            now = jax.block_until_ready(step(now, batch))
        latest[0] = (time.perf_counter() - start) / STEPS

    def load() -> Iterator[Any]:
        for _ in range(STEPS):
            time.sleep(latest[0])  # like a loader that waits for a disk or a network
            yield host

    def ahead(check: bool) -> None:
        now = state
        with helper.prefetch(load(), check=check) as batches:
            for loaded in batches:
                now = jax.block_until_ready(step(now, loaded))

    alone()
    several = '1 process' if jax.process_count() == 1 else f'{jax.process_count()} processes'
    return [
        compare(
            f'{STEPS} steps, loader as slow as a step: prefetch{option_text}, '
            f'against the steps alone, {several}',
            functools.partial(ahead, check),
            alone,
            max(rounds // 200, 2),
            1.1,
            warmup=1,
        )
        for option_text, check in ((', check=False', False), ('', True))
        if several != '1 process' or check
    ]


CALLS, WATCHED_S, STEP_S = 1000, 5.0, 0.05


def naming_the_stuck(rounds: int) -> list[Row]:
    """Measures the cost of the watchdog per step: its call, and the CPU time of its thread.

    The sum is compared with a step of 50 ms, in whose measured time it would be lost.
    """
    numbers = itertools.count(1)

    def ours() -> None:
        for number in itertools.islice(numbers, CALLS):
            distributed.should_stop(number)

    def reference() -> None:
        for number in itertools.islice(numbers, CALLS):
            multihost_utils.reached_preemption_sync_point(number)

    call = compare(
        f'{CALLS} x should_stop, against reached_preemption_sync_point, 2 processes',
        ours,
        reference,
        max(rounds // 40, 5),
    )
    thread = next(thread for thread in threading.enumerate() if thread.name == 'scalax-watch')
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    begun = time.clock_gettime(clock)
    time.sleep(WATCHED_S)
    share = (time.clock_gettime(clock) - begun) / WATCHED_S
    cost = (call.ours - call.reference) / CALLS + share * STEP_S
    return [call, Row('a step of 50 ms that is watched, 2 processes', STEP_S + cost, STEP_S, 1.002)]


WIDTH = 1024


def step_of(helper: MeshShardingHelper) -> tuple[Callable[[jax.Array, jax.Array], jax.Array], jax.Array]:
    """Returns a step of some tens of milliseconds with an all-reduce, and its state."""
    replicated = PartitionSpec()

    @helper.sjit(in_shardings=(replicated, PartitionSpec('data')), out_shardings=replicated)
    def step(state: jax.Array, batch: jax.Array) -> jax.Array:
        hidden = jnp.tanh(batch @ state)
        return state - 1e-6 * (batch.T @ hidden)

    return step, helper.shard(np.eye(WIDTH, dtype=np.float32), replicated)


def by_hand(helper: MeshShardingHelper, tree: Any) -> Any:
    """Does the same with JAX alone, for shards that are already on the right process."""
    sharding = NamedSharding(helper.mesh, PartitionSpec('data'))

    def global_leaf(leaf: np.ndarray) -> jax.Array:
        shape = (leaf.shape[0] * jax.process_count(), *leaf.shape[1:])
        return jax.make_array_from_process_local_data(sharding, leaf, shape)

    return jax.tree.map(global_leaf, tree)


def main() -> None:
    distributed.initialize()
    measured = [dataclasses.asdict(row) for row in rows(int(sys.argv[1]))]
    if jax.process_index() == 0:
        print(json.dumps(measured), flush=True)


if __name__ == '__main__':
    main()
