"""Experts sharded over the batch axes: tokens move to the experts, however the experts are written."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._jax.equations import all_equations
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
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
    'layer by layer': (
        lambda w, x: back({name: weight[1] for name, weight in w.items()}, x),
        STACK,
    ),
    'quantized': (
        lambda w, x: back({name: w[name].astype('int8') * w[name][:, :1] for name in w}, x),
        WEIGHTS,
    ),
    'by an index': (
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


@pytest.mark.parametrize(('width', 'parts'), [(16, 2), (15, 1)])
def test_parts_of_the_width_move_if_another_axis_shards_the_columns(width, parts):
    """All devices along tp need the same rows, so each moves a part of them, unless the width is odd."""
    weights, x = {'down': array(8, 32, width), 'up': array(8, width, 32)}, array(8, 8, 3, width)

    def gradient(w, x):
        value, gradients = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(back(w, x))))(w)
        return gradients, value

    specs = SPREAD['columns and rows over tp']
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(gradient, weights, x, TP, specs=specs, result_specs=[*specs, P()])
        assert_equal(run(), jax.jit(gradient)(weights, x))
    moves = [eqn for eqn in all_equations(step.jaxpr) if eqn.primitive.name == 'all_to_all']
    assert len(moves) == 3
    assert {math.prod(eqn.invars[0].aval.shape) for eqn in moves} == {2 * 8 * 3 * width // parts}
    manual_axes = ('fsdp', 'tp') if parts > 1 else ('fsdp',)
    assert {eqn.ctx.cur_abstract_mesh.manual_axes for eqn in moves} == {manual_axes}


def combined(w, x):
    """Tokens go to experts and back, between two layers over tp."""
    x = x + jax.nn.relu(x @ w['in']) @ w['out']
    routes = jax.nn.softmax(x @ w['router']).reshape(*x.shape[:2], 8, 4)
    rows = jnp.einsum('gsec,gsd->egcd', routes, x)
    hidden = jax.nn.relu(jnp.einsum('egcd,edh->egch', rows, w['up']))
    x = x + jnp.einsum('gsec,egcd->gsd', routes, jnp.einsum('egch,ehd->egcd', hidden, w['down']))
    return jnp.mean((x + jax.nn.relu(x @ w['in']) @ w['out']) ** 2)


def test_moves_in_parts_send_half_as_many_bytes():
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    columns_and_rows = TreePathShardingRule(
        ('up', P('fsdp', None, 'tp')),
        ('down', P('fsdp', 'tp')),
        ('in', P('fsdp', 'tp')),
        ('.', P('tp', 'fsdp')),
    )
    shapes = {'up': UP, 'down': DOWN, 'in': (16, 32), 'out': (32, 16), 'router': (16, 32)}
    weights = {name: jax.ShapeDtypeStruct(shape, 'float32') for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8, 16, 16), 'float32')
    step = helper.sjit(
        combined, in_shardings=(columns_and_rows, P('fsdp')), out_shardings=P(), batch_argnums=1
    )
    rows_bytes = math.prod(ROWS) * 4
    totals = helper.plan(step, weights, x).totals
    assert totals['fsdp',]['all-to-all'] == 2 * rows_bytes // 2
    # The parts are joined at the experts, and behind the sum that combines the rows of a token.
    assert totals['tp',]['all-gather'] <= 4 * rows_bytes // 4
