"""The parts of FLOP formulas that the counts of jaxprs and of HLO programs share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def multiply_add_flops(count: int, complex_: bool) -> int:
    """Returns the FLOPs of *count* multiply-adds: two each for real numbers, eight for complex numbers."""
    return count * (8 if complex_ else 2)


def window_overlaps(
    size: int, kernel: int, result: int, stride: int, low: int, dilated_input: int, dilated_kernel: int
) -> int:
    """Counts the pairs (output position, kernel position) that cover an input element, in one dimension.

    Args:
        size: the size of the input.
        kernel: the size of the kernel.
        result: the size of the output.
        stride: the stride of the window.
        low: the padding before the first element.
        dilated_input: the dilation of the input.
        dilated_kernel: the dilation of the kernel.
    """
    positions = (
        np.arange(result, dtype=np.int64)[:, None] * stride
        + np.arange(kernel, dtype=np.int64) * dilated_kernel
        - low
    )
    inside = (positions >= 0) & (positions <= (size - 1) * dilated_input) & (positions % dilated_input == 0)
    return int(inside.sum())


def fft_flops(shape: Sequence[int], lengths: Sequence[int], complex_: bool) -> int:
    """Returns the FLOPs of FFTs of some *lengths* along the last dimensions of an array.

    By convention an FFT takes 5 N log2 N, and half of that if one side is real
    (http://www.fftw.org/speed/method.html).
    """
    size, count = math.prod(lengths), math.prod(shape[: len(shape) - len(lengths)])
    return round((5 if complex_ else 2.5) * size * math.log2(size) * count) if size else 0
