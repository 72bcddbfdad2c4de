"""examples/ring_attention.py: results as on one device, and no communication except along the ring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from jax.sharding import AxisType, NamedSharding

from examples import ring_attention
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_collectives

HELPERS = {
    'auto': MeshShardingHelper([8], ['sp']),
    'explicit': MeshShardingHelper([8], ['sp'], axis_types=AxisType.Explicit),
    'two axes': MeshShardingHelper([2, 4], ['dp', 'sp']),
    'one device': MeshShardingHelper([1], ['sp'], devices=jax.devices()[:1]),
}
NOTHING_ELSE = dict.fromkeys(
    ['all_gather', 'all_reduce', 'reduce_scatter', 'all_to_all', 'collective_broadcast', 'ragged_all_to_all'],
    0,
)
SEQUENCES = P(None, 'sp')
on_one_device = jax.jit(ring_attention.attention)


def inputs(rng, dtype=np.float32, scale=1.0):
    return [np.asarray(scale * rng.normal(size=(2, 32, 2, 8)), dtype) for _ in range(3)]


def loss(attend, inputs):
    return jnp.sum(jnp.sin(attend(*inputs)))


@pytest.mark.slow
@pytest.mark.parametrize('helper', HELPERS.values(), ids=HELPERS)
def test_values_and_gradients_match_one_device(helper, rng):
    qkv = inputs(rng)
    attend = ring_attention.sharded_attention(helper)
    on_all = helper.sjit(lambda qkv: attend(*qkv), in_shardings=SEQUENCES)
    np.testing.assert_allclose(on_all(qkv), on_one_device(*qkv), atol=1e-5)
    gradient = helper.sjit(jax.grad(functools.partial(loss, attend)), in_shardings=SEQUENCES)
    expected = jax.jit(jax.grad(functools.partial(loss, ring_attention.attention)))(qkv)
    for actual, desired in zip(gradient(qkv), expected, strict=True):
        np.testing.assert_allclose(actual, desired, atol=1e-5)


@pytest.mark.slow
def test_only_the_ring_communicates(rng):
    qkv = inputs(rng)
    for helper in (HELPERS['auto'], HELPERS['explicit'], HELPERS['two axes']):
        attend = ring_attention.sharded_attention(helper)
        steps = helper.mesh.shape['sp'] - 1
        forward = helper.sjit(lambda qkv, attend=attend: attend(*qkv), in_shardings=SEQUENCES)
        permutes = {'sp': 2 * steps}  # keys, values
        assert_collectives(forward, qkv, collective_permute=permutes, **NOTHING_ELSE)
        gradient = helper.sjit(jax.grad(functools.partial(loss, attend)), in_shardings=SEQUENCES)
        permutes = {'sp': 2 * steps + 4 * steps + 2}  # and their gradients, which also return home
        assert_collectives(gradient, qkv, collective_permute=permutes, **NOTHING_ELSE)


def jax_gathers(mesh):
    """Whether ``jax.shard_map`` gathers along Explicit axes that are not manual, as in JAX 0.10.2."""
    mapped = jax.shard_map(
        lambda x: 2 * x, mesh=mesh, in_specs=P(None, 'sp'), out_specs=P(None, 'sp'), axis_names={'sp'}
    )
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P('dp', 'sp')))
    return 'all-gather' in jax.jit(mapped).lower(x).compile().as_text()


BATCHES, HEADS = P('dp', 'sp'), P(None, 'sp', 'dp')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('types', 'spec'),
    [
        pytest.param(AxisType.Auto, BATCHES, id='batches-auto'),
        pytest.param(AxisType.Explicit, HEADS, id='heads-explicit'),
        pytest.param(AxisType.Auto, HEADS, id='heads-auto', marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, BATCHES, id='batches-explicit', marks=pytest.mark.slow),
    ],
)
def test_shards_along_another_axis_stay_sharded(types, spec, rng):
    qkv = inputs(rng)
    helper = MeshShardingHelper([2, 4], ['dp', 'sp'], axis_types=types)
    attend = ring_attention.sharded_attention(helper)
    forward = helper.sjit(lambda qkv: attend(*qkv), in_shardings=spec)
    result = forward(qkv)
    np.testing.assert_allclose(result, on_one_device(*qkv), atol=1e-5)
    assert result.sharding.is_equivalent_to(helper.match_sharding_rule(spec, result), 4)
    if types is AxisType.Explicit and jax_gathers(helper.mesh):
        return
    gradient = helper.sjit(jax.grad(functools.partial(loss, attend)), in_shardings=spec)
    for fun, count in ((forward, 6), (gradient, 20)):
        along = {'sp': count, 'dp': 0, ('dp', 'sp'): 0}
        assert_collectives(fun, qkv, collective_permute=along, **NOTHING_ELSE)


@pytest.mark.slow
def test_narrow_floats_have_narrow_gradients(rng):
    qkv = inputs(rng, jnp.bfloat16)
    attend = ring_attention.sharded_attention(HELPERS['auto'])
    gradients = HELPERS['auto'].sjit(jax.grad(lambda qkv: attend(*qkv).astype(jnp.float32).sum()))(qkv)
    wide = jax.grad(lambda qkv: ring_attention.attention(*qkv).sum())(
        [np.asarray(x, np.float32) for x in qkv]
    )
    for actual, desired in zip(gradients, wide, strict=True):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(actual, np.float32), desired, atol=0.05)


@pytest.mark.medium
def test_large_scores_do_not_overflow(rng):
    qkv = inputs(rng, scale=100.0)
    attend = ring_attention.sharded_attention(HELPERS['auto'])
    np.testing.assert_allclose(attend(*qkv), ring_attention.attention(*qkv), atol=1e-3)
    gradients = HELPERS['auto'].sjit(jax.grad(functools.partial(loss, attend)))(qkv)
    assert all(np.isfinite(np.asarray(gradient)).all() for gradient in gradients)


@pytest.mark.medium
def test_narrow_floats_are_summed_in_wide_ones(rng):
    qkv = inputs(rng, jnp.bfloat16)
    result = ring_attention.sharded_attention(HELPERS['auto'])(*qkv)
    assert result.dtype == jnp.bfloat16
    wide = ring_attention.attention(*[np.asarray(x, np.float32) for x in qkv])
    np.testing.assert_allclose(np.asarray(result, np.float32), wide, atol=0.02)


@pytest.mark.medium
def test_the_future_is_not_seen(rng):
    query, key, value = inputs(rng)
    attend = ring_attention.sharded_attention(HELPERS['auto'])
    before = np.asarray(attend(query, key, value))
    key[:, 17:], value[:, 17:] = 7.0, -7.0
    after = np.asarray(attend(query, key, value))
    np.testing.assert_array_equal(before[:, :17], after[:, :17])
    assert np.abs(before[:, 17:] - after[:, 17:]).max() > 1


@pytest.mark.slow
def test_main_prints_its_communication(capsys):
    assert ring_attention.main(sequence=64) < 1e-5
    assert capsys.readouterr().out.splitlines() == [
        ' 30 x collective-permute along sp, 32,768 bytes, backward',
        ' 14 x collective-permute along sp, 32,768 bytes, forward',
    ]


def test_indivisible_dimensions_are_rejected():
    with pytest.raises(app.UsageError) as error:
        ring_attention.main(sequence=97)
    assert str(error.value) == '--sequence 97 is not a multiple of 8 devices.'
