"""Programs that resemble programs on local shards, but differ, have the results of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, assert_equal, partitioned

pytestmark = pytest.mark.medium

W, X = np.asarray(np.random.default_rng(0).normal(size=(2, 8, 8)), 'f')


def bits_of_integers(w, x):
    """The bitwise or of integers is not their maximum."""
    signs = jnp.int32(x * 100)
    return (
        lax.reduce_or(jnp.uint8(jnp.abs(x) * 50), (0,)),
        lax.reduce_and(signs, (0,)),
        lax.reduce_or(signs, (1,)),
    )


def product_of_booleans(w, x):
    """A product of booleans is true if any pair is true."""
    return (x > 1).T @ (x > 0.5), (x > 1).T @ (w > 0)


def counted_rounds(w, x):
    """Counts the iterations of each example, starting from a replicated number."""

    def halve(row):
        return lax.while_loop(lambda c: jnp.abs(c[0]).max() > 0.1, lambda c: (c[0] * 0.6, c[1] + 1), (row, 0))

    return jax.vmap(halve)(x)


def rounds_with_weights(w, x):
    """Iterations of each example start from replicated values, and multiply them by a weight."""

    def power(row):
        rounds = jnp.int32(jnp.abs(row[0]) * 4)
        return lax.while_loop(lambda c: c[1] < rounds, lambda c: (w @ c[0] / 4, c[1] + 1), (jnp.ones(8), 0))

    return jax.vmap(power)(x)


def rounds_with_products_of_weights(w, x):
    """Iterations of each example multiply by a product of two weights, or compare with a norm of one."""

    def reduce(row):
        return lax.while_loop(
            lambda c: jnp.abs(c).sum() > jnp.abs(w).sum() / 99, lambda c: w.T @ w @ c / 99, row
        )

    return jax.vmap(reduce)(x)


PROGRAMS = [
    counted_rounds,
    rounds_with_weights,
    rounds_with_products_of_weights,
    bits_of_integers,
    product_of_booleans,
]


def largest_of_undefined(w, x):
    """The maximum of elements that include NaN is NaN."""
    return jnp.max(jnp.where(x > 1, jnp.nan, x), 0)


def sum_times_infinity(w, x):
    """Terms of both signs times infinity have no sum, but their sum times infinity is infinite."""
    return x.sum(0) * jnp.inf


PROGRAMS += [
    largest_of_undefined,
    sum_times_infinity,
]


def written_out_of_bounds(w, x):
    """Rows written out of bounds are the first and the last ones, because JAX clamps their indices."""

    def written(i, rows, dtype='int32'):
        return lax.dynamic_update_slice(x @ w, jnp.ones((rows, 8)), jnp.asarray([i, 0], dtype))

    numbers = [written(i, 1, dtype) for i in (0, 5, 7, 8, 100, -1, -40) for dtype in ('int32', 'int8')]
    by_weight = lax.dynamic_update_slice(x @ w, w[:1], (jnp.int32(w[0, 0] * 100), 0))
    read = lax.map(lambda i: lax.dynamic_slice_in_dim(jnp.tanh(x @ w), i + 1, 1), jnp.arange(8))
    return numbers, written(100, 2), by_weight, read


def unsigned_differences(w, x):
    """Unsigned differences of counts wrap around; differences of local counts would too."""

    def add(total, part):
        count = jnp.uint32(256) - jnp.sum(part > 0, dtype=jnp.uint32)
        return total + count * jnp.sum(w**2), count

    return lax.scan(add, 1.0, x.reshape(2, 4, 8))


PROGRAMS += [written_out_of_bounds, unsigned_differences]


@pytest.mark.parametrize('fun', PROGRAMS, ids=lambda fun: fun.__name__)
@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
def test_values_match_one_device(fun, mesh):
    _, run = partitioned(fun, W, X, mesh)
    assert_equal(run(), jax.jit(fun)(W, X))


def test_loops_that_count_iterations_per_example_exchange_nothing():
    step, _ = partitioned(counted_rounds, W, X)
    assert not step.collective_rows


def test_weights_of_a_loop_for_each_example_are_gathered_before_it():
    step, _ = partitioned(rounds_with_products_of_weights, W, X)
    assert [(row.kind, row.what) for row in step.collective_rows] == [('all_gather', 'weight')]
