"""`scalax._planning.autoshard.leaf_groups`: which leaves have the same sharding."""

import jax
import jax.numpy as jnp
import pytest

from scalax._planning.autoshard.leaf_groups import make_groups
from scalax._planning.autoshard.problem import dim_uses_of
from scalax._planning.autoshard.step import trace_step, unique_leaves
from scalax.errors import ArgumentError


def groups_of(function, *args, fixed=()):
    step = trace_step(function, args, 1)
    leaves = unique_leaves(step)
    return make_groups(leaves, dim_uses_of(step, leaves), fixed), [leaf.path for leaf in leaves]


def layers(count):
    return [{'up': jnp.ones((64, 256)), 'down': jnp.ones((256, 64))} for _ in range(count)]


def forward(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w['up']) @ w['down']
    return x


def test_layers_are_one_group_and_their_dimensions_one():
    groups, _ = groups_of(forward, layers(4), jnp.ones((8, 64)))
    assert {group.name for group in groups} == {'{0..3}/up', '{0..3}/down'}
    down, up = sorted(groups, key=lambda group: group.name)
    assert up.classes == down.classes[::-1] and len(set(up.classes)) == 2
    assert up.bytes == 4 * 64 * 256 * 4


def test_bytes_are_those_on_a_device():
    def step(params, x):
        return jnp.tanh(x @ params['w'].astype('float32')) * params['scale']

    w, b, scale = (
        jax.ShapeDtypeStruct(*shape_and_dtype)
        for shape_and_dtype in (((64, 64), 'int4'), ((3,), 'uint4'), ((64,), 'float32'))
    )
    leaves = unique_leaves(trace_step(step, ({'b': b, 'scale': scale, 'w': w}, jnp.ones((8, 64))), 1))
    assert [leaf.bytes for leaf in leaves] == [2, 64 * 4, 64 * 64 // 2]


def test_statistics_belong_to_their_parameter():
    state = {'params': layers(2), 'mu': layers(2), 'count': jnp.zeros(())}

    def step(state, x):
        gradient = jax.grad(lambda p: jnp.sum(forward(p, x)))(state['params'])
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state['mu'], gradient)
        return {**state, 'params': jax.tree.map(jnp.subtract, state['params'], mu), 'mu': mu}

    groups, paths = groups_of(step, state, jnp.ones((8, 64)))
    assert {group.name for group in groups} == {'params/{0,1}/up', 'params/{0,1}/down'}
    for group in groups:
        assert len(group.leaves) == 4 and len(group.parameters) == 2
        assert {paths[i].split('/')[0] for i in {*group.leaves} - group.parameters} == {'mu'}


def test_statistics_belong_to_a_parameter_that_is_only_added():
    params = {'positions': jnp.ones((64, 256)), 'up': jnp.ones((256, 256))}

    def step(params, x, mu):
        gradient = jax.grad(lambda p: jnp.sum(jnp.tanh((x + p['positions']) @ p['up'])))(params)
        return jax.tree.map(lambda m, g: 0.9 * m + g, mu['0'], gradient)

    groups, paths = groups_of(step, params, jnp.ones((8, 64, 256)), {'0': params})
    assert [{paths[i] for i in group.leaves} for group in groups] == [
        {'up', '0/up'},
        {'positions', '0/positions'},
    ]


def test_a_stack_in_which_columns_are_the_next_rows_is_not_folded():
    def model(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    groups, _ = groups_of(model, [jnp.ones((64, 64)) for _ in range(3)], jnp.ones((8, 64)))
    first, second, _ = sorted(groups, key=lambda group: group.name)
    assert [first.name, second.name] == ['0', '1']
    assert second.classes[0] == first.classes[1] != first.classes[0]


def test_small_or_constrained_leaves_are_in_no_group():
    params = {'bias': jnp.ones(8), 'v': jnp.ones((512, 512)), 'w': jnp.ones((512, 512))}
    x = jnp.ones((8, 512))
    groups, paths = groups_of(lambda p, x: (x @ p['w']) @ p['v'] + p['bias'][0], params, x, fixed=[2])
    assert [paths[i] for group in groups for i in group.leaves] == ['v']


def test_one_path_and_two_shapes():
    args = {'w': jnp.ones((4, 4))}, jnp.ones(2), {'w': jnp.ones((4,))}
    with pytest.raises(ArgumentError, match="two arguments have a leaf 'w'"):
        unique_leaves(trace_step(lambda a, x, b: x, args, 1))
