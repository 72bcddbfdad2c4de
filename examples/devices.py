"""The devices that an example runs on.

These are all that JAX sees. It sees a machine without accelerators as one CPU device, on which there is
nothing to shard, so the examples split it into eight simulated ones. That is a choice for a
program's entry point, made before anything asks JAX for its devices; no library should make it.
"""

from __future__ import annotations

import contextlib
import logging
import os

import jax
from absl import app, flags
from absl import logging as absl_logging

from scalax.utils import quiet_libtpu

SIMULATED_DEVICES = 8


def choose_devices(count: int | None = None) -> list[jax.Device]:
    """Returns the devices to run on, simulating some where there is only a CPU.

    The setting is about the CPU alone, so nothing changes where JAX finds an accelerator. Whoever
    has set the number of CPU devices (by `JAX_NUM_CPU_DEVICES` or `XLA_FLAGS`) keeps it.

    Args:
      count: take the first `count` devices; on a CPU, simulate so many. None takes all there are.

    Raises:
      app.UsageError: there are fewer than `count` devices.
    """
    if count is not None and count < 1:
        raise app.UsageError(f'--devices {count}: at least one is needed.')
    if not _already_split():
        # JAX refuses where it has its devices already (a notebook, a test): those are used then.
        with contextlib.suppress(RuntimeError):
            jax.config.update('jax_num_cpu_devices', count or SIMULATED_DEVICES)
    quiet_libtpu()
    if not os.path.exists('/dev/nvidiactl'):  # JAX's plugin for GPUs may be here to plan alone
        os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')
    logging.getLogger('jax').setLevel(logging.WARNING)  # spare the user each device kind not found
    devices = jax.devices()
    if count is not None and count > len(devices):
        raise app.UsageError(
            f'--devices {count}: JAX sees only {len(devices)} here ({devices[0].platform}). '
            f'Ask for {len(devices)} or fewer.'
        )
    return devices[:count]


def quiet_logs() -> None:
    """Shows warnings and errors of libraries only, unless --verbosity says otherwise.

    A program of absl shows more by default, and a checkpoint is sixty lines of it.
    """
    if not flags.FLAGS['verbosity'].present:
        absl_logging.set_verbosity(absl_logging.WARNING)


def _already_split() -> bool:
    """Whether the user has said how many devices a CPU counts for."""
    return jax.config.jax_num_cpu_devices > 0 or 'xla_force_host_platform_device_count' in os.environ.get(
        'XLA_FLAGS', ''
    )
