"""Rows that loops index by the iteration become xs, with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from scalax._jax.equations import all_equations
from scalax._spmd.rewrites.indexed_loops import with_stacks
from tests.support.partitioned import assert_equal, collectives, partitioned

N = 16
W = np.random.default_rng(0).normal(size=(8, 8)).astype('float32') / 4
X = np.random.default_rng(1).normal(size=(N, 8)).astype('float32')
INDEXING = {'dynamic_slice', 'dynamic_update_slice', 'gather', 'scatter', 'scatter-add'}


def counted(w, x, start=0, stop=N):
    return lax.fori_loop(start, stop, lambda i, c: c + jnp.tanh(x[i] @ w), jnp.zeros(8))


def pair(w, x):
    def swapped(i, c):
        return c[0].at[i].set(c[1][i] @ w), c[1].at[i].add(c[0][i])

    return lax.fori_loop(0, N, swapped, (x, x * 2))


# Each reads the row of its iteration.
TAKEN = {
    'counted': counted,
    'numbers': lambda w, x: lax.map(lambda i: jnp.tanh(x[i] @ w), jnp.arange(N)),
    'small numbers': lambda w, x: lax.map(lambda i: x[i] @ w, jnp.arange(N, dtype='uint8')),
    'backwards': lambda w, x: lax.scan(
        lambda c, i: (c + x[i], x[i] @ w + c), X[0], jnp.arange(N), reverse=True
    ),
    'other functions': lambda w, x: lax.map(
        lambda i: (jnp.take(x, i, 0) + lax.dynamic_index_in_dim(x, i, 0, False)) @ w, jnp.arange(N)
    ),
    'with checkpoint': lambda w, x: lax.scan(
        jax.checkpoint(lambda c, i: (c + jnp.tanh(x[i] @ w), None)), jnp.zeros(8), jnp.arange(N)
    )[0],
    'in a jit': jax.jit(counted),
    'an index used in arithmetic': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: c + i * (x[i] @ w), jnp.zeros(8)
    ),
    'rows in the carry': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: (c[0], c[1] + c[0][i] @ w), (x @ w, jnp.zeros(8))
    ),
    'rows that are written': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: c.at[i].set(jnp.tanh(x[i] @ w)), jnp.zeros_like(x)
    ),
    'in place': lambda w, x: lax.fori_loop(0, N, lambda i, c: c.at[i].set(jnp.tanh(c[i] @ w)), x),
    'added': lambda w, x: lax.fori_loop(0, N, lambda i, c: c.at[i].add(x[i] @ w), x),
    'a slice': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: lax.dynamic_update_slice(c, (x[i] @ w)[None], (i, 0)), x
    ),
    'two arrays': pair,
    'parts': lambda w, x: lax.fori_loop(
        0, N // 2, lambda i, c: c + jnp.tanh(lax.dynamic_slice_in_dim(x, 2 * i, 2) @ w), jnp.zeros((2, 8))
    ),
    'parts that are written': lambda w, x: lax.fori_loop(
        *(0, N // 4),
        lambda i, c: lax.dynamic_update_slice(c, lax.dynamic_slice_in_dim(c, 4 * i, 4) @ w, (4 * i, 0)),
        x,
    ),
    'without operands': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: c + x[i] @ w * lax.iota('float32', 8), jnp.zeros(8)
    ),
    'row indices': lambda w, x: lax.fori_loop(0, N, lambda i, c: c.at[i].set((x[i] @ w).sum()), jnp.zeros(N)),
}
# Each reads other rows, or several rows.
OTHERS = {
    'reversed rows': lambda w, x: lax.map(lambda i: x[N - 1 - i] @ w, jnp.arange(N)),
    'counted down': lambda w, x: lax.scan(
        lambda c, _: ((c[0] + 1, c[1] + x[c[0]] @ w), c[0]), (0, X[0]), None, length=N, reverse=True
    ),
    'descending indices': lambda w, x: lax.scan(
        lambda c, i: (c.at[i].set(x[i] @ w), c[i]), x, jnp.arange(N - 1, -1, -1)
    ),
    'from both ends': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: (c[0] + x[i] @ w, c[1].at[N - 1 - i].add(x[i])), (jnp.zeros(8), x * 2)
    ),
    'the next row': lambda w, x: lax.map(lambda i: x[i + 1] @ w, jnp.arange(N)),
    'every second row': lambda w, x: lax.scan(
        lambda c, _: ((c[0] + 2, c[1] + x[c[0]] @ w), None), (0, jnp.zeros(8)), None, length=N
    )[0],
    'but one': lambda w, x: counted(w, x, 1),
    'half of them': lambda w, x: counted(w, x, 0, N // 2),
    'the row before': lambda w, x: lax.fori_loop(0, N, lambda i, c: c.at[i].set(c[i - 1] @ w + x[i]), x),
    'the last row in place': lambda w, x: lax.fori_loop(0, N, lambda i, c: c.at[i].set(c[N - 1 - i] @ w), x),
    'another row': lambda w, x: lax.fori_loop(0, N, lambda i, c: c.at[i].set(c[(i + 1) % N] @ w), x),
    'all rows': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: (c[0].at[i].set(x[i] @ w), c[1] + c[0].sum()), (x, 0.0)
    ),
    'a row that is written': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: ((y := c[0].at[i].set(x[i] @ w)), c[1] + y[i].sum()), (x, 0.0)
    ),
    'a part of a row': lambda w, x: lax.fori_loop(
        0, N, lambda i, c: lax.dynamic_update_slice(c, x[i, :4][None], (i, 2)), x
    ),
    'a column': lambda w, x: lax.map(lambda i: x[:, i] @ X, jnp.arange(8)),
    'parts that overlap': lambda w, x: lax.map(
        lambda i: lax.dynamic_slice_in_dim(x, i, 2) @ w, jnp.arange(N // 2)
    ),
    'indices of the batch': lambda w, x: lax.map(lambda i: x[i], jnp.argsort(x[:, 0])),
}


@jax.custom_vjp
def indexed(x, i):
    return jnp.tanh(x[i])


def indexed_forward(x, i):
    return indexed(x, i), (x, i)


def indexed_backward(saved, gradient):
    x, i = saved
    return jnp.zeros_like(x).at[i].set(3 * gradient), None


indexed.defvjp(indexed_forward, indexed_backward)


@jax.custom_jvp
def looked_up(x, i):
    return jnp.tanh(x[i])


@looked_up.defjvp
def looked_up_forward(values, tangents):
    return looked_up(*values), 5 * tangents[0][values[1]]


def gradient(fun):
    def total(w, x):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(w, jnp.tanh(x @ w))))

    return jax.grad(total, (0, 1))


def stacked(fun):
    """Returns a function that indexes rows, and the indexing that remains after the rewrite."""
    before, jaxpr = None, jax.make_jaxpr(fun)(W, X)
    while jaxpr is not before:
        before, jaxpr = jaxpr, with_stacks(jaxpr)
    return jaxpr_as_fun(jaxpr), INDEXING.intersection(
        equation.primitive.name for equation in all_equations(jaxpr)
    )


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('is_gradient', [False, True], ids=['values', 'gradients'])
@pytest.mark.parametrize('name', [*TAKEN, *OTHERS])
def test_values_are_unchanged(name, is_gradient):
    fun = (TAKEN | OTHERS)[name]
    fun = gradient(fun) if is_gradient else fun
    rewritten, left = stacked(fun)
    assert bool(left) == (name in OTHERS)
    with jax.default_matmul_precision('highest'):
        expected, got = jax.tree.leaves(jax.jit(fun)(W, X)), jax.jit(rewritten)(W, X)
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    for result, expected_result in zip(got, expected, strict=True):
        np.testing.assert_allclose(result, expected_result, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('name', ['counted', 'with checkpoint', 'in place', 'rows that are written', 'parts'])
def test_each_device_runs_over_its_own_examples(name):
    fun = gradient(TAKEN[name])
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(fun, W, X)
        assert_equal(run(), jax.jit(fun)(W, X))
    assert not [reason for reason in collectives(step) if 'examples gathered' in reason]


@pytest.mark.medium
@pytest.mark.parametrize('name', ['reversed rows', 'descending indices'])
def test_examples_in_another_order_are_reported(name):
    fun = gradient(OTHERS[name])
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(fun, W, X)
        assert_equal(run(), jax.jit(fun)(W, X))
    assert [reason for reason in collectives(step) if 'examples gathered' in reason]


@pytest.mark.medium
@pytest.mark.parametrize('take', [indexed, looked_up])
def test_a_custom_gradient_is_kept(take):
    """Also if the rewritten function is differentiated."""

    def fun(w, x):
        return lax.map(jax.checkpoint(lambda i: take(x, i) @ w), jnp.arange(N))

    rewritten, _ = stacked(fun)
    gradients = jax.grad(lambda w, x: sum(y.sum() for y in rewritten(w, x)), (0, 1))(W, X)
    expected = jax.grad(lambda w, x: fun(w, x).sum(), (0, 1))(W, X)
    assert_equal(gradients, expected)


@pytest.mark.medium
@pytest.mark.parametrize('dtype', ['int8', 'uint8', 'int32', 'uint32'])
def test_small_integers_count_from_the_start_again(dtype):
    x = np.random.default_rng(1).normal(size=(320, 8)).astype('float32')

    def fun(x):
        def step(c, i):
            return (c[0] + jnp.asarray(1, dtype), c[1] + x[i] * c[0].astype('float32')), c[0]

        return lax.scan(step, (jnp.asarray(0, dtype), jnp.zeros(8)), jnp.arange(len(x)))

    jaxpr = with_stacks(jax.make_jaxpr(fun)(x))
    assert INDEXING.isdisjoint(equation.primitive.name for equation in all_equations(jaxpr))
    for a, b in zip(jaxpr_as_fun(jaxpr)(x), jax.tree.leaves(fun(jnp.asarray(x))), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_scalars_have_no_rows():
    def fun(x):
        def added(i, c):
            return c[0] + lax.dynamic_slice(x[i, 0], (), ()), lax.dynamic_update_slice(c[1], c[0], ())

        return lax.fori_loop(0, N, added, (0.0, 0.0))

    result = jaxpr_as_fun(with_stacks(jax.make_jaxpr(fun)(X)))(X)
    np.testing.assert_allclose(result, fun(jnp.asarray(X)), rtol=1e-5)


def test_a_program_without_indexed_loops_is_unchanged():
    jaxpr = jax.make_jaxpr(lambda w, x: lax.scan(lambda c, row: (c, row @ w), 0.0, x))(W, X)
    assert with_stacks(jaxpr) is jaxpr
