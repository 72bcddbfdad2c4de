"""Programs of all kinds under `sjit`: each is partitioned, and its results match one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify
from jax.experimental import pallas as pl

from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

pytestmark = pytest.mark.medium

RNG = np.random.default_rng(0)
W, X = np.asarray(RNG.normal(size=(16, 16)) / 4, 'f'), np.asarray(RNG.normal(size=(16, 16)), 'f')
HELPER, RULE = MeshShardingHelper([8], ['fsdp']), FSDPShardingRule(min_fsdp_size=1)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@jax.custom_vjp
def tripled(x):
    return 2 * x


tripled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def with_own_gradient(w, x):
    def layer(c, _):
        return tripled(jax.checkpoint(lambda c: jnp.tanh(c @ w))(c)), None

    return lax.scan(layer, x, None, length=2)[0].mean()


def sgd(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - gradient / 10, value


def step_of(fun, **options):
    return HELPER.sjit(fun, in_shardings=(RULE, P('fsdp')), batch_argnums=1, **options)


def assert_values(results, expected, tolerance=1e-5):
    for a, b in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_allclose(
                np.asarray(a, 'f8'), np.asarray(b, 'f8'), rtol=tolerance, atol=tolerance
            )
        else:
            np.testing.assert_array_equal(a, b)


def offloaded(w, x):
    """Residuals of a loop over layers are stored in host memory."""
    names = {'names_which_can_be_saved': [], 'names_which_can_be_offloaded': ['hidden']}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src='device', offload_dst='pinned_host'
    )

    def layer(x, _):
        return jnp.tanh(checkpoint_name(jnp.sin(x @ w), 'hidden') @ w), None

    def run(w, x):
        return lax.scan(jax.checkpoint(layer, policy=policy), x, None, 3)[0].mean()

    return jax.value_and_grad(run)(w, x)


def through_the_host(w, x):
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    weight = jax.device_put(jax.device_put(w, host), device)
    y = jax.device_put(jax.device_put(jnp.tanh(x @ weight), host), device)
    return y, y.sum()


def kernel(w, x):
    """A kernel that mixes all examples gathers them."""

    def reverse(x, out):
        out[...] = x[...][::-1]

    y = jnp.tanh(x @ w)
    return pl.pallas_call(reverse, out_shape=jax.typeof(y), interpret=True)(y)


def checked(w, x):
    def check(w, x):
        checkify.check(jnp.all(x < 1), 'an example is too large')
        return loss(w, x)

    return checkify.checkify(check)(w, x)


def in_composites(w, x):
    return lax.composite(lambda w, x: jnp.tanh(x @ w), 'scalax.test')(w, x)


def solved(w, x):
    matrices = jnp.einsum('bi,bj->bij', x, x)[:, :4, :4] + 4 * jnp.eye(4)
    return jnp.linalg.solve(matrices, x[:, :4, None]), jnp.linalg.cholesky(matrices)


def without_features(w, x):
    none = x[:, :0]
    return jnp.concatenate([none, none], 1), none[::-1], none.sum(1)[:, None] + x @ w


PROGRAMS = {
    program.__name__: program
    for program in (offloaded, through_the_host, kernel, checked, in_composites, solved, without_features)
}


@pytest.mark.parametrize('name', PROGRAMS)
def test_values(name):
    results, expected = step_of(PROGRAMS[name])(W, X), jax.jit(PROGRAMS[name])(W, X)
    if name == 'checked':  # error codes are numbered per trace
        (error, *results), (expected_error, *expected) = results, expected
        assert error.get() == expected_error.get() is not None
    assert_values(results, expected)


@pytest.mark.parametrize('examples', [0, 8, 16, 24])
def test_one_step_for_several_batch_sizes(examples):
    x = np.resize(X, (examples, 16))
    fun = (lambda w, x: (x[::-1] @ w).sum()) if not examples else sgd
    step = step_of(fun)
    assert_values(step(W, x), jax.jit(fun)(W, x))
    assert_values(step(W, X), jax.jit(fun)(W, X))


DTYPES = ('int8', 'uint8', 'bool', 'float16', 'bfloat16', 'float8_e4m3fn', 'complex64')


@pytest.mark.parametrize('dtype', DTYPES)
def test_dtypes(dtype):
    def fun(w, x):
        moved = [x[::-1], jnp.concatenate([x, x], 1), x.T, x.reshape(4, 4, 16)]
        if dtype == 'bool':
            return [*moved, x.any(0), x.all(), jnp.argmax(x, 0)]
        return moved if dtype.startswith('float8') else [*moved, x.sum(0), x + x]

    x = jnp.asarray(np.abs(X) * 3).astype(dtype)

    def read(values):  # NumPy does not have all of them
        return [
            np.asarray(value.astype('complex64' if dtype == 'complex64' else 'float32')) for value in values
        ]

    for a, b in zip(read(step_of(fun)(W, x)), read(jax.jit(fun)(W, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2)


@pytest.mark.parametrize('partitionable', [True, False])
@pytest.mark.parametrize('generator', ['threefry2x32', 'rbg', 'unsafe_rbg'])
@pytest.mark.sampled(3)
def test_random_bits_match_one_device(generator, partitionable):
    def fun(key, batch):
        keys, x = batch
        kept = jax.random.bernoulli(key, 0.5, x.shape) * x
        drawn = jax.vmap(lambda key, row: row * jax.random.bernoulli(key, 0.5, row.shape))(keys, x)
        others = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, jnp.arange(16)))
        turned = jax.random.key_data(jnp.concatenate([keys[::-1], jax.random.split(key, 16)]))
        return kept, drawn, others, turned, jax.random.permutation(key, 16)

    with jax.threefry_partitionable(partitionable):
        key = jax.random.key(1, impl=generator)
        batch = jax.random.split(key, 16), X
        step = HELPER.sjit(fun, in_shardings=(P(), P('fsdp')), batch_argnums=1)
        assert_values(step(key, batch), jax.jit(fun)(key, batch), 0)


def test_doubles_are_equal_within_their_rounding():
    with jax.enable_x64(True):
        w, x = W.astype('f8'), X.astype('f8')
        assert_values(step_of(sgd)(w, x), jax.jit(sgd)(w, x), 1e-13)


WAYS = {
    'gradient': (jax.grad, loss),
    'gradient in a jit': (lambda fun: jax.jit(jax.grad(fun)), loss),
    'gradient of a checkpoint': (lambda fun: jax.grad(jax.checkpoint(fun)), loss),
    'gradients of both': (lambda fun: jax.grad(fun, (0, 1)), with_own_gradient),
    'pullback': (lambda fun: lambda w, x: jax.vjp(fun, w, x)[1](1.0), loss),
    'linearization': (lambda fun: lambda w, x: jax.linearize(lambda x: fun(w, x), x)[0], loss),
    'checkpoint of a step': (lambda fun: jax.checkpoint(fun), sgd),
    'shapes': (lambda fun: lambda w, x: jax.tree.map(jnp.zeros_like, jax.eval_shape(fun, w, x)), sgd),
    'tangents': (lambda fun: lambda w, x: jax.jvp(fun, (w, x), (w, x)), loss),
    'map': (lambda fun: lambda w, x: jax.vmap(fun, (None, 0))(w, jnp.stack([x, x + 1])), loss),
    'map of a gradient': (
        *(lambda fun: lambda w, x: jax.vmap(jax.grad(fun), (None, 0))(w, jnp.stack([x, x + 1])), loss),
    ),
    'rounds': (lambda fun: lambda w, x: lax.scan(lambda w, _: fun(w, x), w, None, 3), sgd),
    'another sjit': (lambda fun: HELPER.sjit(fun, in_shardings=(RULE, P('fsdp'))), sgd),
    'compiled ahead': (lambda fun: lambda w, x: _compiled(fun, w, x), sgd),
}


def _compiled(fun, w, x):
    return fun.lower(w, x).compile()(w, x) if hasattr(fun, 'lower') else fun(w, x)


@pytest.mark.parametrize('name', WAYS)
def test_ways_to_call_a_step(name):
    way, fun = WAYS[name]
    assert_values(way(step_of(fun))(W, X), way(fun)(W, X))


def test_constants_and_values_of_an_outer_trace():
    def outer(run, w, x):
        def step(x):
            return jnp.tanh(x @ w) + jnp.asarray(X) + HELPER.shard(X, P('fsdp')) + w.sum()

        return run(step)(x).sum(0)

    run = functools.partial(HELPER.sjit, in_shardings=P('fsdp'), batch_argnums=0)
    assert_values(jax.jit(functools.partial(outer, run))(W, X), outer(jax.jit, W, X))
    gradients = [jax.grad(lambda w, run=run: outer(run, w, X).sum())(W) for run in (run, jax.jit)]
    assert_values(*gradients, 1e-4)


def test_a_nan_is_found_where_it_is_made():
    step = HELPER.sjit(lambda x: jnp.log(x - 100), in_shardings=P('fsdp'), batch_argnums=0)
    with jax.debug_nans(True):
        assert_values(step_of(sgd)(W, X), jax.jit(sgd)(W, X))
        with pytest.raises(FloatingPointError):
            step(X)
