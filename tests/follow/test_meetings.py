"""Values that lie differently over mesh axes without rows, in products and side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.following import constraints, like

GRID = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
FREE = P.UNCONSTRAINED


def specs(fun, weight, *rows):
    """The constraints of a function of a weight with columns over tp, and of rows."""
    batch = tuple(range(1, len(rows) + 1))
    placed = P(None, 'tp'), *[P('fsdp') for _ in rows]
    step = GRID.sjit(fun, in_shardings=placed, batch_argnums=batch)
    return [spec for _, spec in constraints(step.trace(weight, *rows).jaxpr)]


def products(weight, x):
    y = x @ weight
    return jnp.einsum('bsd,btd->bst', y, y * 2)


def test_factors_are_gathered_if_their_product_has_more_elements():
    found = specs(products, like(16, 256), like(8, 2048, 16))
    assert found == [P('fsdp', FREE, 'tp'), *[P('fsdp', FREE, 'tp'), P('fsdp', FREE, None)] * 2]


def test_factors_are_gathered_also_if_something_is_added_to_their_product():
    found = specs(lambda weight, x: products(weight, x) + 1, like(16, 256), like(8, 2048, 16))
    assert P('fsdp', FREE, None) in found


def test_a_small_product_is_added_up():
    assert specs(products, like(16, 256), like(8, 16, 16)) == [P('fsdp', FREE, 'tp')]


def test_sums_over_rows_are_added_up():
    def gradient(weight, x):
        return jnp.einsum('bsd,bse->de', x @ weight, x)

    assert specs(gradient, like(16, 256), like(8, 2048, 16)) == [P('fsdp', FREE, 'tp')]


@pytest.mark.parametrize(
    ('rows', 'gathered'), [(16, ('data', 'fsdp')), (48, ('data',)), (1024, ())], ids=lambda value: str(value)
)
def test_few_rows_of_a_gradient_are_gathered_in_place_of_its_sums(rows, gathered):
    """The gradient of 64 x 64 is scattered over fsdp, and a quarter of it added up over data."""
    helper = MeshShardingHelper([2, 4], ['data', 'fsdp'])

    def gradient(weight, x, y):
        return jnp.einsum('bd,be->de', jnp.tanh(x), y) * weight

    axes = ('data', 'fsdp')
    shardings = {'in_shardings': (P('fsdp'), P(axes), P(axes)), 'out_shardings': P('fsdp')}
    step = helper.sjit(gradient, **shardings, batch_argnums=(1, 2))
    args = like(64, 64), like(rows, 64), like(rows, 64)
    left = tuple(axis for axis in axes if axis not in gathered)
    there = P(left if len(left) > 1 else left[0] if left else None, FREE)
    assert [spec for _, spec in constraints(step.trace(*args).jaxpr)] == [P(axes, FREE), there] * 2 * bool(
        gathered
    )
    assert [each.array for each in step.followed(*args).moved] == ['float32[64,64]'] * bool(gathered)
    random = np.random.default_rng(0)
    weight, x, y = (random.normal(size=each.shape).astype('float32') for each in args)
    np.testing.assert_allclose(step(weight, x, y), np.tanh(x).T @ y * weight, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_each_round_of_a_loop_is_not():
    """It is added to those before, and all of them are added up over the devices at once."""
    helper = MeshShardingHelper([8], ['data'])

    def gradient(weight, x):
        return jax.lax.scan(lambda sums, x: (sums + x.T @ x, None), weight, x)[0]

    step = helper.sjit(gradient, in_shardings=(P(), P(None, 'data')), batch_argnums=1)
    found = constraints(step.trace(like(64, 64), like(4, 8, 64)).jaxpr)
    assert not any(shape == (8, 64) and spec[0] is None for shape, spec in found)


@pytest.mark.parametrize('together', [jnp.stack, jnp.concatenate])
def test_what_is_whole_stays_whole_beside_what_is_split(together):
    def fun(weight, x, y):
        return together([jnp.tanh(x), y @ weight], 1 if together is jnp.stack else 0)

    rows = like(2048, 16)
    first, second = specs(fun, like(16, 16), rows, rows)
    assert first == P('fsdp', 'tp')
    assert (second[0], second[-1]) == ('fsdp', None)


def test_values_stay_what_they_are():
    def fun(weight, x, y):
        stacked = jnp.stack([jnp.abs(x), y @ weight], 1)
        return jnp.einsum('bfd,bgd->bfg', stacked, stacked)

    random = np.random.default_rng(1)
    shapes = (16, 16), (64, 16), (64, 16)
    weight, x, y = (random.integers(-3, 4, shape).astype('float32') for shape in shapes)
    step = GRID.sjit(fun, in_shardings=(P(None, 'tp'), P('fsdp'), P('fsdp')), batch_argnums=(1, 2))
    np.testing.assert_array_equal(step(weight, x, y), fun(weight, x, y))


@pytest.mark.medium
def test_beside_what_is_empty_nothing_is_kept_whole():
    """A scan of 8 columns ends with one beside none: if that is constrained, XLA gets the others wrong."""

    def largest(weight, x):
        return jax.lax.associative_scan(jnp.maximum, x @ weight, axis=1)

    random = np.random.default_rng(0)
    weight, x = (random.normal(size=shape).astype('float32') for shape in ((16, 8), (16, 16)))
    assert specs(largest, weight, x) == [P('fsdp', 'tp')]
    step = GRID.sjit(largest, in_shardings=(P(None, 'tp'), P('fsdp')), batch_argnums=1)
    np.testing.assert_allclose(step(weight, x), jax.jit(largest)(weight, x), rtol=1e-5, atol=1e-6)
