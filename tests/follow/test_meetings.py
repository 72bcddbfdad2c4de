"""Values that lie differently over mesh axes without rows, in products and side by side."""

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
    assert found == [P('fsdp', FREE, 'tp'), *[P('fsdp', FREE, None)] * 2]


def test_a_small_product_is_added_up():
    assert specs(products, like(16, 256), like(8, 16, 16)) == [P('fsdp', FREE, 'tp')]


def test_sums_over_rows_are_added_up():
    def gradient(weight, x):
        return jnp.einsum('bsd,bse->de', x @ weight, x)

    assert specs(gradient, like(16, 256), like(8, 2048, 16)) == [P('fsdp', FREE, 'tp')]


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
