"""The TPU compiler in tests: whether it is installed, in the version of JAX whose numbers tests expect."""

import importlib.util

import jax
import pytest

HERE = importlib.util.find_spec('libtpu') is not None
needed = pytest.mark.skipif(not HERE, reason='the TPU compiler is not installed: pip install "jax[tpu]"')
# Programs of older compilers differ: the best mesh, which reductions are scattered, how memory is reported.
newest = pytest.mark.skipif(
    not HERE or jax.__version_info__ < (0, 11),
    reason='the TPU compiler of JAX 0.11 or later is not installed',
)
