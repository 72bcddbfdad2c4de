"""The errors between two arrays, and the tolerance for them that rounding justifies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

_LARGEST_FACTOR, _MEAN_FACTOR = 8.0, 4.0
"""Factors from sampled rounding errors to tolerated ones: the samples do not include the worst case."""
_LONG_SUM_FACTOR, _LONG_SUM_LIMIT = 64.0, 1e-4
"""A larger factor, for errors below this fraction of the values: adding the terms of a long sum one after the
other is less accurate than the samples, and bugs cause larger errors."""
_ULPS = 4.0  # tolerated after any operation, relative to the largest value


@dataclasses.dataclass(frozen=True)
class ErrorStats:
    """The errors of the elements of an array.

    Attributes:
        largest: the largest error of an element, infinite where only one of both values is finite. For signed
            integers, the sum of the errors; for keys and booleans, the number of elements that differ.
        mean: the root mean square error; for integers, keys and booleans, the mean of what *largest* sums.
        index: the element with the largest error.
        actual: the value of that element.
        expected: its expected value.
    """

    largest: float = 0.0
    mean: float = 0.0
    index: tuple[int, ...] = ()
    actual: Any = None
    expected: Any = None

    def __or__(self, other: ErrorStats) -> ErrorStats:
        """Returns the maximum of both statistics, with the element of the larger error."""
        larger = self if self.largest >= other.largest else other
        return dataclasses.replace(larger, mean=max(self.mean, other.mean))


def error_stats(value: np.ndarray, expected: np.ndarray) -> ErrorStats:
    """Returns the errors of an array."""
    if not value.size:
        return ErrorStats()
    if not is_inexact(expected):
        errors = (value != expected).astype(np.float64)
        if jax.dtypes.issubdtype(
            expected.dtype, np.signedinteger
        ):  # counts of rounded values are off by a few
            errors *= np.maximum(np.abs(value.astype(np.float64) - expected.astype(np.float64)), 1)
        largest, mean = float(errors.sum()), float(errors.mean())
    else:
        wide = np.complex128 if np.iscomplexobj(expected) else np.float64
        a, b = value.astype(wide), expected.astype(wide)
        with np.errstate(invalid='ignore', over='ignore'):
            errors = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            errors = np.where(np.isnan(errors), math.inf, errors)
            largest, mean = float(errors.max()), math.sqrt(float(np.mean(np.square(errors))))
    if not largest:
        return ErrorStats()
    index = np.unravel_index(int(np.argmax(errors)), errors.shape)
    return ErrorStats(largest, mean, tuple(map(int, index)), value[index].item(), expected[index].item())


def error_stats_of_shards(shards: Iterable[tuple[Any, np.ndarray]], expected: np.ndarray) -> ErrorStats:
    """Returns the errors of an array, from its shards and their indices.

    Several shards may be replicas of one index; the worst replica counts.
    """
    worst: dict[str, tuple[Any, ErrorStats]] = {}
    for index, shard in shards:
        error, key = error_stats(shard, expected[index]), str(index)
        worst[key] = index, (worst[key][1] if key in worst else ErrorStats()) | error
    total, squares = ErrorStats(), 0.0
    for index, error in worst.values():
        starts = [dim_slice.start or 0 for dim_slice in index]
        global_index = tuple(start + i for start, i in zip(starts, error.index, strict=False))
        total |= dataclasses.replace(error, mean=0.0, index=global_index)
        weight = expected[index].size / max(expected.size, 1)
        squares += weight * (error.mean**2 if is_inexact(expected) else error.mean)
    if not is_inexact(expected):
        return dataclasses.replace(total, largest=squares * expected.size, mean=squares)
    return dataclasses.replace(total, mean=math.sqrt(squares))


def worst_replicas(shards: Iterable[tuple[Any, np.ndarray]], expected: np.ndarray) -> np.ndarray:
    """Assembles an array from its shards; of several replicas, takes the one with the largest error."""
    array = np.array(expected)
    for index, shard in shards:
        if error_stats(shard, expected[index]).largest > error_stats(array[index], expected[index]).largest:
            array[index] = shard
    return array


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The errors of an array that rounding explains.

    Attributes:
        largest: the largest tolerated error of an element; for integers, keys and booleans, of all together.
        mean: the largest tolerated root mean square error.
    """

    largest: float
    mean: float

    def covers(self, error: ErrorStats) -> bool:
        """Whether rounding explains an error."""
        return error.largest <= self.largest and error.mean <= self.mean


def tolerance_for(sampled: ErrorStats, expected: np.ndarray, is_rounded: bool) -> Tolerance:
    """Returns the tolerance for an array.

    Args:
        sampled: the largest sampled rounding errors.
        expected: the values.
        is_rounded: whether the values depend on an operation that may round differently.
    """
    if not is_inexact(expected):
        # One comparison of rounded values may turn out differently although no sample showed it.
        count = _LARGEST_FACTOR * sampled.largest + 1 if is_rounded else 0.0
        return Tolerance(count, count)
    unit = _ULPS * float(jax.numpy.finfo(expected.dtype).eps)
    sizes = np.abs(expected[np.isfinite(expected)].astype(np.complex128))
    largest, mean = (float(sizes.max()), math.sqrt(float(np.mean(sizes**2)))) if sizes.size else (0.0, 0.0)
    return Tolerance(
        _scaled(_LARGEST_FACTOR, sampled.largest, largest) + unit * largest,
        _scaled(_MEAN_FACTOR, sampled.mean, mean) + unit * mean,
    )


def _scaled(factor: float, sampled: float, size: float) -> float:
    if factor * sampled >= size:  # the value is rounding noise, and squares of noise vary with its square
        return _LONG_SUM_FACTOR * sampled
    return max(factor * sampled, min(_LONG_SUM_FACTOR * sampled, _LONG_SUM_LIMIT * size))


def is_inexact(value: np.ndarray) -> bool:
    """Whether an array has a floating-point or complex dtype."""
    return bool(jax.dtypes.issubdtype(value.dtype, np.inexact))
