"""Tests that `scalax/_jax/equations` reads the parameters of JAX equations."""

import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._jax import equations as of
from scalax._jax.rewriting import eval_jaxpr, without_prevent_cse
from tests.support.contracts import contract, equation_in

X, IMAGES = np.ones((2, 3, 4), np.float32), np.ones((2, 8, 8, 3), np.float32)
MESH = AbstractMesh((2, 4), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)


def conv(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(
        *(x, kernel, (1, 2), ((0, 1), (2, 3)), (1, 1), (2, 2)),
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )


def gather(x: Any, i: Any) -> Any:
    return lax.gather(x, i, lax.GatherDimensionNumbers((1, 2), (0,), (0,)), (1, 3, 4), mode='clip')


def scatter(x: Any, i: Any) -> Any:
    return x.at[i].add(np.ones((5, 3, 4), np.float32))


CONV = conv, IMAGES, np.ones((3, 3, 3, 5), np.float32)
INDICES = np.zeros((5, 1), np.int32)
GATHER, SCATTER = (gather, X, INDICES), (scatter, X, INDICES[:, 0])
RAGGED = lax.ragged_dot, np.ones((6, 3), np.float32), np.ones((2, 3, 5), np.float32), np.array([4, 2])


def placed(x: Any) -> Any:
    return jax.jit(jnp.sin, out_shardings=NamedSharding(MESH, P('a')))(x)


def mapped(fun: Any = jnp.sin, *, manual: set[str]) -> Any:
    return jax.shard_map(
        fun,
        mesh=MESH,
        in_specs=P('a' if 'a' in manual else None),
        out_specs=P('a' if 'a' in manual else None),
        axis_names=manual,
    )


# accessor, primitive: (function, arguments ...), expected value
CASES: dict[tuple[Any, str], tuple[tuple[Any, ...], Any]] = {
    (of.dim_of, 'sort'): ((lambda x: lax.sort(x, dimension=1), X), 1),
    (of.dim_of, 'top_k'): ((lambda x: lax.top_k(x, 2), X), 2),
    (of.dim_of, 'approx_top_k'): ((lambda x: lax.approx_max_k(x, 2, reduction_dimension=1), X), 1),
    (of.dim_of, 'iota'): ((lambda x: x + lax.broadcasted_iota('float32', x.shape, 1), X), 1),
    (of.count_sort_keys, 'sort'): ((lambda x: lax.sort((x, x + 1, x), num_keys=2)[1], X), 2),
    (of.removed_dims, 'reduce_sum'): ((lambda x: x.sum((0, 2)), X), (0, 2)),
    (of.removed_dims, 'argmax'): ((lambda x: x.argmax(1), X), (1,)),
    (of.removed_dims, 'squeeze'): ((lambda x: lax.squeeze(x, (1,)), np.ones((2, 1))), (1,)),
    (of.removed_dims, 'reduce'): (
        (lambda x: lax.reduce(x, np.float32(0), lambda a, b: jnp.sin(a) + b, (0,)), X),
        (0,),
    ),
    (of.broadcast_dims, 'broadcast_in_dim'): (
        (lambda x: lax.broadcast_in_dim(x, (7, 2), (1,)), X[:, 0, 0]),
        (1,),
    ),
    (of.permutation, 'transpose'): ((lambda x: x.transpose(2, 0, 1), X), (2, 0, 1)),
    (of.permutes_elements, 'reshape'): ((lambda x: x.reshape(6, 4), X), False),
    (of.fft_lengths, 'fft'): ((lambda x: jnp.fft.fftn(x, axes=(1, 2)), X), (3, 4)),
    (of.is_left_side, 'triangular_solve'): (
        (lambda x: lax.linalg.triangular_solve(x, x, left_side=True), np.ones((4, 4), np.float32)),
        True,
    ),
    (of.dot_dims, 'dot_general'): (
        (lambda x: lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,)))), X),
        (((2,), (2,)), ((0,), (0,))),
    ),
    (of.has_all_groups, 'ragged_dot_general'): (RAGGED, True),
    (of.indices_are_sorted, 'gather'): (
        (lambda x, i: x.at[i].get(indices_are_sorted=True), X, INDICES[:, 0]),
        True,
    ),
    (of.indices_are_sorted, 'scatter-add'): (SCATTER, False),
    (of.ragged_dot_dims, 'ragged_dot_general'): (RAGGED, (((1,), (1,)), ((), ()), (0,))),
    (of.ragged_dim, 'ragged_dot_general'): (RAGGED, 0),
    (lambda eqn: of.conv_dims(eqn).lhs_spec, 'conv_general_dilated'): (CONV, (0, 3, 1, 2)),
    (lambda eqn: of.conv_dims(eqn).rhs_spec, 'conv_general_dilated'): (CONV, (3, 2, 0, 1)),
    (lambda eqn: of.conv_dims(eqn).out_spec, 'conv_general_dilated'): (CONV, (0, 3, 1, 2)),
    (of.conv_groups, 'conv_general_dilated'): (CONV, (1, 1)),
    (of.conv_group_dims, 'conv_general_dilated'): (CONV, None),
    (of.conv_windows, 'conv_general_dilated'): (CONV, ((1, (0, 1), 1, 2), (2, (2, 3), 1, 2))),
    (lambda eqn: of.gather_dims(eqn).offset_dims, 'gather'): (GATHER, (1, 2)),
    (lambda eqn: of.gather_dims(eqn).collapsed_slice_dims, 'gather'): (GATHER, (0,)),
    (of.slice_sizes, 'gather'): (GATHER, (1, 3, 4)),
    (of.slice_bounds, 'slice'): (
        (lambda x: lax.slice(x, (1, 0), (4, 3), (2, 1)), np.ones((5, 3))),
        [(1, 4, 2), (0, 3, 1)],
    ),
    (lambda eqn: of.slice_bounds(eqn), 'slice'): (
        (lambda x: lax.slice(x, (1, 0), (4, 3)), np.ones((5, 3))),
        [(1, 4, 1), (0, 3, 1)],
    ),
    (of.moves_contiguous_parts, 'slice'): (
        (lambda x: lax.slice(x, (1, 0), (4, 3), (2, 1)), np.ones((5, 3))),
        False,
    ),
    (lambda eqn: of.moves_contiguous_parts(eqn), 'slice'): (
        (lambda x: lax.slice(x, (1, 0), (4, 3)), np.ones((5, 3))),
        True,
    ),
    (of.moves_contiguous_parts, 'pad'): (
        (lambda x: lax.pad(x, np.float32(0), [(0, 0, 1), (0, 0, 0), (0, 0, 0)]), X),
        False,
    ),
    (of.bounds_mode, 'gather'): (
        (lambda x, i: x.at[i].get(mode='clip'), X, INDICES[:, 0]),
        lax.GatherScatterMode.CLIP,
    ),
    (of.fill_value, 'gather'): ((lambda x, i: x.at[i].get(mode='fill', fill_value=7), X, INDICES[:, 0]), 7),
    (lambda eqn: of.scatter_dims(eqn).update_window_dims, 'scatter-add'): (SCATTER, (1, 2)),
    (lambda eqn: of.scatter_dims(eqn).inserted_window_dims, 'scatter-add'): (SCATTER, (0,)),
    (lambda eqn: of.sharding_params(eqn)[1][0].spec, 'jit'): ((placed, X), P('a')),
    (lambda eqn: of.sharding_params(eqn)[0], 'jit'): ((placed, X), {}),
    (lambda eqn: of.sharding_params(eqn)[1][0].spec, 'sharding_constraint'): (
        (lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P('b', None))), np.ones((4, 4))),
        P('b', None),
    ),
    (lambda eqn: of.sharding_params(eqn)[1][0].spec, 'device_put'): (
        (lambda x: jax.device_put(x, NamedSharding(MESH, P('b'))), np.ones(4)),
        P('b'),
    ),
    (of.shard_map_out_specs, 'shard_map'): ((mapped(manual={'a', 'b'}), X), (P('a'),)),
    (of.count_shard_map_devices, 'shard_map'): ((mapped(manual={'a', 'b'}), X), 8),
    (lambda eqn: of.count_shard_map_devices(eqn), 'shard_map'): ((mapped(manual={'b'}), X), 4),
    (lambda eqn: of.shard_map_jaxpr(eqn)[1].manual_axes, 'shard_map'): ((mapped(manual={'b'}), X), ('b',)),
    (
        lambda eqn: [inner.primitive.name for inner in of.open_jaxpr(of.shard_map_jaxpr(eqn)[0]).eqns],
        'shard_map',
    ): (
        (mapped(manual={'a'}), X),
        ['sin'],
    ),
    (lambda eqn: [of.acts_along(eqn, dim) for dim in range(3)], 'cumsum'): (
        (lambda x: lax.cumsum(x, axis=1), X),
        [False, True, False],
    ),
    (lambda eqn: [of.acts_along(eqn, dim) for dim in range(3)], 'rev'): (
        (lambda x: lax.rev(x, (0, 2)), X),
        [True, False, True],
    ),
    (lambda eqn: [of.acts_along(eqn, dim) for dim in range(3)], 'pad'): (
        (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, -1, 0), (0, 0, 1))), X),
        [False, True, True],
    ),
    (lambda eqn: [of.acts_along(eqn, dim) for dim in range(3)], 'reduce_window_max'): (
        (lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2, 1), (1, 1, 1), 'SAME'), X),
        [False, True, False],
    ),
    (of.draws_per_key, 'random_bits'): ((jax.random.bits, jax.random.key(0, impl='threefry2x32')), True),
    (lambda eqn: of.draws_per_key(eqn), 'random_bits'): (
        (jax.random.bits, jax.random.key(0, impl='rbg')),
        False,
    ),
    (of.named_axes_of, 'all_gather'): (
        (mapped(lambda x: lax.all_gather(x, 'a', tiled=True), manual={'a', 'b'}), X),
        ('a',),
    ),
    (of.named_axes_of, 'axis_index'): (
        (mapped(lambda x: x * lax.axis_index('a'), manual={'a', 'b'}), X),
        ('a',),
    ),
    (of.named_axes_of, 'ppermute'): (
        (mapped(lambda x: lax.ppermute(x, 'a', [(0, 1)]), manual={'a', 'b'}), X),
        ('a',),
    ),
    (of.named_axes_of, 'reduce_sum'): ((jnp.sum, X), ()),
    (lambda eqn: of.shape_of(eqn.invars[0]), 'sin'): ((jnp.sin, X), (2, 3, 4)),
    (lambda eqn: of.is_on_device(eqn.invars[0]), 'sin'): ((jnp.sin, X), True),
}


def label(case: tuple[Any, str]) -> str:
    name = case[0].__name__
    return f'{case[0].__code__.co_names[-1] if name == "<lambda>" else name} of {case[1]}'


@pytest.mark.parametrize('case', CASES, ids=label)
def test_parameters(case: tuple[Any, str]) -> None:
    accessor, primitive = case
    traced, expected = CASES[case]
    with contract(f'keeps what an equation of {primitive} does where it was', 'to follow dimensions'):
        actual = accessor(equation_in(primitive, *traced))
        actual = tuple(actual) if isinstance(expected, tuple) and not isinstance(expected, P) else actual
        assert actual == expected, f'{actual} and not {expected}'


@pytest.mark.parametrize('name', ['stack', 'unstack'])
def test_parameters_of_primitives_that_not_every_version_has(name: str) -> None:
    fun = {'stack': lambda x: jnp.stack([x, x], 1), 'unstack': lambda x: jnp.unstack(x, axis=1)}[name]
    equations = [
        equation for equation in of.all_equations(jax.make_jaxpr(fun)(X)) if equation.primitive.name == name
    ]
    with contract(f'says with which dimension {name} works', 'to follow rows through it'):
        assert [of.dim_of(equation) for equation in equations] in ([], [1])


def test_a_reshape_that_reads_its_operand_in_another_order() -> None:
    with contract('says of lax.reshape which *dimensions* it reads in turn', 'to follow examples through it'):
        jaxpr = jax.make_jaxpr(lambda x: lax.reshape(x, (24,), dimensions=(2, 0, 1)))(X)
        names = [equation.primitive.name for equation in of.all_equations(jaxpr)]
        orders = [
            of.merging_order(equation)
            for equation in of.all_equations(jaxpr)
            if equation.primitive.name == 'reshape'
        ]
        assert orders == [[2, 0, 1]] or 'transpose' in names


def test_types_name_host_memory() -> None:
    with contract('has the memory of a value in its type', 'to leave what is offloaded where it is'):
        jaxpr = jax.make_jaxpr(lambda x: jax.device_put(x, jax.memory.Space.Host))(X)
        assert not of.is_on_device(of.open_jaxpr(jaxpr).outvars[0])


CALLED = {
    'jit': jax.jit(jnp.sin),
    'remat2': jax.checkpoint(jnp.sin),
    'custom_jvp_call': jax.nn.relu,
    'custom_vjp_call': jax.custom_vjp(jnp.sin),
}
CALLED['custom_vjp_call'].defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))


@pytest.mark.parametrize('name', CALLED)
def test_calls_have_their_jaxpr_with_their_operands(name: str) -> None:
    with contract(f'has the jaxpr that {name} runs under its name', 'to follow the batch into calls'):
        equation = equation_in(name, CALLED[name], X)
        inner = of.open_jaxpr(of.call_jaxpr(equation))
        assert [len(inner.invars), len(inner.outvars)] == [len(equation.invars), len(equation.outvars)]
        assert of.open_jaxpr(of.run_once_jaxpr(equation)) is inner


@pytest.mark.parametrize('prevents', [True, False])
def test_checkpoints_have_prevent_cse(prevents: bool) -> None:
    def fun(x: Any) -> Any:
        return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=prevents)(x).sum()

    with contract(
        'tells of a checkpoint whether it prevents merging', 'to prevent it where it runs in parts'
    ):
        again = equation_in('remat2', jax.grad(fun), X)
        assert [*of.prevents_cse(again)] == [prevents] * len(again.invars)
        for name, first in (('remat2', fun), ('jit', jax.jit(jnp.sin))):
            assert [*of.prevents_cse(equation_in(name, first, X))] == [False]
        assert not any(of.prevents_cse(without_prevent_cse(again)))
        assert again.params.keys() == without_prevent_cse(again).params.keys()


def test_linear_solves_and_shard_maps_run_a_jaxpr_once() -> None:
    def solve(x: Any) -> Any:
        return lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, y: jnp.tanh(y), symmetric=True)

    with contract('has the jaxpr of a solver among those of custom_linear_solve', 'to count its operations'):
        inner = of.run_once_jaxpr(equation_in('custom_linear_solve', solve, X))
        assert 'tanh' in [equation.primitive.name for equation in of.all_equations(inner)]
    with contract('has the jaxpr of shard_map among its parameters', 'to count its operations'):
        inner = of.run_once_jaxpr(equation_in('shard_map', mapped(manual={'a', 'b'}), X))
        assert [equation.primitive.name for equation in inner.eqns] == ['sin']


def test_the_solver_of_a_linear_solve_takes_its_constants_and_right_hand_sides() -> None:
    def solve(a: Any, b: Any, c: Any, x: Any) -> Any:
        return lax.custom_linear_solve(
            *(lambda y: a * y, x, lambda _, y: y / b), transpose_solve=lambda _, y: y / c
        )

    with contract('orders the operands of linear solves by their functions', 'to call the solver alone'):
        equation = equation_in('custom_linear_solve', solve, X, 2 * X, 3 * X, 4 * X)
        jaxpr, operands = of.linear_solve_call(equation)
        positions = [next(i for i, x in enumerate(equation.invars) if x is operand) for operand in operands]
        assert positions == [len(equation.invars) - 3, len(equation.invars) - 1]
        [result] = eval_jaxpr(jaxpr, [2 * X, 4 * X])
        np.testing.assert_array_equal(result, 2 * X)


def test_the_call_of_a_custom_vmap_takes_all_operands() -> None:
    @jax.custom_batching.custom_vmap
    def fun(x: Any, y: Any) -> Any:
        return jnp.sin(x) * y

    fun.def_vmap(lambda size, batched, x, y: (jnp.sin(x) * y, True))
    with contract('calls the jaxpr of a custom_vmap with its operands', 'to run it on blocks'):
        jaxpr, operands = of.custom_vmap_call(equation_in('custom_vmap_call', fun, X, 2 * X))
        assert [*map(of.shape_of, operands)] == [X.shape] * 2
        np.testing.assert_allclose(eval_jaxpr(jaxpr, [X, 2 * X])[0], np.sin(X) * 2 * X, rtol=1e-6)


def test_primitives_of_hijax_are_expanded() -> None:
    table = np.arange(5, dtype=np.float32)
    with contract('expands primitives of hijax to others', 'to partition what they do'):
        jaxpr = jax.make_jaxpr(jnp.searchsorted)(table, X)
        for equation in of.all_equations(jaxpr):
            if equation.primitive.name == 'call_hi_primitive':
                function = of.expansion(equation)
                assert function is not None
                [result] = function(table, X)
                np.testing.assert_array_equal(result, jnp.searchsorted(table, X))
        assert of.expansion(equation_in('sin', jnp.sin, X)) is None


def test_scans_have_constants_then_state_then_stacks() -> None:
    def fun(constant: Any, state: Any, stack: Any) -> Any:
        return lax.scan(lambda c, x: (c + constant, x * c.sum()), state, stack)

    with contract('orders the operands of a scan as constants, state, stacks', 'to follow loops'):
        equation = equation_in('scan', fun, X[0], X[0], np.ones((5, 2), np.float32))
        loop = of.loop_of(equation)
        assert loop[1:] == (None, 0, 1, 1, 5)
        parts = loop.split([*map(of.shape_of, equation.invars)])
        assert parts == ([(3, 4)], [(3, 4)], [(5, 2)])
        assert [*map(of.shape_of, of.open_jaxpr(loop.body).invars)] == [(3, 4), (3, 4), (2,)]


def test_a_parameter_of_scans_is_their_length() -> None:
    def fun(stack: Any) -> Any:
        return lax.scan(lambda c, x: (c + x, None), np.float32(0), stack)[0]

    with contract('keeps the length of a scan in one parameter', 'to run loops over fewer examples'):
        params = equation_in('scan', fun, np.ones(5, np.float32)).params
        length = of.trip_count_param(5)
        assert {name: params[name] for name in length} == length


def test_whiles_have_constants_of_the_test_then_of_the_body_then_state() -> None:
    def fun(end: Any, step: Any, first: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() < end, lambda c: c + step, first)

    with contract('orders the operands of a while as those of test, body, state', 'to follow loops'):
        equation = equation_in('while', fun, np.float32(9), X[0], X[0])
        loop = of.loop_of(equation)
        assert loop[2:] == (1, 1, 1, None)
        assert loop.split([*map(of.shape_of, equation.invars)]) == ([(3, 4)], [(3, 4)], [])
        counts = [len(of.open_jaxpr(closed).invars) for closed in (loop.cond, loop.body)]
        assert counts == [loop.num_cond_consts + loop.num_carry, loop.num_consts + loop.num_carry]


def test_branches_take_all_operands_but_the_first() -> None:
    with contract('has the branches of a cond in its parameters', 'to follow the batch into each'):
        equation = equation_in('cond', lambda i, x: lax.cond(i, jnp.sin, jnp.cos, x), True, X)
        inner = [of.open_jaxpr(branch) for branch in of.branches(equation)]
        assert [branch_jaxpr.eqns[0].primitive.name for branch_jaxpr in inner] == ['cos', 'sin']
        assert [len(branch_jaxpr.invars) for branch_jaxpr in inner] == [len(equation.invars) - 1] * 2


def test_jaxprs_are_found_in_parameters() -> None:
    with contract('has jaxprs in parameters as ClosedJaxpr or Jaxpr', 'to see all that a function does'):
        jaxpr = jax.make_jaxpr(jax.jit(lambda x: lax.cond(True, jax.jit(jnp.sin), jnp.cos, x)))(X)
        assert {'sin', 'cos'} <= {equation.primitive.name for equation in of.all_equations(jaxpr)}
        [outer] = of.open_jaxpr(jaxpr).eqns
        assert [*of.inner_jaxprs(outer)] == [*map(of.open_jaxpr, filter(of.is_jaxpr, of.param_values(outer)))]


def test_jaxprs_and_equations_are_equal_to_themselves_alone() -> None:
    with contract('compares jaxprs and equations by identity', 'to keep what it knows of each'):
        first, second = (jax.make_jaxpr(jax.jit(jnp.sin))(X) for _ in range(2))
        parts = [
            part
            for jaxpr in (first, second)
            for part in (jaxpr, of.open_jaxpr(jaxpr), *of.open_jaxpr(jaxpr).eqns)
        ]
        assert len({*parts}) == len({*map(id, parts)})


def test_names_of_arguments() -> None:
    with contract('names the arguments of a traced function', 'to say which argument is meant'):
        jaxpr = jax.jit(lambda tree, x: tree['w'] + x).trace({'w': X}, X).jaxpr
        assert [*of.argument_names(jaxpr)] == ["tree['w']", 'x']


def test_equal_operations_have_equal_parameters() -> None:
    def casts(x: Any) -> Any:
        return x.astype(jnp.bfloat16), x.astype(jnp.bfloat16), x.astype(jnp.float16)

    with contract('gives equal casts equal parameters', 'to gather a weight once for both'):
        first, second, other = of.all_equations(jax.make_jaxpr(casts)(X))
        assert of.is_same_operation(first, second)
        assert not of.is_same_operation(first, other)


def test_equal_operations_have_equal_keys() -> None:
    matrix, wide = np.ones((2, 2), np.float32), np.ones((2, 3), np.float32)
    programs: list[tuple[Any, ...]] = [
        (lax.dot, matrix, matrix),
        (lax.dot, matrix, wide),
        (lax.dot, matrix, matrix.astype('float16')),
        (lambda x: lax.transpose(x, (1, 0)), matrix),
        (lambda x: lax.transpose(x, (1, 0)), wide),
        (lambda x: lax.reduce_sum(x, (0,)), matrix),
        (lambda x: lax.reduce_max(x, (0,)), matrix),
    ]

    def keys() -> list[Any]:
        jaxprs = [jax.make_jaxpr(fun)(*args) for fun, *args in programs]
        return [of.operation_key(equation) for jaxpr in jaxprs for equation in of.all_equations(jaxpr)]

    with contract('gives equal operations equal parameters', 'to find a strategy once for all layers'):
        assert keys() == keys()
        assert len({*keys()}) == len(programs)


def test_transformations_are_in_the_name_stack() -> None:
    def loss(x: Any) -> Any:
        with jax.named_scope('layer'):
            return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum()

    with contract(
        'writes jvp, transpose and rematted_computation into name stacks', 'to tell parts of a step'
    ):
        stacks = {of.name_stack(equation) for equation in of.all_equations(jax.make_jaxpr(jax.grad(loss))(X))}
        text = ' '.join(stacks)
        assert 'jvp(layer)' in text and 'transpose(jvp(layer))' in text and 'rematted_computation' in text


def test_equations_know_their_lines() -> None:
    with contract('knows where the code of an equation is', 'to name lines of the user'):
        trace = of.traceback_of(equation_in('sin', lambda x: jnp.sin(x), X))
        assert trace is not None
        assert __file__ in [frame.filename for frame in traceback.extract_tb(trace)]


@pytest.mark.parametrize('reverse', [False, True])
def test_the_options_of_a_scan(reverse: bool) -> None:
    def fun(x: Any) -> Any:
        return jax.lax.scan(lambda c, y: (c + y, None), x[0], x, reverse=reverse, unroll=2)[0]

    with contract('names the options of a scan as its function does', 'to write one anew'):
        options = of.scan_options(equation_in('scan', fun, np.ones((4, 3))))
        assert options == {'reverse': reverse, 'unroll': 2}


@pytest.mark.medium
@pytest.mark.parametrize(
    ('generator', 'same'), [('threefry2x32', True), ('rbg', False), ('unsafe_rbg', False)]
)
def test_random_values_drawn_under_vmap(generator: str, same: bool) -> None:
    def fun(data: Any) -> Any:
        return jax.jit(lambda key: jax.random.uniform(key, (2,)))(
            jax.random.wrap_key_data(data, impl=generator)
        )

    data = jax.random.key_data(jax.random.split(jax.random.key(0, impl=generator), 3))
    one_by_one = np.stack([fun(key_data) for key_data in data])
    with contract('draws the same of many keys with some generators', 'to run rounds of a loop at once'):
        assert np.array_equal(jax.vmap(fun)(data), one_by_one) == same
        assert of.draws_same_under_vmap(jax.make_jaxpr(fun)(data[0])) == same


def test_producers_of_values_and_inner_equations() -> None:
    def fun(x: Any) -> Any:
        return jax.jit(jnp.sin)(x) + 1

    jaxpr = of.open_jaxpr(jax.make_jaxpr(fun)(X))
    with contract('has the equations of a call inside it', 'to read those of a whole function'):
        assert [equation.primitive.name for equation in of.with_inner_equations(jaxpr.eqns)] == [
            'jit',
            'sin',
            'add',
        ]
    with contract('uses one variable where a value is made and where it is taken', 'to find what makes it'):
        [result] = jaxpr.outvars
        added = of.producers_of(jaxpr)[id(result)]
        assert of.producers_of(jaxpr)[id(added.invars[0])].primitive.name == 'jit'
    assert of.size_of(result) == X.size


def test_arguments_of_kernels_are_references() -> None:
    from jax.experimental import pallas as pl

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...]

    def fun(x: Any) -> Any:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    with contract('gives arrays a ShapedArray, and references another type', 'to leave kernels alone'):
        assert of.takes_arrays(jax.make_jaxpr(jnp.sin)(X))
        inner, *_ = of.inner_jaxprs(equation_in('pallas_call', fun, X))
        assert not of.takes_arrays(inner)
