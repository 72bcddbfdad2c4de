"""What counts of jaxprs and of HLO programs share: flops of operations, and how well a count is known."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import numpy as np


class Counted(enum.Enum):
    """How well a number of executions is known.

    AT_LEAST: inside a loop whose length depends on data, counted as one round. AT_MOST: inside the largest of
    several branches, or in a loop that may end early. UNKNOWN: both.
    """

    EXACTLY = 'exactly'
    AT_LEAST = 'at least'
    AT_MOST = 'at most'
    UNKNOWN = 'about'

    def along(self, other: Counted) -> Counted:
        """How well a product is known."""
        known = {self, other} - {Counted.EXACTLY}
        return Counted.EXACTLY if not known else known.pop() if len(known) == 1 else Counted.UNKNOWN


def product_flops(count: int, complex_: bool) -> int:
    """The operations of that many multiplications and additions; a complex pair takes eight."""
    return count * (8 if complex_ else 2)


def window_overlaps(
    size: int, kernel: int, result: int, stride: int, low: int, dilated_input: int, dilated_kernel: int
) -> int:
    """In one dimension: how many pairs of an output and a kernel position cover an element of the input."""
    places = (
        np.arange(result, dtype=np.int64)[:, None] * stride
        + np.arange(kernel, dtype=np.int64) * dilated_kernel
        - low
    )
    inside = (places >= 0) & (places <= (size - 1) * dilated_input) & (places % dilated_input == 0)
    return int(inside.sum())


def fft_flops(shape: Sequence[int], lengths: Sequence[int], complex_: bool) -> int:
    """The operations of FFTs of these *lengths* along the last dimensions of an array.

    5 N log2 N by convention, half of that where one side is real (http://www.fftw.org/speed/method.html).
    """
    size, many = math.prod(lengths), math.prod(shape[: len(shape) - len(lengths)])
    return round((5 if complex_ else 2.5) * size * math.log2(size) * many) if size else 0
