"""Which host memory does JAX take as it is? On CPU, memory that begins at a multiple of 64 bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENT = 64


def aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Memory that becomes an array on CPU without a copy, not filled."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)
