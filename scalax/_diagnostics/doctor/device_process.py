"""Script that opens the devices of this machine, in a separate process because it may hang or crash.

It is run by its path, and writes a line of JSON for each stage that it enters, and for each result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(descriptor: int, root: str, timeout: int, facts: dict[str, str]) -> None:
    """Runs one stage after another.

    Args:
        descriptor: the file descriptor to write to.
        root: the folder that contains the package scalax.
        timeout: the maximum seconds to join the other processes.
        facts: name -> text that must be the same on every process.
    """
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.path.append(root)
    with os.fdopen(descriptor, 'w', buffering=1) as out:

        def write(**values: Any) -> None:
            out.write(json.dumps(values) + '\n')

        write(stage='importing JAX')
        import jax
        import numpy as np

        from scalax import distributed

        write(stage='joining the other processes')
        distributed.initialize(initialization_timeout=timeout)
        write(stage='opening the devices')
        start = time.monotonic()
        local_devices = jax.local_devices()
        write(
            opened=time.monotonic() - start,
            devices=[[device.platform, device.device_kind, memory(device)] for device in local_devices],
            everywhere=jax.device_count(),
            process=jax.process_index(),
            processes=jax.process_count(),
        )
        write(stage='running a program on each device')
        add = jax.jit(lambda x: x + 1)
        for device in local_devices:
            add(jax.device_put(np.int32(1), device)).block_until_ready()
        if jax.process_count() > 1:
            write(stage='comparing the processes')
            from scalax._data.host.process_collectives import gather_bytes

            text = f'{len(local_devices)} x {local_devices[0].device_kind}'
            local_facts = {**facts, 'devices of a process': text}
            mesh = jax.sharding.Mesh(np.asarray(jax.devices()), 'all')
            gathered = gather_bytes(mesh, json.dumps(local_facts).encode())
            write(facts=[json.loads(data) for data in gathered])
        write(stage='')


def memory(device: Any) -> int | None:
    """Returns the bytes of device memory that programs can use; None if the device does not report it."""
    try:
        stats: dict[str, int] = device.memory_stats() or {}
        return stats.get('bytes_limit')
    except Exception:  # noqa: BLE001 - plugins raise errors of many kinds
        return None


if __name__ == '__main__':
    main(*json.loads(sys.argv[1]))
