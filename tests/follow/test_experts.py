"""Rows move to experts that the axes of the batch shard, if that takes less than to gather the experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.sharding import MeshShardingHelper, TreePathShardingRule, with_sharding_constraint
from scalax.sharding import PartitionSpec as P
from tests.support.following import constraints, like

HELPER = MeshShardingHelper([8], ['fsdp'])
EXPERTS = TreePathShardingRule(('.', P('fsdp')))
STACKED = TreePathShardingRule(('.', P(None, 'fsdp')))
# (groups, experts, rows of a group for each, width), and experts of (width, hidden) and back.
ROWS, UP, DOWN = (8, 8, 4, 16), (8, 16, 32), (8, 32, 16)


def experts(w, x):
    """Each row to its expert and back."""
    hidden = jax.nn.relu(jnp.einsum('gecd,edh->egch', x, w['up']))
    return jnp.einsum('egch,ehd->egcd', hidden, w['down'])


def back(w, x):
    return jnp.einsum('gecd,egcd->gcd', x, experts(w, x))


def step(fun, rule=EXPERTS):
    return HELPER.sjit(fun, in_shardings=(rule, P('fsdp')))


def weights(*before):
    return {'up': like(*before, *UP), 'down': like(*before, *DOWN)}


def first_axes(fun, w, x, rule=EXPERTS):
    """The dimensions over `fsdp` of the constraints, in order."""
    found = constraints(step(fun, rule).trace(w, x).jaxpr)
    return [list(spec).index('fsdp') for _, spec in found]


FORMS = {
    'products': (experts, weights(), EXPERTS),
    'a loop over layers': (
        lambda w, x: lax.scan(lambda c, w: (c + back(w, c)[:, None], None), x, w)[0],
        weights(3),
        STACKED,
    ),
    'one layer after the other': (
        lambda w, x: experts({name: each[1] for name, each in w.items()}, x),
        weights(3),
        STACKED,
    ),
    'quantized': (
        lambda w, x: experts({name: w[name].astype('int8') * w[name][:, :1] for name in w}, x),
        weights(),
        EXPERTS,
    ),
    'by a number': (
        lambda w, x: experts({name: lax.dynamic_index_in_dim(w[name], 1, keepdims=False) for name in w}, x),
        weights(3),
        STACKED,
    ),
    'transposed': (
        lambda w, x: experts({'up': w['down'].swapaxes(1, 2), 'down': w['up'].swapaxes(1, 2)}, x),
        weights(),
        EXPERTS,
    ),
    'in another dtype': (
        lambda w, x: experts(jax.tree.map(lambda w: w.astype('bfloat16'), w), x),
        weights(),
        EXPERTS,
    ),
    'a branch': (
        lambda w, x: lax.cond(x.sum() > 0, lambda: experts(w, x), lambda: x.swapaxes(0, 1)),
        weights(),
        EXPERTS,
    ),
    'a call': (lambda w, x: jax.jit(experts)(w, x), weights(), EXPERTS),
}


@pytest.mark.parametrize('name', FORMS)
def test_rows_move_to_experts(name):
    fun, w, rule = FORMS[name]
    kept = [each for each in step(fun, rule).followed(w, like(*ROWS)).kept if each.primitive == 'dot_general']
    assert kept
    # The dimension of the experts is the first one of these products.
    assert all(each.spec.index('fsdp') == 0 for each in kept)
    assert all(each.array.endswith(('[8,8,4,32]', '[8,8,4,16]')) for each in kept)


def test_they_move_at_both_ends_and_back_to_others():
    # x before and behind the move, both products, and the last one back, before and behind that.
    assert first_axes(back, weights(), like(*ROWS)) == [0, 1, 0, 0, 0, 1]


def test_what_moved_moves_once():
    def fun(w, x):
        return jnp.einsum('gecd,edh->egch', x, w['up']), jnp.einsum('gecd,ehd->egch', x, w['down'])

    assert first_axes(fun, weights(), like(*ROWS)) == [0, 1, 0, 0]


@pytest.mark.medium
def test_few_weights_are_gathered_instead():
    many = (8, 8, 4096, 16)
    assert first_axes(experts, weights(), like(*many)) == [1, 1]


@pytest.mark.parametrize(('dtype', 'axes'), [('float32', [0, 1, 0]), ('bfloat16', [1])])
def test_bytes_are_compared(dtype, axes):
    """3,072 numbers of each device's rows in float32, and all 4,096 weights in one or the other dtype."""

    def fun(w, x):
        dims = (((3,), (1,)), ((1,), (0,)))
        return lax.dot_general(x, w['up'], dims, preferred_element_type='float32')

    assert first_axes(fun, {'up': like(*UP, dtype=dtype)}, like(8, 8, 24, 16)) == axes


def test_slices_gather_all_weights_too():
    """Rows move between the four devices of a slice, half of all rows in each; weights would go to eight."""
    helper, rows = MeshShardingHelper([2, 4], ['data', 'fsdp']), P(('data', 'fsdp'))
    fun = helper.sjit(experts, in_shardings=(P('fsdp'), rows), batch_argnums=1)
    kept = fun.followed(weights(), like(8, 8, 16, 16)).kept
    assert [value.spec[:2] for value in kept] == [('fsdp', 'data'), ('fsdp', 'data')]


def test_a_constraint_of_the_user_stands():
    def fun(w, x):
        return experts(w, with_sharding_constraint(x * 2, P('fsdp')))

    # The first weights are gathered; behind that product the user says nothing.
    assert first_axes(fun, weights(), like(*ROWS)) == [0, 1, 1, 0, 0]


def test_experts_of_a_loop_are_not_gathered_before_it():
    def fun(w, x):
        return lax.scan(lambda c, _: (experts(w, c).swapaxes(0, 1), None), x, None, length=3)[0]

    taken = [shape for shape, _ in constraints(step(fun).trace(weights(), like(*ROWS)).jaxpr)]
    assert UP not in taken
    assert DOWN not in taken


@pytest.mark.medium
def test_values_stay_what_they_are():
    random = np.random.default_rng(1)
    w = {name: random.normal(size=each.shape).astype(np.float32) / 8 for name, each in weights().items()}
    x = random.normal(size=ROWS).astype(np.float32)

    def gradient(w, x):
        return jax.value_and_grad(lambda w: jnp.sum(jnp.sin(back(w, x))))(w)

    with jax.default_matmul_precision('highest'):
        found, expected = step(gradient)(w, x), jax.jit(gradient)(w, x)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_less_is_moved():
    w = {'up': like(8, 256, 512), 'down': like(8, 512, 256)}
    x = like(8, 8, 4, 256)
    followed = HELPER.plan(step(experts), w, x)
    alone = HELPER.plan(HELPER.sjit(experts, in_shardings=(EXPERTS, P('fsdp')), batch_argnums=()), w, x)
    [moved], [before] = followed.totals.values(), alone.totals.values()
    assert set(moved) == {'all-to-all'}
    assert sum(moved.values()) <= sum(before.values())


GRID = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
COLUMNS_AND_ROWS = {'up': P('fsdp', None, 'tp'), 'down': P('fsdp', 'tp')}


def test_parts_of_the_width_move_if_another_axis_shards_the_experts():
    spread = GRID.sjit(back, in_shardings=(COLUMNS_AND_ROWS, P('fsdp')), batch_argnums=1)
    free = P.UNCONSTRAINED
    assert [spec for _, spec in constraints(spread.trace(weights(), like(*ROWS)).jaxpr)] == [
        P('fsdp', free, free, 'tp'),
        P(free, 'fsdp', free, 'tp'),
        P(free, 'fsdp', free, None),  # whole at the experts
        P('fsdp', free, free, 'tp'),  # the first product
        P('fsdp', free, free, 'tp'),  # the second one: a sum over tp, split
        P('fsdp', free, free, 'tp'),  # and so it moves back
        P(free, 'fsdp', free, 'tp'),
    ]


def test_rows_that_are_in_parts_are_whole_at_the_experts():
    def fun(w, x):
        return back(w, with_sharding_constraint(x, P('fsdp', None, None, 'tp')) * 2)

    spread = GRID.sjit(fun, in_shardings=(COLUMNS_AND_ROWS, P('fsdp')), batch_argnums=1)
    free = P.UNCONSTRAINED
    _, *first = [spec for _, spec in constraints(spread.trace(weights(), like(*ROWS)).jaxpr)]
    assert first[:3] == [
        P('fsdp', free, free, 'tp'),
        P(free, 'fsdp', free, 'tp'),
        P(free, 'fsdp', free, None),
    ]


def test_a_sum_over_another_axis_is_split():
    def fun(w, x):
        return jnp.einsum('gech,ehd->egcd', x, w['down'])

    spread = GRID.sjit(fun, in_shardings=(COLUMNS_AND_ROWS, P('fsdp')), batch_argnums=1)
    [kept] = spread.followed(weights(), like(8, 8, 4, 32)).kept
    assert kept.spec == P('fsdp', P.UNCONSTRAINED, P.UNCONSTRAINED, 'tp')


def test_a_width_that_does_not_divide_moves_whole():
    odd = {'up': like(8, 5, 32), 'down': like(8, 32, 5)}
    spread = GRID.sjit(experts, in_shardings=(COLUMNS_AND_ROWS, P('fsdp')), batch_argnums=1)
    free = P.UNCONSTRAINED
    assert [spec for _, spec in constraints(spread.trace(odd, like(8, 8, 3, 5)).jaxpr)][:2] == [
        P('fsdp', free, free, free),
        P(free, 'fsdp', free, free),
    ]


@pytest.mark.medium
def test_values_that_move_in_parts_stay_what_they_are():
    leaves = [np.arange(np.prod(shape)).reshape(shape) % 5 - 2.0 for shape in (UP, DOWN, ROWS)]
    up, down, x = (leaf.astype('float32') for leaf in leaves)
    given = {'up': up, 'down': down}
    spread = GRID.sjit(back, in_shardings=(COLUMNS_AND_ROWS, P('fsdp')), batch_argnums=1)
    np.testing.assert_array_equal(spread(given, x), jax.jit(back)(given, x))


@pytest.mark.medium
@pytest.mark.parametrize('axes', [('fsdp', 'tp'), ('tp', 'fsdp')])
def test_experts_over_another_axis_as_well(axes):
    fun = GRID.sjit(experts, in_shardings=(P(axes), P('fsdp')), batch_argnums=1)
    followed = fun.followed(weights(), like(*ROWS))
    assert len(followed.kept) == 2
    assert all(axes in value.spec for value in followed.kept)

    leaves = [np.arange(np.prod(shape)).reshape(shape) % 5 - 2.0 for shape in (UP, DOWN, ROWS)]
    up, down, x = (leaf.astype('float32') for leaf in leaves)
    given = {'up': up, 'down': down}
    np.testing.assert_array_equal(fun(given, x), jax.jit(experts)(given, x))
