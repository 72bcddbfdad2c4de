"""`helper.auto_axes` and `helper.explicit_axes`: JAX's, with rules, on every kind of mesh."""

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


def under_jit(helper, fun):
    def call(*args):
        if EXPLICIT not in helper.axis_types:
            return jax.jit(fun)(*args)
        with jax.set_mesh(helper.mesh):  # else JAX does not know on which devices host data is to be
            return jax.jit(fun)(*args)

    return call


CALLS = {
    'eager': lambda helper, fun: fun,
    'jit': under_jit,
    'sjit': lambda helper, fun: helper.sjit(fun),
}
LIES = {
    'host': lambda helper: X,
    'as asked': lambda helper: helper.shard(X, P('a', 'b')),
    'turned': lambda helper: helper.shard(X, P('b', 'a')),
    'elsewhere': lambda helper: jax.device_put(X, jax.devices()[3]),
}
WHERE = [*[('eager', lies) for lies in LIES], ('jit', 'host'), ('jit', 'turned'), ('sjit', 'host')]
MATRIX = {
    f'{mesh}, {call}, {lies}': (HELPERS[mesh], CALLS[call], LIES[lies], None)
    for mesh in ('auto', 'explicit', 'mixed')
    for call, lies in WHERE
} | {
    f'{mesh}, {axes}': (helper, CALLS['sjit'], LIES['turned'], axes)
    for mesh, helper in HELPERS.items()
    for axes in ('a', ('b',))
}
each_case = pytest.mark.parametrize(('helper', 'call', 'lies', 'axes'), MATRIX.values(), ids=MATRIX)


def types_inside(helper, axes, kind):
    return tuple(
        kind if axes is None or axis in axes else outside
        for axis, outside in zip(helper.axis_names, helper.axis_types, strict=True)
    )


def entries_of_type(kind, types, spec):
    """The entries of a spec that a type mentions where the axes are of these types."""
    explicit = {axis for axis, type_ in zip(('a', 'b'), types, strict=True) if type_ is EXPLICIT}
    assert list(kind.sharding.spec) == [axis if axis in explicit else None for axis in spec]


@each_case
def test_auto_axes(helper, call, lies, axes):
    seen = []

    def fun(x):
        seen.append((jax.sharding.get_abstract_mesh().axis_types, jax.typeof(x)))
        # Over Explicit axes alone this has no sharding: both dimensions would have the same axis.
        return {'y': x + x.T if axes is None else 2 * x, 'z': x.sum()}

    out = TreePathShardingRule(('y', P('b', 'a')), ('z', P()))
    result = call(helper, helper.auto_axes(fun, axes=axes, out_sharding=out))(lies(helper))
    np.testing.assert_array_equal(result['y'], X + X.T if axes is None else 2 * X)
    np.testing.assert_array_equal(result['z'], X.sum())
    assert_lies(helper, result['y'], P('b', 'a'))
    ((types, kind),) = seen
    assert types == types_inside(helper, axes, AUTO)
    entries_of_type(kind, types, kind.sharding.spec)


@each_case
def test_explicit_axes(helper, call, lies, axes):
    seen = []

    def fun(tree):
        seen.append((jax.sharding.get_abstract_mesh().axis_types, jax.typeof(tree['x'])))
        return {'y': 2 * tree['x'], 'sum': tree['x'].sum(axis=0) + tree['b']}

    rule = TreePathShardingRule(('x', P('b', 'a')), ('b', P()))
    switched = call(helper, helper.explicit_axes(fun, axes=axes, in_sharding=rule))
    result = switched({'x': lies(helper), 'b': np.float32(1)})
    np.testing.assert_array_equal(result['y'], 2 * X)
    np.testing.assert_array_equal(result['sum'], X.sum(axis=0) + 1)
    ((types, kind),) = seen
    assert types == types_inside(helper, axes, EXPLICIT)
    entries_of_type(kind, types, ('b', 'a'))
    assert_lies(helper, result['y'], P('b', 'a'))


def assert_lies(helper, x, spec):
    assert x.sharding.is_equivalent_to(helper.match_sharding_rule(spec, X), 2), x.sharding
    assert jax.typeof(x).sharding.mesh.axis_types == helper.axis_types
    entries_of_type(jax.typeof(x), helper.axis_types, spec)


def test_as_jax_does_it():
    """The same program with jax.sharding.auto_axes and explicit_axes, on a mesh that is set."""
    helper, spec = EXPLICIT_MESH, P('b', 'a')
    x = helper.shard(X, P('a', 'b'))
    ours = helper.sjit(helper.auto_axes(lambda x: x + x.T, out_sharding=spec))(x)
    with jax.set_mesh(helper.mesh):
        theirs = jax.jit(jax.sharding.auto_axes(lambda x: x + x.T, out_sharding=spec))(x)
    np.testing.assert_array_equal(ours, theirs)
    assert jax.typeof(ours) == jax.typeof(theirs)
    helper = AUTO_MESH
    x = helper.shard(X, P('a', 'b'))
    ours = helper.sjit(helper.explicit_axes(lambda x: 2 * x, in_sharding=spec))(x)
    with jax.set_mesh(helper.mesh):
        theirs = jax.jit(jax.sharding.explicit_axes(lambda x: 2 * x, in_sharding=spec))(x)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.sharding.is_equivalent_to(theirs.sharding, 2)


@each_mesh
def test_what_lies_right_already_is_not_sent(helper):
    x = helper.shard(X, P('a', 'b'))
    auto = helper.sjit(helper.auto_axes(lambda x: 2 * x, out_sharding=P('a', 'b')))
    explicit = helper.sjit(helper.explicit_axes(lambda x: 2 * x, in_sharding=P('a', 'b')))
    for fun in (auto, explicit):
        assert helper.plan(fun, x).collectives == ()
    turned = helper.sjit(helper.auto_axes(lambda x: 2 * x, out_sharding=P('b', 'a')))
    assert helper.plan(turned, x).collectives


@each_mesh
def test_all_forms_of_rules(helper):
    fsdp = FSDPShardingRule('a', min_fsdp_size=1)

    @helper.auto_axes(out_sharding=(fsdp, {'n': P()}))
    def auto(params, x, *, scale=3):
        return {'w': params['w'] * scale}, {'n': x.sum()}

    grown, total = auto({'w': X}, X)
    np.testing.assert_array_equal(grown['w'], 3 * X)
    assert_lies(helper, grown['w'], P('a', None))
    assert float(total['n']) == X.sum()

    kinds = {}

    @helper.explicit_axes(in_sharding={'params': fsdp, 'x': P('b'), 'scale': P()})
    def explicit(params, x, *, scale=3):
        kinds.update(w=str(jax.typeof(params['w'])), x=str(jax.typeof(x)))
        return x * scale

    np.testing.assert_array_equal(explicit({'w': X}, x=X, scale=4), 4 * X)
    assert kinds == {'w': 'float32[8@a,8]', 'x': 'float32[8@b,8]'}


@each_mesh
def test_constraints_and_annotations_inside_know_the_types(helper):
    own = NamedSharding(helper.mesh, P('b', 'a'))

    def fun(x):
        x = with_sharding_constraint(2 * x, P('b'))
        x = with_sharding_constraint(x, own)
        return with_sharding_annotation(x, 'hidden')

    auto = helper.auto_axes(fun, out_sharding=P('a', 'b'))
    explicit = helper.explicit_axes(fun, in_sharding=P('a', 'b'))
    for switched in (auto, explicit):
        step = helper.sjit(switched, annotation_shardings={'hidden': own})  # one not used would warn
        np.testing.assert_array_equal(step(helper.shard(X, P('a'))), 2 * X)
    kinds = []
    helper.explicit_axes(lambda x: kinds.append(jax.typeof(fun(x))), in_sharding=P('a', 'b'))(X)
    assert str(kinds[0]) == 'float32[8@b,8@a]'


def test_one_inside_the_other():
    kinds = []

    def innermost(x):
        kinds.append(jax.typeof(x))
        return x + 1

    def middle(x):
        kinds.append(jax.typeof(x))
        y = AUTO_MESH.auto_axes(innermost, axes='b', out_sharding=P('a', 'b'))(x)
        kinds.append(jax.typeof(y))
        return y

    outer = AUTO_MESH.explicit_axes(middle, in_sharding=P('a', 'b'))
    for call in (AUTO_MESH.sjit, lambda fun: fun):
        np.testing.assert_array_equal(call(outer)(X), X + 1)
    assert list(map(str, kinds)) == 2 * ['float32[8@a,8@b]', 'float32[8@a,8]', 'float32[8@a,8@b]']


@each_mesh
@pytest.mark.parametrize('mode', ['auto_axes', 'explicit_axes'])
def test_a_compiled_function_inside_goes_by_the_types_there(helper, mode):
    seen = []

    @helper.sjit(
        in_shardings=(P('b'), None),
        out_shardings=P('a', 'b'),
        args_sharding_constraint=(P(None, 'b'), None),
        annotation_shardings={'hidden': P('b', 'a')},
    )
    def layer(x, scale):
        hidden = with_sharding_annotation(scale * x, 'hidden')
        seen.append((jax.sharding.get_abstract_mesh().axis_types, jax.typeof(x), jax.typeof(hidden)))
        return hidden

    def model(x):
        y = layer(layer(x, scale=2), 3)
        seen.append(jax.typeof(y))
        return y

    if mode == 'auto_axes':
        switched = helper.auto_axes(model, out_sharding=P('a'))
    else:
        switched = helper.explicit_axes(model, in_sharding=P('a'))
    result = helper.sjit(switched, in_shardings=P('a'), out_shardings=P('a'))(X)
    np.testing.assert_array_equal(result, 6 * X)
    assert_lies(helper, result, P('a', None))
    kind = EXPLICIT if mode == 'explicit_axes' else AUTO
    assert seen[0][0] == (kind, kind)
    for kinds, spec in ((seen[0][1], (None, 'b')), (seen[0][2], ('b', 'a')), (seen[-1], ('a', 'b'))):
        entries_of_type(kinds, (kind, kind), spec)


def test_a_compiled_function_inside_axes_that_jax_has_switched():
    helper, seen = EXPLICIT_MESH, []

    @helper.sjit(in_shardings=P('b'), out_shardings=P('a', 'b'))
    def layer(x):
        seen.append(jax.typeof(x))
        return x + x.T

    switched = jax.sharding.auto_axes(layer, out_sharding=P('a'))
    result = helper.sjit(switched, in_shardings=P('a'))(X)
    np.testing.assert_array_equal(result, X + X.T)
    assert str(seen[0]) == 'float32[8,8]'


@pytest.mark.parametrize('helper', [AUTO_MESH, EXPLICIT_MESH], ids=['auto', 'explicit'])
def test_inside_shard_map_over_the_axes_that_are_left(helper):
    kinds = []

    def block(x):
        kinds.append((jax.sharding.get_abstract_mesh().axis_types, jax.typeof(x).shape))
        return 2 * x

    auto = helper.auto_axes(block, axes='b', out_sharding=P(None, 'b'))
    explicit = helper.explicit_axes(block, axes='b', in_sharding=P(None, 'b'))
    for switched in (auto, explicit):
        mapped = helper.shard_map(switched, P('a'), P('a'), axis_names='a')
        np.testing.assert_array_equal(helper.sjit(mapped)(X), 2 * X)
    manual = AxisType.Manual
    assert kinds == [((manual, AUTO), (2, 8)), ((manual, EXPLICIT), (2, 8))]


@each_mesh
def test_gradients_vmap_and_scan(helper):
    def squares(x):
        return (x * x).sum(axis=-1)

    auto = helper.auto_axes(squares, out_sharding=P('a'))
    explicit = helper.explicit_axes(squares, in_sharding=P('a', 'b'))
    for switched in (auto, explicit):

        @helper.sjit(in_shardings=P('a', 'b'))
        def gradient(x, switched=switched):
            return jax.grad(lambda x: switched(x).sum())(x)

        np.testing.assert_array_equal(gradient(X), 2 * X)
        batch = helper.sjit(jax.vmap(switched))(np.stack([X, X + 1]))
        np.testing.assert_array_equal(batch, [squares(X), squares(X + 1)])

        @helper.sjit
        def scanned(x, switched=switched):
            return jax.lax.scan(lambda carry, _: (carry + switched(x).sum(), None), 0.0, None, length=3)[0]

        assert float(scanned(X)) == 3 * squares(X).sum()


@each_mesh
def test_transformations_that_run_at_once_take_arrays_of_all_kinds(helper):
    auto = helper.auto_axes(lambda x: 3 * x, out_sharding=P('a'))
    explicit = helper.explicit_axes(lambda x: 3 * x, in_sharding=P('a'))
    for switched in (auto, explicit):
        for x in (X, jnp.asarray(X), helper.shard(X, P('b'))):
            mapped = jax.vmap(switched)(jnp.stack([x, x]))
            np.testing.assert_array_equal(mapped, [3 * X, 3 * X])
            value, tangent = jax.jvp(switched, (x,), (2 * x,))
            np.testing.assert_array_equal([value, tangent], [3 * X, 6 * X])
            assert len(value.sharding.device_set) == 8
        with jax.set_mesh(helper.mesh):  # for the cotangent that jax.grad starts from
            gradient = jax.grad(lambda x, switched=switched: (switched(x) ** 2).sum())(X)
        np.testing.assert_array_equal(gradient, 18 * X)


SUMS = [
    P('a', unreduced={'b'}),
    P(None, 'b', unreduced={'a'}),
    P(unreduced={'a'}),
    P(unreduced={'a', 'b'}),
    P('a', reduced={'b'}),
    P('b'),
]


@pytest.mark.parametrize('axes', [None, 'a', ('a', 'b')], ids=str)
@pytest.mark.parametrize('spec', SUMS, ids=str)
def test_outputs_of_auto_axes_may_be_parts_of_sums(spec, axes):
    helper = EXPLICIT_MESH
    double = helper.auto_axes(lambda x: 2 * x, axes=axes, out_sharding=spec)
    for call in (double, helper.sjit(double)):
        out = call(X)
        assert jax.typeof(out).sharding.spec.unreduced == spec.unreduced
        np.testing.assert_array_equal(helper.gather(out), 2 * X)


@pytest.mark.parametrize('mode', ['auto_axes', 'explicit_axes'])
@pytest.mark.parametrize('to', SUMS, ids=str)
@pytest.mark.parametrize('come', SUMS, ids=str)
def test_parts_of_sums_become_parts_of_others(come, to, mode):
    helper, option = EXPLICIT_MESH, 'out_sharding' if mode == 'auto_axes' else 'in_sharding'
    switched = getattr(helper, mode)(lambda x: x.T, **{option: to})
    out = helper.sjit(switched, in_shardings=come)(X)
    np.testing.assert_array_equal(helper.gather(out), X.T)


def test_sums_are_made_where_an_axis_becomes_auto():
    # Beside an Auto axis JAX takes parts for values: a transpose of them comes back multiplied.
    helper = EXPLICIT_MESH
    kinds = []

    def inside(x):
        kinds.append(jax.typeof(x))
        return x.T

    @helper.sjit(in_shardings=(P('a'), P('a')))
    def fun(x, y):
        sums = jnp.einsum('ij,ik->jk', x, y, out_sharding=P(unreduced={'a'}))
        return helper.auto_axes(inside, axes='b', out_sharding=P('a'))(sums)

    np.testing.assert_array_equal(fun(X, X), X.T @ X)
    assert not kinds[0].sharding.spec.unreduced


@pytest.mark.parametrize('spec', SUMS, ids=str)
def test_arguments_of_explicit_axes_may_be_parts_of_sums(spec):
    helper = AUTO_MESH
    kinds = []

    def inside(x):
        kinds.append(jax.typeof(x).sharding.spec)
        return x + x

    double = helper.explicit_axes(inside, in_sharding=spec)
    for call in (double, helper.sjit(double), jax.jit(double)):
        np.testing.assert_array_equal(call(X), 2 * X)
    assert {(kind.unreduced, kind.reduced) for kind in kinds} == {(spec.unreduced, spec.reduced)}


def test_a_function_is_traced_once_a_kind_of_argument():
    traces = []

    def fun(x):
        traces.append(x.shape)
        return x + x.T

    switched = EXPLICIT_MESH.auto_axes(fun, out_sharding=P('a'))
    x = EXPLICIT_MESH.shard(X, P('a'))
    for _ in range(3):
        switched(x)
    assert traces == [(8, 8)]


def test_the_name_and_the_signature_stay():
    def step(x, scale=2):
        """Scales."""
        return x * scale

    for switched in (
        AUTO_MESH.auto_axes(step, out_sharding=P('a')),
        AUTO_MESH.explicit_axes(step, in_sharding={'x': P('a'), 'scale': P()}),
    ):
        assert (switched.__name__, switched.__doc__, switched.__wrapped__) == ('step', 'Scales.', step)


def test_axes_of_the_type_already_keep_what_none_leaves_open():
    auto = AUTO_MESH.auto_axes(lambda x: 2 * x, out_sharding=None)
    x = AUTO_MESH.shard(X, P('a', 'b'))
    assert auto(x).sharding.spec == P('a', 'b')
    kinds = []
    explicit = EXPLICIT_MESH.explicit_axes(lambda x: kinds.append(jax.typeof(x)), in_sharding=None)
    explicit(EXPLICIT_MESH.shard(X, P('b')))
    assert str(kinds[0]) == 'float32[8@b,8]'


def test_abstract_meshes_trace():
    mesh = jax.sharding.AbstractMesh((64, 8), ('a', 'b'), axis_types=(EXPLICIT, EXPLICIT))
    helper = MeshShardingHelper.from_mesh(mesh)
    switched = helper.auto_axes(lambda x: x + x.T, out_sharding=P('a', 'b'))
    out = jax.eval_shape(switched, jax.ShapeDtypeStruct((128, 128), jnp.bfloat16))
    assert (out.shape, out.dtype) == ((128, 128), jnp.bfloat16)
    assert str(out.sharding.spec) == "P('a', 'b')"


# --- What goes wrong ------------------------------------------------------------------------------


ARGUMENTS = "of the arguments of 'double' (in_sharding) cannot be sharded as asked (mesh: a=4, b=2):"
OUTPUTS = "of the outputs of 'double' (out_sharding) cannot be sharded as asked (mesh: a=4, b=2):"


def double(x):
    return jax.tree.map(lambda leaf: 2 * leaf, x)


def deleted():
    x = AUTO_MESH.shard(X, P('a'))
    x.delete()
    return x


def cases():
    host = TreePathShardingRule(('', P('a'))).with_memory_kind('pinned_host')
    return {
        'not a function': (lambda: AUTO_MESH.auto_axes({}, out_sharding=P('a')), errors.ArgumentError),
        'not a function either': (
            lambda: AUTO_MESH.explicit_axes({}, in_sharding=P('a')),
            errors.ArgumentError,
        ),
        'an axis that is not there': (
            lambda: AUTO_MESH.auto_axes(double, axes=['a', 'bb'], out_sharding=P('a')),
            errors.MeshError,
        ),
        'axes that are no names': (
            lambda: AUTO_MESH.explicit_axes(double, axes=3, in_sharding=P('a')),
            errors.ArgumentError,
        ),
        'arguments that are no arrays': (
            lambda: EXPLICIT_MESH.auto_axes(lambda x, how, n: x, out_sharding=P())(
                X, {'by': 'rows'}, n=print
            ),
            errors.ShardingError,
        ),
        'the same in a compiled function': (
            lambda: AUTO_MESH.sjit(lambda x: AUTO_MESH.auto_axes(jnp.sum, out_sharding=P())(x, 'rows'))(X),
            errors.ShardingError,
        ),
        'results that are no arrays': (
            lambda: AUTO_MESH.explicit_axes(lambda x: {'x': x, 'how': 'rows'}, in_sharding=P())(X),
            errors.ShardingError,
        ),
        'an argument that is deleted': (
            lambda: AUTO_MESH.auto_axes(double, out_sharding=P())({'u': deleted()}),
            errors.ArgumentError,
        ),
        'arguments that do not fit the parameters': (
            lambda: AUTO_MESH.auto_axes(double, out_sharding=P())(X, X),
            TypeError,
        ),
        'more rules than arguments': (
            lambda: AUTO_MESH.explicit_axes(double, in_sharding=(P(), P()))(X),
            errors.StructureError,
        ),
        'a rule that is none': (lambda: AUTO_MESH.auto_axes(double, out_sharding='a'), errors.StructureError),
        'an argument that is not there': (
            lambda: AUTO_MESH.explicit_axes(double, in_sharding={'y': P('a')}),
            errors.StructureError,
        ),
        'an output left open': (
            lambda: EXPLICIT_MESH.auto_axes(double, out_sharding={'u': P(), 'v': None})({'u': X, 'v': X}),
            errors.ShardingError,
        ),
        'an argument left open': (
            lambda: HELPERS['mixed'].explicit_axes(double, axes='b', in_sharding=None)(X),
            errors.ShardingError,
        ),
        'outputs in another memory': (
            lambda: AUTO_MESH.auto_axes(double, out_sharding=host)(X),
            errors.ShardingError,
        ),
        'arguments in another memory': (
            lambda: AUTO_MESH.explicit_axes(double, in_sharding=host)(X),
            errors.ShardingError,
        ),
        'an argument that does not divide': (
            lambda: AUTO_MESH.explicit_axes(double, in_sharding=P('a'))({'u': X[:6], 'v': X}),
            errors.ShardingError,
        ),
        'an output that does not divide': (
            lambda: EXPLICIT_MESH.auto_axes(double, out_sharding=P('a'))({'u': X[:6], 'v': X}),
            errors.ShardingError,
        ),
        'an axis that is manual': (
            lambda: AUTO_MESH.shard_map(
                AUTO_MESH.explicit_axes(double, axes=['b', 'a'], in_sharding=P()),
                P('a'),
                P('a'),
                axis_names='a',
            )(X),
            errors.MeshError,
        ),
        'a call without arrays': (
            lambda: AUTO_MESH.auto_axes(lambda: X, out_sharding=P('a'))(),
            errors.ArgumentError,
        ),
        'a mesh without devices': (
            lambda: MeshShardingHelper.from_mesh(AUTO_MESH.mesh.abstract_mesh).auto_axes(
                double, out_sharding=P('a')
            )(X),
            errors.MeshError,
        ),
    }


@pytest.mark.parametrize('case', cases().values(), ids=cases())
def test_errors(case, snapshot):
    act, kind = case
    with snapshot.raises(kind):
        act()


@pytest.mark.parametrize('helper', [AUTO_MESH, EXPLICIT_MESH], ids=['auto', 'explicit'])
def test_parts_of_sums_are_refused_beside_manual_axes(helper):
    spec = P(None, unreduced={'b'})
    constrained = helper.explicit_axes(lambda x: with_sharding_constraint(x, spec), axes='b', in_sharding=P())
    for inside in (helper.explicit_axes(lambda x: x, axes='b', in_sharding=spec), constrained):
        mapped = helper.shard_map(inside, P('a'), P('a'), axis_names='a')
        with pytest.raises(errors.ShardingError, match='on a mesh that also has axes of type Manual'):
            helper.sjit(mapped)(X)
