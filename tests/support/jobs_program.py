"""One process of a job that sends or receives a state; `tests/jobs` starts several of each.

The environment identifies the process, as with launchers. A fault is a signal that the process sends to
itself at its n-th request or reply of a kind: ``9 pieces 2``.
"""

import os
import sys
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalax import distributed
from scalax.errors import ScalaxError
from scalax.jobs import Sender, _connection, receive
from scalax.sharding import MeshShardingHelper, PartitionSpec

P = PartitionSpec


def values(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        'embed': random.normal(size=(24, 16)).astype(np.float32),
        'layers/w': random.normal(size=(3, 16, 24)).astype(jnp.bfloat16),
        'norm': random.integers(-9, 9, size=16).astype(np.int8),
        'empty': np.zeros((0, 8), np.float32),
        'scale': np.float32(random.normal()),
    }


def state(step: int) -> dict[str, Any]:
    return {**values(step), 'key': jax.random.key(step)}


SENT = {'embed': P('fsdp', 'tp'), 'layers/w': P(None, 'tp', 'fsdp'), 'norm': P('tp')}
RECEIVED = {'embed': P(None, 'x'), 'w': P(None, ('y', 'x')), 'norm': P('x')}


def renamed(path: str) -> str:
    return path.replace('layers/w', 'w')


def rules(of: dict[str, Any]) -> dict[str, Any]:
    return {path: of.get(path, P()) for path in map(renamed if of is RECEIVED else str, state(0))}


def fail_at(fault: str) -> None:
    """Stops or kills this process when it sends or receives a kind of request for the n-th time."""
    signal, kind, count = fault.split()
    left = int(count)

    def meet(message: Any) -> None:
        nonlocal left
        left -= message['asks'] == kind
        if left == 0:
            print('FAULT', flush=True)
            os.kill(os.getpid(), int(signal))
            time.sleep(600)  # a signal stops all threads, but not at once

    request, respond = _connection.SenderConnection.request, Sender._respond

    def requesting(self: Any, message: Any, seconds: float) -> Any:
        meet(message)
        return request(self, message, seconds)

    def responding(self: Any, channel: Any, message: Any) -> Any:
        meet(message)
        return respond(self, channel, message)

    _connection.SenderConnection.request = requesting  # type: ignore[method-assign]
    Sender._respond = responding  # type: ignore[method-assign]


def send(times: int, wait: float, timeout: float) -> None:
    helper = MeshShardingHelper([-1, 2], ['fsdp', 'tp'])
    with Sender('localhost:0', wait=wait, timeout=timeout) as sender:
        print(f'at {sender.address}.', flush=True)
        for step in range(times):
            sender.send(helper.shard(state(step), rules(SENT)))
            print(f'sent {step}', flush=True)


def fetch(address: str, times: int, wait: float, timeout: float, memory: str) -> None:
    helper = MeshShardingHelper([2, -1], ['y', 'x'])
    for step in range(times):
        got = receive(
            helper, address, rules(RECEIVED), mapping=renamed, memory=memory, wait=wait, timeout=timeout
        )
        for path, value in values(step).items():
            leaf = got[renamed(path)]
            assert leaf.dtype == value.dtype, path
            assert leaf.sharding.spec == rules(RECEIVED)[renamed(path)], path
            np.testing.assert_array_equal(helper.gather(leaf), value)
        key = jax.random.key_data(got['key'])
        np.testing.assert_array_equal(helper.gather(key), jax.random.key_data(jax.random.key(step)))
        print(f'received {step}', flush=True)


def main(role: str, times: str, wait: str, timeout: str, memory: str, fault: str, address: str = '') -> None:
    warnings.simplefilter('error')
    distributed.initialize()
    if fault and jax.process_index() == int(fault.split()[0]):
        fail_at(fault.split(maxsplit=1)[1])
    try:
        if role == 'send':
            send(int(times), float(wait), float(timeout))
        else:
            fetch(address, int(times), float(wait), float(timeout), memory)
    except ScalaxError as error:
        print(f'{type(error).__name__}: {error}', flush=True)
        os._exit(3)
    jax.distributed.shutdown() if jax.process_count() > 1 else None


if __name__ == '__main__':
    main(*sys.argv[1:])
