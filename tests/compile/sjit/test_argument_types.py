"""Arguments of calls that are not run: structs, and types that ``jax.typeof`` returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.axes import named_jit
from scalax.errors import ArgumentError, DataError, ShardingError
from scalax.sharding import FSDPShardingRule, MeshShardingHelper

AUTO = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
EXPLICIT = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=AxisType.Explicit)
HELPERS = {'auto': AUTO, 'explicit': EXPLICIT}
X = jnp.ones((8, 4))
TYPE = jax.typeof(X)


def scaled(x, by, *, more=None):
    return x * by if more is None else x * by + more


VALUES = {
    'array': X,
    'host data': np.ones((8, 4), np.int32),
    'weak': 2.0,
    'weak integer': jnp.asarray(3),
    'bfloat16': jnp.ones((8, 4), jnp.bfloat16),
    'keys': jax.random.split(jax.random.key(0), 8),
}


@pytest.mark.parametrize('kind', VALUES)
def test_types_lower_as_under_jit(kind):
    value = VALUES[kind]
    function = jax.random.key_data if kind == 'keys' else lambda x: x * 2
    sjitted, jitted, expected = AUTO.sjit(function), jax.jit(function), jax.jit(function).trace(value)
    for fun in (sjitted, jitted):
        traced = fun.trace(jax.typeof(value))
        assert traced.in_avals == expected.in_avals
        assert fun.lower(jax.typeof(value)).in_avals == expected.in_avals
        assert fun.eval_shape(jax.typeof(value)) == jitted.eval_shape(value)
    assert sjitted.shardings_for(jax.typeof(value)) == sjitted.shardings_for(value)


class Duck:
    """An object with a shape and a dtype, like objects of other libraries."""

    def __init__(self, shape, dtype, **attributes):
        self.shape, self.dtype = shape, dtype
        self.__dict__.update(attributes)


DUCKS = {
    'NumPy dtype': ((8, 4), np.dtype('float32')),
    'name of a dtype': ((8, 4), 'bfloat16'),
    'scalar type': ((8, 4), np.int32),
    'list': ([8, 4], 'float32'),
    'one number': (8, 'float32'),
    'NumPy number': ((np.int64(8),), 'float32'),
    'wide': ((8, 4), 'float64'),
    'no array': (('a', 4), 'float32'),
    'no dtype': ((8, 4), 'text'),
}


@pytest.mark.medium
@pytest.mark.parametrize('attributes', [{}, {'weak_type': True}, {'sharding': None}], ids=str)
@pytest.mark.parametrize('kind', DUCKS)
def test_objects_with_a_shape_and_a_dtype_lower_as_under_jit(kind, attributes):
    duck, sjitted, jitted = Duck(*DUCKS[kind], **attributes), AUTO.sjit(scaled), jax.jit(scaled)
    if kind.startswith('no '):
        for fun in (sjitted, jitted):
            for method in (fun.trace, fun.lower, fun.eval_shape):
                with pytest.raises(TypeError):
                    method(duck, 2.0)
        return
    expected = jitted.trace(duck, 2.0)
    assert str(sjitted.trace(duck, 2.0).in_avals) == str(expected.in_avals)
    assert str(sjitted.lower(duck, by=2.0).in_avals) == str(jitted.lower(duck, by=2.0).in_avals)
    assert str(sjitted.eval_shape(duck, 2.0)) == str(jitted.eval_shape(duck, 2.0))


def test_objects_with_a_shape_and_a_dtype_get_the_shardings_of_rules():
    duck = Duck((8, 4), 'float32')
    function = AUTO.sjit(scaled, in_shardings={'x': P('fsdp'), 'more': P('tp')}, static_argnames='by')
    assert function.shardings_for(duck, 2.0, more=duck) == function.shardings_for(X, 2.0, more=X)
    lowered, expected = (function.lower(x, 2.0, more=x) for x in (duck, X))
    assert lowered.as_text() == expected.as_text()
    explicit = EXPLICIT.sjit(scaled, in_shardings={'x': P('fsdp'), 'by': None})
    assert explicit.trace(duck, 2.0).in_avals == explicit.trace(X, 2.0).in_avals
    kept = AUTO.sjit(lambda x, options: x * len(options.shape), static_argnums=1)
    assert kept.eval_shape(X, duck).shape == (8, 4)  # a static argument is unchanged
    with pytest.raises(ArgumentError, match='leaves that are not arrays'):
        function(duck, 2.0)


@pytest.mark.parametrize('by_name', [False, True])
@pytest.mark.parametrize('rules', [None, {'x': P('fsdp'), 'more': P('fsdp')}])
@pytest.mark.parametrize('name', HELPERS)
def test_types_take_the_shardings_of_arrays(name, rules, by_name):
    function = HELPERS[name].sjit(scaled, in_shardings=rules)
    arrays, keywords = ((X, 2.0), {'more': X}) if by_name else ((X, 2.0), {})
    types, typed_keywords = jax.tree.map(jax.typeof, (arrays, keywords))
    lowered, expected = function.lower(*types, **typed_keywords), function.lower(*arrays, **keywords)
    assert lowered.in_avals == expected.in_avals
    assert lowered.as_text() == expected.as_text()
    shardings = function.shardings_for(*types, **typed_keywords)
    assert shardings == function.shardings_for(*arrays, **keywords)


@pytest.mark.medium
@pytest.mark.parametrize('other', HELPERS)
@pytest.mark.parametrize('name', HELPERS)
def test_types_of_placed_arrays_need_no_active_mesh(name, other):
    kind = jax.typeof(HELPERS[other].shard(X, P('fsdp')))
    by_type = HELPERS[name].sjit(scaled).lower(kind, 2.0)
    expected = 'float32[8@fsdp,4]' if name == other == 'explicit' else 'float32[8,4]'
    assert str(by_type.in_avals[0][0]) == expected
    by_rule = HELPERS[name].sjit(scaled, in_shardings={'x': P('tp')}).lower(kind, 2.0)
    assert by_rule.compile().input_shardings[0][0].spec == P('tp')


@pytest.mark.medium
@pytest.mark.parametrize(
    ('axis_types', 'spec'),
    [
        (AxisType.Auto, P('fsdp')),
        (AxisType.Auto, P('tp', 'fsdp')),
        (AxisType.Explicit, P('fsdp', 'tp')),
        ((AxisType.Explicit, AxisType.Auto), P('fsdp', 'tp')),
        ((AxisType.Auto, AxisType.Explicit), P('fsdp', 'tp')),
    ],
    ids=str,
)
def test_types_of_arrays_that_are_placed_by_the_rules(axis_types, spec):
    # Over Auto axes the type of such an array is that of a replicated one.
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=axis_types)
    function = helper.sjit(lambda w, x: w * x, in_shardings=spec)
    w, x = arrays = helper.shard((jnp.ones((8, 8)), jnp.ones((8, 8))), spec)
    types = jax.typeof(w), jax.typeof(x)
    lowered, expected = function.lower(*types), function.lower(*arrays)
    assert lowered.in_avals == expected.in_avals
    assert [item.spec for item in lowered.compile().input_shardings[0]] == [spec, spec]
    if axis_types is AxisType.Auto:
        assert lowered.as_text() == expected.as_text()
        assert helper.plan(function, *types).totals == helper.plan(function, *arrays).totals
        assert function.explain_propagation(*types) == function.explain_propagation(*arrays)


def test_structs_of_a_mesh_without_devices():
    struct = jax.ShapeDtypeStruct(
        (8, 4), 'float32', sharding=NamedSharding(AUTO.mesh.abstract_mesh, P('fsdp'))
    )
    compiled = AUTO.sjit(scaled).lower(struct, 2.0).compile()
    assert compiled.input_shardings[0][0].spec == P('fsdp')


def test_types_of_arrays_on_the_host():
    placed = AUTO.shard(X, P('fsdp'))
    on_host = jax.device_put(placed, placed.sharding.with_memory_kind('pinned_host'))
    fetch = AUTO.sjit(lambda x: jax.device_put(x, jax.memory.Space.Device) * 2)
    assert fetch.lower(jax.typeof(on_host)).in_avals == fetch.lower(on_host).in_avals


def test_types_of_references():
    double = AUTO.sjit(lambda ref: ref[...] * 2, in_shardings=P())
    explicit = EXPLICIT.sjit(lambda ref: ref[...] * 2)
    for function in (double, explicit):
        lowered = function.trace(jax.typeof(jax.new_ref(X)))
        assert [str(item.aval) for item in lowered.jaxpr.jaxpr.invars] == ['Ref{float32[8,4]}']


def test_wide_types_without_x64():
    with jax.enable_x64(True):
        kind = jax.typeof(jnp.ones((8, 4)))
    assert AUTO.sjit(lambda x: -x).lower(kind).in_avals[0][0].dtype == np.float64  # as under jax.jit
    with pytest.raises(ArgumentError) as error:
        EXPLICIT.sjit(lambda x: -x, in_shardings=P('fsdp')).lower(kind)
    assert str(error.value) == (
        'float64[8, 4] is a type of jax_enable_x64, which is off, and has to be placed on the mesh\n'
        'What to do: call this under jax.enable_x64(True), or pass the array.'
    )


@pytest.mark.parametrize('name', HELPERS)
@pytest.mark.parametrize('first', [False, True], ids=['compiled', 'new'])
def test_a_call_needs_values(name, first):
    traced = []
    function = HELPERS[name].sjit(lambda x: traced.append(1) or x['a'] * 2, in_shardings=P())
    if not first:
        function({'a': X})
    count = len(traced)
    for kind in (TYPE, jax.ShapeDtypeStruct((8, 4), 'float32')):
        with pytest.raises(ArgumentError) as error:
            function({'a': kind})
        assert str(error.value) == (
            f'<lambda> got types ({type(kind).__name__}), which have no values:\n'
            '  x/a: float32[8, 4]\n'
            'What to do: pass arrays. lower, trace, eval_shape and shardings_for of the function, and '
            'helper.plan, take types.'
        )
    assert len(traced) == count


def step(w, x):
    return (x @ w).sum()


@pytest.mark.medium
def test_other_methods_accept_structs():
    rule = FSDPShardingRule(min_fsdp_size=1)
    w, x = jax.typeof(jnp.ones((8, 16))), jax.typeof(jnp.ones((16, 8)))
    function = AUTO.sjit(step, in_shardings=(rule, P('fsdp')))
    plan = AUTO.plan(function, w, x)
    assert {row.kind for row in plan.collectives} == {
        row.kind.replace('_', '-') for row in plan.propagation.collectives
    }
    assert (plan.propagation.axes, plan.propagation.batch) == (('fsdp',), ('x',))
    assert AUTO.verify(function, w, x).ok
    tree = {'w': w}
    assert AUTO.match_sharding_rule(rule, tree)['w'].spec == P(None, 'fsdp')
    assert AUTO.abstract(tree, rule)['w'].shape == AUTO.explain(tree, rule).rows[0].shape == (8, 16)
    assert AUTO.visualize(tree, rule).pictures[0].paths == ('w',)
    lowered = named_jit(lambda x: x * 2).lower(x)
    assert [leaf.shape for leaf in jax.tree.leaves(lowered.args_info)] == [(16, 8)]


@pytest.mark.parametrize(
    ('call', 'error', 'line'),
    [
        (lambda: AUTO.shard(TYPE, P()), ShardingError, 'a ShapedArray has no value that could be placed'),
        (
            lambda: AUTO.visualize(TYPE),
            ShardingError,
            'this has no sharding, because it is not on a device yet',
        ),
        (lambda: AUTO.local_data_to_global_array(TYPE), DataError, 'float32[8, 4] is not an array'),
        (lambda: AUTO.broadcast_from(0, TYPE), DataError, 'float32[8, 4] is not an array'),
        (lambda: AUTO.reshard(TYPE, P()), ArgumentError, 'float32[8, 4] has no sharding'),
        (
            lambda: AUTO.reshard(jax.typeof(AUTO.shard(X, P('tp'))), P()),
            ArgumentError,
            'float32[8, 4] is on a mesh without devices',
        ),
    ],
)
def test_calls_reject_types(call, error, line):
    with pytest.raises(error) as raised:
        call()
    assert line in str(raised.value)
