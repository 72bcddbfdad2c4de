"""Experts sharded over the batch axes: tokens move to the experts, however the experts are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import TP, P, assert_equal, partitioned

pytestmark = pytest.mark.medium

# (groups, experts, rows of a group per expert, width), and experts of (width, hidden) and back.
ROWS, UP, DOWN = (8, 8, 4, 16), (8, 16, 32), (8, 32, 16)
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype('f') / 4


X, WEIGHTS = array(*ROWS), {'down': array(*DOWN), 'up': array(*UP)}
STACK = {'down': array(3, *DOWN), 'up': array(3, *UP)}


def experts(w, x):
    """Returns the results of each expert for its rows, with the experts first."""
    hidden = jax.nn.relu(jnp.einsum('gecd,edh->egch', x, w['up']))
    return jnp.einsum('egch,ehd->egcd', hidden, w['down'])


def back(w, x):
    return jnp.einsum('gecd,egcd->gcd', x, experts(w, x))


FORMS = {
    'products': (back, WEIGHTS),
    'a loop over layers': (
        lambda w, x: lax.scan(lambda c, w: (c + back(w, c)[:, None], None), x, w)[0],
        STACK,
    ),
    'one layer after the other': (
        lambda w, x: back({name: weight[1] for name, weight in w.items()}, x),
        STACK,
    ),
    'quantized': (
        lambda w, x: back({name: w[name].astype('int8') * w[name][:, :1] for name in w}, x),
        WEIGHTS,
    ),
    'by a number': (
        lambda w, x: back({name: lax.dynamic_index_in_dim(w[name], 1, keepdims=False) for name in w}, x),
        STACK,
    ),
    'transposed': (
        lambda w, x: back({'up': w['down'].swapaxes(1, 2), 'down': w['up'].swapaxes(1, 2)}, x),
        WEIGHTS,
    ),
    'in another dtype': (lambda w, x: back(jax.tree.map(lambda w: w.astype('bfloat16'), w), x), WEIGHTS),
    'a branch': (lambda w, x: lax.cond(x.sum() > 0, lambda: back(w, x), lambda: x.sum(1)), WEIGHTS),
    'a call': (lambda w, x: jax.jit(back)(w, x), WEIGHTS),
}


def test_rows_move_to_experts_and_no_expert_moves():
    def run_all(w, x):
        return {name: fun(w[name], x) for name, (fun, _) in FORMS.items()}

    weights = {name: weight for name, (_, weight) in FORMS.items()}
    specs = [P('fsdp') if leaf.ndim == 3 else P(None, 'fsdp') for leaf in jax.tree.leaves(weights)]
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(run_all, weights, X, specs=specs)
        assert_equal(run(), jax.jit(run_all)(weights, X), 1e-4)
    assert {row.kind for row in step.collective_rows if row.what != 'sum'} == {'all_to_all'}


SPREAD = {
    'columns and rows over tp': [P('fsdp', 'tp'), P('fsdp', None, 'tp')],
    'experts over both': [P(('fsdp', 'tp'))] * 2,
    'experts over both, tp first': [P(('tp', 'fsdp'))] * 2,
}


@pytest.mark.parametrize('name', SPREAD)
def test_experts_over_another_axis_as_well(name):
    def gradient(w, x):
        value, gradients = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(back(w, x))))(w)
        return gradients, value

    with jax.default_matmul_precision('highest'):
        step, run = partitioned(
            gradient, WEIGHTS, X, TP, specs=SPREAD[name], result_specs=[*SPREAD[name], P()]
        )
        assert_equal(run(), jax.jit(gradient)(WEIGHTS, X))
    assert {row.kind for row in step.collective_rows if row.what != 'sum'} == {'all_to_all'}
