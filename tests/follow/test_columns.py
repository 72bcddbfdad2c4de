"""Columns over a mesh axis that shards no rows: split where a product sums them, else whole beside sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

GRID = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
COLUMNS, ROWS = P('fsdp', 'tp'), P('tp', 'fsdp')
RULES = {'skip': COLUMNS, 'up': COLUMNS, 'down': ROWS, 'next': COLUMNS, 'behind': ROWS}


def block(w, x):
    return x @ w['skip'] + jax.nn.relu(x @ w['up']) @ w['down']


def inner(w, x):
    return jax.nn.relu(x) @ w['behind']


# A function, and how many of its products have their columns split, and whole.
CASES = {
    'columns are added to a sum': (lambda w, x: block(w, x) @ w['next'], 2, 2),
    'concatenated with one': (
        lambda w, x: jnp.concatenate([x @ w['skip'], (x @ w['up']) @ w['down']], -1),
        *(1, 2),
    ),
    'a product sums them': (lambda w, x: jax.nn.relu(block(w, x)) @ w['behind'], 2, 2),
    'one in a function': (lambda w, x: jax.jit(inner)(w, block(w, x)), 2, 2),
    'columns are added': (lambda w, x: (x @ w['skip'] + x @ w['up']) @ w['next'], 3, 0),
    'multiplied with a sum': (lambda w, x: (x @ w['skip']) * ((x @ w['up']) @ w['down']), 2, 1),
}


def arguments():
    rng = np.random.default_rng(0)
    w = {name: rng.normal(size=(16, 16)).astype('float32') / 4 for name in RULES}
    return w, rng.normal(size=(512, 16)).astype('float32')


@pytest.mark.medium
@pytest.mark.parametrize('case', CASES)
def test_columns(case):
    fun, split, whole = CASES[case]
    step = GRID.sjit(fun, in_shardings=(RULES, P('fsdp')), batch_argnums=1)
    kept = step.followed(*arguments()).kept
    last = [each.spec[-1] for each in kept for _ in range(each.count)]
    assert (last.count('tp'), last.count(None)) == (split, whole)
    np.testing.assert_allclose(step(*arguments()), fun(*arguments()), rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_gradients_have_the_values_of_one_device():
    def loss(w, x):
        return jnp.mean(jnp.square(block(w, block(w, x))))

    step = GRID.sjit(jax.grad(loss), in_shardings=(RULES, P('fsdp')), out_shardings=RULES, batch_argnums=1)
    found, expected = step(*arguments()), jax.grad(loss)(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.medium
def test_images_of_convolutions_have_the_values_of_one_device():
    def images(w, x):
        def conv(x, name):
            kernel = w[name].reshape(1, 1, 16, 16) * jnp.ones((3, 3, 1, 1))
            return jax.lax.conv_general_dilated(
                x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
            )

        x = jax.nn.relu(conv(x[:, None, None], 'up'))
        x = conv(x, 'next') + conv(conv(x, 'up'), 'down')
        return conv(jax.nn.relu(x), 'behind')

    step = GRID.sjit(images, in_shardings=(RULES, P('fsdp')), batch_argnums=1)
    kept = step.followed(*arguments()).kept
    assert {each.spec for each in kept} == {
        P('fsdp', P.UNCONSTRAINED, P.UNCONSTRAINED, 'tp'),
        P('fsdp', P.UNCONSTRAINED, P.UNCONSTRAINED, None),
    }
    np.testing.assert_allclose(step(*arguments()), images(*arguments()), rtol=1e-5, atol=1e-5)
