"""sjit on meshes with Explicit axes, where types hold shardings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from scalax.errors import MeshError, PlacementError
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, NamedSharding, PolicyShardingRule
from scalax.sharding import PartitionSpec as P

EXPLICIT = MeshShardingHelper([4, 2], ['x', 'y'], axis_types=AxisType.Explicit)
MIXED = MeshShardingHelper([4, 2], ['x', 'y'], axis_types=(AxisType.Explicit, AxisType.Auto))
MIXED_TOO = MeshShardingHelper([4, 2], ['x', 'y'], axis_types=(AxisType.Auto, AxisType.Explicit))
MESHES = {'explicit': EXPLICIT, 'mixed': MIXED, 'mixed, reversed': MIXED_TOO}
X = np.arange(64, dtype=np.float32).reshape(8, 8)
SPEC = P('x', 'y')


@pytest.fixture(params=MESHES)
def helper(request):
    return MESHES[request.param]


def is_sharded_as(array, helper, spec):
    return array.sharding.is_equivalent_to(helper.match_sharding_rule(spec, array), array.ndim)


def explicit_axes(helper, value):
    """Returns the Explicit axes in the type of a value."""
    names = zip(helper.axis_names, helper.axis_types, strict=True)
    explicit = {name for name, kind in names if kind is AxisType.Explicit}
    return [axis for axis in jax.typeof(value).sharding.spec if axis in explicit]


NESTED = {
    'in_shardings': {'in_shardings': SPEC},
    'in_shardings, reshard': {'in_shardings': SPEC, 'on_mismatch': 'reshard'},
    'args_sharding_constraint': {'args_sharding_constraint': SPEC},
}


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('start', [P(), P('y'), SPEC], ids=str)
@pytest.mark.parametrize('options', NESTED)
@pytest.mark.parametrize('outer', ['sjit', 'sjit with rules', 'jit'])
def test_a_nested_call_takes_its_shardings(helper, outer, options, start):
    types = []

    def inner(value):
        types.append(explicit_axes(helper, value))
        return value + 1

    nested = helper.sjit(inner, **NESTED[options])
    compile_ = {
        'sjit': helper.sjit,
        'sjit with rules': lambda f: helper.sjit(f, in_shardings=start),
        'jit': jax.jit,
    }[outer]
    expected = [axis for axis, kind in zip('xy', helper.axis_types, strict=True) if kind is AxisType.Explicit]
    compiled = compile_(lambda value: nested(value * 2))
    for _ in range(2):
        out = compiled(helper.shard(X, start))
        np.testing.assert_array_equal(out, 2 * X + 1)
        assert is_sharded_as(out, helper, SPEC)
    assert types == [expected]


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('start', [P(), P('x'), P('y')], ids=str)
@pytest.mark.parametrize('outer', ['sjit', 'jit'])
def test_a_nested_call_gives_its_outputs_their_shardings(helper, outer, start):
    nested = helper.sjit(
        lambda value: {'a': value + 1, 'constant': np.ones(8, np.float32), 'number': 2},
        out_shardings={'a': SPEC, 'constant': P('x'), 'number': P()},
    )
    out = (helper.sjit if outer == 'sjit' else jax.jit)(lambda value: nested(value * 2))(
        helper.shard(X, start)
    )
    np.testing.assert_array_equal(out['a'], 2 * X + 1)
    assert is_sharded_as(out['a'], helper, SPEC)
    assert is_sharded_as(out['constant'], helper, P('x'))
    assert is_sharded_as(out['number'], helper, P())


def test_outputs_get_the_sharding_of_a_donated_argument(helper):
    nested = helper.sjit(lambda value: {'a': jnp.zeros((8, 8))}, SPEC, donate_argnums=0)
    out = jax.jit(lambda value: nested(value * 2))(helper.shard(X, P()))
    assert is_sharded_as(out['a'], helper, SPEC)


def test_rules_for_outputs_are_called_once(helper):
    traces, paths = [], []

    def policy(path, leaf):
        paths.append(path)
        return SPEC

    @helper.sjit(out_shardings=PolicyShardingRule(policy))
    def double(x):
        traces.append(1)
        return {'w': x * 2}

    for x in (X, jnp.asarray(X), helper.shard(X, P())):
        out = double(x)
        assert is_sharded_as(out['w'], helper, SPEC)
        np.testing.assert_array_equal(out['w'], 2 * X)
    assert (len(traces), paths) == (1, ['w'])


@pytest.mark.slow
def test_transformations_reshard_arguments(helper):
    square = helper.sjit(lambda x: x**2, in_shardings=SPEC, out_shardings=SPEC)
    # JAX's jit too ignores out_shardings for the cotangents that it creates, on Auto axes.
    open_ended = helper.sjit(lambda x: x**2, in_shardings=SPEC)
    x = helper.shard(X, P())
    for _ in range(2):
        with jax.set_mesh(helper.mesh):  # for the cotangent of a sum
            gradient = jax.grad(lambda value: open_ended(value).sum())(x)
        np.testing.assert_array_equal(gradient, 2 * X)
        gradient = jax.jit(jax.grad(lambda value: square(value).sum()))(x)
        np.testing.assert_array_equal(gradient, 2 * X)
        out, tangent = jax.jvp(square, (x,), (x,))
        np.testing.assert_array_equal(tangent, 2 * X * X)
        assert is_sharded_as(out, helper, SPEC)
        mapped = jax.vmap(square)(helper.shard(np.stack([X, X, X]), P()))
        np.testing.assert_array_equal(mapped, np.stack([X, X, X]) ** 2)
        assert is_sharded_as(mapped, helper, P(None, 'x', 'y'))


class Node:
    """A node that accepts only arrays, like some nodes of other libraries."""

    def __init__(self, value):
        if not isinstance(value, np.ndarray | jax.Array):
            raise TypeError(f'an array, please, not a {type(value).__name__}')
        self.value = value


jax.tree_util.register_pytree_node(Node, lambda node: ((node.value,), None), lambda _, kids: Node(*kids))


@pytest.mark.medium
@pytest.mark.parametrize('make', [np.asarray, jnp.asarray, 'placed'], ids=['numpy', 'jax', 'placed'])
def test_nodes_that_reject_types_are_traced_with_arrays(helper, make):
    types = []

    @helper.sjit(in_shardings=SPEC, out_shardings=SPEC)
    def double(node):
        types.append(explicit_axes(helper, node.value))
        return Node(node.value * 2)

    for _ in range(3):
        out = double(Node(helper.shard(X, SPEC) if make == 'placed' else make(X)))
        np.testing.assert_array_equal(out.value, 2 * X)
        assert is_sharded_as(out.value, helper, SPEC)
    assert len(types) == 1
    assert types[0]


@pytest.mark.parametrize(
    ('start', 'spec', 'expected'),
    [
        (P('x'), P(P.UNCONSTRAINED, 'y'), P('x', 'y')),
        (P('x', 'y'), P(P.UNCONSTRAINED), P('x')),
        (P('x'), P('y', P.UNCONSTRAINED), P('y')),
    ],
    ids=str,
)
def test_open_dimensions_of_an_argument_keep_their_axes(start, spec, expected):
    out = EXPLICIT.sjit(lambda x: x + 0, args_sharding_constraint=spec)(EXPLICIT.shard(X, start))
    assert is_sharded_as(out, EXPLICIT, expected)


@pytest.mark.slow
def test_calls_without_shardings_run_on_all_devices(helper):
    for x in (X, jnp.asarray(X), 2.0):
        for _ in range(2):
            out = helper.sjit(lambda a: a * 2)(x)
            np.testing.assert_array_equal(out, np.asarray(x) * 2)
            assert is_sharded_as(out, helper, P())
    drawn = helper.sjit(lambda key: jax.random.normal(key, (8, 8)))(jax.random.key(0))
    np.testing.assert_allclose(drawn, jax.random.normal(jax.random.key(0), (8, 8)), rtol=1e-6)
    assert is_sharded_as(helper.sjit(lambda a, b: a + b)(helper.shard(X, SPEC), 1.0), helper, SPEC)


@pytest.mark.medium
@pytest.mark.parametrize('spec', [P(), SPEC], ids=str)
def test_outputs_that_depend_on_no_argument_are_on_the_mesh(helper, spec):
    constant = helper.sjit(jax.grad(lambda x: (3 * x).sum()), spec)  # JAX drops unused arguments
    for x in (X, helper.shard(X, spec)):
        out = constant(x)
        np.testing.assert_array_equal(out, np.full_like(X, 3))
        assert out.sharding.device_set == set(helper.mesh.devices.flat)
        assert explicit_axes(helper, out) == explicit_axes(helper, helper.shard(X, spec))


@pytest.mark.medium
@pytest.mark.parametrize('other', MESHES)
def test_arrays_that_a_helper_of_other_types_has_placed(helper, other):
    auto = MeshShardingHelper([4, 2], ['x', 'y'])
    double = helper.sjit(lambda a: a * 2, SPEC)
    for placed in (auto.shard(X, SPEC), MESHES[other].shard(X, SPEC), X):
        for _ in range(2):
            out = double(placed)
            np.testing.assert_array_equal(out, X * 2)
            assert is_sharded_as(out, helper, SPEC)
    with pytest.raises(PlacementError, match='committed to another sharding'):
        double(auto.shard(X, P('y')))


def test_functions_for_other_meshes_do_not_nest(snapshot):
    inner = MeshShardingHelper([8], ['z'], axis_types=AxisType.Explicit).sjit(lambda tree: tree['a'] * 2)
    with snapshot.raises(MeshError):
        EXPLICIT.sjit(lambda x: inner({'a': x}), SPEC)(X)


@pytest.mark.medium
@pytest.mark.parametrize('outer', MESHES)
def test_functions_run_with_the_active_axis_types(helper, outer):
    seen = []

    @helper.sjit(in_shardings=P('y'), out_shardings=P('x'))
    def inner(x):
        seen.append((jax.sharding.get_abstract_mesh().axis_types, explicit_axes(MESHES[outer], x)))
        return 2 * x

    out = MESHES[outer].sjit(inner, SPEC, SPEC)(X)
    np.testing.assert_array_equal(out, 2 * X)
    assert is_sharded_as(out, MESHES[outer], SPEC)
    types = MESHES[outer].axis_types
    assert seen == [(types, ['y'] if types[1] is AxisType.Explicit else [])]


@pytest.mark.medium
@pytest.mark.parametrize('ambient', MESHES)
def test_outputs_are_sharded_on_the_mesh_of_the_helper(helper, ambient):
    step = helper.sjit(lambda x: 2 * x, in_shardings=P('x'), out_shardings=P('y'))
    with jax.set_mesh(MESHES[ambient].mesh):
        out = step(X)
        assert jax.eval_shape(step, X).shape == (8, 8)
    np.testing.assert_array_equal(out, 2 * X)
    assert is_sharded_as(out, helper, P('y'))


@pytest.mark.medium
@pytest.mark.parametrize('ambient', MESHES)
@pytest.mark.parametrize('donated', [(), (0,)], ids=['kept', 'donated'])
def test_uncommitted_arrays_are_traced_once_under_other_axis_types(ambient, donated):
    auto = MeshShardingHelper([4, 2], ['x', 'y'])
    step = auto.sjit(lambda x, y: (2 * x, y), in_shardings=SPEC, out_shardings=SPEC, donate_argnums=donated)
    batches = [(make(), make()) for make in [lambda: jnp.asarray(X)] * 4 + [lambda: X.copy()] * 4]
    traced = []

    def listen(event, _, **__):
        if event == '/jax/core/compile/jaxpr_trace_duration':
            traced.append(event)

    with jax.set_mesh(MESHES[ambient].mesh):
        for kind in batches[:4], batches[4:]:
            step(*kind[0])
            step(*kind[1])
            jax.monitoring.register_event_duration_secs_listener(listen)
            try:
                outs = step(*kind[2])
                np.testing.assert_array_equal(step(*kind[3])[0], 2 * X)
            finally:
                jax.monitoring.unregister_event_duration_listener(listen)
            assert not traced
            assert all(is_sharded_as(out, auto, SPEC) for out in outs)


def test_an_array_off_the_mesh_without_a_rule():
    elsewhere = jax.device_put(np.ones(8, np.float32), jax.devices()[0])
    for _ in range(2):
        with pytest.raises(PlacementError) as error:
            EXPLICIT.sjit(lambda k: k * 2)(elsewhere)
        assert str(error.value) == (
            '<lambda> got arrays that are not on its mesh, and in_shardings gives them no '
            'sharding:\n'
            f'  k: float32[8] is sharded as {elsewhere.sharding}, asked for: P() on (x=4, y=2)\n'
            'What to do: move them first (helper.shard), or name their shardings in in_shardings and pass '
            "on_mismatch='reshard' to sjit to have them moved at every such call."
        )
    moved = EXPLICIT.sjit(lambda k: k * 2, on_mismatch='reshard')(elsewhere)
    assert is_sharded_as(moved, EXPLICIT, P())


@pytest.mark.medium
def test_host_data_is_placed_on_the_fast_path(helper, monkeypatch):
    rule = FSDPShardingRule('x', min_fsdp_size=64)
    traces = []

    @helper.sjit(in_shardings=(SPEC, rule))
    def step(params, batch):
        traces.append(jax.typeof(batch['a']))
        return params * 2, jax.tree.map(lambda leaf: leaf + 1, batch)

    params = helper.shard(X, SPEC)
    large, small = {'a': X}, {'a': X[:2, :4]}
    several = {'a': X[:4], 'b': np.float32(1)}

    def check(batch):
        _, out = step(params, batch)
        jax.tree.map(np.testing.assert_array_equal, out, jax.tree.map(lambda leaf: leaf + 1, batch))
        for array, sharding in zip(
            jax.tree.leaves(out), jax.tree.leaves(helper.match_sharding_rule(rule, batch)), strict=True
        ):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)

    for _ in range(2):
        for batch in (large, small, several, jax.tree.map(jnp.asarray, large)):
            check(batch)
    assert len(traces) == 3
    state = step._dispatcher
    monkeypatch.setattr(type(state), 'dispatch', lambda *_: pytest.fail('the slow path'))
    monkeypatch.setattr(type(state), '_run_in_trace', lambda *_: pytest.fail('a trace'))
    for batch in (large, small, several, helper.shard(large, rule), jax.tree.map(jnp.asarray, small)):
        check(batch)


@pytest.mark.medium
@pytest.mark.parametrize('placed_first', [False, True])
def test_host_data_without_rules_is_dispatched_once(helper, monkeypatch, placed_first):
    traces = []

    @helper.sjit
    def double(x):
        traces.append(x.shape)
        return x * 2

    calls = [X, X[:4], X[:2, :4]]
    if placed_first:
        for x in calls[:2]:
            double(helper.shard(x, P()))
    for x in calls:
        double(x)
    monkeypatch.setattr(type(double._dispatcher), 'dispatch', lambda *_: pytest.fail('the slow path'))
    for x in calls * 2:
        out = double(x)
        np.testing.assert_array_equal(out, x * 2)
        assert is_sharded_as(out, helper, P())
    assert len(traces) == len(calls)


def test_host_data_with_misplaced_arrays():
    step = EXPLICIT.sjit(lambda a, b: a + b, in_shardings=(SPEC, SPEC))
    step(X, X)
    with pytest.raises(PlacementError, match=r'b: float32\[8, 8\] is sharded as P\(\)'):
        step(X, EXPLICIT.shard(X, P()))
    resharding = EXPLICIT.sjit(lambda a, b: a + b, in_shardings=(SPEC, SPEC), on_mismatch='reshard')
    for _ in range(2):
        assert is_sharded_as(resharding(X, X), EXPLICIT, SPEC)
        assert is_sharded_as(resharding(X, EXPLICIT.shard(X, P())), EXPLICIT, SPEC)


def test_structs_may_have_shardings(helper):
    compiled = helper.sjit(lambda x: x * 2, in_shardings=SPEC)
    plain = jax.ShapeDtypeStruct((8, 8), np.float32)
    typed = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(helper.mesh, SPEC))
    for struct in (plain, typed):
        assert compiled.shardings_for(struct)[0][0].spec == SPEC
        assert compiled.lower(struct).compile() is not None


AUTO_HELPER = MeshShardingHelper([4, 2], ['x', 'y'])
TWO = (AxisType.Explicit, AxisType.Explicit)
TYPED = {
    'as requested': NamedSharding(jax.make_mesh((4, 2), ('x', 'y'), TWO), P('x')),
    'otherwise': NamedSharding(jax.make_mesh((4, 2), ('x', 'y'), TWO), P('y')),
    'along other axes': NamedSharding(jax.make_mesh((2, 4), ('a', 'b'), TWO), P('b')),
    'of two devices': NamedSharding(jax.make_mesh((2,), ('a',), TWO[:1]), P('a')),
}
ASKED = {
    'a call': lambda compiled, x: compiled(x),
    'lower': lambda compiled, x: compiled.lower(x).compile(),
    'eval_shape': lambda compiled, x: compiled.eval_shape(x),
    'shardings_for': lambda compiled, x: compiled.shardings_for(x),
    'a plan': lambda compiled, x: AUTO_HELPER.plan(compiled, x),
    'vmap': lambda compiled, x: jax.vmap(compiled)(x[None]),
}


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('sharding', TYPED.values(), ids=TYPED)
@pytest.mark.parametrize('ask', ASKED.values(), ids=ASKED)
def test_arrays_of_an_explicit_mesh_for_a_mesh_of_auto_axes(ask, sharding):
    x = jax.device_put(np.ones((8, 8), np.float32), sharding)
    compiled = AUTO_HELPER.sjit(
        lambda x: x * 2, in_shardings=P('x'), out_shardings=P('x'), on_mismatch='reshard'
    )
    if ask is ASKED['vmap']:
        with pytest.raises(MeshError, match='got values of another mesh with Explicit axes'):
            ask(compiled, x)
        return
    for _ in range(2):
        ask(compiled, x)
    assert compiled(x).sharding.spec == P('x')


@pytest.mark.medium
@pytest.mark.parametrize('sharding', TYPED.values(), ids=TYPED)
def test_arrays_of_an_explicit_mesh_without_rules_stay_on_their_devices(sharding):
    x, compiled = jax.device_put(X, sharding), AUTO_HELPER.sjit(lambda x: x * 2)
    for first in (x, X, x):
        np.testing.assert_array_equal(compiled(first), X * 2)
    assert compiled(x).sharding.device_set == sharding.device_set
    assert AxisType.Explicit not in jax.typeof(compiled(x)).sharding.mesh.axis_types
    compiled.lower(x).compile()


@pytest.mark.parametrize('rules', [{'in_shardings': P('x')}, {'out_shardings': P('x')}], ids=['in', 'out'])
@pytest.mark.parametrize('called_before', [False, True], ids=['first', 'known'])
def test_values_of_another_explicit_mesh_inside_a_function(rules, called_before, snapshot):
    """JAX would ignore the shardings, because it cannot combine types of two meshes."""
    x = jax.device_put(np.ones((8, 8), np.float32), TYPED['as requested'])
    compiled = AUTO_HELPER.sjit(lambda x: x * 2, **rules)
    if called_before:
        assert compiled(x).sharding.spec[0] == 'x'
    for _ in range(2):
        with snapshot.raises(MeshError):
            jax.jit(lambda x: compiled(x))(x)


@pytest.mark.medium
@pytest.mark.parametrize('rules', [None, P('data')])
@pytest.mark.parametrize('kinds', [AxisType.Explicit, AxisType.Auto, (AxisType.Explicit, AxisType.Auto)])
def test_auto_axes_and_explicit_axes_of_jax_need_a_jit_around_them(kinds, rules):
    helper = MeshShardingHelper([4, 2], ['data', 'model'], axis_types=kinds)
    compiled = helper.sjit(lambda x: 2 * x, rules, rules)
    x = helper.shard(X, P('data'))
    around = [
        jax.sharding.auto_axes(compiled, out_sharding=P('data')),
        jax.sharding.explicit_axes(compiled, in_sharding=P('data')),
    ]
    refused = 0
    with jax.set_mesh(helper.mesh):
        for call in around:
            out = jax.jit(call)(x)
            np.testing.assert_array_equal(out, 2 * X)
            assert out.sharding.is_equivalent_to(x.sharding, 2)
            try:
                np.testing.assert_array_equal(call(x), 2 * X)
            except MeshError as error:
                assert 'needs a jax.jit around the auto_axes or explicit_axes of JAX' in str(error)
                refused += 1
    assert refused


def test_explicit_arguments_without_rules_keep_their_own_types():
    double = EXPLICIT.sjit(lambda x: x * 2)
    for spec in (P('x'), P(None, 'y'), P('x', 'y'), P(), P('x')):
        out = double(EXPLICIT.shard(X, spec))
        assert out.sharding.is_equivalent_to(EXPLICIT.match_sharding_rule(spec, X), 2)

    @EXPLICIT.sjit
    def by_type(x):
        return x * (2 if jax.typeof(x).sharding.spec[0] == 'x' else 3)

    for spec, factor in ((P('x'), 2), (P(None, 'y'), 3), (P('x'), 2)):
        np.testing.assert_array_equal(by_type(EXPLICIT.shard(X, spec)), X * factor)
