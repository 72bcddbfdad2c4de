"""Tests that equations along manual mesh axes, and random bits of a block, equal those that JAX traces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from scalax._jax.equations import (
    ANNOTATED_CALLS,
    all_equations,
    annotated_call_jaxpr,
    collective_dims,
    has_effects,
    is_ordered,
    is_partitioned_callback,
    name_stack,
    open_jaxpr,
    shard_map_in_specs,
    shard_map_manual_axes,
    shard_map_mesh_shape,
    shard_map_out_specs,
    sharding_callback,
    takes_refs,
)
from scalax._jax.manual_axes import (
    ManualEquations,
    callbacks_nest,
    in_scope,
    is_backward,
    is_noop_reshard,
    params_with_jaxprs,
    rebuild_jaxpr,
    scan_counts,
)
from scalax._jax.random_bits import bits_at, depends_on_indices, gamma_expansion, random_bits_of_shape
from scalax._jax.rewriting import eval_equation, eval_jaxpr, replace_jaxpr, resized_params

MESH = AbstractMesh((8,), ('fsdp',), axis_types=(AxisType.Auto,))


def traced(fun, *args):
    return open_jaxpr(jax.make_jaxpr(fun)(*args))


@pytest.mark.parametrize(
    'function, shape, after',
    [
        (lambda x: lax.all_gather(x, 'fsdp', axis=0, tiled=True), (3, 4), (24, 4)),
        (lambda x: lax.psum_scatter(x, 'fsdp', scatter_dimension=0, tiled=True), (16, 4), (2, 4)),
        (lambda x: lax.psum(x, 'fsdp'), (3, 4), (3, 4)),
        (lambda x: lax.pmax(x, 'fsdp'), (3, 4), (3, 4)),
        (lambda x: lax.all_to_all(x, 'fsdp', 1, 0, tiled=True), (3, 16), (24, 2)),
    ],
)
def test_parameters_of_collectives_do_not_depend_on_shapes(function, shape, after):
    with jax.sharding.use_abstract_mesh(MESH):
        code, like = ManualEquations(MESH), traced(jnp.sin, jnp.ones(3)).eqns[0]
        operand = code.var(like.invars[0], shape)
        result = code.var(like.invars[0], after)
        actual = code.collective(function, object(), like, operand, result)
        expected = code.equation(function, object(), like, [operand])
    assert actual.primitive is expected.primitive
    assert actual.params == expected.params
    assert actual.outvars[0].aval.shape == expected.outvars[0].aval.shape
    assert actual.source_info is like.source_info


@pytest.mark.parametrize('dtype', ['bfloat16', 'int8', 'bool'])
def test_parameters_of_collectives_do_not_depend_on_dtypes_or_ranks(dtype):
    functions = [
        lambda x: lax.all_gather(x, 'fsdp', axis=1, tiled=True),
        lambda x: lax.psum_scatter(x, 'fsdp', scatter_dimension=1, tiled=True),
    ]
    functions += [lambda x: lax.psum(x, 'fsdp')] if dtype != 'bool' else []  # devices exchange no such sums
    with jax.sharding.use_abstract_mesh(MESH):
        code, like = ManualEquations(MESH), traced(lambda x: x | x, jnp.ones(3, 'int8')).eqns[0]
        operand = traced(lambda x: x, jnp.ones((3, 16), dtype)).invars[0]
        templates = code.collective_templates(functions, 4, object())
        expected = [code.equation(function, object(), like, [operand]) for function in functions]
    for template, equation in zip(templates, expected, strict=True):
        actual = code.from_template(template, like, operand, equation.outvars[0])
        assert actual.primitive is equation.primitive
        assert actual.params == equation.params
        assert actual.source_info is like.source_info


def test_barriers_have_no_parameters():
    with jax.sharding.use_abstract_mesh(MESH):
        code, like = ManualEquations(MESH), traced(jnp.sin, jnp.ones((3, 4), 'bfloat16')).eqns[0]
        operands = [*like.invars, *like.outvars]
        actual = code.barrier(like, operands)
        expected = code.equation(lambda *xs: lax.optimization_barrier(xs), object(), like, operands)
    assert (actual.primitive, actual.params) == (expected.primitive, expected.params) and not actual.params
    assert [x.aval for x in actual.outvars] == [x.aval for x in expected.outvars]


def test_other_axes_stay_auto():
    """Types, constraints and nested functions equal those that JAX traces where some axes are Auto."""
    mesh = AbstractMesh((4, 2), ('fsdp', 'tp'), axis_types=(AxisType.Auto,) * 2)

    def constrain(x):
        return lax.with_sharding_constraint(x, PartitionSpec(None, 'tp'))

    with jax.sharding.use_abstract_mesh(mesh):
        code, like = ManualEquations(mesh, ['tp']), traced(jnp.sin, jnp.ones(3)).eqns[0]
        operand = code.var(like.invars[0], (3, 6))
        actual = code.constraint(PartitionSpec(None, 'tp'), like, operand)
        mapped = jax.shard_map(
            lambda x: jnp.sin(constrain(x)),
            in_specs=PartitionSpec('fsdp'),
            out_specs=PartitionSpec('fsdp'),
            axis_names={'fsdp'},
            check_vma=False,
        )
        expected, sine = open_jaxpr(traced(mapped, jnp.ones((12, 6))).eqns[0].params['jaxpr']).eqns
    assert actual.params == expected.params
    assert actual.outvars[0].aval == expected.outvars[0].aval
    assert code.localize(like, [operand], [operand]).ctx == sine.ctx


@pytest.mark.parametrize('constants, carried, elements, results', [(0, 1, 1, 0), (1, 2, 0, 3), (3, 0, 2, 1)])
def test_scans_with_one_constant_more(constants, carried, elements, results):
    """A `scan` runs with one more constant if its parameters have the new operand counts."""

    def loop(fixed, begun, stacks):
        def layer(state, parts):
            total = sum([*fixed, *parts], 1.0)
            return [x * total for x in state], [total] * results

        return lax.scan(layer, begun, stacks, 2)

    values = [*jnp.arange(1.0, 1 + constants)], [*jnp.ones(carried)], [*jnp.ones((elements, 2))]
    jaxpr = jax.make_jaxpr(loop)(*values)
    [equation] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'scan']
    body, [outer], [inner] = equation.params['jaxpr'], *[traced(jnp.sin, 1.0).invars for _ in range(2)]
    counts = scan_counts(constants + 1, carried, elements, len(equation.outvars) - carried)
    assert counts.keys() < equation.params.keys()
    layer = rebuild_jaxpr(
        body, [inner, *open_jaxpr(body).invars], open_jaxpr(body).eqns, open_jaxpr(body).outvars
    )
    params = {**equation.params, **counts, 'jaxpr': layer}
    changed = equation.replace(invars=[outer, *equation.invars], params=params)
    eqns = [changed if eqn is equation else eqn for eqn in jaxpr.eqns]
    new = replace_jaxpr(jaxpr, invars=[outer, *jaxpr.jaxpr.invars], eqns=eqns)
    flat = jax.tree.leaves(values)
    for actual, expected in zip(eval_jaxpr(new, [0.0, *flat]), jax.tree.leaves(loop(*values)), strict=True):
        np.testing.assert_allclose(actual, expected)


def test_calls_of_functions_that_are_traced():
    like = traced(jnp.sin, jnp.ones(3)).eqns[0]
    with jax.sharding.use_abstract_mesh(MESH):
        code = ManualEquations(MESH)
        operands = [
            code.var(like.invars[0], (3,)),
            code.var(like.invars[0], (2, 3)),
            code.scalar_var('int32'),
        ]
        call = code.call_function(lambda x, y, i: [y[i] + lax.psum(x, 'fsdp'), x], like, operands)
    assert [*call.invars] == operands and [x.aval.shape for x in call.outvars] == [(3,), (3,)]
    assert call.source_info is like.source_info


TILED = {'tiled': True}
EXCHANGES = {
    'psum': (lambda x: lax.psum(x, 'fsdp'), {0: 0, 1: 1, 2: 2}),
    'all_gather': (lambda x: lax.all_gather(x, 'fsdp', axis=1, **TILED), {0: 0, 2: 2}),
    'all_gather to a new dimension': (lambda x: lax.all_gather(x, 'fsdp', axis=1), {0: 0, 2: 1, 3: 2}),
    'reduce_scatter': (lambda x: lax.psum_scatter(x, 'fsdp', scatter_dimension=1, **TILED), {0: 0, 2: 2}),
    'reduce_scatter of a dimension': (
        *(lambda x: lax.psum_scatter(x, 'fsdp', scatter_dimension=1)[:, None], {0: 0, 1: 2}),
    ),
    'all_to_all': (lambda x: lax.all_to_all(x, 'fsdp', 1, 2, **TILED), {0: 0}),
    'all_to_all of a dimension': (lambda x: lax.all_to_all(x, 'fsdp', 1, 1), {0: 0, 2: 2}),
}


@pytest.mark.parametrize('name', EXCHANGES)
def test_dimensions_that_a_collective_keeps(name):
    function, expected = EXCHANGES[name]
    mapped = jax.shard_map(
        function, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    [equation] = traced(mapped, jnp.ones((3, 8, 16))).eqns
    equation = open_jaxpr(equation.params['jaxpr']).eqns[0]
    assert collective_dims(equation) == [expected]
    shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    assert all(shapes[0][old] == shapes[1][new] for new, old in expected.items())
    assert not has_effects(equation)


def test_axes_and_specs_of_a_shard_map():
    mesh = AbstractMesh((4, 2), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
    for axes in (None, {'a'}):
        mapped = jax.shard_map(
            lambda x: x,
            mesh=mesh,
            in_specs=PartitionSpec('a'),
            out_specs=PartitionSpec(None, 'a'),
            **({} if axes is None else {'axis_names': axes}),
        )
        [equation] = traced(mapped, jnp.ones((8, 8))).eqns
        assert shard_map_manual_axes(equation) == (axes or {'a', 'b'})
        assert [*shard_map_mesh_shape(equation).items()] == [('a', 4), ('b', 2)]
        assert [*shard_map_in_specs(equation)] == [PartitionSpec('a')]
        assert [*shard_map_out_specs(equation)] == [PartitionSpec(None, 'a')]


@pytest.mark.parametrize('ordered', [False, True])
def test_callbacks_have_effects_and_may_be_ordered(ordered):
    def call(x):
        jax.debug.print('{}', x, ordered=ordered)
        jax.debug.callback(print, x, ordered=ordered)
        io_callback(print, None, x, ordered=ordered)

    names = {'debug_print', 'debug_callback', 'io_callback'}
    callbacks = [equation for equation in traced(call, jnp.ones(())).eqns if equation.primitive.name in names]
    assert len(callbacks) == 3
    assert all(map(has_effects, callbacks))
    assert [*map(is_ordered, callbacks)] == [ordered] * 3


def test_partitioned_callbacks_are_recognized():
    for partitioned in (False, True):
        call = functools.partial(jax.debug.callback, print, partitioned=partitioned)
        [equation] = traced(call, jnp.ones(())).eqns
        assert is_partitioned_callback(equation) == partitioned


def test_inspect_sharding_has_its_callback():
    [equation] = traced(lambda x: jax.debug.inspect_array_sharding(x, callback=print), jnp.ones(())).eqns
    assert equation.primitive.name == 'inspect_sharding'
    assert has_effects(equation)
    assert sharding_callback(equation) is print


def test_equations_that_take_refs_are_recognized():
    def change(x):
        ref = jax.new_ref(x)
        ref[0] = 1.0
        return jax.ref.freeze(ref) + x

    *refs, add = traced(change, jnp.ones(3)).eqns
    assert [takes_refs(equation) for equation in refs if has_effects(equation)] == [True] * 3
    assert not takes_refs(add)


def test_annotated_calls_have_their_jaxpr():
    custom = custom_partitioning(jnp.sin)
    custom.def_partition(lambda *_: None, sharding_rule='... -> ...')
    composite = jax.lax.composite(jnp.sin, 'scalax.sin')
    for function in (custom, composite):
        [equation] = traced(function, jnp.ones(3)).eqns
        assert equation.primitive.name in ANNOTATED_CALLS
        [sine] = open_jaxpr(annotated_call_jaxpr(equation)).eqns
        assert sine.primitive.name == 'sin'


def test_scopes_are_added_innermost():
    """The name of the HLO operation has the scope too, and the equation keeps its traceback."""

    def fun(x):
        with jax.named_scope('layer'):
            return jnp.sin(x)

    jaxpr = traced(jax.grad(fun), 1.0)
    before = jaxpr.eqns[-1]
    after = in_scope(before, 'scalax(weight, 7)')
    assert name_stack(after) == f'{name_stack(before)}/scalax(weight, 7)'
    assert after.source_info.traceback is before.source_info.traceback
    new = rebuild_jaxpr(jaxpr, jaxpr.invars, [*jaxpr.eqns[:-1], after], jaxpr.outvars)
    lowered = jax.jit(lambda x: jax.core.eval_jaxpr(new, (), x)).lower(1.0)
    assert 'transpose(jvp(layer))/scalax(weight, 7)/' in lowered.as_text(debug_info=True)


def test_local_equations_run_in_a_shard_map():
    """Equations that were traced for all examples run on blocks, with other parameters."""
    jaxpr = traced(lambda x: jnp.broadcast_to(x[:, None], (16, 3)), jnp.ones(16))
    with jax.sharding.use_abstract_mesh(MESH):
        code = ManualEquations(MESH)
        operand, result = code.var(jaxpr.invars[0], (2,)), code.var(jaxpr.outvars[0], (2, 3))
        changed = resized_params(jaxpr.eqns[-1], [(2,)], [(2, 3)])
        equation = code.localize(jaxpr.eqns[-1], [operand], [result], **changed)
    new = rebuild_jaxpr(jaxpr, [operand], [equation], [result])
    assert [x.aval.shape for x in (*new.invars, *new.outvars)] == [(2,), (2, 3)]


@pytest.mark.parametrize(
    'function, local, expected',
    [
        (lambda x: lax.reshape(x, (96,)), (12,), {'new_sizes': (12,)}),
        (lambda x: lax.broadcast_in_dim(x, (8, 12, 2), (0, 1)), (1, 12, 2), {'shape': (1, 12, 2)}),
        (lambda x: lax.slice(x, (0, 2), (8, 6)), (1, 4), {'limit_indices': (1, 6)}),
        (lambda x: lax.dynamic_slice(x, (0, 2), (8, 4)), (1, 4), {'slice_sizes': (1, 4)}),
        (jnp.sin, (1, 12), {}),
    ],
)
def test_parameters_of_blocks(function, local, expected):
    equation = traced(function, jnp.ones((8, 12))).eqns[-1]
    assert resized_params(equation, [(1, 12)], [local]) == expected


def test_equations_of_backward_passes_are_recognized():
    eqns = traced(jax.grad(lambda x: jnp.sin(x).sum()), jnp.ones(3)).eqns
    assert [is_backward(equation) for equation in eqns if equation.primitive.name in ('cos', 'mul')] == [
        False,
        True,
    ]


def test_jaxprs_in_named_tuples_are_replaced():
    def solve(b):
        return lax.custom_linear_solve(lambda x: 2 * x, b, lambda _, b: b / 2, symmetric=True)

    [equation] = [
        candidate
        for candidate in traced(solve, 1.0).eqns
        if candidate.primitive.name == 'custom_linear_solve'
    ]
    seen = []
    assert params_with_jaxprs(equation, lambda jaxpr: seen.append(jaxpr) or jaxpr) is not None
    assert seen


def test_reshards_of_constants_are_not_noops():
    def moved(x):
        return jax.sharding.reshard(x, PartitionSpec())

    explicit = MESH.update(axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(explicit):
        [equation] = traced(moved, jax.ShapeDtypeStruct((8,), 'float32')).eqns
    assert not is_noop_reshard(equation)


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'uint32'])
@pytest.mark.parametrize('shape', [(12,), (4, 3), (2, 6, 5)])
def test_bits_depend_on_their_indices(dtype, shape):
    key = jax.random.key(7)
    every, local = jax.random.bits(key, shape, dtype), (shape[0] // 2, *shape[1:])
    for block in range(2):
        starts = [block * local[0], *[0] * (len(shape) - 1)]
        actual = bits_at(key, shape, local, starts, jnp.dtype(dtype))
        np.testing.assert_array_equal(actual, np.split(every, 2)[block])


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'uint32'])
def test_bits_of_another_shape_are_the_same_bits(dtype):
    def bits(key):
        return jax.random.bits(key, (12, 5), dtype)

    key = jax.random.key(7)
    [equation] = [x for x in all_equations(jax.make_jaxpr(bits)(key)) if x.primitive.name == 'random_bits']
    reshaped = random_bits_of_shape(equation, (3, 4, 5))
    [actual] = eval_equation(reshaped, [key])
    np.testing.assert_array_equal(actual, bits(key).reshape(3, 4, 5))


def test_gamma_draws_for_each_element_with_a_key():
    key, shapes = jax.random.key(7), jnp.arange(1.0, 7.0).reshape(2, 3)
    [equation] = [
        x
        for x in all_equations(jax.make_jaxpr(jax.random.gamma)(key, shapes))
        if x.primitive.name == 'random_gamma'
    ]
    actual = jax.jit(gamma_expansion(equation))(key, shapes)
    np.testing.assert_array_equal(actual, jax.jit(jax.random.gamma)(key, shapes))


def test_which_generators_have_bits_that_depend_on_indices():
    def of(impl, shape=()):
        key = jax.random.key(0, impl=impl)
        jaxpr = jax.make_jaxpr(lambda key: jax.random.bits(key, shape))(key)
        eqns = [*open_jaxpr(jaxpr).eqns]
        while eqns[-1].primitive.name == 'jit':
            eqns = [*open_jaxpr(eqns[-1].params['jaxpr']).eqns]
        return [depends_on_indices(equation) for equation in eqns if equation.primitive.name == 'random_bits']

    assert of('threefry2x32', (4,)) == [True]
    assert of('rbg', (4,)) == [False]
    with jax.threefry_partitionable(False):
        assert of('threefry2x32', (4,)) == [False]


def test_another_mesh_may_be_in_force_when_callbacks_are_tried():
    mesh = AbstractMesh((8,), ('x',), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert callbacks_nest.__wrapped__() == callbacks_nest()


def test_callbacks_run_in_nested_shard_maps_if_they_are_lowered_there():
    mesh, replicated, calls = jax.make_mesh((2, 4), ('a', 'b')), PartitionSpec(), []

    def call(x):
        jax.debug.callback(calls.append, x)
        return x

    def nest(x):
        return jax.shard_map(
            call, in_specs=replicated, out_specs=replicated, axis_names={'b'}, check_vma=False
        )(x)

    outer = jax.jit(
        jax.shard_map(
            nest, mesh=mesh, in_specs=replicated, out_specs=replicated, axis_names={'a'}, check_vma=False
        )
    )
    if callbacks_nest():
        outer(np.float32(3)).block_until_ready()
        jax.effects_barrier()
        assert [float(x) for x in calls] == [3] * len(calls) and calls
    else:
        with pytest.raises((NotImplementedError, TypeError, ValueError)):
            outer(np.float32(3))
