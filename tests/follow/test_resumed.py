"""Rows that were lost are found again where users say where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
RULE = FSDPShardingRule(min_fsdp_size=1)
ROWS = {'rows': P('fsdp')}
W, X = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)


def mixed(x):
    return jnp.fft.fft(x, axis=0).real


LOST = {
    'before': lambda x: mixed(with_sharding_annotation(x, 'rows')),
    'nowhere': lambda x: mixed(x),
    'an annotation': lambda x: with_sharding_annotation(mixed(x), 'rows'),
    'a constraint': lambda x: with_sharding_constraint(mixed(x), P('fsdp')),
    'a constraint of JAX': lambda x: lax.with_sharding_constraint(
        mixed(x), NamedSharding(HELPER.mesh, P('fsdp'))
    ),
    'blocks': lambda x: HELPER.shard_map(jnp.tanh, in_specs=P('fsdp'), out_specs=P('fsdp'))(mixed(x)),
    'blocks of other columns': lambda x: HELPER.shard_map(jnp.tanh, in_specs=P(), out_specs=P())(x),
}
FOUND = {'an annotation', 'a constraint', 'a constraint of JAX', 'blocks'}
BEHIND = {
    'products': lambda w, x: jnp.tanh(x @ w) @ w,
    'a loop': lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0],
    'a call': lambda w, x: jax.jit(lambda x: jnp.tanh(x @ w))(x),
    'a gradient': lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x),
}


def kept(fun, **options):
    step = HELPER.sjit(fun, in_shardings=(RULE, P('fsdp')), **options)
    return [value for value in step.followed(W, X).kept if value.primitive == 'dot_general']


@pytest.mark.parametrize('behind', BEHIND)
@pytest.mark.parametrize('name', LOST)
def test_rows_are_found_again(name, behind):
    names = {'annotation_shardings': ROWS} if name in ('before', 'an annotation') else {}
    values = kept(lambda w, x: BEHIND[behind](w, LOST[name](x)), **names)
    assert bool(values) is (name in FOUND)
    assert all(value.spec == P('fsdp', None) for value in values)


def test_rows_that_a_round_finds_are_carried():
    def fun(w, x):
        def round_(c, _):
            return jnp.tanh(with_sharding_annotation(c, 'rows') @ w), None

        return lax.scan(round_, mixed(x), None, length=3)[0] @ w

    assert sum(value.count for value in kept(fun, annotation_shardings=ROWS)) == 2


@pytest.mark.parametrize(
    'weight',
    [
        lambda w: with_sharding_constraint(w, P('fsdp')),
        lambda w: HELPER.shard_map(jnp.tanh, in_specs=P('fsdp'), out_specs=P('fsdp'))(w),
    ],
    ids=['constraint', 'blocks'],
)
def test_weights_do_not_become_rows(weight):
    def fun(w, x):
        w = weight(w)
        return jnp.tanh(w @ w), x

    assert not kept(fun)


def test_what_is_said_of_weights_is_followed_along_other_axes():
    [value] = kept(lambda w, x: x @ with_sharding_constraint(w, P(None, 'tp')))
    assert value.spec == P('fsdp', 'tp')


def test_a_mesh_axis_of_one_device_says_nothing():
    helper = MeshShardingHelper([8, 1], ['fsdp', 'tp'])
    step = helper.sjit(
        lambda w, x: with_sharding_constraint(mixed(x), P('tp')) @ w, in_shardings=(RULE, P('fsdp'))
    )
    assert not step.followed(W, X).kept


def placed(spec):
    return NamedSharding(HELPER.mesh, spec)


# Each places the product that it is given, or what it computes of it.
PLACED = {
    'a constraint': lambda x, spec: lax.with_sharding_constraint(x, placed(spec)),
    'device_put': lambda x, spec: jax.device_put(x, placed(spec)),
    'in_shardings': lambda x, spec: jax.jit(lambda x: x * 2, in_shardings=(placed(spec),))(x),
}
PLACED_LATER = {
    'out_shardings': lambda x, spec: jax.jit(lambda x: x * 2, out_shardings=placed(spec))(x),
    'out_shardings of a product': lambda x, spec: jax.jit(jnp.matmul, out_shardings=placed(spec))(x, x[:16]),
    'in a loop': lambda x, spec: lax.scan(
        lambda c, _: (jax.device_put(c * 2, placed(spec)), None), x, None, length=2
    )[0],
}
TALL = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(64, 16)


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('spec', [P(), P(None, 'fsdp'), P('fsdp'), P('tp')], ids=str)
@pytest.mark.parametrize('name', [*PLACED, *PLACED_LATER])
def test_what_users_place_is_where_they_say(name, spec):
    """A product that they place is not kept elsewhere, and behind it there are the rows that they say."""

    def fun(w, x):
        value = {**PLACED, **PLACED_LATER}[name](x @ w, spec)
        return value, jnp.tanh(value) @ w

    step = HELPER.sjit(fun, in_shardings=(RULE, P('fsdp')))
    value, behind = step(W, TALL)
    expected = fun(W, TALL)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(behind, expected[1], rtol=1e-5)
    if name not in ('in_shardings', 'in a loop'):  # these place what is inside
        assert value.sharding.is_equivalent_to(placed(spec), 2)
    products = [each for each in step.followed(W, TALL).kept if each.primitive == 'dot_general']
    assert sum(each.count for each in products) == (name in PLACED_LATER) + (spec == P('fsdp'))


def test_one_function_that_is_placed_in_one_place_only():
    def product(x, w):
        return x @ w

    def fun(w, x):
        return jax.jit(product, out_shardings=placed(P()))(x, w), jax.jit(product)(x, w)

    placed_, free = HELPER.sjit(fun, in_shardings=(RULE, P('fsdp')))(W, TALL)
    assert placed_.sharding.is_fully_replicated
    assert free.sharding.spec == P('fsdp')


@pytest.mark.parametrize('say', [PLACED['device_put'], PLACED_LATER['out_shardings'], PLACED['in_shardings']])
def test_rows_are_found_again_where_users_place_them(say):
    assert [each.spec for each in kept(lambda w, x: say(mixed(x), P('fsdp')) @ w)] == [P('fsdp', None)]
    assert not kept(lambda w, x: (x * 0 + say(w, P('fsdp'))).sum(0) @ w)  # a weight has no rows


def test_a_device_put_that_says_nothing_passes_rows_on():
    assert [each.spec for each in kept(lambda w, x: jax.device_put(x) @ w)] == [P('fsdp', None)]
    device = jax.memory.Space.Device
    assert [each.spec for each in kept(lambda w, x: jax.device_put(x, device) @ w)] == [P('fsdp', None)]
