"""Where rows are lost is told, and where they are only summed nothing is."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.support.following import following, like, result_dims

W, X = like(24, 24), like(64, 24)
ALL = jnp.arange(64)


def scattered(w, x):
    """Rows go to places of experts."""
    expert = jnp.argmax(x[:, :8], 1)
    place = jnp.cumsum(jax.nn.one_hot(expert, 8, dtype='int32'), 0)[jnp.arange(64), expert]
    return jnp.zeros((8, 16, 24)).at[expert, place].set(x) @ w


def sorted_to_experts(w, x):
    expert = jnp.argmax(x[:, :8], 1)
    sizes = jnp.bincount(expert, length=8)
    return lax.ragged_dot(x[jnp.argsort(expert)], jnp.broadcast_to(w, (8, 24, 24)), sizes)


LOSSES = {
    'a loop over rows': (lambda w, x: lax.map(lambda row: jnp.tanh(row @ w), x), {'scan': (64, 24)}),
    'a row of each round': (
        lambda w, x: lax.scan(lambda c, i: (c + x[i] @ w, None), jnp.zeros(24), ALL)[0],
        {'dynamic_slice': (64, 24)},
    ),
    'reshaped': (lambda w, x: x.reshape(4, 4, 4, 4, 6) * 2, {'reshape': (4, 4, 4, 4, 6)}),
    'a part': (lambda w, x: x[:20] * 2, {'slice': (20, 24)}),
    'in what a loop carries': (
        lambda w, x: lax.scan(lambda c, _: (jnp.tanh(jnp.fft.fft(c, axis=0).real @ w), None), x, length=3)[0],
        {'fft': (24, 64)},
    ),
    'transformed': (lambda w, x: jnp.fft.fft(x, axis=0).real, {'fft': (24, 64)}),
}


@pytest.mark.parametrize('fun, expected', LOSSES.values(), ids=LOSSES)
def test_where_rows_are_lost_is_told(fun, expected):
    found = {each.equation.primitive.name: each.aval.shape for each in following(fun, (W, X), [None, 0]).lost}
    assert found == expected


MOVES = {
    'looked up by numbers of rows': (lambda w, x: x[jnp.argmax(x, 1)] @ w, {'gather': (64, 24)}),
    'windows': (
        lambda w, x: lax.map(lambda i: lax.dynamic_slice_in_dim(x, i * 16, 16) @ w, jnp.arange(4)),
        {'dynamic_slice': (16, 24)},
    ),
    'permuted': (lambda w, x: jax.random.permutation(jax.random.key(0), x) @ w, {'gather': (64, 24)}),
    'taken': (lambda w, x: x[w[0].astype(int)] @ w, {'gather': (24, 24)}),
    'sorted': (lambda w, x: jnp.sort(x, 0) @ w, {'sort': (64, 24)}),
    'sums of segments': (lambda w, x: jax.ops.segment_sum(x @ w, ALL // 4, 16), {'scatter-add': (16, 24)}),
    'experts by scatter': (scattered, {'scatter': (8, 16, 24)}),
    'experts by sorting': (sorted_to_experts, {'sort': (64,), 'gather': (64, 24)}),
    'one for each of a stack': (lambda w, x: x[jnp.zeros((3, 16), int)] @ w, {'gather': (3, 16, 24)}),
}


@pytest.mark.parametrize('fun, expected', MOVES.values(), ids=MOVES)
def test_rows_in_another_order_are_dealt_to_the_devices_anew(fun, expected):
    found = following(fun, (W, X), [None, 0])
    assert not found.lost
    assert {each.equation.primitive.name: each.aval.shape for each in found.moved} == expected
    assert result_dims(found) != [None]


def gradient_of_a_table(w, x):
    return jax.grad(lambda w: jnp.sum(w[jnp.argmax(x, 1)] ** 2))(w)


SUMS = {
    'a mean': lambda w, x: x.mean(0) @ w,
    'a gradient': lambda w, x: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w),
    'the gradient of a table': gradient_of_a_table,
    'few segments': lambda w, x: jax.ops.segment_sum(x, ALL // 16, 4),
    'a histogram': lambda w, x: jnp.bincount(jnp.argmax(x, 1), length=8),
    'the largest': lambda w, x: (x.max(0), x.argmax(0)),
    'parts of a batch': lambda w, x: lax.map(lambda rows: rows @ w, x.reshape(4, 16, 24)),
    'a column of each row': jax.grad(lambda w, x: jnp.mean((x @ w)[jnp.arange(64), jnp.argmax(x, 1)])),
    'special functions': lambda w, x: (jax.scipy.special.erfinv(x), jax.random.gamma(jax.random.key(0), x)),
}


@pytest.mark.parametrize('fun', SUMS.values(), ids=SUMS)
def test_sums_over_rows_lose_none(fun):
    found = following(fun, (W, X), [None, 0])
    assert not found.lost and not found.moved
