"""The devices of the examples.

They are all devices of JAX. A machine without accelerators has one CPU device, on which there is nothing to
shard, so the examples simulate eight devices. Only the entry point of a program should do this, before
anything initializes JAX's devices, and never a library.
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
    """Returns the devices to run on, which are simulated if there is only a CPU.

    The setting affects only CPUs, so nothing changes if JAX finds an accelerator. A number of CPU devices
    that the user has set (with `JAX_NUM_CPU_DEVICES` or `XLA_FLAGS`) is kept.

    Args:
      count: the number of devices to use or, on a CPU, to simulate. None uses all devices.

    Raises:
      app.UsageError: there are fewer than `count` devices.
    """
    if count is not None and count < 1:
        raise app.UsageError(f'--devices {count}: at least one is needed.')
    if not _already_split():
        # Fails if JAX is initialized already (in a notebook or a test); then its devices are used.
        with contextlib.suppress(RuntimeError):
            jax.config.update('jax_num_cpu_devices', count or SIMULATED_DEVICES)
    quiet_libtpu()
    if not os.path.exists('/dev/nvidiactl'):  # JAX's GPU plugin may be installed for planning only
        os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')
    logging.getLogger('jax').setLevel(logging.WARNING)  # no message for each missing platform
    devices = jax.devices()
    if count is not None and count > len(devices):
        raise app.UsageError(
            f'--devices {count}: JAX sees only {len(devices)} here ({devices[0].platform}). '
            f'Ask for {len(devices)} or fewer.'
        )
    return devices[:count]


def quiet_logs() -> None:
    """Shows only warnings and errors of libraries, unless --verbosity is set.

    By default, absl programs show more, such as sixty lines for each checkpoint.
    """
    if not flags.FLAGS['verbosity'].present:
        absl_logging.set_verbosity(absl_logging.WARNING)


def _already_split() -> bool:
    """Returns whether the user has set the number of CPU devices."""
    return jax.config.jax_num_cpu_devices > 0 or 'xla_force_host_platform_device_count' in os.environ.get(
        'XLA_FLAGS', ''
    )
