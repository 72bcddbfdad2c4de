"""`helper.shard_map`: the same local shards as jax.shard_map, for all meshes and argument shardings."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from scalax import errors
from scalax.rules._rule import looks_at_paths_only
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    TreePathShardingRule,
    with_sharding_annotation,
)
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
HELPERS = {
    'auto': MeshShardingHelper([4, 2], ['a', 'b']),
    'explicit': MeshShardingHelper([4, 2], ['a', 'b'], axis_types=EXPLICIT),
    'mixed': MeshShardingHelper([4, 2], ['a', 'b'], axis_types=[EXPLICIT, AUTO]),
}
HELPER = HELPERS['auto']
X = np.arange(64, dtype=np.float32).reshape(8, 8)

each_mesh = pytest.mark.parametrize('helper', HELPERS.values(), ids=HELPERS)


def numbered(axes, x):
    """Adds the index of each local shard along *axes* to it, so that a misplaced shard is detected."""
    for i, axis in enumerate(axes):
        x = x + 100 * 10**i * jax.lax.axis_index(axis)
    return x


def numbered_by_hand(spec, manual):
    sizes = {'a': 4, 'b': 2}
    expected = X.copy()
    for i, axis in enumerate(sorted(manual)):
        for dim, entry in enumerate(spec):
            cut = [a for a in ((entry,) if isinstance(entry, str) else entry or ()) if a in manual]
            if axis not in cut:
                continue
            inner = int(np.prod([sizes[a] for a in cut[cut.index(axis) + 1 :]]))
            blocks = int(np.prod([sizes[a] for a in cut]))
            index = np.arange(8) // (8 // blocks) // inner % sizes[axis]
            expected += 100 * 10**i * index.reshape(-1, *[1] * (1 - dim))
    return expected


# (specs of argument and output, manual axes)
CUTS = {
    'both': (P('a', 'b'), None),
    'turned': (P('b', 'a'), None),
    'one dimension': (P(('b', 'a')), None),
    'one of two': (P('a'), {'a'}),
    'the second of two': (P('b'), {'b'}),
    'and one for the compiler': (P('a', 'b'), {'a'}),
    'with the other axis Auto': (P('a', 'b'), {'b'}),
    'a dimension of two': (P(None, ('a', 'b')), {'a'}),
}
LIES = {
    'host': lambda helper: X,
    'as requested': lambda helper: helper.shard(X, P('a', 'b')),
    'turned': lambda helper: helper.shard(X, P('b', 'a')),
    'elsewhere': lambda helper: jax.device_put(X, jax.devices()[3]),
}
CALLS = {
    'eager': lambda helper, fun: fun,
    'jit': lambda helper, fun: jax.jit(fun),
    'sjit': lambda helper, fun: helper.sjit(fun),
}


# On a mesh of axes of two types, a dimension may have axes of one type only.
MATRIX = {
    f'{mesh}, {cut}': (HELPERS[mesh], *CUTS[cut])
    for mesh in HELPERS
    for cut in CUTS
    if mesh != 'mixed' or not any(isinstance(entry, tuple) for entry in CUTS[cut][0])
}


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize(('helper', 'spec', 'names'), MATRIX.values(), ids=MATRIX)
@pytest.mark.parametrize('lies', LIES.values(), ids=LIES)
@pytest.mark.parametrize('call', CALLS.values(), ids=CALLS)
def test_local_shards(helper, spec, names, lies, call):
    manual = {'a', 'b'} if names is None else names
    # An output need not vary along axes outside its spec, so only the axes in the spec are numbered.
    cut = sorted(a for a in manual if a in str(spec))
    fun = helper.shard_map(functools.partial(numbered, cut), spec, spec, axis_names=names)
    x = lies(helper)
    if lies is LIES['elsewhere'] and call is not CALLS['eager']:
        with pytest.raises(ValueError, match='device'):  # inside a compiled function it cannot be moved
            call(helper, fun)(x)
        return
    result = call(helper, fun)(x)
    np.testing.assert_array_equal(result, numbered_by_hand(spec, manual))
    if manual.issuperset({'a', 'b'}) or len(str(spec)) > len("P('a',)"):  # otherwise some axis is Auto
        assert result.sharding.is_equivalent_to(helper.match_sharding_rule(spec, X), 2)


@each_mesh
def test_the_function_is_traced_once(helper):
    traces = []

    def fun(x):
        traces.append(jax.typeof(x).shape)
        return 2 * x

    helper.sjit(helper.shard_map(fun, P('a', 'b'), P('a', 'b')))(X)
    assert traces == [(2, 4)]


def test_rules_for_arguments_and_outputs():
    params = {'up': {'w': np.ones((8, 16), np.float32)}, 'scale': np.float32(3)}
    rule = TreePathShardingRule(('w', P(None, 'b')), ('scale', P()))
    shapes = {}

    def fun(params, x):
        shapes.update(w=params['up']['w'].shape, x=x.shape, scale=params['scale'].shape)
        y = x @ params['up']['w'] * params['scale']
        return {'y': y, 'sum': jax.lax.psum(y.sum(), ('a', 'b'))}

    out = TreePathShardingRule(('y', P('a', 'b')), ('sum', P()))
    result = HELPER.shard_map(fun, (rule, P('a')), out)(params, X)
    assert shapes == {'w': (8, 8), 'x': (2, 8), 'scale': ()}
    np.testing.assert_allclose(result['y'], X @ params['up']['w'] * 3)
    assert result['y'].sharding.spec == P('a', 'b')
    np.testing.assert_allclose(result['sum'], result['y'].sum())


def test_fsdp_gathers_its_own_parameters():
    fsdp = FSDPShardingRule('a', min_fsdp_size=1)
    shapes = []

    def fun(w, x):
        shapes.append(w.shape)
        return x @ jax.lax.all_gather(w, 'a', axis=0, tiled=True)

    w = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    result = HELPER.shard_map(fun, (fsdp, P('a')), P('a'))(w, X)
    assert shapes == [(2, 4)]
    np.testing.assert_allclose(result, X @ w, rtol=1e-5)


def test_calls_by_name_and_defaults():
    mapped = HELPER.shard_map(lambda x, *, scale=3: x * scale, {'x': P('a'), 'scale': P()}, P('a'))
    np.testing.assert_array_equal(mapped(x=X), X * 3)
    np.testing.assert_array_equal(mapped(X, scale=4), X * 4)


def test_none_keeps_the_shards_of_an_argument():
    helper = HELPERS['explicit']
    x = helper.shard(X, P('b', 'a'))
    fun = functools.partial(numbered, ['a', 'b'])
    result = helper.shard_map(fun, None, P('b', 'a'))(x)
    np.testing.assert_array_equal(result, numbered_by_hand(P('b', 'a'), {'a', 'b'}))


@pytest.mark.medium
@each_mesh
def test_gradients_and_vmap(helper):
    total = helper.shard_map(lambda x: jax.lax.psum((x**2).sum(), ('a', 'b')), P('a', 'b'), P())
    gradient = helper.sjit(jax.grad(total), in_shardings=P('a', 'b'))(X)
    np.testing.assert_allclose(gradient, 2 * X)
    double = helper.shard_map(lambda x: 2 * x, P('a', 'b'), P('a', 'b'))
    batch = np.stack([X, X + 1])
    np.testing.assert_array_equal(jax.vmap(double)(batch), 2 * batch)


def test_nested_over_the_other_axes():
    inner = HELPER.shard_map(lambda x: x - jax.lax.psum(x, 'b'), P(None, 'b'), P(None, 'b'))
    outer = HELPER.shard_map(inner, P('a'), P('a'), axis_names='a')
    np.testing.assert_array_equal(jax.jit(outer)(X), -np.roll(X, 4, axis=1))


def test_the_helper_and_the_bindings_outside_are_active_inside():
    seen = []

    def block(x):
        seen.append(MeshShardingHelper.get_global_mesh_helper())
        return with_sharding_annotation(2 * x, 'block')

    mapped = HELPER.shard_map(block, P('a'), P('a'), axis_names={'a'})
    step = HELPER.sjit(mapped, annotation_shardings={'block': P('a', 'b')})
    result = step(X)  # an unused name would warn
    assert seen == [HELPER]
    assert result.sharding.spec == P('a', 'b')


def test_the_name_and_the_signature_stay():
    def step(x, scale=2):
        """Scales."""
        return x * scale

    mapped = HELPER.shard_map(step, {'x': P('a')}, P('a'))
    assert (mapped.__name__, mapped.__doc__, mapped.__wrapped__) == ('step', 'Scales.', step)


def test_an_empty_output():
    assert HELPER.shard_map(lambda x: None, P('a'), None)(X) is None


def test_abstract_meshes_trace():
    helper = MeshShardingHelper.from_mesh(jax.sharding.AbstractMesh((64, 8), ('a', 'b')))
    mapped = helper.shard_map(lambda x: 2 * x, P('a', 'b'), P('a', 'b'))
    out = jax.eval_shape(mapped, jax.ShapeDtypeStruct((128, 64), jnp.bfloat16))
    assert (out.shape, out.dtype) == ((128, 64), jnp.bfloat16)


@pytest.mark.parametrize('policy', ['error', 'replicate', 'warn'])
def test_local_shards_do_not_depend_on_the_policy(policy):
    """A replicated array would be summed once for each device."""
    helper = MeshShardingHelper([4, 2], ['a', 'b'], on_indivisible='replicate')
    rule = TreePathShardingRule(('', P('a')), on_indivisible=policy)
    mapped = helper.shard_map(lambda x: jax.lax.psum(x.sum(), 'a'), rule, P())
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with pytest.raises(errors.ShardingError, match='dimension 0 of size 6 is not divisible by 4'):
            mapped(X[:6])


def test_the_policy_holds_for_axes_that_are_left_to_the_compiler():
    helper = MeshShardingHelper([4, 2], ['a', 'b'], on_indivisible='replicate')
    mapped = helper.shard_map(lambda x: 2 * x, P('a', 'b'), P('a'), axis_names='a')
    np.testing.assert_array_equal(mapped(X[:, :7]), 2 * X[:, :7])


def test_arrays_on_the_same_devices_in_another_order_are_moved():
    turned = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ('d',))
    x = jax.device_put(X, jax.sharding.NamedSharding(turned, P('d')))
    result = HELPER.shard_map(functools.partial(numbered, ['a']), P('a'), P('a'))(x)
    np.testing.assert_array_equal(result, numbered_by_hand(P('a'), {'a', 'b'}))


def test_auto_axes_of_a_mixed_mesh_are_left_to_the_compiler():
    helper = HELPERS['mixed']
    mapped = helper.shard_map(lambda x: 2 * x, P('a'), P('a'), axis_names='a')
    x = helper.shard(X, P('a', 'b'))
    assert jax.jit(mapped)(x).sharding.is_equivalent_to(x.sharding, 2)
    assert_collectives(jax.jit(mapped), x, helper=helper, all_gather=0)


def test_the_name_of_the_function_shows_in_the_program():
    def recognisable(x):
        return jnp.sin(x)

    text = jax.jit(HELPER.shard_map(recognisable, P('a'), P('a'))).lower(X).as_text(debug_info=True)
    assert 'jit(recognisable)' in text


# --- Errors ---------------------------------------------------------------------------------------

ARGUMENTS = "of the arguments of 'double' (in_specs) cannot be sharded as asked (mesh: a=4, b=2):"
OUTPUTS = "of the outputs of 'double' (out_specs) cannot be sharded as asked (mesh: a=4, b=2):"
OPEN = (
    '    None does not determine the blocks\n'
    'What to do: give PartitionSpec() for replicated arguments; only arguments over axes of type Explicit '
    'may be None, which takes their own blocks.'
)


def double(x):
    return 2 * x


def deleted():
    x = HELPER.shard(X, P('a'))
    x.delete()
    return x


def cases():
    host = TreePathShardingRule(('', P('a'))).with_memory_kind('pinned_host')
    return {
        'results that are no arrays': (
            lambda: HELPER.shard_map(lambda x: {'x': x, 'how': 'rows'}, P('a'), P('a'))(X),
            errors.ShardingError,
        ),
        'an argument that is deleted': (
            lambda: HELPER.shard_map(double, P('a'), P('a'))(deleted()),
            errors.ArgumentError,
        ),
        'not a function': (lambda: HELPER.shard_map({}, P('a'), P('a')), errors.ArgumentError),
        'an unknown axis to map': (
            lambda: HELPER.shard_map(double, P('a'), P('a'), axis_names={'aa'}),
            errors.MeshError,
        ),
        'an output rule that needs shapes': (
            lambda: HELPER.shard_map(double, P('a'), {'y': FSDPShardingRule('a')}),
            errors.RuleError,
        ),
        'an argument left open': (lambda: HELPER.shard_map(double, None, P('a'))(X), errors.ShardingError),
        'an output left open': (
            lambda: HELPERS['explicit'].shard_map(double, P('a'), None)(X),
            errors.ShardingError,
        ),
        'a size that is not divisible': (
            lambda: HELPER.shard_map(double, P('a'), P('a'))({'u': X[:6], 'v': X[:7]}),
            errors.ShardingError,
        ),
        'an output spec that is too long': (
            lambda: HELPER.shard_map(double, P('a'), P('a', None, 'b'))(X),
            errors.ShardingError,
        ),
        'a manual axis after another': (
            lambda: HELPER.shard_map(double, P(('b', 'a')), P('a'), axis_names={'a'})(X),
            errors.ShardingError,
        ),
        'another memory': (lambda: HELPER.shard_map(double, host, P('a'))(X), errors.ShardingError),
        'inside, over the same axes': (
            lambda: HELPER.shard_map(
                HELPER.shard_map(double, P('a'), P('a'), axis_names='a'), P('a'), P('a'), axis_names='a'
            )(X),
            errors.MeshError,
        ),
        'inside, with no axis left': (
            lambda: HELPER.shard_map(HELPER.shard_map(double, P('a'), P('a')), P('a'), P('a'))(X),
            errors.MeshError,
        ),
        'unknown axis names': (
            lambda: HELPER.shard_map(double, P('a'), P('a'), axis_names=3),
            errors.ArgumentError,
        ),
        'too many specs': (lambda: HELPER.shard_map(double, (P('a'), P()), P('a'))(X), errors.StructureError),
        'another argument name': (
            lambda: HELPER.shard_map(double, {'y': P('a')}, P('a')),
            errors.StructureError,
        ),
        'a mesh without devices': (
            lambda: MeshShardingHelper.from_mesh(HELPER.mesh.abstract_mesh).shard_map(double, P('a'), P('a'))(
                X
            ),
            errors.MeshError,
        ),
    }


def test_messages_of_jax_name_the_function():
    with pytest.raises(
        ValueError, match="the function 'double' was given out_specs which require replication"
    ):
        HELPER.sjit(HELPER.shard_map(double, P('a'), P()))(X)


@pytest.mark.parametrize('case', cases().values(), ids=cases())
def test_errors(case, snapshot):
    act, kind = case
    with snapshot.raises(kind):
        act()


@pytest.mark.parametrize(
    ('rule', 'expected'),
    [
        (TreePathShardingRule(('w', P('a'))), True),
        (TreePathShardingRule(('w', FSDPShardingRule('a'))), False),
        (TreePathShardingRule(('w', P('a'))) | P(), True),
        (TreePathShardingRule(('w', P('a'))) & FSDPShardingRule('a'), False),
        (TreePathShardingRule(('w', P('a'))).stacked(1), True),
        (PolicyShardingRule(lambda path, leaf: P()), False),
    ],
)
def test_which_rules_look_at_paths_only(rule, expected):
    assert looks_at_paths_only(rule) is expected


@each_mesh
def test_a_call_outside_of_compiled_functions_compiles_once(helper):
    runs = []

    def fun(x):
        runs.append(x.shape)
        return 2 * x

    mapped = helper.shard_map(fun, P('a'), P('a'))
    placed = helper.shard(X, P('a'))
    for _ in range(3):
        np.testing.assert_array_equal(mapped(placed), 2 * X)
    assert len(runs) == 1


def test_a_decorator_with_options():
    @HELPERS['auto'].shard_map(in_specs=P('a'), out_specs=P('a'), axis_names='a')
    def double(x):
        return 2 * x

    np.testing.assert_array_equal(double(X), 2 * X)
    for options, missing in (({'out_specs': P()}, 'in_specs'), ({'in_specs': P()}, 'out_specs')):
        with pytest.raises(errors.ArgumentError) as error:
            HELPERS['auto'].shard_map(**options)
        assert str(error.value) == f'shard_map needs {missing}: a PartitionSpec, a rule, or a tree of them'


def test_a_vmapped_dimension_sharded_over_an_explicit_axis():
    helper = HELPERS['explicit']
    placed = helper.shard(X, P('a', 'b'))

    def mapped(spec, **options):
        return jax.vmap(helper.shard_map(lambda row: 2 * row, spec, spec, **options))

    over_b = mapped(P('b'), axis_names='b')
    for call in (over_b, helper.sjit(over_b, in_shardings=P('a', 'b'))):
        out = call(placed)
        np.testing.assert_array_equal(out, 2 * X)
        assert out.sharding.is_equivalent_to(placed.sharding, 2)
    with pytest.raises(ValueError, match='axis_names'):  # of JAX
        mapped(P('b'))(placed)
