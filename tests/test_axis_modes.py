"""`helper.auto_axes` and `helper.explicit_axes`: JAX's, with rules; on every kind of mesh, wherever they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from scalax import errors
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    NamedSharding,
    TreePathShardingRule,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_collectives, assert_no_recompile

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
HELPERS = {
    'auto': MeshShardingHelper([4, 2], ['a', 'b']),
    'explicit': MeshShardingHelper([4, 2], ['a', 'b'], axis_types=EXPLICIT),
    'mixed': MeshShardingHelper([4, 2], ['a', 'b'], axis_types=[EXPLICIT, AUTO]),
    'mixed the other way': MeshShardingHelper([4, 2], ['a', 'b'], axis_types=[AUTO, EXPLICIT]),
}
AUTO_MESH, EXPLICIT_MESH = HELPERS['auto'], HELPERS['explicit']
X = np.arange(64, dtype=np.float32).reshape(8, 8)

each_mesh = pytest.mark.parametrize('helper', HELPERS.values(), ids=HELPERS)

CALLS = {
    'eager': lambda helper, fun: fun,
    'jit': lambda helper, fun: jax.jit(fun),
    'sjit': lambda helper, fun: helper.sjit(fun),
}
each_call = pytest.mark.parametrize('call', CALLS.values(), ids=CALLS)

LIES = {
    'host': lambda helper: X,
    'as asked': lambda helper: helper.shard(X, P('a', 'b')),
    'turned': lambda helper: helper.shard(X, P('b', 'a')),
    'elsewhere': lambda helper: jax.device_put(X, jax.devices()[3]),
}
each_place = pytest.mark.parametrize('lies', LIES.values(), ids=LIES)

AXES = {'both': None, 'a': 'a', 'b': ['b']}
each_choice = pytest.mark.parametrize('axes', AXES.values(), ids=AXES)


def named(axes):
    return {'a', 'b'} if axes is None else set(axes)


def typed(mesh, x):
    """The spec of a type without the axes that are not Explicit there, as a type shows it."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    assert all(types[axis] is EXPLICIT for axis in str(jax.typeof(x).sharding.spec) if axis in types)
    return jax.typeof(x).sharding.spec


def runs(call, lies, helper):
    """Whether a call can be made: inside a compiled function nobody can move an array."""
    return lies is not LIES['elsewhere'] or call is CALLS['eager']


@each_mesh
@each_call
@each_place
@each_choice
def test_auto_axes(helper, call, lies, axes):
    seen = []

    def fun(x):
        seen.append((jax.sharding.get_abstract_mesh().axis_types, jax.typeof(x)))
        return {'y': x + x.T, 'z': x.sum()}

    out = TreePathShardingRule(('y', P('b', 'a')), ('z', P()))
    switched = call(helper, helper.auto_axes(fun, axes=axes, out_sharding=out))
    if not runs(call, lies, helper):
        with pytest.raises((ValueError, errors.PlacementError), match='device|lie'):
            switched(lies(helper))
        return
    result = switched(lies(helper))
    np.testing.assert_array_equal(result['y'], X + X.T)
    np.testing.assert_array_equal(result['z'], X.sum())
    assert_lies(helper, result['y'], P('b', 'a'))
    ((types, kind),) = seen
    changed = named(axes)
    assert types == tuple(
        AUTO if axis in changed else kind
        for axis, kind in zip(helper.axis_names, helper.axis_types, strict=True)
    )
    assert not changed.intersection(str(kind.sharding.spec))


@each_mesh
@each_call
@each_place
@each_choice
def test_explicit_axes(helper, call, lies, axes):
    seen = []

    def fun(tree):
        seen.append((jax.sharding.get_abstract_mesh().axis_types, jax.typeof(tree['x'])))
        return {'y': 2 * tree['x'], 'sum': tree['x'].sum(axis=0) + tree['b']}

    rule = TreePathShardingRule(('x', P('b', 'a')), ('b', P()))
    switched = call(helper, helper.explicit_axes(fun, axes=axes, in_sharding=rule))
    if not runs(call, lies, helper):
        with pytest.raises((ValueError, errors.PlacementError), match='device|lie'):
            switched({'x': lies(helper), 'b': np.float32(1)})
        return
    result = switched({'x': lies(helper), 'b': np.float32(1)})
    np.testing.assert_array_equal(result['y'], 2 * X)
    np.testing.assert_array_equal(result['sum'], X.sum(axis=0) + 1)
    ((types, kind),) = seen
    inside = dict(zip(helper.axis_names, helper.axis_types, strict=True))
    inside.update(dict.fromkeys(named(axes), EXPLICIT))
    assert types == tuple(inside.values())
    expected = [axis if inside[axis] is EXPLICIT else None for axis in ('b', 'a')]
    assert list(kind.sharding.spec) == expected
    assert len(result['y'].sharding.device_set) == 8
    assert_lies(helper, result['y'], P('b', 'a'))


def assert_lies(helper, x, spec):
    assert x.sharding.is_equivalent_to(helper.match_sharding_rule(spec, X), 2), x.sharding
    assert jax.typeof(x).sharding.mesh.axis_types == helper.axis_types
    for axis, kind in zip(helper.axis_names, helper.axis_types, strict=True):
        assert (axis in str(jax.typeof(x).sharding.spec)) is (kind is EXPLICIT)
