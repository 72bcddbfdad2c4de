"""What every pytest run needs, of the tests as of the doctests in scalax/: eight simulated devices.

It lies at the top so that `pytest --doctest-modules scalax/_mesh/meshes.py` finds it too.
"""

import os
import signal

# Before JAX is imported, and inherited by the processes that tests start. Whoever wants another
# platform says so by setting the variable.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import pytest

pytest_plugins = [
    'tests.support.comparisons',
    'tests.support.orphans',
    'tests.support.samples',
    'tests.support.snapshots',
]
DEVICES = 8

# This process has read where it keeps what it compiles. Those that tests start do not share that folder: JAX
# writes an entry in place, and another process could read half of one. Some have a folder of their own (see
# tests/support/processes.py).
if folder := os.environ.pop('JAX_COMPILATION_CACHE_DIR', None):
    os.environ['SCALAX_COMPILED'] = f'{folder}-by-processes'

# A shell lets what it runs in the background ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Nothing has used a device yet; JAX refuses this line otherwise.
jax.config.update('jax_num_cpu_devices', DEVICES)


@pytest.fixture(scope='session', autouse=True)
def simulated_devices() -> list[jax.Device]:
    """The devices of this run. With fewer, most tests would pass without having tested anything."""
    devices = jax.devices()
    assert len(devices) == DEVICES, (
        f'the tests need {DEVICES} devices but JAX shows {len(devices)}: {devices}. '
        'Unset XLA_FLAGS and JAX_PLATFORMS to test on simulated CPU devices.'
    )
    return devices
