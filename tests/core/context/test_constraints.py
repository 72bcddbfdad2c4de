"""Constraints and annotations on every type of mesh axis, in and out of jit, shard_map and contexts."""

import contextlib
import functools
import itertools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import IndivisibleWarning, MeshError, ShardingError, StructureError
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    TreePathShardingRule,
    get_global_annotation_shardings,
    get_global_mesh,
    get_global_mesh_helper,
    with_sharding_annotation,
    with_sharding_constraint,
)

U = P.UNCONSTRAINED
HELPERS = {
    '-'.join(kind.name for kind in types): MeshShardingHelper([4, 2], ['a', 'b'], axis_types=types)
    for types in itertools.product([AxisType.Auto, AxisType.Explicit], repeat=2)
}
AUTO, EXPLICIT = HELPERS['Auto-Auto'], HELPERS['Explicit-Explicit']
LEAVES = {
    'float32': (np.arange(64, dtype=np.float32).reshape(8, 8), P('a', 'b')),
    'bfloat16': (jnp.ones((8, 8), jnp.bfloat16), P(None, 'a')),
    'int8': (np.ones((8, 4, 2), np.int8), P('b', None, None)),
    'keys': (jax.random.split(jax.random.key(0), 8), P('a')),
    'scalar': (1.5, P()),
}

every_helper = pytest.mark.parametrize('helper', HELPERS.values(), ids=HELPERS)
every_leaf = pytest.mark.parametrize(('x', 'spec'), LEAVES.values(), ids=LEAVES)


def assert_lies(result, helper, spec, x):
    assert result.sharding.is_equivalent_to(NamedSharding(helper.mesh, spec), result.ndim), result.sharding
    if jax.dtypes.issubdtype(result.dtype, jax.dtypes.prng_key):
        result, x = jax.random.key_data(result), jax.random.key_data(x)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(x))


# --- Sources of the mesh --------------------------------------------------------------------------


@pytest.mark.medium
@every_helper
@every_leaf
def test_constraints_inside_sjit(helper, x, spec):
    assert_lies(helper.sjit(lambda y: with_sharding_constraint(y, spec))(x), helper, spec, x)


@pytest.mark.medium
@pytest.mark.sampled(3)
@every_helper
@every_leaf
def test_constraints_in_a_context(helper, x, spec):
    with helper.get_context():
        assert_lies(with_sharding_constraint(x, spec), helper, spec, x)
        # Explicit axes are part of types, for which a plain jit needs to know the mesh.
        explicit = AxisType.Explicit in helper.axis_types
        with jax.set_mesh(helper.mesh) if explicit else contextlib.nullcontext():
            assert_lies(jax.jit(lambda y: with_sharding_constraint(y, spec))(x), helper, spec, x)


@pytest.mark.medium
@pytest.mark.sampled(3)
@every_helper
@every_leaf
def test_constraints_on_the_mesh_that_is_set(helper, x, spec):
    with jax.set_mesh(helper.mesh):
        assert_lies(jax.jit(lambda y: with_sharding_constraint(y, spec))(x), helper, spec, x)
        assert_lies(with_sharding_constraint(x, spec), helper, spec, x)


@pytest.mark.medium
@every_helper
def test_constraints_by_named_shardings_need_no_context(helper):
    x, spec = LEAVES['float32']
    sharding = NamedSharding(helper.mesh, spec)
    constrained = functools.partial(with_sharding_constraint, sharding_rule=sharding)
    assert_lies(constrained(x), helper, spec, x)
    with jax.set_mesh(helper.mesh):
        assert_lies(constrained(x), helper, spec, x)
        assert_lies(jax.jit(constrained)(x), helper, spec, x)
    assert_lies(helper.sjit(constrained)(x), helper, spec, x)
    if helper is AUTO:
        assert_lies(jax.jit(constrained)(x), helper, spec, x)


def test_without_any_mesh_specs_and_rules_do_nothing():
    tree = {'x': np.zeros(8), 'y': jnp.zeros(8)}
    rules = [
        P('whatever'),
        FSDPShardingRule('z'),
        TreePathShardingRule(('x', P())),
        None,
        {'x': P('q'), 'y': None},
    ]
    for rule in rules:
        assert with_sharding_constraint(tree, rule) is tree
    mixed = with_sharding_constraint(tree, {'x': P('q'), 'y': NamedSharding(AUTO.mesh, P('a'))})
    assert mixed['x'] is tree['x']
    assert_lies(mixed['y'], AUTO, P('a'), tree['y'])
    with pytest.raises(StructureError):
        with_sharding_constraint(tree, {'x': P()})


@pytest.mark.medium
@every_helper
def test_rules_trees_of_rules_and_none(helper):
    tree = {'w': np.ones((8, 4), np.float32), 'b': np.ones(8, np.float32), 'n': None}
    fsdp = FSDPShardingRule('a', min_fsdp_size=0)
    for rules, w, b in (
        (fsdp, P('a'), P('a')),
        (TreePathShardingRule(('w', P(None, 'b')), ('', P())), P(None, 'b'), P()),
        (PolicyShardingRule(lambda path, x: P('b')), P('b'), P('b')),
        ({'w': fsdp, 'b': P('b'), 'n': None}, P('a'), P('b')),
        ({'w': None, 'b': NamedSharding(helper.mesh, P('a')), 'n': P()}, P(), P('a')),
    ):
        result = helper.sjit(lambda t, rules=rules: with_sharding_constraint(t, rules))(
            helper.shard(tree, P())
        )
        assert result['n'] is None
        assert_lies(result['w'], helper, w, tree['w'])
        assert_lies(result['b'], helper, b, tree['b'])


@pytest.mark.medium
@pytest.mark.parametrize(
    ('start', 'spec', 'expected'),
    [
        (P('a', 'b'), P(U, None), P('a')),
        (P('a', 'b'), P(None, U), P(None, 'b')),
        (P('a'), P(U, 'b'), P('a', 'b')),
        (P('a'), P(U, 'a'), P(None, 'a')),  # the axis moves to the other dimension
        (P(('a', 'b')), P(U, 'b'), P('a', 'b')),
        (P('b', 'a'), P(U, U), P('b', 'a')),
    ],
)
def test_unconstrained_dimensions_stay_as_they_are(start, spec, expected):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    result = EXPLICIT.sjit(lambda y: with_sharding_constraint(y, spec))(EXPLICIT.shard(x, start))
    assert_lies(result, EXPLICIT, expected, x)
    # On Auto axes that is the compiler's choice.
    AUTO.sjit(lambda y: with_sharding_constraint(y, spec))(AUTO.shard(x, start))


@pytest.mark.medium
@every_helper
def test_constraints_are_transparent_to_transformations(helper):
    def loss(w, x):
        return (with_sharding_constraint(w @ x, P('a')) ** 2).sum()

    w, x = np.ones((8, 4), np.float32), np.arange(4, dtype=np.float32)
    gradient = helper.sjit(jax.grad(loss))(w, x)
    np.testing.assert_allclose(gradient, np.broadcast_to(2 * x.sum() * x, (8, 4)))


# --- shard_map ------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.sampled(11)
@every_helper
@pytest.mark.parametrize('manual', ['a', 'b', 'ab'])
@pytest.mark.parametrize('kind', ['spec', 'named sharding', 'rule', 'annotation'])
def test_manual_axes_are_left_alone(helper, manual, kind):
    requested = P('a', 'b')
    rule = {
        'spec': requested,
        'named sharding': NamedSharding(helper.mesh, requested),
        'rule': TreePathShardingRule(('', requested)),
        'annotation': requested,
    }[kind]

    def body(y):
        assert y.shape == (2 if 'a' in manual else 8, 4 if 'b' in manual else 8)
        return with_sharding_annotation(y, 'y') if kind == 'annotation' else with_sharding_constraint(y, rule)

    spec = P(*(name if name in manual else None for name in 'ab'))
    mapped = jax.shard_map(body, mesh=helper.mesh, in_specs=spec, out_specs=spec, axis_names=set(manual))
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    placed = helper.shard(x, spec)  # the other axes come from the constraint alone
    expected = requested if jax_keeps_types(helper.mesh, spec, requested) else spec
    with helper.get_context({'y': rule}):
        assert_lies(jax.jit(mapped)(placed), helper, expected, x)
        assert_lies(mapped(placed), helper, expected, x)
    bindings = {'y': rule} if kind == 'annotation' else None
    assert_lies(helper.sjit(mapped, annotation_shardings=bindings)(placed), helper, expected, x)
    if kind != 'annotation':
        # The mesh of shard_map is an ambient one.
        assert_lies(jax.jit(mapped)(placed), helper, expected, x)


def jax_keeps_types(mesh, spec, requested):
    """Whether a value keeps its type over Explicit axes when it leaves ``jax.shard_map``.

    JAX 0.10.2 drops Explicit axes if a manual axis has type Auto.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    inside = [axis if axis not in spec and types[axis] is AxisType.Explicit else None for axis in requested]

    def typed(y):
        return jax.sharding.reshard(y, NamedSharding(jax.sharding.get_abstract_mesh(), P(*inside)))

    if not any(inside):
        return True
    manual = {axis for axis in spec if axis}
    mapped = jax.shard_map(typed, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=manual)
    x = jax.device_put(np.zeros((8, 8), np.float32), NamedSharding(mesh, spec))
    return set(filter(None, inside)) <= set(jax.jit(mapped)(x).sharding.spec)


def test_shard_map_over_another_mesh(snapshot):
    other = MeshShardingHelper([8], ['x'])
    mapped = jax.shard_map(
        lambda y: with_sharding_constraint(y, P('a')), mesh=other.mesh, in_specs=P('x'), out_specs=P('x')
    )
    with AUTO.get_context(), snapshot.raises(MeshError):
        jax.jit(mapped)(np.zeros(8))


# --- Errors ---------------------------------------------------------------------------------------


@every_helper
def test_errors_name_the_source_line_before_anything_is_compiled(helper):
    def constrained(tree):
        return with_sharding_constraint(tree, P('a', 'c'))

    def annotated(tree):
        return with_sharding_annotation(tree, 'hidden')

    tree = {'x': np.zeros(8, np.float32), 'y': np.zeros((8, 8), np.float32)}
    for where, function in (('a sharding constraint', constrained), ("annotation 'hidden'", annotated)):
        with pytest.raises(ShardingError) as error:
            helper.sjit(function, annotation_shardings={'hidden': P('a', 'c')})(tree)
        assert str(error.value) == (
            f'2 leaves of {where} cannot be sharded as asked (mesh: a=4, b=2):\n'
            '  x: float32[8]\n'
            "    the mesh has no axis 'c' (known: 'a', 'b')\n"
            '    the spec has 2 entries, the array 1 dimension\n'
            "    asked for: P('a', 'c') from the spec given\n"
            '  y: float32[8, 8]\n'
            "    the mesh has no axis 'c' (known: 'a', 'b')\n"
            "    asked for: P('a', 'c') from the spec given\n"
            'What to do: name only axes of the mesh, or build the mesh with that axis.\n'
            'What to do: give a spec at most one entry per dimension (PartitionSpec() replicates).'
        )


def test_dimensions_that_do_not_divide_warn_on_auto_axes_and_fail_on_explicit_ones():
    x = np.arange(6, dtype=np.float32)
    with pytest.warns(IndivisibleWarning) as caught:
        result = AUTO.sjit(
            lambda y: with_sharding_annotation(2 * y, 'h'), annotation_shardings={'h': P('a')}
        )(x)
    np.testing.assert_array_equal(result, 2 * x)
    assert [str(warning.message) for warning in caught] == [
        "dimensions of annotation 'h' that are not divisible (mesh: a=4, b=2):\n"
        "  (the leaf itself): float32[6], P('a',) from the spec given: dimension 0 of size 6 is not "
        'divisible by 4 (a=4); XLA pads it, and computes some operations wrong there (jnp.nonzero)'
    ]
    with pytest.raises(ShardingError, match='dimension 0 of size 6 is not divisible by 4'):
        EXPLICIT.sjit(lambda y: with_sharding_constraint(y, P('a')))(x)
    replicating = TreePathShardingRule(('', P('a')), on_indivisible='replicate')
    assert_lies(EXPLICIT.sjit(lambda y: with_sharding_constraint(y, replicating))(x), EXPLICIT, P(), x)


@every_helper
def test_no_padding_outside_jit(helper):
    with (
        helper.get_context(),
        pytest.raises(ShardingError, match='dimension 0 of size 6 is not divisible by 4'),
    ):
        with_sharding_constraint(np.zeros(6), P('a'))


@pytest.mark.parametrize(
    'run',
    [
        lambda f: jax.vmap(f)(np.ones((3, 6), np.float32)),
        lambda f: jax.grad(lambda x: f(x).sum())(np.ones(6, np.float32)),
        lambda f: jax.jvp(f, [np.ones(6, np.float32)], [np.ones(6, np.float32)]),
    ],
    ids=['vmap', 'grad', 'jvp'],
)
def test_eagerly_run_constraints_are_not_padded(run, snapshot):
    with AUTO.get_context(), snapshot.raises(ShardingError):
        run(lambda x: with_sharding_constraint(x, P('a')))
    with AUTO.get_context(), pytest.warns(IndivisibleWarning, match='XLA pads it'):
        jax.make_jaxpr(lambda: run(lambda x: with_sharding_constraint(x, P('a'))))()


@pytest.mark.medium
@pytest.mark.parametrize('size', [6, 7, 9, 10])
def test_padded_values_may_be_outputs(size):
    x = np.arange(size, dtype=np.float32)
    for spec in (P('a'), P(('a', 'b'))):
        with pytest.warns(IndivisibleWarning):
            result = AUTO.sjit(lambda y, spec=spec: with_sharding_constraint(2 * y, spec))(x)
        np.testing.assert_array_equal(result, 2 * x)


# --- Contexts and annotations ---------------------------------------------------------------------


def test_unbound_names_do_nothing():
    tree = {'x': np.zeros(8)}
    assert with_sharding_annotation(tree, 'h') is tree
    with AUTO.get_context({'other': P('a')}):
        assert with_sharding_annotation(tree, 'h') is tree
    with AUTO.get_context({'h': None}):
        assert with_sharding_annotation(tree, 'h')['x'] is tree['x']


def test_contexts_nest_inherit_and_override():
    x = np.zeros(8)

    def spec(name):
        result = with_sharding_annotation(x, name)
        return None if result is x else result.sharding.spec

    context = AUTO.get_context({'p': P('a'), 'q': P('b')})
    for _ in range(2):  # a context can be used again
        with context as entered:
            assert entered.mesh_helper is AUTO
            assert (spec('p'), spec('q'), spec('r')) == (P('a'), P('b'), None)
            with AUTO.get_context({'q': P(), 'r': P('a')}), context:
                assert get_global_annotation_shardings() == {'p': P('a'), 'q': P('b'), 'r': P('a')}
                assert (spec('p'), spec('q'), spec('r')) == (P('a'), P('b'), P('a'))
            assert (spec('q'), spec('r')) == (P('b'), None)
        assert spec('p') is None


def test_the_active_helper():
    assert get_global_mesh_helper() is get_global_mesh() is get_global_annotation_shardings() is None
    with AUTO.get_context():
        assert get_global_mesh_helper() is AUTO
        assert get_global_mesh() is AUTO.mesh
        assert get_global_annotation_shardings() == {}
        with EXPLICIT.get_context({'h': P('a')}):
            assert MeshShardingHelper.get_global_mesh_helper() is EXPLICIT
        with pytest.raises(ZeroDivisionError), EXPLICIT.get_context():
            raise ZeroDivisionError
        assert get_global_mesh() is AUTO.mesh
    assert get_global_mesh_helper() is None


def test_a_bound_name_uses_the_mesh_of_the_helper_that_bound_it():
    other = MeshShardingHelper([8], ['x'])
    with other.get_context({'h': P('x')}), AUTO.get_context():
        assert with_sharding_annotation(np.zeros(8), 'h').sharding.mesh == other.mesh


def test_contexts_belong_to_their_thread():
    seen = {}
    inside, done = threading.Barrier(3), threading.Barrier(3)

    def work(name, helper):
        with helper.get_context({name: P('a')}):
            inside.wait(200)
            seen[name] = (get_global_mesh_helper(), get_global_annotation_shardings())
            done.wait(200)

    threads = [threading.Thread(target=work, args=item) for item in (('p', AUTO), ('q', EXPLICIT))]
    for thread in threads:
        thread.start()
    inside.wait(200)
    seen['main'] = get_global_mesh_helper()
    done.wait(200)
    for thread in threads:
        thread.join(200)
    assert seen == {'p': (AUTO, {'p': P('a')}), 'q': (EXPLICIT, {'q': P('a')}), 'main': None}


def test_one_context_entered_by_many_threads():
    context = AUTO.get_context({'h': P('a')})
    failures = []

    def work():
        try:
            for _ in range(50):
                with context, context:
                    assert get_global_mesh_helper() is AUTO
                assert get_global_mesh_helper() is None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not failures


@pytest.mark.medium
@pytest.mark.parametrize(
    'wrap',
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda y: jax.lax.scan(lambda carry, _: (f(carry), None), y, length=2)[0],
        lambda f: lambda y: jax.vmap(f)(y[None])[0],
    ],
    ids=['jit', 'checkpoint', 'scan', 'vmap'],
)
def test_a_shared_inner_function_never_sees_the_binding_of_another(wrap):
    inner = wrap(lambda y: with_sharding_annotation(y, 'h'))
    x = np.arange(8, dtype=np.float32)
    plain = jax.jit(inner)(x)  # traced without any binding first
    assert len(plain.sharding.device_set) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for spec in (P('a'), P('b'), P(('a', 'b')), P('a')):
            result = AUTO.sjit(lambda y: inner(y), annotation_shardings={'h': spec})(x)
            assert_lies(result, AUTO, spec, x)
            with AUTO.get_context({'h': spec}):
                assert_lies(jax.jit(inner)(x), AUTO, spec, x)
    assert len(jax.jit(inner)(x).sharding.device_set) == 1


# --- Another active mesh --------------------------------------------------------------------------

OUTSIDE = {
    'a constraint': lambda helper: with_sharding_constraint,
    'shard_map': lambda helper: lambda x, spec: helper.shard_map(lambda y: y * 1, spec, spec)(x),
    'shard_map, partly': lambda helper: (
        lambda x, spec: helper.shard_map(lambda y: y * 1, spec, spec, axis_names='a')(x)
    ),
}
MESHES = {name: helper.mesh for name, helper in HELPERS.items()} | {
    'another shape': MeshShardingHelper([8], ['d']).mesh,
    'another shape, explicit': MeshShardingHelper([8], ['d'], axis_types=AxisType.Explicit).mesh,
}


@pytest.mark.medium
@pytest.mark.sampled(11)
@every_helper
@pytest.mark.parametrize('call', OUTSIDE)
@pytest.mark.parametrize('mesh', MESHES)
def test_the_mesh_of_the_helper_takes_precedence(helper, call, mesh):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    arrays = {
        'host': x,
        'of the helper': helper.shard(x, P('b')),
        'of other types': AUTO.shard(x, P('b')) if helper is not AUTO else EXPLICIT.shard(x, P('b')),
    }
    for array in arrays.values():
        with jax.set_mesh(MESHES[mesh]), helper.get_context():
            out = OUTSIDE[call](helper)(array, P('a'))
        np.testing.assert_array_equal(out, x)
        assert out.sharding.mesh == helper.mesh
        if call != 'shard_map, partly':  # which leaves some axes unconstrained
            assert out.sharding.is_equivalent_to(NamedSharding(helper.mesh, P('a')), 2)


@every_helper
@pytest.mark.parametrize('call', OUTSIDE)
def test_a_mesh_of_other_devices_is_an_error(helper, call):
    for devices in (jax.devices()[:4], jax.devices()[::-1]):
        mesh = Mesh(np.array(devices), ('d',))
        with jax.set_mesh(mesh), helper.get_context(), pytest.raises(MeshError) as error:
            OUTSIDE[call](helper)(np.zeros((8, 8), np.float32), P('a'))
        ids, ambient_ids = ([device.id for device in group] for group in (jax.devices(), devices))
        assert str(error.value).endswith(
            f' uses the devices {ids}, but jax.set_mesh is active with the devices {ambient_ids}: exit that '
            'mesh before the call'
        )


def test_values_of_two_explicit_meshes_cannot_be_combined(snapshot):
    def constrained(x):
        with EXPLICIT.get_context():
            return with_sharding_constraint(x, P('a'))

    with jax.set_mesh(MESHES['another shape']), snapshot.raises(MeshError):
        jax.jit(constrained)(np.zeros((8, 8), np.float32))


# --- Memory kinds and other shardings ----------------------------------------------------------


@pytest.mark.medium
@every_helper
def test_a_memory_kind_is_an_error(helper):
    x = np.ones((8, 8), np.float32)
    host = NamedSharding(helper.mesh, P('a'), memory_kind='pinned_host')
    rule = FSDPShardingRule(min_fsdp_size=1, fsdp_axis_name='a').with_memory_kind('pinned_host')

    def eagerly():
        with helper.get_context():
            with_sharding_constraint(helper.shard(x, P()), host)

    for call in (
        lambda: helper.sjit(lambda x: with_sharding_constraint(x, host))(x),
        lambda: helper.sjit(lambda x: with_sharding_constraint(x, rule))(x),
        lambda: helper.sjit(lambda x: with_sharding_annotation(x, 'n'), annotation_shardings={'n': host})(x),
        lambda: helper.sjit(lambda x: x, args_sharding_constraint=host)(x),
        lambda: jax.jit(lambda x: with_sharding_constraint(x, host))(helper.shard(x, P())),
        eagerly,
    ):
        with pytest.raises(ShardingError) as error:
            call()
        [problem] = error.value.problems
        assert (problem.kind, problem.detail, problem.hint) == (
            'memory-kind',
            "a constraint cannot move a value to 'pinned_host': JAX ignores its memory kind",
            'give a rule without a memory kind here, and move arrays outside, or with out_shardings.',
        )
    here = host.with_memory_kind('device')
    assert_lies(helper.sjit(lambda x: with_sharding_constraint(x, here))(x), helper, P('a'), x)


@pytest.mark.slow
@every_helper
def test_a_named_sharding_with_other_axis_types(helper):
    x = np.ones((8, 8), np.float32)
    for other in HELPERS.values():
        sharding = NamedSharding(other.mesh, P('b', 'a'))
        out = helper.sjit(lambda x, sharding=sharding: with_sharding_constraint(2 * x, sharding))(x)
        assert out.sharding == NamedSharding(helper.mesh, P('b', 'a'))
        with helper.get_context():
            assert_lies(with_sharding_constraint(helper.shard(x, P('a')), sharding), helper, P('b', 'a'), x)
    turned = Mesh(helper.mesh.devices[::-1], ('a', 'b'), axis_types=other.mesh.axis_types)
    with pytest.raises(ShardingError, match='for another mesh'):
        helper.sjit(lambda x: with_sharding_constraint(x, NamedSharding(turned, P('a'))))(x)
