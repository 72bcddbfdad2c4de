"""The flags of XLA that docs/hangs.md recommends exist in the installed JAX."""

import os
import re
import subprocess
import sys

import jax

from tests.support import ROOT

PROGRAM = 'import jax; jax.jit(lambda x: x + 1)(1)'
# A flag that the page describes as unknown to the oldest JAX.
SINCE_0_12 = '--xla_gpu_device_execution_terminate_timeout'


def test_xla_accepts_the_flags() -> None:
    text = (ROOT / 'docs' / 'hangs.md').read_text(encoding='utf-8')
    flags = re.findall(r'^\| `(--xla_\w+=\w+)`', text, re.MULTILINE)
    assert len(flags) > 5
    if jax.__version_info__ < (0, 12):
        flags = [flag for flag in flags if not flag.startswith(SINCE_0_12)]
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ' '.join(flags)}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
