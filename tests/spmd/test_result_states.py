"""Which state each result is, and the layout of gradients without a specified sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._spmd.placements.result_states import ResultState, result_states
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.partitioned import assert_equal

pytestmark = pytest.mark.medium

FSDP = FSDPShardingRule(min_fsdp_size=1)
WIDTH = 16
W = np.asarray(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / 4, 'float32')
V = W[::-1].copy()
X = np.asarray(np.random.default_rng(1).normal(size=(32, WIDTH)), 'float32')


def states_of(fun, *args, batch=()):
    """Returns the state of each result of a function, and the paths of arguments."""
    jaxpr, out = jax.make_jaxpr(fun, return_shape=True)(*args)
    text = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')  # noqa: E731
    names = fun.__code__.co_varnames
    paths = [
        None if i in batch else f'{names[i]}/{text(path)}'.rstrip('/')
        for i, argument in enumerate(args)
        for path, _ in jax.tree.leaves_with_path(argument)
    ]
    results = [text(path) for path, _ in jax.tree.leaves_with_path(out)]
    states = result_states(jaxpr, paths, results)
    return [[paths[i] for i in state.arguments] for state in states]


def test_updated_state_in_any_order():
    def adam(w, m, v, x):
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w) + 0.01 * w
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        return v, w - 0.1 * m / (jnp.sqrt(v) + 1e-8), m

    assert states_of(adam, W, W, W, X, batch=[3]) == [['v'], ['w'], ['m']]


def test_state_in_loops_branches_and_calls():
    def fun(first, second, flag):
        @jax.jit
        def update(w):
            return jax.lax.cond(flag, lambda w: w - 0.1, lambda w: w * 0.5, w)

        stacked = jax.lax.scan(lambda c, w: (c, update(w)), 0.0, second)[1]
        return stacked, jax.lax.fori_loop(0, 3, lambda i, w: update(w), first)

    assert states_of(fun, W, W, True, batch=[2]) == [['second'], ['first']]


def test_a_loss_is_not_a_scalar_of_the_state():
    def fun(state, x):
        loss = jnp.mean(x) * state['scale']
        return {'loss': loss, 'scale': 0.9 * state['scale'] + 0.1 * loss}

    assert states_of(fun, {'scale': np.float32(1)}, X, batch=[1]) == [[], ['state/scale']]


def test_gradients_by_the_path_of_their_weights():
    def fun(params, x):
        return jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p['a']['w'] @ p['b'][0] @ p['b'][1])))(
            params
        )

    params = {'a': {'w': W}, 'b': [W, V]}
    assert states_of(fun, params, X, batch=[1]) == [[], ['params/a/w'], ['params/b/0'], ['params/b/1']]


def test_all_weights_that_may_match_are_reported():
    def fun(w, v, x):
        return jax.grad(lambda w, v: jnp.mean(x @ w @ v), (0, 1))(w, v)

    assert states_of(fun, W, V, X, batch=[2]) == [['w', 'v']] * 2


def test_another_array_with_the_type_of_a_weight_is_not_the_weight():
    assert states_of(lambda w, x: (x @ w, x.T @ x), W, X, batch=[1]) == [[], []]
    assert result_states(jax.make_jaxpr(jnp.sin)(W), [None], ['']) == [ResultState()]


# Gradients that a compiled function returns ----------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Kernel:
    value: jax.Array


def forward(params, x):
    for w in jax.tree.leaves(params):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def with_aux(params, x):
    def loss(params):
        value = forward(params, x)
        return value, {'double': 2 * value}

    return jax.value_and_grad(loss, has_aux=True)(params)


def clipped(params, x):
    grads = jax.grad(forward)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)


TREES = {
    'nested dicts': {'layers': {'up': {'kernel': W}, 'down': {'kernel': V}}},
    'list': [W, V],
    'tuple': (W, (V,)),
    'module': {'layers': {0: {'kernel': Kernel(W)}, 1: {'kernel': Kernel(V)}}},
    'one array': W,
}


@pytest.mark.parametrize('fun', [jax.grad(forward), jax.value_and_grad(forward), with_aux, clipped])
@pytest.mark.parametrize('tree', TREES)
def test_gradients_without_a_specified_sharding_have_the_layout_of_their_weights(fun, tree):
    params = TREES[tree]

    def step(params, x):
        return fun(params, x)

    helper = MeshShardingHelper([8], ['fsdp'])
    function = helper.sjit(step, in_shardings=(FSDP, P('fsdp')), batch_argnums=1)
    report = function.explain_propagation(params, X)
    large = [row for row in report.collectives if 'reduce' in row.kind and row.bytes > 8]
    if not (tree == 'one array' and fun is clipped):  # it is unknown which weight the gradient belongs to
        assert {row.kind for row in large} == {'reduce_scatter'}
        names = [
            f'params/{jax.tree_util.keystr(path, simple=True, separator="/")}'.rstrip('/')
            for path, _ in jax.tree.leaves_with_path(params)
        ]
        assert sorted(row.reason for row in large) == sorted(f'gradient of {name}' for name in names)
    results = function(params, X)
    sharded = [x for x in jax.tree.leaves(results) if x.ndim]
    if len(large) and {row.kind for row in large} == {'reduce_scatter'}:
        assert {x.sharding.spec for x in sharded} <= {P('fsdp'), P('fsdp', None), P(None, 'fsdp')}
    assert_equal(jax.tree.leaves(results), jax.jit(step)(params, X))


def test_a_specified_sharding_of_a_gradient_is_kept():
    helper = MeshShardingHelper([8], ['fsdp'])
    function = helper.sjit(
        jax.grad(forward), in_shardings=(FSDP, P('fsdp')), out_shardings=P(), batch_argnums=1
    )
    [row] = [row for row in function.explain_propagation({'w': W}, X).collectives if 'reduce' in row.kind]
    assert (row.kind, row.path[-1]) == ('all_reduce', 'w')
    assert function({'w': W}, X)['w'].sharding.is_fully_replicated
