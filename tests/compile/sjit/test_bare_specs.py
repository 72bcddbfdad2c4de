"""Bare specs in JAX's own functions refer to the helper's mesh, as under ``jax.set_mesh``."""

from __future__ import annotations

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import MeshError
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.testing import assert_collectives

X = np.arange(32, dtype=np.float32).reshape(8, 4)
KEY = jax.random.key(0)
AUTO = MeshShardingHelper([4, 2], ['dp', 'mp'])
SOME = MeshShardingHelper.from_mesh(Mesh(np.array(jax.devices()[:3:-1]).reshape(2, 2), ('dp', 'mp')))
EXPLICIT = MeshShardingHelper([4, 2], ['dp', 'mp'], axis_types=AxisType.Explicit)
MIXED = MeshShardingHelper([4, 2], ['dp', 'mp'], axis_types=[AxisType.Explicit, AxisType.Auto])


def constrained(x):
    return with_sharding_constraint(2 * x, P('dp'))


def integers(x):
    return with_sharding_constraint(x.astype(int), P('dp')), 3


def init(key):
    return {'b': jnp.zeros(4), 'w': with_sharding_constraint(jax.random.normal(key, (8, 4)), P('dp', 'mp'))}


def without_arguments():
    return with_sharding_constraint(jnp.ones((8, 4)), P(None, 'mp'))


def without_arguments_inside_a_jit():
    return jax.jit(without_arguments)() + 1


def gradient(x):
    return jax.grad(lambda x: jnp.sum(constrained(x)))(x)


def inside_a_scan(x):
    return jax.lax.scan(lambda carry, row: (carry + row, with_sharding_constraint(row, P('mp'))), x[0], x)


def inside_a_checkpoint(x):
    return jax.checkpoint(constrained)(x)


def of_flax(x):
    with nn.logical_axis_rules([('rows', 'dp')]):
        return nn.with_logical_constraint(2 * x, ('rows', None))


def blocks(x):
    return jax.shard_map(lambda block: 2 * block, in_specs=P('dp'), out_specs=P('dp'))(x)


def summed_blocks(x):
    mapped = jax.shard_map(
        lambda block: jax.lax.psum(block, 'dp'), in_specs=P('dp', 'mp'), out_specs=P(None, 'mp')
    )
    return mapped(x)


IN_SHARDING = next(
    name for name in inspect.signature(jax.sharding.explicit_axes).parameters if 'in_shard' in name
)


def explicit_inside(x):
    inside = jax.sharding.explicit_axes(lambda x: 2 * x, axes=('dp', 'mp'), **{IN_SHARDING: P('dp')})
    return inside(x)


def resharded(x):
    return jax.sharding.reshard(x, P('dp'))


ON_AUTO = [
    (constrained, X),
    (integers, X),
    (init, KEY),
    (without_arguments,),
    (without_arguments_inside_a_jit,),
    (gradient, X),
    (inside_a_scan, X),
    (inside_a_checkpoint, X),
    (of_flax, X),
    (blocks, X),
    (summed_blocks, X),
    (explicit_inside, X),
]


def places(tree):
    return [array.sharding.devices_indices_map(array.shape) for array in jax.tree.leaves(tree)]


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ('helper', 'call'),
    [
        *[pytest.param(AUTO, call, id=f'auto-{call[0].__name__}') for call in ON_AUTO],
        *[pytest.param(SOME, call, id=f'some-{call[0].__name__}') for call in ON_AUTO],
        *[
            pytest.param(MIXED, (fun, X), id=f'mixed-{fun.__name__}')
            for fun in (blocks, summed_blocks, resharded)
        ],
        pytest.param(EXPLICIT, (resharded, X), id='explicit-resharded'),
    ],
)
def test_a_function_runs_on_the_mesh_as_under_set_mesh(helper, call):
    fun, *args = call
    with jax.set_mesh(helper.mesh):
        expected = jax.jit(fun)(*args)
    compiled = helper.sjit(fun)
    for _ in range(2):
        got = compiled(*args)
        assert places(got) == places(expected)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert places(compiled.lower(*args).compile()(*args)) == places(expected)


@pytest.mark.medium
def test_transformations_of_the_function_run_on_the_mesh():
    compiled = AUTO.sjit(constrained)
    assert jax.vmap(compiled)(np.stack([X, X])).sharding.spec == P(None, 'dp')
    assert jax.grad(lambda x: compiled(x).sum())(X).sharding.spec == P('dp')
    assert jax.jit(compiled)(X).sharding.spec == P('dp')

    def linear(x):
        return {'count': jnp.arange(3), 'out': constrained(x), 'sum': x.sum()}

    _, back = jax.vjp(lambda x: AUTO.sjit(linear)(x)['out'], X)
    [cotangent] = back(np.ones_like(X))
    assert cotangent.sharding.spec == P('dp')


def test_the_users_code_runs_once():
    seen = []

    @AUTO.sjit
    def counted(x):
        seen.append(x)
        return constrained(x)

    counted(X)
    counted(counted(X))
    counted.lower(X)
    assert len(seen) == 1


def test_unused_arguments_do_not_determine_devices():
    def init_like(params):
        return with_sharding_constraint(jnp.zeros_like(params), P('dp'))

    compiled = AUTO.sjit(init_like, in_shardings=FSDPShardingRule(min_fsdp_size=1, fsdp_axis_name='dp'))
    assert compiled(X).sharding.spec == P('dp')
    # The same shardings, of a function that depends on its argument in one case.
    either = AUTO.sjit(lambda x: init_like(x) if x.shape == X.shape else 2 * x, in_shardings=P('dp'))
    for _ in range(2):
        assert either(X).sharding.spec == either(X[:, :2]).sharding.spec == P('dp')


def test_a_function_without_outputs_runs_on_the_mesh():
    seen = []

    @AUTO.sjit
    def look(x):
        x = with_sharding_constraint(x, P('dp'))
        jax.debug.inspect_array_sharding(x, callback=seen.append)
        jax.debug.callback(lambda x: None, x)

    look(X)
    jax.effects_barrier()
    assert [sharding.num_devices for sharding in seen] == [8]


def test_arrays_on_other_devices_are_an_error():
    compiled = AUTO.sjit(constrained)
    with pytest.raises(ValueError, match=r'argument x of constrained .*device ids \[3\]'):  # of JAX
        compiled(jax.device_put(X, jax.devices()[3]))
    # A function that uses no mesh runs on the devices of its arguments, as with jax.jit.
    assert AUTO.sjit(lambda x: 2 * x)(jax.device_put(X, jax.devices()[3])).sharding.device_set == {
        jax.devices()[3]
    }


def test_it_is_planned_on_the_mesh():
    def summed(x):
        return with_sharding_constraint(x, P('dp')).sum()

    assert_collectives(AUTO.sjit(summed), jax.ShapeDtypeStruct(X.shape, X.dtype), all_reduce={'dp': 1})


def test_an_abstract_mesh_is_lowered_for_all_its_devices():
    abstract = MeshShardingHelper.from_mesh(AUTO.mesh.abstract_mesh)
    for fun, partitions in ((constrained, 8), (lambda x: 2 * x, 1)):
        lowered = abstract.sjit(fun).trace(X).lower(lowering_platforms=('tpu',))
        assert f'mhlo.num_partitions = {partitions} ' in lowered.as_text()


def test_a_function_on_an_abstract_mesh_can_be_nested():
    for types in (AxisType.Auto, AxisType.Explicit):
        mesh = MeshShardingHelper([4, 2], ['dp', 'mp'], axis_types=types).mesh.abstract_mesh
        helper = MeshShardingHelper.from_mesh(mesh)
        inner = helper.sjit(lambda x: 2 * x, in_shardings=P('dp'))
        lowered = helper.sjit(lambda x, inner=inner: inner(x) + 1).trace(X).lower(lowering_platforms=('tpu',))
        assert 'mhlo.num_partitions = 8 ' in lowered.as_text()
    with pytest.raises(MeshError, match='needs devices to run on'):
        inner(X)


PLACED = {
    'device_put': lambda x: jax.device_put(2 * x, P('dp')),
    'in_shardings': lambda x: jax.jit(lambda x: 2 * x, in_shardings=P('dp'))(x),
    'out_shardings': lambda x: jax.jit(lambda x: 2 * x, out_shardings=P('dp'))(x),
}


@pytest.mark.medium
@pytest.mark.parametrize('name', PLACED)
@pytest.mark.parametrize('helper', [AUTO, EXPLICIT], ids=['auto', 'explicit'])
def test_some_functions_only_use_a_mesh_that_is_set(helper, name):
    compiled = helper.sjit(PLACED[name], out_shardings=P('dp'))
    if helper is AUTO or name == 'device_put':
        with pytest.raises((ValueError, RuntimeError), match=r'set a mesh|a non-empty mesh in context'):
            compiled(X)
    with jax.set_mesh(helper.mesh):
        np.testing.assert_array_equal(compiled(X), 2 * X)


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
def test_programs_for_another_platform_are_lowered_under_its_mesh(types):
    helper = MeshShardingHelper([4, 2], ['dp', 'mp'], axis_types=types)
    fields = {'device_kind': 'TPU v5e', 'num_cores': 1, 'platform': 'tpu'}
    parameters = inspect.signature(jax.sharding.AbstractDevice).parameters
    device = jax.sharding.AbstractDevice(**{name: fields[name] for name in parameters})
    others = [AxisType.Auto if types is AxisType.Explicit else AxisType.Explicit] * 2
    for rules in (None, P('dp')):
        for mesh in (
            helper.mesh.abstract_mesh.update(abstract_device=device),
            helper.mesh.abstract_mesh.update(axis_types=tuple(others)),
        ):
            inner = helper.sjit(lambda x: jnp.sin(x), in_shardings=rules)
            with jax.sharding.use_abstract_mesh(mesh):
                around = jax.jit(lambda x, inner=inner: inner(x) + 1)
                for fun in (around, inner):
                    text = fun.trace(X).lower(lowering_platforms=('tpu',)).as_text()
                    if rules is not None and mesh.axis_types == helper.mesh.axis_types:
                        assert 'mhlo.num_partitions = 8 ' in text
                    assert fun.eval_shape(X).shape == X.shape


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('helper', [AUTO, EXPLICIT, MIXED], ids=['auto', 'explicit', 'mixed'])
@pytest.mark.parametrize('options', ['in_shardings', 'out_shardings', 'args_sharding_constraint'])
def test_an_abstract_mesh_with_the_same_axes_keeps_shardings(helper, options):
    mesh = helper.mesh.abstract_mesh
    compiled = helper.sjit(lambda x: 2 * x, **{options: P('dp')})
    with jax.sharding.use_abstract_mesh(AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types)):
        out = compiled(X)
        mapped = helper.shard_map(lambda x: 2 * x, in_specs=P('dp'), out_specs=P('dp'))(X)
        lowered = jax.jit(lambda x: compiled(x)).trace(X).lower(lowering_platforms=('tpu',))
    for result in (out, mapped, compiled(X)):
        assert result.sharding.is_equivalent_to(NamedSharding(helper.mesh, P('dp')), 2)
        np.testing.assert_array_equal(result, 2 * X)
    assert 'mhlo.num_partitions = 8 ' in lowered.as_text()


def test_an_argument_that_jax_drops_does_not_determine_devices():
    """JAX drops operands of shard_map that no result depends on, and loses their devices."""

    def fun(x, y):
        mapped = jax.shard_map(lambda x, y: (2 * x, y), in_specs=P('dp'), out_specs=P('dp'))
        return mapped(x, y)[0]

    out = AUTO.sjit(fun, in_shardings=(None, P('dp')))(X, X)
    assert out.sharding.spec == P('dp')
    np.testing.assert_array_equal(out, 2 * X)


def of_a_backward_function():
    fun = jax.custom_vjp(lambda x: 2 * x)
    fun.defvjp(lambda x: (2 * x, None), lambda _, g: (with_sharding_constraint(2 * g, P('dp')),))
    return fun


def of_a_jvp():
    fun = jax.custom_jvp(lambda x: 2 * x)
    fun.defjvp(lambda primals, tangents: (fun(*primals), with_sharding_constraint(2 * tangents[0], P('dp'))))
    return fun


@pytest.mark.parametrize('fun', [of_a_backward_function(), of_a_jvp()], ids=['vjp', 'jvp'])
def test_specs_in_rules_of_differentiation(fun):
    """Such specs are in a jaxpr only after differentiation, so these functions differentiate inside."""
    gradient = AUTO.sjit(jax.grad(lambda x: fun(x).sum()))(X)
    assert gradient.sharding.spec == P('dp')
    np.testing.assert_array_equal(gradient, np.full_like(X, 2))


def test_explicit_axes_under_auto_ones_that_name_no_devices():
    compiled = EXPLICIT.sjit(lambda x: 2 * x, in_shardings=P('dp'))
    with jax.sharding.use_abstract_mesh(AUTO.mesh.abstract_mesh):
        out = jax.jit(lambda x: compiled(x))(X)
        with pytest.raises(MeshError, match='needs a jax'):
            compiled(X)
    assert out.sharding.spec == P('dp')


def test_specs_of_a_function_on_a_mesh_of_another_shape():
    other = MeshShardingHelper([2, 4], ['dp', 'mp'])
    out = AUTO.sjit(lambda x: other.sjit(constrained)(x))(X)
    assert out.sharding.is_equivalent_to(NamedSharding(other.mesh, P('dp')), 2)
