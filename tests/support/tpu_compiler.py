"""The TPU compiler in tests: whether it is here."""

import importlib.util

import pytest

HERE = importlib.util.find_spec('libtpu') is not None
needed = pytest.mark.skipif(not HERE, reason='the TPU compiler is not installed: pip install "jax[tpu]"')
