"""What every pytest run needs, of the tests as of the doctests in scalax/: eight simulated devices.

It lies at the top so that `pytest --doctest-modules scalax/_core/mesh/meshes.py` finds it too.
"""

import atexit
import os
import shutil
import signal
import tempfile

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

# A folder of this run for programs that several processes of a test compile (tests/support/processes.py).
if 'SCALAX_TESTS_COMPILED' not in os.environ:
    os.environ['SCALAX_TESTS_COMPILED'] = tempfile.mkdtemp(prefix='scalax-compiled-')
    atexit.register(shutil.rmtree, os.environ['SCALAX_TESTS_COMPILED'], ignore_errors=True)

# Tables are as wide as the terminal, and pytest-xdist tells its workers how wide that is.
os.environ.pop('COLUMNS', None)

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
