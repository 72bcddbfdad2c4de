"""examples/expert_parallel.py: values and gradients as on one device, and tokens sent to experts and back."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from jax.sharding import AxisType

from examples import expert_parallel
from examples.expert_parallel import PARAMS, TOKENS
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_collectives

HELPERS = {
    'auto': MeshShardingHelper([2, 4], ['dp', 'expert']),
    'explicit': MeshShardingHelper([2, 4], ['dp', 'expert'], axis_types=AxisType.Explicit),
    'one group of devices': MeshShardingHelper([1, 8], ['dp', 'expert']),
}
each_mesh = pytest.mark.parametrize('helper', HELPERS.values(), ids=HELPERS)
NOTHING_ELSE = dict.fromkeys(
    ['all_gather', 'reduce_scatter', 'collective_permute', 'collective_broadcast', 'ragged_all_to_all'], 0
)
EXPERTS = 8


@pytest.fixture
def params():
    params = expert_parallel.init_params(jax.random.key(1), EXPERTS, width=16, hidden=8)
    return jax.tree.map(np.array, params)


@pytest.fixture
def tokens(rng):
    return np.asarray(rng.normal(size=(64, 16)), np.float32)


def loss(layer, params, tokens):
    return jnp.sum(jnp.sin(layer(params, tokens)))


def gradient_of(layer):
    return jax.grad(functools.partial(loss, layer), argnums=(0, 1))


@pytest.mark.slow
@each_mesh
@pytest.mark.parametrize('favour', [0.0, 3.0], ids=['balanced', 'one expert too full'])
def test_values_and_gradients_match_one_device(helper, favour, params, tokens):
    tokens[:, 0] = 1.0
    params['router'][0, 5] += favour
    on_one = jax.jit(functools.partial(expert_parallel.expert_layer, groups=8))
    layer = expert_parallel.sharded_expert_layer(helper)
    result = helper.sjit(layer, in_shardings=(PARAMS, TOKENS))(params, tokens)
    np.testing.assert_allclose(result, on_one(params, tokens), atol=1e-5)
    gradients = helper.sjit(gradient_of(layer), in_shardings=(PARAMS, TOKENS))(params, tokens)
    expected = jax.jit(gradient_of(on_one))(params, tokens)
    for actual, desired in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, desired, atol=1e-5)


@pytest.mark.slow
@each_mesh
def test_tokens_are_sent_there_and_back_and_nothing_else(helper, params, tokens):
    layer = expert_parallel.sharded_expert_layer(helper)
    forward = helper.sjit(layer, in_shardings=(PARAMS, TOKENS))
    there_and_back = {'expert': 2}
    assert_collectives(forward, params, tokens, all_to_all=there_and_back, all_reduce=0, **NOTHING_ELSE)
    both_ways = helper.sjit(gradient_of(layer), in_shardings=(PARAMS, TOKENS), out_shardings=(PARAMS, TOKENS))
    # Gradients of replicated parameters are reduced: the router's over all devices, an expert's along dp.
    sums = {('dp', 'expert'): 1, 'dp': 2} if helper.mesh.shape['dp'] > 1 else {'expert': 1}
    expected = {'all_to_all': only(helper, {'expert': 4}), 'all_reduce': only(helper, sums)}
    assert_collectives(both_ways, params, tokens, **expected, **NOTHING_ELSE)


def only(helper, counts):
    """Returns these counts by mesh axes, and 0 for the other axes."""
    names = helper.mesh.axis_names
    subsets = [axes for size in range(1, len(names) + 1) for axes in itertools.combinations(names, size)]
    counts = {(axes,) if isinstance(axes, str) else axes: count for axes, count in counts.items()}
    return dict.fromkeys(subsets, 0) | counts


@pytest.mark.slow
def test_another_axis_splits_the_experts_themselves(params, tokens):
    helper = MeshShardingHelper([2, 2, 2], ['dp', 'expert', 'tp'])
    rule = TreePathShardingRule(('router', P()), ('up', P('expert', None, 'tp')), ('down', P('expert', 'tp')))
    layer = helper.sjit(
        expert_parallel.sharded_expert_layer(helper), in_shardings=(rule, TOKENS), out_shardings=TOKENS
    )
    on_one = jax.jit(functools.partial(expert_parallel.expert_layer, groups=4))(params, tokens)
    np.testing.assert_allclose(layer(params, tokens), on_one, atol=1e-5)
    expected = {'all_to_all': only(helper, {'expert': 2}), 'all_reduce': only(helper, {'tp': 1})}
    assert_collectives(layer, params, tokens, **expected, **NOTHING_ELSE)


@pytest.mark.medium
def test_every_capacity_slot_is_used_once_and_first_choices_come_first(params, tokens):
    tokens[:, 0] = 1.0
    params['router'][0, 5] += 100.0  # all tokens prefer expert 5
    places, weights = expert_parallel.route(params['router'], tokens)
    capacity = places.shape[-1]
    assert capacity == 20  # 64 tokens, 2 choices, 8 experts, a quarter more than needed
    assert places.sum(axis=0).max() == 1
    np.testing.assert_array_equal(np.flatnonzero(places[:, 5].sum(axis=-1)), range(capacity))
    first = weights[:, 5].sum(axis=-1)
    np.testing.assert_allclose(first[:capacity], 1.0, atol=1e-5)
    assert (first[capacity:] == 0).all()


@pytest.mark.slow
def test_a_token_beyond_the_capacity_gets_zeros(params, tokens):
    tokens = np.tile(tokens[:1], (64, 1))  # all tokens choose the same two experts
    result = expert_parallel.expert_layer(params, tokens, groups=1)
    assert (np.abs(result[:20]).sum(axis=-1) > 0).all()
    assert (np.asarray(result[20:]) == 0).all()


@pytest.mark.slow
def test_main_prints_its_communication(capsys):
    assert expert_parallel.main(tokens=64) < 1e-5
    there_and_back = [
        f'  1 x all-to-all along expert, 12,288 bytes, {way}' for way in ('forward', 'backward')
    ]
    assert capsys.readouterr().out.splitlines() == [
        '  1 x all-reduce along dp, 16,384 bytes, backward',
        '  1 x all-reduce along dp, 16,384 bytes, backward',
        *there_and_back,
        *there_and_back,
        '  1 x all-reduce along dp, expert, 1,024 bytes, backward',
    ]


@pytest.mark.medium
def test_indivisible_dimensions_are_rejected():
    with pytest.raises(app.UsageError) as error:
        expert_parallel.main(tokens=97)
    assert str(error.value) == '--tokens 97 is not a multiple of 8 devices.'
