"""Loops: what is kept at both ends of a round; weights gathered before a loop, and sums behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.sharding import PartitionSpec as P
from tests.support.following import constraints, following, like, result_dims

X, W = like(16, 24), like(24, 24)
OPEN = P.UNCONSTRAINED
ROWS, STACK, WHOLE = P('fsdp', OPEN), P(OPEN, 'fsdp', OPEN), P(None, None)


def recurrent(x, w):
    """A cell over time: few rows in each round."""
    return lax.scan(lambda c, row: (jnp.tanh(c @ w + row), None), jnp.zeros((16, 24)), x)[0]


def outside(followed):
    """The constraints around the loops of a jaxpr."""
    equations = followed.jaxpr.jaxpr.eqns
    return [each for each in equations if each.primitive.name == 'sharding_constraint']


def specs(equations):
    return [each.params['sharding'].spec for each in equations]


def test_both_ends_of_a_round_are_kept():
    followed = following(
        lambda x, w: lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0], (X, W), [0, None]
    )
    assert constraints(followed.jaxpr) == [((16, 24), ROWS)] * 3  # the last one behind the loop


def test_weights_of_few_rows_are_gathered_before_the_loop():
    followed = following(recurrent, (like(9, 16, 24), W), [1, None])
    assert specs(outside(followed)) == [STACK, WHOLE, ROWS]


def test_so_are_those_of_a_loop_of_unknown_length():
    def fun(x, w):
        return lax.while_loop(lambda c: jnp.max(jnp.abs(c)) < 9, lambda c: jnp.tanh(c @ w) + c, x)

    assert specs(outside(following(fun, (X, W), [0, None]))) == [WHOLE, ROWS]


def test_weights_of_many_rows_are_not():
    many = like(9, 8 * 1024, 24)

    def fun(x, w):
        return lax.scan(lambda c, row: (jnp.tanh(row @ w), None), x[0], x)[0]

    assert specs(outside(following(fun, (many, W), [1, None]))) == [STACK, ROWS]


def test_a_stack_is_constrained_once():
    def fun(x, w):
        last, stack = lax.scan(lambda c, _: (jnp.tanh(c @ w), c), x, None, length=3)
        return lax.scan(lambda c, each: (c * each, None), last, stack)[0]

    # Behind the loop that makes it; not before the one that takes it, nor its elements in the rounds.
    followed = following(fun, (X, W), [0, None])
    assert specs(outside(followed)) == [WHOLE, ROWS, STACK, ROWS]
    *_, second = [each for each in followed.jaxpr.jaxpr.eqns if each.primitive.name == 'scan']
    assert constraints(second.params['jaxpr']) == [((16, 24), ROWS)] * 2


def lost_rows(x):
    """A large value whose rows an unknown primitive has lost."""
    return jax.pure_callback(np.asarray, like(24, 24), x)


@pytest.mark.parametrize(
    'value',
    [
        lost_rows,
        lambda x: jax.jit(lost_rows)(x),
        lambda x: lax.cond(x[0, 0] > 0, lambda: lost_rows(x), lambda: jnp.ones((24, 24))),
        lambda x: lax.cond(x[0, 0] > 0, lambda: jnp.zeros((24, 24)), lambda: jnp.ones((24, 24))),
        lambda x: lax.while_loop(lambda c: c.sum() < x.sum(), lambda c: c * 2, jnp.ones((24, 24))),
        lambda x: lax.fori_loop(0, 3, lambda _, c: c + lost_rows(x), jnp.ones((24, 24))),
        lambda x: lax.scan(lambda c, _: (c, lost_rows(x)), 0.0, None, length=2)[1][0],
    ],
    ids=['callback', 'jit', 'cond', 'which branch', 'rounds', 'carry', 'stacked'],
)
def test_what_depends_on_the_batch_is_no_weight(value):
    """It is large perhaps, and was never on each device."""

    def fun(x, rows):
        return recurrent(rows, value(x))

    followed = following(fun, (X, like(9, 16, 24)), [0, 1])
    assert WHOLE not in specs(outside(followed))


@pytest.mark.parametrize(
    'weight',
    [
        lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
        lambda w: jnp.tanh(w) @ w,
        lambda w: lax.fori_loop(0, 2, lambda _, c: c @ w, w),
        lambda w: lax.cond(w[0, 0] > 0, lambda: w, lambda: 2 * w),
    ],
    ids=['cast', 'product', 'loop', 'cond'],
)
def test_what_is_computed_of_weights_is_a_weight(weight):
    followed = following(lambda x, w: recurrent(x, weight(w)), (like(9, 16, 24), W), [1, None])
    assert WHOLE in specs(outside(followed))


def test_gradients_of_few_rows_are_summed_behind_the_loop():
    followed = following(jax.grad(lambda w, x: recurrent(x, w).sum()), (W, like(9, 16, 24)), [None, 1])
    assert specs(outside(followed)).count(WHOLE) == 3  # the weights of two loops, and the sum of one
    assert result_dims(followed) == [None]


def test_constraints_of_the_user_stand_alone():
    def fun(x, w):
        def round_(c, _):
            return jax.lax.with_sharding_constraint(c @ w, P(None, 'fsdp')), None

        return jax.lax.with_sharding_constraint(lax.scan(round_, x, None, length=3)[0], P())

    followed = following(fun, (X, W), [0, None])
    found = [spec for _, spec in constraints(followed.jaxpr)]
    # The trail goes on from the user's: rows are the other dimension, in the carry they are lost.
    assert P(None, 'fsdp') in found
    assert P() in found
    assert ROWS not in found


def test_a_trail_goes_on_from_the_constraint():
    def fun(x, w):
        return jax.lax.with_sharding_constraint(x @ w, P(None, 'fsdp')).T @ w[:16]

    assert result_dims(following(fun, (X, W), [0, None])) == [0]


def test_a_constraint_that_leaves_rows_open_keeps_the_trail():
    def fun(x):
        return jax.lax.with_sharding_constraint(x, P(OPEN, None)) * 2

    assert result_dims(following(fun, (X,), [0])) == [0]


def test_a_loop_that_the_batch_ends():
    def fun(x, w):
        return lax.while_loop(lambda c: (c[1] < 5) & (c[0].sum() < 9), lambda c: (c[0] @ w, c[1] + 1), (x, 0))

    assert result_dims(following(fun, (X, W), [0, None])) == [0, None]


def test_results_that_nobody_takes():
    def fun(x, w):
        lax.scan(lambda c, _: (c @ w, c), x, None, length=2)
        lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: x)
        return x

    assert result_dims(following(fun, (X, W), [0, None])) == [0]


def test_keys_that_are_carried():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))

    def fun(keys, x):
        def round_(carry, _):
            keys, x = carry
            noise = jax.vmap(lambda key: jax.random.normal(key, (24,)))(keys)
            return (jax.vmap(lambda key: jax.random.split(key)[0])(keys), x + noise), None

        return lax.scan(round_, (keys, x), None, length=2)[0]

    followed = following(fun, (keys, X), [0, 0])
    assert result_dims(followed) == [0, 0]
    assert ((16,), P('fsdp')) in constraints(followed.jaxpr)


def test_shared_jaxprs_stay_shared():
    shared = jax.jit(lambda x, w: jnp.tanh(x @ w))

    followed = following(lambda x, y, w: shared(x, w) + shared(y, w), (X, X, W), [0, 0, None])
    first, second = (each.params['jaxpr'] for each in followed.jaxpr.jaxpr.eqns[:2])
    assert first is second


@pytest.mark.parametrize(
    'fun',
    [
        lambda w, x: jnp.tanh(x[0] @ w) @ w,
        lambda w, x: recurrent(x, w),
        jax.grad(lambda w, x: recurrent(x, w).sum()),
        jax.grad(
            lambda w, x: lax.scan(jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), c)), x[0], None, 2)[0].sum()
        ),
        lambda w, x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ w, x[0]),
        lambda w, x: lax.cond(w[0, 0] > 0, lambda: x[0] @ w, lambda: x[0]),
    ],
    ids=['products', 'scan', 'its gradient', 'remat', 'while', 'cond'],
)
def test_following_twice_adds_nothing(fun):
    args, dims = (W, like(9, 16, 24)), [None, 1]
    once = following(fun, args, dims)
    twice = following(jax.extend.core.jaxpr_as_fun(once.jaxpr), args, dims)
    assert constraints(once.jaxpr)
    assert constraints(twice.jaxpr) == constraints(once.jaxpr)
