"""A script: opens the devices of this machine in a process of its own, which may hang or crash.

It is run by its path, and writes a line of JSON for each stage that it enters, and for what it finds there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(descriptor: int, root: str, timeout: int, facts: dict[str, str]) -> None:
    """Enters one stage after another.

    Args:
        descriptor: the file descriptor to write to.
        root: the folder of the package scalax.
        timeout: the seconds that joining other processes may take.
        facts: what all processes have to have in common: name -> text.
    """
    sys.path[:] = [each for each in sys.path if each != os.path.dirname(os.path.abspath(__file__))]
    sys.path.append(root)
    with os.fdopen(descriptor, 'w', buffering=1) as out:

        def say(**values: Any) -> None:
            out.write(json.dumps(values) + '\n')

        say(stage='importing JAX')
        import jax
        import numpy as np

        from scalax import distributed

        say(stage='joining the other processes')
        distributed.initialize(initialization_timeout=timeout)
        say(stage='opening the devices')
        start = time.monotonic()
        local = jax.local_devices()
        say(
            opened=time.monotonic() - start,
            devices=[[device.platform, device.device_kind, memory(device)] for device in local],
            everywhere=jax.device_count(),
            process=jax.process_index(),
            processes=jax.process_count(),
        )
        say(stage='running a program on each device')
        add = jax.jit(lambda x: x + 1)
        for device in local:
            add(jax.device_put(np.int32(1), device)).block_until_ready()
        if jax.process_count() > 1:
            say(stage='comparing the processes')
            from scalax._data.host.process_collectives import gather_bytes

            own = {**facts, 'devices of a process': f'{len(local)} x {local[0].device_kind}'}
            mesh = jax.sharding.Mesh(np.asarray(jax.devices()), 'all')
            rows = [json.loads(row) for row in gather_bytes(mesh, json.dumps(own).encode())]
            say(rows=rows)
        say(stage='')


def memory(device: Any) -> int | None:
    """The bytes that programs can use of a device; None where it does not say so."""
    try:
        stats: dict[str, int] = device.memory_stats() or {}
        return stats.get('bytes_limit')
    except Exception:  # noqa: BLE001 - plugins raise errors of many kinds
        return None


if __name__ == '__main__':
    main(*json.loads(sys.argv[1]))
