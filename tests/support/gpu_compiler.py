"""The compiler for NVIDIA GPUs in tests: whether it is installed in the version that JAX loads."""

import importlib.metadata

import pytest

from scalax._core.mesh.gpu_topologies import installed_plugins, plugin_fault

_FOUND = installed_plugins()
HERE = bool(_FOUND) and plugin_fault(_FOUND, importlib.metadata.version('jaxlib')) is None
needed = pytest.mark.skipif(
    not HERE, reason='the compiler for GPUs is not installed: pip install "jax[cuda12-local]"'
)
