"""The TPU compiler in tests: whether it is here, and how it is kept quiet."""

import importlib.util
import os

import pytest

# Without these it asks the network where it runs, and two processes cannot load it at the same time.
ALONE = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_LOG_DIR': 'disabled',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TPU_MIN_LOG_LEVEL': '3',
}

HERE = importlib.util.find_spec('libtpu') is not None
needed = pytest.mark.skipif(not HERE, reason='the TPU compiler is not installed: pip install "jax[tpu]"')


def set_up() -> None:
    """For this process and those that it starts; before anything loads the compiler."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
