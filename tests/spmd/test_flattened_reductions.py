"""Reductions of flattened arrays: each device reduces its local shard, and nothing is gathered."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.partitioned import P, assert_equal, collectives, partitioned

pytestmark = pytest.mark.medium


def array(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype('float32')


# The weight is sharded by columns, so its shards are not contiguous when it is flattened.
W, V = array(8, 32), array(8, 32)


def inner_product(w, v):
    return jnp.vdot(w, 2 * v)


def norm(w, v):
    return jnp.linalg.norm((w + v).reshape(-1))


def maximum_norm(w, v):
    return jnp.max(jnp.abs(w.ravel() - v.ravel() * 0.5))


def is_finite(w, v):
    return jnp.all(jnp.isfinite(w.ravel()))


def rms_of_several(w, v):
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.ravel())) for x in (w, v)))


def average(w, v):
    return jnp.mean(w.ravel()) + jnp.mean(v.ravel() ** 2)


@pytest.mark.parametrize('fun', [inner_product, norm, maximum_norm, is_finite, rms_of_several, average])
def test_reductions_gather_nothing(fun):
    step, run = partitioned(lambda state, x: fun(*state), (W, V), array(8, 2), result_specs=[P()])
    assert collectives(step)
    assert {row.kind for row in step.collective_rows} == {'all_reduce'}
    assert max(row.bytes for row in step.collective_rows) == (1 if fun is is_finite else 4)
    assert_equal(run(), fun(W, V))


def of_two_shapes(w, v):
    """Combines elements at different positions."""
    return jnp.sum(w.ravel() * v.T.ravel())


def order_matters(w, v):
    flat = w.ravel()
    return jnp.sum(jnp.cumsum(flat)) + jnp.sum(flat * jnp.arange(flat.size)) + jnp.sum(flat**2)


def returned(w, v):
    flat = jnp.sin(w.ravel())
    return flat, jnp.sum(flat * v.ravel())


def reversed_order(w, v):
    return jnp.vdot(w.ravel()[::-1], v.ravel())


def outer_product(w, v):
    return jnp.tensordot(w.ravel(), v.ravel(), 0).max()


@pytest.mark.parametrize('fun', [of_two_shapes, order_matters, returned, reversed_order, outer_product])
def test_reductions_that_depend_on_the_order_stay_flattened(fun):
    _, run = partitioned(lambda state, x: fun(*state), (W, V), array(8, 2))
    assert_equal(run(), fun(W, V), 1e-4)


def test_examples_that_are_flattened():
    def fun(w, x):
        return jnp.linalg.norm((x @ w).ravel())

    w, x = array(8, 8), array(16, 8)
    step, run = partitioned(fun, w, x, result_specs=[P()])
    assert [(row.kind, row.bytes) for row in step.collective_rows] == [
        ('all_gather', w.nbytes),
        ('all_reduce', 4),
    ]
    assert_equal(run(), fun(w, x))
