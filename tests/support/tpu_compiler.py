"""The TPU compiler in tests: whether it is here, and that of a JAX whose figures are expected."""

import importlib.util

import jax
import pytest

HERE = importlib.util.find_spec('libtpu') is not None
needed = pytest.mark.skipif(not HERE, reason='the TPU compiler is not installed: pip install "jax[tpu]"')
# What an older compiler makes of a program differs: which mesh is best, what it scatters, how memory is told.
newest = pytest.mark.skipif(
    not HERE or jax.__version_info__ < (0, 11),
    reason='the TPU compiler of JAX 0.11 or later is not installed',
)
