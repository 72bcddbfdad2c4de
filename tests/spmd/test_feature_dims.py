"""Feature dimensions sharded over a non-batch axis, in programs whose matmuls the compiler partitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import TP, P, assert_equal, partitioned

pytestmark = pytest.mark.medium

COLUMNS, ROWS = P('fsdp', 'tp'), P('tp', 'fsdp')
SPECS = {'behind': ROWS, 'down': ROWS, 'next': COLUMNS, 'skip': COLUMNS, 'up': COLUMNS}
RNG = np.random.default_rng(0)
W = {name: RNG.normal(size=(16, 16)).astype('f') / 4 for name in SPECS}
X = RNG.normal(size=(64, 16)).astype('f')


def block(w, x):
    return x @ w['skip'] + jax.nn.relu(x @ w['up']) @ w['down']


def images(w, x):
    def conv(x, name):
        kernel = w[name].reshape(1, 1, 16, 16) * jnp.ones((3, 3, 1, 1))
        return lax.conv_general_dilated(x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))

    x = jax.nn.relu(conv(x[:, None, None], 'up'))
    x = conv(x, 'next') + conv(conv(x, 'up'), 'down')
    return conv(jax.nn.relu(x), 'behind')


def stacked(w, x):
    both = jnp.stack([jnp.abs(x), x @ w['up']], 1)
    return jnp.einsum('bfd,bgd->bfg', both, both)


PROGRAMS = {
    'columns are added to a sum': lambda w, x: block(w, x) @ w['next'],
    'concatenated with one': lambda w, x: jnp.concatenate([x @ w['skip'], (x @ w['up']) @ w['down']], -1),
    'a matmul contracts them': lambda w, x: jax.nn.relu(block(w, x)) @ w['behind'],
    'multiplied with a sum': lambda w, x: (x @ w['skip']) * ((x @ w['up']) @ w['down']),
    'images': images,
    'stacked with a replicated value': stacked,
    'largest': lambda w, x: lax.associative_scan(jnp.maximum, x @ w['up'], axis=1),
}


@pytest.mark.slow
def test_values_and_gradients_match_one_device():
    def losses(w, x):
        return {name: jnp.mean(jnp.sin(fun(w, x))) for name, fun in PROGRAMS.items()}

    def run_all(w, x):
        return losses(w, x), jax.grad(lambda w: sum(losses(w, x).values()))(w)

    specs = [*SPECS.values()]
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(run_all, W, X, TP, specs=specs, result_specs=[*[P()] * len(PROGRAMS), *specs])
        assert_equal(run(), jax.jit(run_all)(W, X))
    assert not [row for row in step.collective_rows if row.what == 'examples']
