"""A script: opens the devices of this machine in a process of its own, which may hang or crash.

It is run by its path and imports only the standard library until the user's file has been imported, so that
variables that the file sets before JAX are in time. It writes a line of JSON for each stage that it enters,
and for what it finds there.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import sys
import time
from typing import Any

WATCHED = ('XLA_', 'LIBTPU_INIT_ARGS', 'TPU_', 'NCCL_', 'CUDA_VISIBLE_DEVICES')
LATER = ('JAX_COORDINATOR', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')  # read when processes join


def main(descriptor: int, root: str, file: str, verify: bool, timeout: int, facts: dict[str, str]) -> None:
    """Enters one stage after another.

    Args:
        descriptor: the file descriptor to write to.
        root: the folder of the package scalax.
        file: a file of the user to import first; empty for none.
        verify: whether to compare a step on all devices with the same on one.
        timeout: the seconds that joining other processes may take.
        facts: what all processes have to have in common: name -> text.
    """
    sys.path[:] = [each for each in sys.path if each != os.path.dirname(os.path.abspath(__file__))]
    sys.path += [os.getcwd(), root]
    with os.fdopen(descriptor, 'w', buffering=1) as out:

        def say(**values: Any) -> None:
            out.write(json.dumps(values) + '\n')

        late: list[list[str]] = []
        if file:
            say(stage=f'importing {file}')
            sys.addaudithook(lambda event, args: watch(late, *args) if event == 'os.putenv' else None)
            sys.argv, name = [file], os.path.abspath(file)
            sys.path.insert(0, os.path.dirname(name))
            try:
                runpy.run_path(name, run_name='__doctor__')
            finally:
                say(late=late)
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
        if verify:
            say(stage='verifying a training step')
            from scalax._doctor.training_step import verified

            found = verified()
            if found is None:
                say(verified='not run: there is only one device')
            else:
                gone = [
                    f'the difference is gone {each.change}' for each in found.retries if each.stays is False
                ]
                wrong = [*([str(found.first)] if found.first else []), *gone, *map(str, found.differences)]
                say(verified=str(found).partition('\n')[0], wrong=[] if found.ok else wrong)
        if jax.process_count() > 1:
            say(stage='comparing the processes')
            from scalax._hostdata.collectives import gather_bytes

            own = {**facts, 'devices of a process': f'{len(local)} x {local[0].device_kind}'}
            mesh = jax.sharding.Mesh(np.asarray(jax.devices()), 'all')
            rows = [json.loads(row) for row in gather_bytes(mesh, json.dumps(own).encode())]
            say(rows=rows)
        say(stage='')


def watch(late: list[list[str]], key: bytes, value: bytes) -> None:
    """Notes a variable that is set after it was read."""
    name, text = os.fsdecode(key), os.fsdecode(value)
    if os.environ.get(name) == text or 'jax' not in sys.modules:
        return
    if name.startswith('JAX_') and not name.startswith(LATER):
        read = 'JAX was imported'
    elif name.startswith(WATCHED) and started():
        read = 'JAX has used its devices'
    else:
        return
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get('__name__') in (__name__, 'os', '_collections_abc'):
        frame = frame.f_back
    module = '' if frame is None else str(frame.f_globals.get('__name__', ''))
    if frame is not None and module.partition('.')[0] not in ('jax', 'jaxlib', 'libtpu', 'scalax'):
        late.append([name, f'{frame.f_code.co_filename}:{frame.f_lineno}', read])


def started() -> bool:
    """Whether JAX has opened its devices: only before that it takes another number of them."""
    jax = sys.modules.get('jax')
    settings: Any = getattr(jax, 'config', None)
    if not hasattr(settings, 'jax_num_cpu_devices'):  # not imported, or not yet to the end
        return False
    own = settings.jax_num_cpu_devices
    try:
        settings.update('jax_num_cpu_devices', max(own, 0) + 1)
    except RuntimeError:
        return True
    settings.update('jax_num_cpu_devices', own)
    return False


def memory(device: Any) -> int | None:
    """The bytes that programs can use of a device; None where it does not say so."""
    try:
        stats: dict[str, int] = device.memory_stats() or {}
        return stats.get('bytes_limit')
    except Exception:  # noqa: BLE001 - plugins raise errors of many kinds
        return None


if __name__ == '__main__':
    main(*json.loads(sys.argv[1]))
