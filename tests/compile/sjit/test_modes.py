"""sjit under every kind of mesh, context and transformation."""

from __future__ import annotations

import contextlib
import re
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax.errors import MeshError
from scalax.sharding import (
    MeshShardingHelper,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import (
    PartitionSpec as P,
)

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TYPES = {
    'auto': (AUTO, AUTO),
    'explicit': (EXPLICIT, EXPLICIT),
    'mixed': (EXPLICIT, AUTO),
    'mixed, reversed': (AUTO, EXPLICIT),
}
HELPER = MeshShardingHelper([4, 2], ['data', 'model'])
X = np.arange(64, dtype=np.float32).reshape(8, 8)
OTHER = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ('a', 'b'))


@pytest.fixture(params=TYPES)
def helper(request):
    return MeshShardingHelper([4, 2], ['data', 'model'], axis_types=TYPES[request.param])


def in_thread(call):
    """Runs *call* in another thread."""
    box = []
    thread = threading.Thread(target=lambda: box.append(call()), daemon=True)
    thread.start()
    thread.join(timeout=300)
    return box[0]


CONTEXTS = {
    'no context': lambda helper: contextlib.nullcontext(),
    'set_mesh of its mesh': lambda helper: jax.set_mesh(helper.mesh),
    'a foreign set_mesh': lambda helper: jax.set_mesh(OTHER),
    'get_context': lambda helper: helper.get_context(),
}


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('context', CONTEXTS)
@pytest.mark.parametrize('placed', ['numpy', 'jax', 'placed'])
def test_every_mesh_and_context(helper, context, placed):
    traces = []

    @helper.sjit(
        in_shardings=(P('data', 'model'), P('data')),
        out_shardings=(P('data', 'model'), None),
        annotation_shardings={'h': P('data', 'model')},
    )
    def step(w, x):
        traces.append(1)
        h = with_sharding_annotation(x @ w, 'h')
        return with_sharding_constraint(w + 1, P('data', 'model')), h.sum()

    with CONTEXTS[context](helper):
        for _ in range(2):
            arguments = {
                'numpy': lambda: (X, X),
                'jax': lambda: (jnp.asarray(X), jnp.asarray(X)),
                'placed': lambda: helper.shard((X, X), (P('data', 'model'), P('data'))),
            }[placed]()
            if 'set_mesh' in context and placed == 'jax':
                arguments = (X, X)  # under set_mesh, jnp.asarray places on that mesh
            w, loss = step(*arguments)
            np.testing.assert_allclose(w, X + 1)
            np.testing.assert_allclose(loss, (X @ X).sum(), rtol=1e-5)
            assert w.sharding.is_equivalent_to(helper.match_sharding_rule(P('data', 'model'), X), 2)
    assert len(traces) == 1


@pytest.mark.medium
@pytest.mark.parametrize('called_before', [False, True], ids=['first call', 'later call'])
def test_a_call_under_a_mesh_with_another_device_order(helper, called_before):
    compiled = helper.sjit(lambda x: x * 2, P('data'))
    if called_before:
        compiled(X)
    turned = Mesh(helper.mesh.devices[::-1], helper.axis_names, axis_types=helper.axis_types)
    with jax.set_mesh(turned), pytest.raises(ValueError, match='Received incompatible devices'):  # of JAX
        compiled(X)
    np.testing.assert_array_equal(compiled(X), X * 2)


def test_numpy_and_placed_arguments_share_one_trace(helper):
    traces = []

    @helper.sjit(in_shardings=P('data'))
    def double(x):
        traces.append(1)
        return x * 2

    for _ in range(2):
        for x in (X, jnp.asarray(X), helper.shard(X, P('data'))):
            np.testing.assert_array_equal(double(x), X * 2)
    assert len(traces) == 1


@pytest.mark.medium
def test_no_rules_at_all(helper):
    placed = helper.shard(X, P('data'))
    out = helper.sjit(lambda x: x * 2)(placed)
    assert out.sharding.is_equivalent_to(placed.sharding, 2)
    np.testing.assert_array_equal(helper.sjit(lambda: jnp.ones(3))(), np.ones(3))


def test_from_another_thread(helper):
    double = helper.sjit(
        lambda x: with_sharding_annotation(x * 2, 'h'),
        P('data'),
        annotation_shardings={'h': P('data', 'model')},
    )
    with helper.get_context({'h': P()}):
        out = in_thread(lambda: double(X))
    assert out.sharding.is_equivalent_to(helper.match_sharding_rule(P('data', 'model'), X), 2)


@pytest.mark.medium
def test_transformations_of_a_compiled_function(helper):
    square = helper.sjit(lambda x: x**2, P('data'))
    if helper.axis_types == TYPES['auto']:
        # With Explicit axes JAX needs jax.set_mesh for the cotangent of an eager sum, with jax.jit too.
        np.testing.assert_allclose(jax.grad(lambda x: square(x).sum())(X), 2 * X)
    np.testing.assert_allclose(jax.vmap(square)(X[None]), X[None] ** 2)
    np.testing.assert_allclose(jax.vmap(square)(X[None]), X[None] ** 2)
    np.testing.assert_allclose(jax.jit(lambda x: square(x) + 1)(X), X**2 + 1)
    _, tangent = jax.jvp(square, (X,), (X,))
    np.testing.assert_allclose(tangent, 2 * X * X)
    scanned, _ = jax.lax.scan(lambda c, _: (square(c) * 0 + c, None), jnp.asarray(X), None, length=2)
    np.testing.assert_allclose(scanned, X)
    np.testing.assert_allclose(jax.checkpoint(square)(X), X**2)


def test_inside_shard_map_bodies_run_inline():
    nested = HELPER.sjit(
        lambda x: with_sharding_annotation(x * 2, 'h'),
        P('data', 'model'),
        annotation_shardings={'h': P('data', 'model')},
    )
    np.testing.assert_array_equal(nested(X), X * 2)
    for names in (set(), {'data'}):
        spec = P('data', 'model') if not names else P('data')
        mapped = jax.shard_map(nested, mesh=HELPER.mesh, in_specs=spec, out_specs=spec, axis_names=names)
        np.testing.assert_array_equal(jax.jit(mapped)(X), X * 2)


def test_shard_map_inside(helper):
    def local(x):
        return with_sharding_constraint(x * 2, P('data', 'model'))

    @helper.sjit(in_shardings=P('data', 'model'))
    def mapped(x):
        spec = P('data', 'model')
        return jax.shard_map(local, mesh=helper.mesh, in_specs=spec, out_specs=spec)(x)

    np.testing.assert_array_equal(mapped(X), X * 2)


@pytest.mark.medium
def test_without_jit_the_function_runs_with_values_from_the_first_call(helper):
    signs = []

    @helper.sjit(in_shardings=P('data'), out_shardings=P('data'), annotation_shardings={'h': P('data')})
    def doubled_if_positive(x):
        signs.append(float(x.sum()) > 0)  # fails where x has no value
        return with_sharding_annotation(x * 2, 'h') if signs[-1] else x

    with jax.disable_jit():
        for x in (X, -X, X[:4], X):
            np.testing.assert_array_equal(doubled_if_positive(x), x * 2 if x.sum() > 0 else x)
    assert signs == [True, False, True, True]


@pytest.mark.medium
def test_without_jit_another_shape_is_not_traced(helper):
    compiled = helper.sjit(lambda x: x * 2 if isinstance(x, jax.core.Tracer) else x * 3, P('data'))
    np.testing.assert_array_equal(compiled(X), X * 2)
    with jax.disable_jit():
        for x in (X, X[:4]):
            np.testing.assert_array_equal(compiled(x), x * 3)
    np.testing.assert_array_equal(compiled(X[:4]), X[:4] * 2)


EAGER = {
    'grad': lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    'vmap': lambda f, x: jax.vmap(f)(x[None])[0],
    'jvp': lambda f, x: jax.jvp(f, (x,), (x,))[1],
}


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('transform', EAGER)
@pytest.mark.parametrize('called_before', [False, True], ids=['first call', 'later call'])
def test_arguments_with_other_shardings_under_transformations(transform, called_before):
    square, moving = (
        HELPER.sjit(lambda x: x**2, P('data'), on_mismatch=policy) for policy in ('error', 'reshard')
    )
    x = HELPER.shard(X, P(None, 'model'))
    if called_before:
        for function in (square, moving):
            EAGER[transform](function, jnp.asarray(X))
    expected = EAGER[transform](lambda x: x**2, X)
    np.testing.assert_allclose(EAGER[transform](moving, x), expected)
    with pytest.raises(ValueError, match='Sharding passed to jit does not match'):  # of JAX
        EAGER[transform](square, x)


def test_a_users_error_under_a_transformation_is_unchanged():
    @HELPER.sjit(in_shardings=P('data'))
    def failing(x):
        raise ValueError('mine')

    for _ in range(2):
        with pytest.raises(ValueError, match='mine') as error:
            jax.grad(failing)(HELPER.shard(X, P(None, 'model')))
        assert type(error.value) is ValueError


@pytest.mark.medium
@pytest.mark.parametrize('args', [(), (3.0,), (3.0, 2)], ids=str)
def test_exported_functions_have_the_arguments_that_were_given(helper, args):
    pytest.importorskip('flatbuffers', reason='jax.export serializes with it')
    traces = []

    def scaled(x, factor=2.0, power=1, *rest, shift=1.0, **named):
        traces.append(power)
        return factor * x**power + shift

    compiled = helper.sjit(scaled, {'x': P('data')}, P('data'), static_argnames='power')
    struct = helper.abstract(X, P('data'))
    exported = jax.export.export(compiled.get_jitted_function_by_args(struct, *args))(struct, *args)
    again = jax.export.deserialize(exported.serialize())
    out = jax.jit(again.call)(helper.shard(X, P('data')), *args[:1])
    np.testing.assert_allclose(out, scaled(X, *args))
    assert (exported.fun_name, exported.nr_devices, len(traces)) == ('scaled', 8, 2)


def test_export():
    pytest.importorskip('flatbuffers', reason='jax.export serializes with it')
    compiled = HELPER.sjit(lambda x: x * 2, P('data'), P('data'))
    jitted = compiled.get_jitted_function_by_args(X)
    exported = jax.export.export(jitted)(jax.ShapeDtypeStruct(X.shape, X.dtype))
    again = jax.export.deserialize(exported.serialize())
    out = jax.jit(again.call, in_shardings=HELPER.match_sharding_rule(P('data'), X))(X)
    np.testing.assert_array_equal(out, X * 2)


def test_debug_callbacks_run(capfd):
    helper = MeshShardingHelper([8], ['data'])

    @helper.sjit(in_shardings=P('data'))
    def noisy(x):
        jax.debug.print('sum {}', x.sum())
        return x

    for x in (X[:, 0], jnp.asarray(X[:, 0]), helper.shard(X[:, 0], P('data'))):
        jax.block_until_ready(noisy(x))
    jax.effects_barrier()
    assert capfd.readouterr().out.count('sum 224.0') == 3


def test_an_abstract_mesh_lowers_and_does_not_run(snapshot):
    mesh = AbstractMesh((4, 2), ('data', 'model'), axis_types=(AUTO, AUTO))
    compiled = MeshShardingHelper.from_mesh(mesh).sjit(lambda x: x * 2, P('data'), P('data'))
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert compiled.eval_shape(struct).shape == X.shape
    assert compiled.shardings_for(struct)[1].spec == P('data')
    assert compiled.shardings_for(jnp.asarray(X))[1].spec == P('data')
    assert compiled.eval_shape(HELPER.shard(X, P())).shape == X.shape
    assert 'data' in compiled.trace(struct).lower(lowering_platforms=('tpu',)).as_text()
    with snapshot.raises(MeshError):
        compiled(X)
    with pytest.raises(ValueError, match='lowering_platforms'):  # of JAX
        compiled.lower(struct)


def test_a_mesh_of_some_of_the_devices():
    helper = MeshShardingHelper([2], ['data'], devices=jax.devices()[3:5])
    out = helper.sjit(lambda x: x + 1, P('data'))(X)
    assert out.sharding.device_set == set(jax.devices()[3:5])


def test_jit_options_pass_through():
    helper = MeshShardingHelper([8], ['data'])
    compiled = helper.sjit(
        lambda x, unused: x, (P('data'), None), keep_unused=True, inline=True, compiler_options={}
    )
    assert len(compiled.lower(X, X).compile().input_shardings[0]) == 2


WITH_A_MESH = {
    'a constraint by a spec': lambda x: jax.lax.with_sharding_constraint(x, P('b')),
    'shard_map': lambda x: jax.shard_map(lambda y: y * 1, in_specs=P('a'), out_specs=P('a'))(x),
    'auto_axes': lambda x: jax.sharding.auto_axes(lambda y: y * 1, out_sharding=P('b'))(x),
    'explicit_axes': lambda x: jax.sharding.explicit_axes(lambda y: y * 1, in_sharding=P('b'))(x),
    'reshard': lambda x: jax.reshard(x, P('b')),
}


@pytest.mark.medium
@pytest.mark.parametrize('under', [None, 'another mesh'])
@pytest.mark.parametrize('types', [AUTO, EXPLICIT], ids=['auto', 'explicit'])
@pytest.mark.parametrize('name', WITH_A_MESH)
def test_the_active_mesh_is_the_helpers(name, types, under):
    helper = MeshShardingHelper([4, 2], ['a', 'b'], axis_types=types)
    of_one_kind = {'a constraint by a spec': AUTO, 'reshard': EXPLICIT}
    if of_one_kind.get(name, types) is not types:
        pytest.skip('JAX has it for axes of the other type')
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    other = jax.set_mesh(MeshShardingHelper([8], ['d']).mesh) if under else contextlib.nullcontext()
    with other:
        out = helper.sjit(WITH_A_MESH[name], in_shardings=P('a'))(x)
    np.testing.assert_array_equal(out, x)
    assert out.sharding.mesh == helper.mesh


@pytest.mark.medium
@pytest.mark.parametrize('placed', [False, True], ids=['host', 'placed'])
def test_debug_nans_finds_the_line(placed):
    log = HELPER.sjit(lambda x: jnp.log(x), P('data'))
    log(np.ones(8, np.float32))
    x = -np.ones(8, np.float32)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match='invalid value'):
        log(HELPER.shard(x, P('data')) if placed else x)


def test_shard_map_over_another_mesh_inside():
    inner_mesh = Mesh(HELPER.mesh.devices.reshape(8), ('all',))
    by_jax = jax.shard_map(lambda y: y * 2, mesh=inner_mesh, in_specs=P('all'), out_specs=P('all'))
    by_helper = MeshShardingHelper.from_mesh(inner_mesh).shard_map(lambda y: y * 2, P('all'), P('all'))

    def entered(x):
        with jax.sharding.use_abstract_mesh(inner_mesh.abstract_mesh):
            return by_jax(x)

    for mapped in (entered, by_helper):
        np.testing.assert_array_equal(HELPER.sjit(mapped, in_shardings=P('data'))(X), X * 2)
    with pytest.raises(ValueError, match='context mesh'):  # the active mesh is the helper's
        HELPER.sjit(by_jax, in_shardings=P('data'))(X)


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('in_specs', [P('data', 'model'), P()], ids=str)
@pytest.mark.parametrize(
    'options',
    [{'in_shardings': P('data')}, {'out_shardings': P('data')}, {'args_sharding_constraint': P('data')}],
    ids=str,
)
def test_cached_functions_run_inline_inside_shard_map(options, in_specs):
    compiled = HELPER.sjit(lambda x: x * 2, **options)
    compiled(X)
    mapped = jax.shard_map(compiled, mesh=HELPER.mesh, in_specs=in_specs, out_specs=in_specs)
    for call in (mapped, jax.jit(mapped), mapped):
        np.testing.assert_array_equal(call(X), X * 2)


def test_a_call_under_a_mesh_of_another_size(helper):
    compiled = helper.sjit(lambda x: x * 2, P('data'))
    other = jax.make_mesh((2,), ('a',), devices=jax.devices()[:2], axis_types=(AUTO,))
    message = re.escape(
        '<lambda> was compiled for a mesh of 8 devices, but is called under a mesh of 2 devices (an '
        'enclosing function, or jax.set_mesh): call it outside of that'
    )
    with jax.set_mesh(other), pytest.raises(MeshError, match=f'^{message}'):
        compiled(helper.shard(X, P('data')))
    outer = MeshShardingHelper.from_mesh(other).sjit(lambda x: compiled(x) + 1)
    with pytest.raises(MeshError, match=f'^{message}'):
        outer(X)
