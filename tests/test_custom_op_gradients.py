"""Gradients of operations whose operands lie in all sorts of ways over Explicit axes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gradient_cases
import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize('operation', gradient_cases.SHAPES)
def test_gradients_are_those_on_one_device(operation: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(HERE / 'gradient_cases.py'), operation],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(HERE.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout
