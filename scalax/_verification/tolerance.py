"""How far two values are apart, and how far rounding explains it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

_LARGEST, _MEAN = 8.0, 4.0
"""How many times the errors that were drawn are still explained by rounding: they are only samples."""
_OF_LONG_SUMS, _NO_FAULT = 64.0, 1e-4
"""As many times, as long as that is below this part of the values: sums that are added up one term after the
other are off by more than what is drawn, and no fault is so small."""
_UNITS = 4.0  # that any operation may be off, relative to the largest value


@dataclasses.dataclass(frozen=True)
class Error:
    """The error of an array.

    Attributes:
        largest: the largest error of an element; infinite where one is finite and the other one is not. Of
            signed integers the sum of the errors; of keys and booleans how many elements differ.
        mean: the root of the mean of the squares; of the others the mean of what is summed there.
        index: where the largest one is.
        actual: the value of that element.
        expected: what it should be.
    """

    largest: float = 0.0
    mean: float = 0.0
    index: tuple[int, ...] = ()
    actual: Any = None
    expected: Any = None

    def __or__(self, other: Error) -> Error:
        """What both have at most; the place is that of the larger one."""
        larger = self if self.largest >= other.largest else other
        return dataclasses.replace(larger, mean=max(self.mean, other.mean))


def error_of(value: np.ndarray, expected: np.ndarray) -> Error:
    """The error of an array."""
    if not value.size:
        return Error()
    if not is_number(expected):
        differ = (value != expected).astype(np.float64)
        if jax.dtypes.issubdtype(expected.dtype, np.signedinteger):  # counts of what is rounded are a few off
            differ *= np.maximum(np.abs(value.astype(np.float64) - expected.astype(np.float64)), 1)
        largest, mean = float(differ.sum()), float(differ.mean())
    else:
        wide = np.complex128 if np.iscomplexobj(expected) else np.float64
        a, b = value.astype(wide), expected.astype(wide)
        with np.errstate(invalid='ignore', over='ignore'):
            differ = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            differ = np.where(np.isnan(differ), math.inf, differ)
            largest, mean = float(differ.max()), math.sqrt(float(np.mean(np.square(differ))))
    if not largest:
        return Error()
    place = np.unravel_index(int(np.argmax(differ)), differ.shape)
    return Error(largest, mean, tuple(map(int, place)), value[place].item(), expected[place].item())


def error_of_blocks(blocks: Iterable[tuple[Any, np.ndarray]], expected: np.ndarray) -> Error:
    """The error of an array in blocks, of which several may be copies of one part; that of the worst copy."""
    worst: dict[str, tuple[Any, Error]] = {}
    for place, block in blocks:
        error, key = error_of(block, expected[place]), str(place)
        worst[key] = place, (worst[key][1] if key in worst else Error()) | error
    total, squares = Error(), 0.0
    for place, error in worst.values():
        starts = [part.start or 0 for part in place]
        index = tuple(start + i for start, i in zip(starts, error.index, strict=False))
        total |= dataclasses.replace(error, mean=0.0, index=index)
        part = expected[place].size / max(expected.size, 1)
        squares += part * (error.mean**2 if is_number(expected) else error.mean)
    if not is_number(expected):
        return dataclasses.replace(total, largest=squares * expected.size, mean=squares)
    return dataclasses.replace(total, mean=math.sqrt(squares))


def worst_copies(blocks: Iterable[tuple[Any, np.ndarray]], expected: np.ndarray) -> np.ndarray:
    """An array of blocks; of several copies of a part, the one with the largest error."""
    whole = np.array(expected)
    for place, block in blocks:
        if error_of(block, expected[place]).largest > error_of(whole[place], expected[place]).largest:
            whole[place] = block
    return whole


@dataclasses.dataclass(frozen=True)
class Explained:
    """How large the errors of an array may be.

    Attributes:
        largest: of an element; of what is no number, of all together.
        mean: the root of the mean of the squares.
    """

    largest: float
    mean: float

    def covers(self, error: Error) -> bool:
        """Whether rounding explains an error."""
        return error.largest <= self.largest and error.mean <= self.mean


def explained(drawn: Error, expected: np.ndarray, rounded: bool) -> Explained:
    """What rounding explains.

    Args:
        drawn: the largest errors that were drawn.
        expected: the values.
        rounded: whether they descend from what may round differently.
    """
    if not is_number(expected):
        # After a comparison of what is rounded, one may go the other way that none of the draws took.
        count = _LARGEST * drawn.largest + 1 if rounded else 0.0
        return Explained(count, count)
    unit = _UNITS * float(jax.numpy.finfo(expected.dtype).eps)
    sizes = np.abs(expected[np.isfinite(expected)].astype(np.complex128))
    largest, mean = (float(sizes.max()), math.sqrt(float(np.mean(sizes**2)))) if sizes.size else (0.0, 0.0)
    return Explained(
        _times(_LARGEST, drawn.largest, largest) + unit * largest,
        _times(_MEAN, drawn.mean, mean) + unit * mean,
    )


def _times(count: float, drawn: float, size: float) -> float:
    if count * drawn >= size:  # nothing but rounding; squares of that are off by squares
        return _OF_LONG_SUMS * drawn
    return max(count * drawn, min(_OF_LONG_SUMS * drawn, _NO_FAULT * size))


def is_number(value: np.ndarray) -> bool:
    """Whether an array has numbers that may be rounded."""
    return bool(jax.dtypes.issubdtype(value.dtype, np.inexact))
