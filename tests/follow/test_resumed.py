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

LOST = {
    'before': lambda x: jnp.sort(with_sharding_annotation(x, 'rows'), 0),
    'nowhere': lambda x: jnp.sort(x, 0),
    'an annotation': lambda x: with_sharding_annotation(jnp.sort(x, 0), 'rows'),
    'a constraint': lambda x: with_sharding_constraint(jnp.sort(x, 0), P('fsdp')),
    'a constraint of JAX': lambda x: lax.with_sharding_constraint(
        jnp.sort(x, 0), NamedSharding(HELPER.mesh, P('fsdp'))
    ),
    'blocks': lambda x: HELPER.shard_map(jnp.tanh, in_specs=P('fsdp'), out_specs=P('fsdp'))(jnp.sort(x, 0)),
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

        return lax.scan(round_, jnp.sort(x, 0), None, length=3)[0] @ w

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
        lambda w, x: with_sharding_constraint(jnp.sort(x, 0), P('tp')) @ w, in_shardings=(RULE, P('fsdp'))
    )
    assert not step.followed(W, X).kept
