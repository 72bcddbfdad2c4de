"""Errors of arrays, and the tolerances that explain them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._verification.tolerance import ErrorStats, error_stats, error_stats_of_shards, tolerance_for


def test_the_largest_error_and_the_mean():
    error = error_stats(np.asarray([[1.0, 2.0], [3.0, 7.0]]), np.asarray([[1.0, 2.0], [3.0, 4.0]]))
    assert (error.largest, error.index, error.actual, error.expected) == (3.0, (1, 1), 7.0, 4.0)
    assert error.mean == 1.5


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_nonfinite_values(value):
    same = np.asarray([1.0, value])
    assert error_stats(same, same.copy()) == ErrorStats()
    assert error_stats(np.asarray([1.0, 2.0]), same).largest == math.inf
    assert error_stats(same, np.asarray([1.0, 2.0])).largest == math.inf


def test_scalars_and_nothing():
    assert error_stats(np.float32(2), np.float32(1.5)).largest == 0.5
    assert error_stats(np.zeros((0, 3)), np.zeros((0, 3))) == ErrorStats()


def test_integers_are_counted():
    error = error_stats(np.asarray([1, 2, 3, 4]), np.asarray([1, 2, 4, 5]))
    assert (error.largest, error.mean, error.index) == (2.0, 0.5, (2,))
    assert tolerance_for(ErrorStats(), np.asarray([1, 2]), is_rounded=False).covers(ErrorStats())
    assert not tolerance_for(ErrorStats(), np.asarray([1, 2]), is_rounded=False).covers(ErrorStats(1.0, 0.5))
    assert tolerance_for(ErrorStats(), np.asarray([1, 2]), is_rounded=True).covers(ErrorStats(1.0, 0.5))
    assert not tolerance_for(ErrorStats(), np.asarray([1, 2]), is_rounded=True).covers(ErrorStats(2.0, 1.0))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'complex64', 'float64'])
def test_a_few_units_are_always_explained(dtype):
    value = np.asarray(jnp.asarray([3.0, -1.0])).astype(dtype)
    unit = float(jnp.finfo(value.dtype).eps)
    limit = tolerance_for(ErrorStats(), value, is_rounded=True)
    assert limit.covers(error_stats((value * (1 + 0.9 * unit)).astype(dtype), value))
    assert not limit.covers(ErrorStats(20 * unit, unit))


def test_many_small_errors_are_detected_beside_a_large_sampled_error(rng):
    value = rng.normal(size=1000)
    drawn = np.zeros(1000)
    drawn[3] = 0.5  # a row that goes to another expert
    limit = tolerance_for(error_stats(value + drawn, value), value, is_rounded=True)
    assert limit.covers(error_stats(value + np.roll(drawn, 5), value))
    assert not limit.covers(error_stats(value * 1.3, value))


def test_squares_of_rounding_errors(rng):
    noise, other = rng.normal(size=(2, 8)) * 1e-8
    limit = tolerance_for(error_stats(other**2, noise**2), noise**2, is_rounded=True)
    assert limit.covers(error_stats((4 * other) ** 2, noise**2))
    assert not limit.covers(error_stats(noise**2 + 1, noise**2))


def test_each_copy_of_a_block_counts():
    value = np.arange(8.0)
    low, high = (slice(0, 4),), (slice(4, 8),)
    blocks = [
        (low, value[:4]),
        (high, value[4:]),
        (low, value[:4]),
        (high, value[4:] + np.asarray([0, 0, 5, 0])),
    ]
    error = error_stats_of_shards(blocks, value)
    assert (error.largest, error.index, error.expected) == (5.0, (6,), 6.0)
    assert error.mean == pytest.approx(math.sqrt(25 / 8))
    assert error_stats_of_shards(blocks[:3], value) == ErrorStats()


def test_blocks_of_integers_are_counted():
    value = np.arange(8)
    blocks = [((slice(0, 4),), value[:4]), ((slice(4, 8),), value[4:] + 1), ((slice(0, 4),), value[:4] - 1)]
    error = error_stats_of_shards(blocks, value)
    assert (error.largest, error.mean) == (8.0, 1.0)


def test_blocks_of_scalars_and_of_devices():
    assert error_stats_of_shards([((), np.float32(1)), ((), np.float32(3))], np.asarray(1.0)).largest == 2.0
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(jax.make_mesh((8,), ('x',)), jax.P('x')))
    assert (
        error_stats_of_shards([(s.index, np.asarray(s.data)) for s in x.addressable_shards], np.arange(8.0))
        == ErrorStats()
    )
