"""State with tp before the batch axis in one dimension: devices keep its blocks, in any operation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from scalax._jax.equations import all_equations
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from tests.support.partitioned import TP, P, assert_equal, partitioned, with_gradients

pytestmark = pytest.mark.medium

ROWS, COLUMNS = P(('tp', 'fsdp')), P(None, ('tp', 'fsdp'))
REPLICATED_FSDP = {'replica': 2, 'fsdp': 2, 'tp': 2}


def array(*shape, dtype='float32'):
    return np.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / 4, dtype)


W, X, TOKENS = array(16, 24), array(8, 16), np.arange(64, dtype='int32').reshape(8, 8) * 7 % 16


def constrained(x, spec):
    return x if jax.sharding.get_abstract_mesh().empty else lax.with_sharding_constraint(x, spec)


def scanned(w, x):
    stack = w.reshape(16, 3, 8).swapaxes(0, 1)
    return lax.scan(lambda c, p: (c + jnp.tanh(c @ p) @ p.T, c.sum()), x, stack)


def elementwise(w, x):
    return jnp.where(w > 0, jnp.sin(w).astype('bfloat16').astype('float32'), w.T.T * 2) + w / jnp.linalg.norm(
        w
    )


# Functions of state (16, 24), sharded in its rows or columns, and examples (8, 16).
FUNCTIONS = {
    'matmul': lambda w, x: jnp.tanh(x @ w),
    'transposed': lambda w, x: jnp.tanh(x @ w.T.T) @ w.T,
    'elementwise': elementwise,
    'sums': lambda w, x: (w.sum(0), w.sum(1), w.max(0), w.min(1), w.mean(), jnp.linalg.norm(w)),
    'product of weights': lambda w, x: (x @ (w @ w.T), jnp.sin(w.T @ w)),
    'slices': lambda w, x: (w[1], w[:, 2], w[3:7] * 2, w[::2, 1::3], x @ w[:, :12]),
    'a dynamic slice': lambda w, x: lax.dynamic_slice(w, (TOKENS[0, 1], 3), (8, 6)),
    'an update': lambda w, x: (w.at[3].set(1.0), w.at[:, 2:5].add(2.0), w.at[jnp.array([1, 9])].mul(3.0)),
    'joined': lambda w, x: (jnp.concatenate([w, w * 2]), jnp.concatenate([w, w], 1), jnp.stack([w, w])),
    'padded': lambda w, x: (jnp.pad(w, ((1, 2), (0, 3))), jnp.roll(w, 3, 0), w[::-1], w[:, ::-1]),
    'reshaped': lambda w, x: (
        w.reshape(4, 4, 24) * 2,
        w.reshape(-1),
        w.reshape(16, 4, 6).sum(1),
        w[None] + 1,
    ),
    'along a dimension': lambda w, x: (jnp.cumsum(w, 0), jnp.cumsum(w, 1), jnp.sort(w, 0), jnp.argmax(w, 1)),
    'broadcast': lambda w, x: (x[:, :, None] + w, jnp.broadcast_to(w, (3, 16, 24)) * 1.5),
    'positions': lambda w, x: w + jnp.arange(16)[:, None] * 10 + jnp.arange(24),
    'random bits': lambda w, x: w * jax.random.bernoulli(jax.random.key(1), 0.5, w.shape),
    'look-ups': lambda w, x: jnp.tanh(w[TOKENS]) * x[:, :8, None],
    'a scan': scanned,
    'a constraint': lambda w, x: (
        constrained(w * 2, P('fsdp', 'tp')),
        constrained(w * 3, P()),
        constrained(w * 4, P(None, ('fsdp', 'tp'))),
        constrained(w * 5, P(('tp', 'fsdp'))),
    ),
    'a branch': lambda w, x: lax.cond(x.sum() > 0, lambda: w * 2, lambda: jnp.ones_like(w)),
    'matrix functions': lambda w, x: (
        jnp.linalg.svd(w, compute_uv=False),
        jnp.linalg.inv(w @ w.T + jnp.eye(16)),
    ),
    'a while loop': lambda w, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1]) * 2), (0, w)
    )[1],
}


@pytest.mark.parametrize('spec', [ROWS, COLUMNS], ids=['rows', 'columns'])
@pytest.mark.parametrize('mesh', [TP, REPLICATED_FSDP], ids=['fsdp', 'hsdp'])
def test_values_of_any_operation(mesh, spec):
    def fun(w, x):
        return {name: function(w, x) for name, function in FUNCTIONS.items()}

    with jax.default_matmul_precision('highest'):
        _, run = partitioned(fun, W, X, mesh, specs=[spec])
        assert_equal(run(), jax.jit(fun)(W, X))


@pytest.mark.parametrize('spec', [ROWS, COLUMNS], ids=['rows', 'columns'])
def test_gradients_of_any_operation(spec):
    skipped = {'along a dimension', 'matrix functions', 'an update', 'a while loop', 'sums'}

    def fun(w, x):
        return {name: function(w, x) for name, function in FUNCTIONS.items() if name not in skipped}

    with jax.default_matmul_precision('highest'):
        expected = jax.jit(with_gradients(fun))(W, X)
        result_specs = [spec, *[None] * (len(jax.tree.leaves(expected)) - 1)]
        _, run = partitioned(with_gradients(fun), W, X, TP, specs=[spec], result_specs=result_specs)
        assert_equal(run(), expected, 1e-4)


TABLE = array(4096, 16)


@pytest.mark.parametrize('spec', [ROWS, COLUMNS], ids=['rows', 'columns'])
def test_rows_of_a_large_table_move(spec):
    """Rows that are looked up, and their gradients, are sent instead of the table."""

    def step(table, tokens):
        value, gradient = jax.value_and_grad(lambda table: jnp.mean(jnp.sin(table[tokens])))(table)
        return table - 0.1 * gradient, value

    tokens = np.random.default_rng(0).integers(-4096, 4100, (8, 4)).astype('int32')
    partitioned_step, run = partitioned(step, TABLE, tokens, TP, specs=[spec], result_specs=[spec, P()])
    assert_equal(run(), jax.jit(step)(TABLE, tokens))
    sizes = [math.prod(eqn.outvars[0].aval.shape) for eqn in exchanges(partitioned_step)]
    assert max(sizes) <= (tokens.size * 16 if spec == ROWS else TABLE.size)


def exchanges(step):
    """The collectives of a step."""
    kinds = ('all_gather', 'all_to_all', 'psum', 'reduce_scatter')
    return [eqn for eqn in all_equations(step.jaxpr) if eqn.primitive.name in kinds]


def mlp(w, x):
    return jnp.mean((x + jnp.tanh(x @ w['up']) @ w['down']) ** 2)


def layers(w, x):
    def block(x, p):
        return x + jnp.tanh(x @ p['up']) @ p['down'], None

    return jnp.mean(lax.scan(jax.checkpoint(block), x, w)[0] ** 2)


UP, DOWN = array(32, 64), array(64, 32)
STEPS = {
    'adamw': (layers, optax.adamw(0.1), {'down': np.stack([DOWN] * 3), 'up': np.stack([UP] * 3)}),
    'muon': (mlp, optax.contrib.muon(0.1), {'down': DOWN, 'up': UP}),
}


@pytest.mark.parametrize('name', STEPS)
def test_no_weight_is_permuted(name):
    """Columns and rows over tp stay so: only activations are summed over tp."""
    helper, (loss, optimizer, weights) = MeshShardingHelper([4, 2], ['fsdp', 'tp']), STEPS[name]
    before = [None] * (weights['up'].ndim - 2)
    rule = TreePathShardingRule(
        ('up', P(*before, None, ('tp', 'fsdp'))), ('down', P(*before, ('tp', 'fsdp'))), ('.', P())
    )

    def step(state, x):
        weights, moments = state
        value, gradients = jax.value_and_grad(loss)(weights, x)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    state, x = (weights, optimizer.init(weights)), array(256, 32)
    options = {'in_shardings': (rule, P('fsdp')), 'out_shardings': (rule, P()), 'batch_argnums': 1}
    partitioned_step = helper.sjit(step, **options)
    with jax.default_matmul_precision('highest'):
        actual, expected = partitioned_step(state, x), jax.jit(step)(state, x)
    assert_equal(jax.tree.leaves(actual), expected, 1e-3)
    totals = helper.plan(partitioned_step, state, x).totals
    assert not any('collective-permute' in kinds for kinds in totals.values())
    if name == 'adamw':
        assert {axes: {*kinds} for axes, kinds in totals.items()} == {
            ('fsdp',): {'all-gather', 'all-reduce', 'reduce-scatter'},
            ('tp',): {'all-reduce'},
        }
        # Each pass gathers a half of the weights, and one pass reduces a half of the gradients.
        half = sum(weight.nbytes for weight in weights.values()) // 2
        assert totals['fsdp',]['all-gather'] == 2 * half
        assert totals['fsdp',]['reduce-scatter'] == half
