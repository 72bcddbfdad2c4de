"""Tests that `scalax/_jax/tracing` recognizes transformations, types and trace contexts of JAX."""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._jax import tracing
from tests.support.contracts import contract

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ('x',))


def seen_in(transformed: Callable[[Any], Any], ask: Callable[[Any], Any], x: Any = X) -> Any:
    """Returns the answer of `ask` inside a transformation."""
    answers = []

    def fun(x: Any) -> Any:
        answers.append(ask(x))
        return x.sum()

    transformed(fun)(x)
    return answers[0]


def run(fun: Any) -> Any:
    return fun


RUN_AT_ONCE = [jax.grad, jax.vmap]


@pytest.mark.parametrize('transformed', [run, *RUN_AT_ONCE, jax.jit, jax.checkpoint])
def test_get_mesh_raises_where_something_is_traced(transformed: Any) -> None:
    with contract(
        'raises in jax.sharding.get_mesh inside transformations alone', 'to know that it is traced'
    ):
        assert seen_in(transformed, lambda _: tracing.is_traced()) is (transformed is not run)


@pytest.mark.parametrize('transformed', [run, *RUN_AT_ONCE, jax.jit, jax.checkpoint])
def test_constants_are_tracers_where_something_is_compiled(transformed: Any) -> None:
    compiled = transformed in (jax.jit, jax.checkpoint)
    with contract('makes tracers of constants inside of jax.jit alone', 'to know that it is compiled'):
        assert seen_in(transformed, lambda _: tracing.is_compiled()) is compiled


CONTEXTS = {
    'x64': lambda: jax.enable_x64(True),
    'precision': lambda: jax.default_matmul_precision('highest'),
    'mesh': lambda: jax.sharding.use_abstract_mesh(AbstractMesh((8,), ('x',))),
    'user context': lambda: user_context('some'),
}
user_context = jax.make_user_context('none')


@pytest.mark.parametrize('name', CONTEXTS)
def test_the_trace_context_does_not_keep_traces_alive(name: str) -> None:
    with contract(
        'keeps one trace of a function that does nothing for each trace context', 'to tell calls apart'
    ):
        outside = tracing.trace_context()
        with CONTEXTS[name]():
            inside = tracing.trace_context()
            assert inside is not outside
            assert tracing.trace_context() is inside
        assert tracing.trace_context() is outside


def test_traces_of_transformations_differ() -> None:
    outside = tracing.current_trace()
    with contract('gives an object that compares by the trace at work', 'to know names used in inner traces'):
        assert outside == tracing.current_trace()
        inside = seen_in(jax.jit, lambda _: (tracing.current_trace(), tracing.current_trace()))
        assert inside[0] == inside[1] and inside[0] != outside


def test_settings_of_threads_have_context_managers() -> None:
    with contract(
        'has a context manager of its name for each setting of a thread', 'to enter them elsewhere'
    ):
        expected_settings = {
            'default_matmul_precision',
            'enable_x64',
            'debug_nans',
            'disable_jit',
            'default_device',
        }
        assert expected_settings <= set(tracing.THREAD_SETTINGS)
        for name in tracing.THREAD_SETTINGS:
            with getattr(jax, name)(getattr(jax.config, f'jax_{name}')):
                pass


def test_shard_map_refuses_axes_that_vmap_maps() -> None:
    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, P('x')))
    with contract('refuses shard_map along an axis that jax.vmap maps', 'to name it'), jax.set_mesh(mesh):
        assert not tracing.is_mapped(mesh, 'x')
        mapped = seen_in(lambda fun: jax.vmap(fun, spmd_axis_name=None), lambda _: asked(), x)
        assert mapped
        assert not seen_in(jax.jit, lambda _: asked(), x)


def asked() -> bool:
    return tracing.is_mapped(jax.sharding.get_abstract_mesh(), 'x')


def test_types_of_leaves() -> None:
    with contract('raises TypeError or OverflowError about what it does not take', 'to name such leaves'):
        assert tracing.type_of(X).shape == (8,)
        assert tracing.type_of(jax.ShapeDtypeStruct((3,), 'int8')).dtype == jnp.int8
        for leaf, kind in ((object(), TypeError), (np.ma.masked_array(X), TypeError), (2**80, OverflowError)):
            with pytest.raises(kind):
                tracing.type_of(leaf)


def test_opaque_types() -> None:
    token = seen_in(jax.jit, lambda _: tracing.type_of(jax.lax.create_token()))
    with contract('gives arrays, and nothing else, a type with shape and dtype', 'to leave others alone'):
        assert tracing.is_opaque(token)
        assert not tracing.is_opaque(tracing.type_of(X))
        assert not tracing.is_opaque(tracing.type_of(jax.random.key(0)))


def test_jit_lowers_types() -> None:
    value = jnp.ones((8, 2))
    with contract('takes what jax.typeof returns in lower, and gives it the type of arrays', 'to take types'):
        kind = jax.typeof(value)
        assert type(kind) is jax.core.ShapedArray
        assert tracing.is_abstract(kind)
        assert jax.jit(jnp.sum).lower(kind).in_avals == jax.jit(jnp.sum).lower(value).in_avals


def test_jit_lowers_objects_with_a_shape_and_a_dtype() -> None:
    duck = types.SimpleNamespace(shape=[8], dtype='float32', weak_type=True)
    with contract('takes objects with a shape and a dtype in lower, and in no call', 'to take them'):
        assert (
            jax.jit(jnp.sin).lower(duck).in_avals == jax.jit(jnp.sin).lower(tracing.as_struct(duck)).in_avals
        )
        assert tracing.as_struct(duck) == jax.ShapeDtypeStruct((8,), jnp.float32, weak_type=True)
        with pytest.raises(TypeError):
            jax.jit(jnp.sin)(duck)
    for leaf in (X, jax.typeof(X), np.ma.masked_array(X), jax.new_ref(X), 2.0, 'text'):
        assert tracing.as_struct(leaf) is leaf
    for shape, dtype in (('a', 'float32'), ((8,), 'no dtype'), ((8,), torch_like)):
        duck = types.SimpleNamespace(shape=shape, dtype=dtype)
        assert tracing.as_struct(duck) is duck


def torch_like() -> None:
    """Not a dtype of NumPy."""


def test_types_of_references() -> None:
    ref = jax.new_ref(jnp.ones(8))
    with contract('has types of references that are no types of arrays', 'to leave references in place'):
        for reference in (ref, jax.typeof(ref)):
            assert tracing.is_reference(reference)
            assert not tracing.is_abstract(reference)
            assert tracing.type_of(reference) == jax.typeof(ref)
        assert not tracing.is_reference(jax.typeof(X))


def test_memory_spaces() -> None:
    def ask(x: Any) -> Any:
        kinds = map(jax.typeof, (x, jax.device_put(x, jax.memory.Space.Host)))
        return [*map(tracing.memory_space, kinds)]

    with contract('says in the type of a value in which memory it is', 'to trace again for another one'):
        assert seen_in(jax.jit, ask) == [jax.memory.Space.Device, jax.memory.Space.Host]
        assert tracing.memory_space(jax.ShapeDtypeStruct((), 'int8')) is None


def test_values_that_vary_along_manual_axes(mesh: Mesh) -> None:
    def varying(x: Any) -> Any:
        seen_axes.append(
            [tracing.varying_axes(jax.typeof(value)) for value in (x, x.sum() * 0, jax.lax.psum(x, 'x'))]
        )
        return x

    seen_axes: list[Any] = []
    jax.eval_shape(jax.shard_map(varying, mesh=mesh, in_specs=P('x'), out_specs=P('x')), X)
    with contract('follows which values vary along manual axes', 'to find sums that were forgotten'):
        assert [set(value) for value in seen_axes[0]] == [{'x'}, {'x'}, set()]


def test_jit_names_its_options() -> None:
    options = {
        'in_shardings',
        'static_argnums',
        'donate_argnames',
        'keep_unused',
        'compiler_options',
        'inline',
    }
    with contract('has a signature that names all options of jax.jit', 'to tell an unknown option'):
        assert options <= tracing.jit_options()
        for option in ('keep_unused', 'compiler_options', 'inline'):
            jax.jit(jnp.sum, **{option: None if option == 'compiler_options' else False})
        with pytest.raises(TypeError, match='unexpected keyword'):
            jax.jit(jnp.sum, in_sharding=None)


def test_compiler_options_are_named_in_another_trace() -> None:
    options = {'xla_gpu_autotune_level': 0, 'xla_dump_to': "a'}", 'xla_gpu_enable_triton_gemm': False}
    with contract('names the compiler_options of a jit in another trace', 'to plan with them'):
        for passed_options in (None, {}, options):
            jitted = jax.jit(
                lambda x, n, *, k: k * x[0] * n, static_argnums=1, compiler_options=passed_options
            )
            jitted.trace([X], 2, k=X)
            assert tracing.compiler_options(jitted, ([X], 2), {'k': X}) == (passed_options or {})
