"""Partial sums are reduced where that takes the fewest bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, assert_equal, partitioned, with_gradients

pytestmark = pytest.mark.medium

EXAMPLES, TIME, WIDTH = 16, 13, 8


def array(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype('float32')


W = {'decay': array(2, WIDTH), 'kernel': array(WIDTH, WIDTH)}
X = array(EXAMPLES, TIME, WIDTH)


def recurrence(w, x):
    """A diagonal recurrence over time, whose complex decay all examples share (S5, LRU)."""
    decay = jnp.exp(-jnp.exp(w['decay'][0]) + 1j * w['decay'][1])

    def one(x):
        powers = decay * jnp.ones(x.shape, 'complex64')
        after = lax.associative_scan(lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1]), (powers, x + 0j))[1]
        return after.real

    return jax.vmap(one)(x @ w['kernel'])


def sums(step):
    return {
        (row.kind, row.array): row.count
        for row in step.collective_rows
        if row.kind in ('all_reduce', 'reduce_scatter')
    }


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['FSDP', 'HSDP'])
def test_the_gradient_of_a_recurrence_is_reduced_once(mesh):
    fun = with_gradients(recurrence)
    step, run = partitioned(fun, W, X, mesh)
    reduced = sums(step)
    assert sum(reduced.values()) <= 2 * len(mesh)  # of the decay and of the kernel
    assert {array for _, array in reduced} <= {'complex64[8]', 'complex64[2]', 'float32[2,8]', 'float32[8,8]'}
    assert_equal(run(), jax.jit(fun)(W, X), tolerance=1e-4)


def padded(x):
    return lax.pad(x, 0.0, [(3, 3, 0), (0, 0, 0)])


def padded_and_summed(w, x):
    total = x.sum(0)  # the sums of a partial sum
    return jnp.sum(padded(total) * jnp.arange(TIME + 6)[:, None])


def added_again(w, x):
    total = x.sum(0)
    return jnp.sum(total[:5] - total[-5:]) + 3 * total[0].sum()


def padded_and_squared(w, x):
    return jnp.sum(padded(x.sum(0)) ** 2)


def used_twice(w, x):
    total = x.sum(0)
    return total + 1, jnp.sin(total)


def terms_of_examples(w, x):
    """The padded sum meets a replicated value, so it cannot stay partial."""
    return jnp.sum(padded(x.sum(0)) + jnp.arange(TIME + 6)[:, None])


@pytest.mark.parametrize(
    'fun, expected',
    [
        (padded_and_summed, {('all_reduce', 'float32[]'): 1}),
        (added_again, {('all_reduce', 'float32[]'): 1}),
        (padded_and_squared, {('all_reduce', f'float32[{TIME},{WIDTH}]'): 1}),
        (used_twice, {('all_reduce', f'float32[{TIME},{WIDTH}]'): 1}),
        (terms_of_examples, {('all_reduce', f'float32[{TIME},{WIDTH}]'): 1}),
    ],
    ids=lambda x: getattr(x, '__name__', ''),
)
def test_where_sums_are_reduced(fun, expected):
    step, run = partitioned(fun, W, X)
    assert sums(step) == expected
    assert_equal(run(), fun(W, X), tolerance=1e-4)
