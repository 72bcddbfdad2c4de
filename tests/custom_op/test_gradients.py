"""Gradients of operations for many shardings of the operands over Explicit axes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT, gradient_cases


@pytest.fixture(scope='module')
def output() -> str:
    """Returns the output of a process that tries all operations, because XLA may abort the process."""
    return subprocess.run(
        [sys.executable, '-m', 'tests.support.gradient_cases', *gradient_cases.SHAPES],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    ).stdout


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('operation', gradient_cases.SHAPES)
def test_gradients_are_those_on_one_device(operation: str, output: str) -> None:
    assert f'{operation} passed' in output.splitlines(), output
