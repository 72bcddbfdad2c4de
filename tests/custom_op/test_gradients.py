"""Gradients of operations whose operands lie in all sorts of ways over Explicit axes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT, gradient_cases

# The operations on which an older JAX is tested, too: each takes seconds.
ON_EACH_JAX = ('scores', 'norms')


@pytest.mark.parametrize(
    'operation',
    [
        name if name in ON_EACH_JAX else pytest.param(name, marks=pytest.mark.one_jax)
        for name in gradient_cases.SHAPES
    ],
)
def test_gradients_are_those_on_one_device(operation: str) -> None:
    ran = subprocess.run(
        [sys.executable, '-m', 'tests.support.gradient_cases', operation],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout
