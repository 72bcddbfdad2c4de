"""Unusual arguments, batches and transformations: results match one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.sharding import BatchPartitioning, FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

pytestmark = pytest.mark.medium

HELPER = MeshShardingHelper([8], ['fsdp'], partitioning=BatchPartitioning())
LENIENT = MeshShardingHelper([8], ['fsdp'], partitioning=BatchPartitioning(), on_indivisible='replicate')
RULE, ROWS = FSDPShardingRule(min_fsdp_size=1), P('fsdp')
RNG = np.random.default_rng(0)
W, X = (np.asarray(RNG.normal(size=(16, 8)), 'f') for _ in range(2))
W = W[:8]


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - gradient / 10, value


def sjit(fun, batch=ROWS, helper=HELPER, **options):
    return helper.sjit(fun, in_shardings=(RULE, batch), batch_argnums=1, **options)


def assert_alike(results, expected):
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """State with leaves that are None, and trees without leaves."""

    w: Any
    missing: Any = None
    empty: Any = dataclasses.field(default_factory=dict)


def of_odd_trees(state, batch):
    w, value = step(state.w, batch['x'][0])
    return State(w), {'value': value, 'none': batch['none'], 'nothing': ()}, [batch['x'], 1.0, 3]


def of_nothing(w, x):
    """Empty arrays as state, as examples, and as both."""
    none = x[:, :0]
    return (
        none @ w[:0],
        none.sum(),
        x[:0].sum(0),
        none,
        jnp.zeros((0, 8)) + w[:0],
        jnp.concatenate([none, x], 1),
    )


def of_no_use(w, x):
    return w, w, x, x, x.sum(), x.sum(), jnp.ones(3), ()


PROGRAMS = {
    'odd trees': (of_odd_trees, State(W), {'x': [X], 'none': None, 'empty': {}}),
    'without elements': (of_nothing, W, X),
    'without examples': (lambda w, x: (x @ w, x.sum(0), x[::-1]), W, X[:0]),
    'results that are arguments': (of_no_use, W, X),
    'no argument is used': (lambda w, x: jnp.arange(4.0), W, X),
}


@pytest.mark.parametrize('name', PROGRAMS)
def test_arguments(name):
    fun, state, batch = PROGRAMS[name]
    compiled = sjit(fun)
    assert compiled.explain_propagation(state, batch).axes == ('fsdp',)
    assert_alike(compiled(state, batch), jax.jit(fun)(state, batch))


def test_batches_of_several_sizes_in_turn():
    compiled = sjit(step)
    for count in (16, 8, 32, 16):
        batch = np.tile(X, (2, 1))[:count]
        assert compiled.explain_propagation(W, batch).axes == ('fsdp',)
        assert_alike(compiled(W, batch), step(W, batch))


def test_several_batches_of_several_sizes():
    def fun(w, batch):
        x, y = batch
        return step(w, x), step(w, y), jnp.concatenate([x, y]), x.mean() + y.mean()

    batch = X, np.tile(X, (2, 1))
    assert_alike(sjit(fun)(W, batch), jax.jit(fun)(W, batch))


@pytest.mark.parametrize('count', [1, 12])
def test_indivisible_examples_are_replicated_if_requested(count):
    compiled = sjit(step, helper=LENIENT)
    report = compiled.explain_propagation(W, X[:count])
    assert report.reason.startswith('no array in the arguments of batch_argnums')
    assert_alike(compiled(W, X[:count]), step(W, X[:count]))


def test_examples_in_the_second_dimension():
    def fun(w, x):
        last, states = lax.scan(lambda c, row: (jnp.tanh(c @ w + row), c.sum()), x[0], x)
        return last, states, x.sum(1), jnp.mean(x)

    batch = np.stack([X, -X, X / 2])
    compiled = sjit(fun, P(None, 'fsdp'))
    assert not compiled.explain_propagation(W, batch).gathered_examples
    assert_alike(compiled(W, batch), jax.jit(fun)(W, batch))


AROUND = {
    'grad': lambda fun: jax.grad(fun)(W, X),
    'grad in a jit': lambda fun: jax.jit(jax.value_and_grad(lambda w: fun(w, X)))(W),
    'checkpoint': lambda fun: jax.grad(jax.checkpoint(lambda w: fun(w, X) ** 2))(W),
    'jvp': lambda fun: jax.jvp(lambda w: fun(w, X), (W,), (W,)),
    'hessian': lambda fun: jax.hessian(lambda row: fun(W + row, X))(W[0]),
    'vmap of weights': lambda fun: jax.vmap(fun, (0, None))(np.stack([W, 2 * W]), X),
    'vmap of batches': lambda fun: jax.jit(jax.vmap(fun, (None, 0)))(W, np.stack([X, 2 * X])),
    'scan': lambda fun: lax.scan(lambda w, x: (w - jax.grad(fun)(w, x), fun(w, x)), W, np.stack([X, X])),
}


@pytest.mark.parametrize('name', AROUND)
@pytest.mark.sampled(3)
def test_transformations_around(name):
    assert_alike(AROUND[name](sjit(loss)), AROUND[name](loss))


def test_numbers_of_64_bits():
    with jax.enable_x64(True):
        w, x = W.astype('float64'), X.astype('float64')

        def fun(w, x):
            return (
                step(w, x),
                jnp.int64(x * 1e12).sum(0),
                x.max(0),
                jnp.argsort(x, 0),
                x.astype('complex128').sum(),
            )

        results, expected = sjit(fun)(w, x), jax.jit(fun)(w, x)
        for a, b in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
