"""Rows that are written out of bounds are the last and the first one, as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._follow.bounds import within_bounds
from scalax._jax import rewriting
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from tests.support.contracts import contract

N = 16
W = np.random.default_rng(0).normal(size=(8, 8)).astype('float32') / 4
X = np.random.default_rng(1).normal(size=(N, 8)).astype('float32')


def written(x, row, i):
    return lax.dynamic_update_slice(x, row, (i, jnp.zeros_like(i)))


def test_xla_writes_no_row_out_of_bounds():
    """Where this fails, XLA has mended it, and `within_bounds` can go."""
    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Auto,))
    rows, zeros, ones = NamedSharding(mesh, P('x')), jnp.zeros((N, 8)), jnp.ones((1, 8))
    with contract('writes it nowhere', 'to mend it', library='jaxlib'):
        assert jax.jit(written, out_shardings=rows)(zeros, ones, N).sum() == 0


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('dtype', ['int32', 'uint8', 'int8'])
@pytest.mark.parametrize('number', [0, 5, 15, 16, 40, 100, -1, -40])
def test_numbers_are_kept_within_bounds(number, dtype):
    if number < 0 and dtype == 'uint8':
        number += 256
    args = jnp.asarray(X), jnp.ones((1, 8)), jnp.asarray(number, dtype)
    changed = rewriting.Rewriter(within_bounds).jaxpr(jax.make_jaxpr(written)(*args))
    [found] = rewriting.run(changed, args)
    np.testing.assert_array_equal(found, written(*args))


@pytest.mark.medium
@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize('number', [N, 100, -100])
def test_constants_out_of_bounds(number, rows):
    def fun(w, x):
        return lax.dynamic_update_slice(x @ w, jnp.ones((rows, 8)), (number, 0))

    helper, rule = MeshShardingHelper([8], ['fsdp']), FSDPShardingRule('fsdp', min_fsdp_size=1)
    with jax.default_matmul_precision('highest'):
        step = helper.sjit(fun, in_shardings=(rule, P('fsdp')))
        np.testing.assert_allclose(step(W, X), jax.jit(fun)(W, X), rtol=1e-5, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('size', [300, N])
def test_small_integers_count_only_so_far(size):
    args = jnp.zeros((size, 2)), jnp.ones((1, 2)), jnp.int8(100)
    changed = rewriting.Rewriter(within_bounds).jaxpr(jax.make_jaxpr(written)(*args))
    [found] = jax.jit(lambda *args: rewriting.run(changed, args))(*args)
    # As JAX itself does: XLA of JAX 0.10 may take the last of 300 rows for row 43, as a small integer has it.
    np.testing.assert_array_equal(found, jax.jit(written)(*args))
    assert found.sum() == 2


@pytest.mark.medium
def test_gradients_of_rows_out_of_bounds_are_those_of_one_device():
    def total(w, x):
        return jnp.sum(jnp.sin(lax.map(lambda i: jnp.tanh(x @ w)[i + 1] @ w, jnp.arange(N))))

    helper, rule = MeshShardingHelper([8], ['fsdp']), FSDPShardingRule('fsdp', min_fsdp_size=1)
    with jax.default_matmul_precision('highest'):
        step = helper.sjit(jax.grad(total), in_shardings=(rule, P('fsdp')))
        np.testing.assert_allclose(step(W, X), jax.jit(jax.grad(total))(W, X), rtol=1e-5, atol=1e-5)


def test_what_is_within_bounds_stays_as_it_is():
    def fun(x):
        return lax.dynamic_update_slice(x, x[:1], (3, 0)), jnp.cumsum(x)

    jaxpr = jax.make_jaxpr(fun)(X)
    assert rewriting.Rewriter(within_bounds).jaxpr(jaxpr) is jaxpr
