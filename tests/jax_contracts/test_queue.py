"""Tests that `scalax/_jax/device_queue` waits for the pending work of the devices of a process."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.launch.ports import held_port
from scalax._jax import device_queue
from scalax._jax.device_queue import drain, fence_program, pending_arrays
from tests.support.contracts import contract
from tests.support.threads import in_threads

LONGEST_S = 200
AT_EXIT = """
import atexit, sys, jax
atexit.register(lambda: print('joined' if jax.distributed.is_initialized() else 'left'))
jax.distributed.initialize(f'localhost:{sys.argv[1]}', 1, 0)
jax.devices()
"""


class Waiting:
    """A program on all devices that ends once `may_end` is set; the call returns before that."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.devices = tuple(jax.local_devices())
        sharding = NamedSharding(Mesh(np.asarray(self.devices, dtype=object), ('x',)), P('x'))
        self.rows = jax.device_put(jnp.arange(float(len(self.devices))), sharding)
        self._compiled = jax.jit(lambda rows: jax.pure_callback(self._wait, jax.typeof(rows), rows))

    def _wait(self, rows: np.ndarray) -> np.ndarray:
        self.may_end.wait(LONGEST_S)
        return rows

    def start(self) -> jax.Array:
        return self._compiled(self.rows)

    def start_and_drop(self) -> None:
        self.start()


@pytest.mark.medium
@pytest.mark.parametrize('in_a_thread', [False, True])
def test_the_last_program_runs_after_programs_with_dropped_results(in_a_thread: bool) -> None:
    waiting = Waiting()
    fence_program(waiting.devices)().block_until_ready()  # compiled, so that only the wait takes time below
    last = threading.Thread(target=lambda: fence_program(waiting.devices)().block_until_ready(), daemon=True)
    try:
        with contract('runs programs of a device in their order', 'to wait at exit for what was dropped'):
            if in_a_thread:
                first = threading.Thread(target=waiting.start_and_drop, daemon=True)
                first.start()
                first.join(LONGEST_S)
            else:
                waiting.start_and_drop()
            last.start()
            last.join(0.5)
            assert last.is_alive()
    finally:
        waiting.may_end.set()
    last.join(LONGEST_S)
    assert not last.is_alive()


def test_pending_arrays_are_not_computed_yet() -> None:
    waiting = Waiting()
    try:
        with contract('says which arrays are not computed yet', 'to name them at exit'):
            result = waiting.start()
            moving = pending_arrays('cpu')
            assert any(array is result for array in moving)
            assert not any(array is waiting.rows for array in moving)
    finally:
        waiting.may_end.set()
    result.block_until_ready()
    assert not any(array is result for array in pending_arrays('cpu'))


def test_drain_returns_the_errors_of_failed_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()

    def fail_once_listed(platform: str) -> list[jax.Array]:
        arrays = pending_arrays(platform)
        waiting.may_end.set()
        return arrays

    monkeypatch.setattr(device_queue, 'pending_arrays', fail_once_listed)

    def fail(rows: np.ndarray) -> np.ndarray:
        waiting.may_end.wait(LONGEST_S)
        raise ValueError('lost')

    failing = jax.jit(lambda rows: jax.pure_callback(fail, jax.typeof(rows), rows))
    try:
        with contract('raises where an array is waited for that never comes', 'to go on at exit'):
            # JAX keeps the error of the callback for the effects_barrier of the thread that made the call.
            [result] = in_threads(lambda _: failing(waiting.rows), count=1)
            [(arrays, error)] = drain('cpu')
            assert len(arrays) == 1 and arrays[0] is result
            assert 'lost' in str(error)
    finally:
        waiting.may_end.set()


@pytest.mark.medium
def test_jax_leaves_its_service_after_handlers_that_were_registered_when_it_was_imported() -> None:
    with held_port() as port:
        command = [sys.executable, '-c', AT_EXIT, str(port)]
        env = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    with contract('shuts its service down in a handler that it registers on import', 'to wait before that'):
        assert 'joined' in done.stdout.split(), done.stdout + done.stderr
