"""What counts of jaxprs and of HLO programs share: flops, parts of a step, and how well a count is known."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np


class Exactness(enum.Enum):
    """How well a number of executions is known.

    AT_LEAST: inside a loop whose length depends on data, counted as one round. AT_MOST: inside the largest of
    several branches, in a loop that may end early, or for rows whose lengths are data. APPROXIMATE: both.
    """

    EXACT = 'exact'
    AT_LEAST = 'at least'
    AT_MOST = 'at most'
    APPROXIMATE = 'about'

    def combine(self, other: Exactness) -> Exactness:
        """How well a product is known."""
        known = {self, other} - {Exactness.EXACT}
        return Exactness.EXACT if not known else known.pop() if len(known) == 1 else Exactness.APPROXIMATE


Phase = Literal['other', 'update', 'forward', 'backward', 'recomputed']
PHASES: tuple[Phase, ...] = get_args(Phase)
# JAX writes the transformations that made an operation into its name, in programs and in jaxprs alike:
# jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/dot_general
# Names of users stand in brackets too, as in ``jit(my_jvp)``, but have none of their own.
_MARKS: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ('recomputed', re.compile(r'(?:^|/)rematted_computation(?:/|$)')),
    ('backward', re.compile(r'(?:^|[/(])transpose\(')),
    ('forward', re.compile(r'(?:^|[/(])jvp\(')),
)


def phase_of(op_name: str) -> Phase:
    """The part of a step that an operation belongs to.

    ``'forward'`` is what is differentiated, ``'backward'`` its transpose, and ``'recomputed'`` what
    ``jax.checkpoint`` computes again on the way back. ``'other'`` is the rest: all of a program that takes
    no gradient. What a ``custom_vjp`` computes on the way back is backward. What is computed with gradients,
    such as the update of an optimizer, has no name of its own; `scalax._planning.program.phases` finds it.

    Args:
        op_name: the name of an operation, with the names of the scopes around it.

    Example:
        >>> [phase_of(name) for name in ('jit(f)/dot', 'jit(f)/jvp()/dot', 'jit(f)/transpose(jvp())/dot')]
        ['other', 'forward', 'backward']
        >>> phase_of('jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot')
        'recomputed'
    """
    return next((phase for phase, mark in _MARKS if mark.search(op_name)), 'other')


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
