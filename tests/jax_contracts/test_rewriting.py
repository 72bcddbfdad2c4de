"""Tests that `scalax/_jax/rewriting` makes jaxprs and equations from others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._jax import rewriting
from scalax._jax.equations import all_equations, call_jaxpr, loop_of, open_jaxpr
from scalax._jax.tracing import trace_context
from scalax._jaxpr.source_lines import line_of
from tests.support.contracts import contract, equation_in

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ('x',))


def test_jaxprs_take_other_equations_and_results() -> None:
    with contract('lets the equations and results of a jaxpr be replaced', 'to constrain values'):
        jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(X)
        first = open_jaxpr(jaxpr).eqns[0]
        changed = rewriting.replace_jaxpr(jaxpr, eqns=[first], outvars=first.outvars)
        assert type(changed) is type(jaxpr)
        np.testing.assert_array_equal(rewriting.eval_jaxpr(changed, [X])[0], jnp.cos(X))


def test_equations_take_other_operands() -> None:
    with contract('lets the operands of an equation be replaced', 'to constrain values'):
        jaxpr = open_jaxpr(jax.make_jaxpr(lambda x, y: x - y)(X, X))
        [equation] = jaxpr.eqns
        assert rewriting.with_operands(equation, jaxpr.invars[::-1]).invars == jaxpr.invars[::-1]
        assert equation.invars == jaxpr.invars


def test_equations_read_other_variables() -> None:
    with contract('lets the operands of equations be new variables', 'to take loops over layers apart'):
        jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x) * 2, jnp.sin(x)))(X)
        inner = open_jaxpr(jaxpr)
        changed, [new] = rewriting.substitute_vars(jaxpr, [inner.eqns[0].outvars[0]])
        assert open_jaxpr(changed).eqns[0].outvars == inner.eqns[0].outvars
        rest = rewriting.extract_subjaxpr(changed, [new], open_jaxpr(changed).outvars[:1])
        np.testing.assert_array_equal(rewriting.eval_jaxpr(rest, [X])[0], X * 2)


HOLDERS = {
    'jit': lambda x: jax.jit(jnp.sin)(x),
    'remat2': jax.checkpoint(jnp.sin),
    'scan': lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=1)[0],
    'while': lambda x: lax.while_loop(lambda c: (c > 2).all(), jnp.sin, x),
    'cond': lambda x: lax.cond(False, jnp.sin, jnp.sin, x),
}


@pytest.mark.parametrize('name', HOLDERS)
def test_equations_take_other_jaxprs(name: str) -> None:
    with contract(f'lets the jaxpr of {name} be replaced', 'to constrain values in it'):
        jaxpr = jax.make_jaxpr(HOLDERS[name])(X)
        equation = equation_in(name, HOLDERS[name], X)
        if name == 'cond':
            inner = [jax.make_jaxpr(jnp.cos)(X)] * 2
        elif name in ('scan', 'while'):
            assert open_jaxpr(loop_of(equation).body).eqns[0].primitive.name == 'sin'
            inner = [jax.make_jaxpr(jnp.cos)(X)]
        else:
            closed = jax.make_jaxpr(jnp.cos)(X)
            inner = [closed if hasattr(call_jaxpr(equation), 'consts') else open_jaxpr(closed)]
        [holder] = [eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive.name == name]
        eqns = [
            rewriting.with_jaxprs(eqn, *inner) if eqn is holder else eqn for eqn in open_jaxpr(jaxpr).eqns
        ]
        changed = rewriting.replace_jaxpr(jaxpr, eqns=eqns)
        expected = X if name == 'while' else jnp.cos(X)
        np.testing.assert_array_equal(rewriting.eval_jaxpr(changed, [X])[0], expected)


def test_a_constraint_depends_on_sharding_rank_and_trace_context_only(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P('x', P.UNCONSTRAINED))

    def constrained(x: Any) -> Any:
        return lax.with_sharding_constraint(x, sharding)

    with contract(
        'makes constraints of equal parameters for arrays of one rank', 'to make them of one another'
    ):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            original = equation_in('sharding_constraint', constrained, np.ones((16, 3), np.int8))
            constraint = rewriting.make_constraint(original.invars[0], sharding, original, trace_context())
        assert constraint.ctx == original.ctx
        assert constraint.params == original.params and constraint.primitive is original.primitive
        assert (
            constraint.outvars[0].aval == constraint.invars[0].aval
            and constraint.source_info is original.source_info
        )


def test_cached_constraints_depend_on_the_ambient_mesh(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P('x'))
    [equation] = open_jaxpr(jax.make_jaxpr(jnp.sin)(X)).eqns
    with contract('tells traces under other meshes apart', 'to keep equations of constraints'):
        for ambient in (mesh.abstract_mesh, AbstractMesh((), ()), mesh.abstract_mesh):
            with jax.sharding.use_abstract_mesh(ambient):
                constraint = rewriting.make_constraint(
                    equation.invars[0], sharding, equation, trace_context()
                )
            assert constraint.ctx.cur_abstract_mesh == ambient


def test_a_made_constraint_constrains_its_result(mesh: Mesh) -> None:
    with contract('runs a constraint whose result is a new variable', 'to constrain values'):
        jaxpr = jax.make_jaxpr(jnp.sin)(X)
        [equation] = open_jaxpr(jaxpr).eqns
        constraint = rewriting.make_constraint(
            equation.outvars[0], NamedSharding(mesh, P('x')), equation, trace_context()
        )
        changed = rewriting.replace_jaxpr(jaxpr, eqns=[equation, constraint], outvars=constraint.outvars)
        result = jax.jit(lambda x: rewriting.bind_as_jit(changed, [x], 'f'))(X)[0]
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P('x')), 1)
        np.testing.assert_allclose(result, jnp.sin(X), rtol=1e-6)


def test_cached_constraints_depend_on_the_trace_context(mesh: Mesh) -> None:
    from jax.experimental.xla_metadata import set_xla_metadata

    sharding = NamedSharding(mesh, P('x'))
    [equation] = open_jaxpr(jax.make_jaxpr(jnp.sin)(X)).eqns
    with contract('tells traces with other metadata apart', 'to keep equations of constraints'):
        with set_xla_metadata(tag='mine'):
            rewriting.make_constraint(equation.invars[0], sharding, equation, trace_context())
            rewriting.bind_as_jit(jax.make_jaxpr(jnp.sin)(X), [X], 'f')
        later = rewriting.make_constraint(equation.invars[0], sharding, equation, trace_context())
        assert not later.ctx.xla_metadata


def test_an_equation_is_traced_from_a_function() -> None:
    with contract('makes one equation of a function of one operation', 'to run kernels on their rows'):
        like = equation_in('sin', jnp.sin, X)
        traced = rewriting.trace_equation(jnp.cos, like)
        assert traced.primitive.name == 'cos'
        assert (traced.invars, traced.outvars, traced.source_info) == (
            like.invars,
            like.outvars,
            like.source_info,
        )


def test_values_of_an_outer_trace_become_inputs() -> None:
    with contract('has the values that a function closes over as constants', 'to follow such functions'):

        def outer(y: Any) -> Any:
            jaxpr = jax.make_jaxpr(lambda x: x * y + table)(X)
            closed, captured = rewriting.lift_captured_tracers(jaxpr)
            assert len(captured) == 1 and len(open_jaxpr(closed).invars) == 2
            return rewriting.eval_jaxpr(closed, [X, *captured])[0]

        table = jnp.arange(8.0) ** 2
        np.testing.assert_allclose(jax.jit(outer)(np.float32(3)), X * 3 + table)


def test_jaxprs_run_with_other_constants() -> None:
    table = jnp.ones(8)
    with contract('runs a jaxpr with other constants', 'to run operations on blocks'):
        jaxpr = jax.make_jaxpr(lambda x: x + table)(X)
        [result] = rewriting.eval_jaxpr(jaxpr, [X], [2 * table])
        np.testing.assert_array_equal(result, X + 2)


def test_parameters_of_jit_that_have_entries_for_operands_and_results() -> None:
    def fun(a: Any, b: Any) -> Any:
        return a, b, a + b, a - b, b

    with contract('has the known parameters of jit for each operand and result', 'to bind what it follows'):
        params = equation_in('jit', jax.jit(fun), X, X).params
        lengths = {name: len(value) for name, value in params.items() if isinstance(value, tuple) and value}
        expected = {
            **dict.fromkeys(rewriting.JIT_OPERAND_PARAMS, 2),
            **dict.fromkeys(rewriting.JIT_RESULT_PARAMS, 5),
        }
        assert lengths == expected


def test_a_jaxpr_runs_as_one_equation() -> None:
    with contract('binds a jaxpr as one jit', 'to keep the equations of the user'):
        jaxpr = jax.make_jaxpr(lambda a, b, c: (jnp.sin(a) * b, c))(X, X, X)

        def fun(*operands: Any) -> Any:
            return rewriting.bind_as_jit(jaxpr, operands, 'users')

        equation = equation_in('jit', fun, X, X, X)
        assert open_jaxpr(call_jaxpr(equation)).eqns == open_jaxpr(jaxpr).eqns
        assert equation.params['name'] == 'users'
        assert [eqn.primitive.name for eqn in all_equations(jaxpr)] == ['sin', 'mul']
        np.testing.assert_allclose(jax.jit(fun)(X, X, X)[0], np.sin(X) * X, rtol=1e-6)
        gradient = jax.grad(lambda x: fun(x, X, X)[0].sum())(X)
        np.testing.assert_allclose(gradient, np.cos(X) * X, rtol=1e-5, atol=1e-6)


def test_a_call_of_a_jaxpr_replaces_an_equation() -> None:
    with contract('runs a jit that calls another jaxpr', 'to open operations that are made of others'):
        table = jnp.arange(3.0)
        jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(X)
        other = jax.make_jaxpr(lambda x: x.at[..., 0].add(table.sum()))(X)
        [equation, last] = open_jaxpr(jaxpr).eqns
        call = rewriting.replace_by_jit(equation, other, equation.invars)
        assert (call.primitive.name, call.params['name']) == ('jit', 'sin')
        [result] = rewriting.eval_jaxpr(rewriting.replace_jaxpr(jaxpr, eqns=[call, last]), [X])
        np.testing.assert_allclose(result, 2 * np.asarray([3, *X[1:]]))
    with contract('takes the line of an equation from its source', 'to name the line of the user'):
        inner = rewriting.with_source_of(other, equation)
        assert {line_of(eqn) for eqn in open_jaxpr(inner).eqns} == {line_of(equation)}
        call = rewriting.with_inner_lines(call)
        assert {line_of(eqn) for eqn in open_jaxpr(call_jaxpr(call)).eqns} == {line_of(equation)}


def test_constants_are_in_the_order_of_their_variables() -> None:
    first, second = np.ones(2), np.zeros(3)
    jaxpr = jax.make_jaxpr(lambda x: (jnp.asarray(first) * x, jnp.asarray(second) * x))(1.0)
    with contract('has constants in the order of their variables', 'to run parts of jaxprs'):
        for var, value in rewriting.constants_of(jaxpr):
            assert var.aval.shape == value.shape


def test_an_equation_stays_where_a_primitive_is_not_mapped() -> None:
    like = equation_in('sin', jnp.sin, np.ones((2, 3)))

    def mapped(x: Any) -> Any:
        return jax.vmap(lambda x, size: jax.lax.ragged_dot(x, jnp.ones((1, 1, 3)), size))(
            x[:, None, :1] * jnp.ones((2, 1, 1)), jnp.ones((2, 1), int)
        )[:, 0]

    with contract('raises NotImplementedError where jax.vmap has no rule', 'to leave such loops alone'):
        assert rewriting.trace_equation_if_supported(jax.jit(jnp.cos), like) is not None
        assert rewriting.trace_equation_if_supported(jax.jit(mapped), like) is None


def test_an_equation_is_bound_to_other_operands() -> None:
    def bound(x: Any) -> Any:
        return rewriting.rebind(equation_in('reduce_sum', lambda x: x.sum(1), np.ones((2, 3))), x)

    with contract('binds an equation with its own parameters', 'to run it on parts of its operands'):
        np.testing.assert_array_equal(jax.jit(bound)(np.ones((4, 3))), np.full(4, 3.0))


def test_a_part_of_a_jaxpr_is_extracted_as_a_jaxpr() -> None:
    def fun(x: Any, y: Any) -> Any:
        doubled = 2 * x
        return jnp.sin(doubled) + y, jnp.cos(y)

    jaxpr = jax.make_jaxpr(fun)(X, X)
    doubled, sine, *_ = open_jaxpr(jaxpr).eqns
    with contract('lets a jaxpr have other arguments and results', 'to run a part of it'):
        part = rewriting.extract_subjaxpr(jaxpr, doubled.outvars, sine.outvars)
        assert len(open_jaxpr(part).eqns) == 1
        np.testing.assert_allclose(rewriting.eval_jaxpr(part, [X])[0], np.sin(X), rtol=1e-6)


def test_a_jaxpr_is_flattened() -> None:
    def fun(x: Any) -> Any:
        numbers = jnp.arange(4.0)

        def step(c: Any, _: None) -> Any:
            return jax.jit(lambda c: jnp.sin(c) * numbers)(c), None

        return lax.scan(step, jax.jit(jnp.cos)(x), None, length=2)[0]

    jaxpr = jax.make_jaxpr(fun)(np.ones(4, np.float32))
    with contract('lets equations be copied, with other variables', 'to see what is sorted and put back'):
        flat = rewriting.inline_and_sink_constants(jaxpr, {'iota', 'convert_element_type', 'mul', 'add'})
        names = [eqn.primitive.name for eqn in open_jaxpr(flat).eqns]
        [loop] = [eqn for eqn in open_jaxpr(flat).eqns if eqn.primitive.name == 'scan']
        inside = [eqn.primitive.name for eqn in open_jaxpr(loop_of(loop).body).eqns]
        assert 'jit' not in names and inside[0] == 'iota' and 'jit' not in inside
        x = np.linspace(0, 1, 4, dtype=np.float32)
        np.testing.assert_allclose(rewriting.eval_jaxpr(flat, [x])[0], fun(x), rtol=1e-6)


@pytest.mark.parametrize('fun', [jnp.sin, lambda x: x + x, lambda x: jnp.sort(x), lambda x: jnp.split(x, 2)])
def test_an_equation_is_evaluated(fun: Any) -> None:
    x = np.linspace(0, 1, 4, dtype=np.float32)
    [equation] = open_jaxpr(rewriting.inline_calls(jax.make_jaxpr(fun)(x), lambda call: True)).eqns
    with contract('makes a jaxpr of one equation', 'to run steps equation by equation'):
        actual = rewriting.eval_equation(equation, [x] * len(equation.invars))
        np.testing.assert_array_equal(actual, jax.tree.leaves(fun(x)))


MANY, ROWS, PLACES = np.ones((6, 4), np.float32), np.ones((3, 4), np.float32), np.array([[1], [2]])
LOOKED_UP = lax.GatherDimensionNumbers((0,), (1,), (1,))
# Primitives with size parameters: function, further operands, resized shape.
RESIZED: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    'reshape': (lambda x: x.reshape(6, 2, 2), (), (3, 2, 2)),
    'broadcast_in_dim': (lambda x: lax.broadcast_in_dim(x, (2, 6, 4), (1, 2)), (), (2, 3, 4)),
    'slice': (lambda x: lax.slice(x, (0, 1), (6, 3)), (), (3, 2)),
    'dynamic_slice': (
        lambda x, i, j: lax.dynamic_slice(x, (i, j), (6, 2)),
        (np.int32(0), np.int32(1)),
        (3, 2),
    ),
    'gather': (lambda x, i: lax.gather(x, i, LOOKED_UP, (6, 1), mode='clip'), (PLACES,), (3, 2)),
    'sin': (jnp.sin, (), (3, 4)),
}


@pytest.mark.parametrize('name', RESIZED)
def test_an_equation_runs_with_other_sizes(name: str, mesh: Mesh) -> None:
    fun, others, shape = RESIZED[name]
    equation = equation_in(name, fun, MANY, *others)

    def run(x: Any) -> Any:
        return rewriting.eval_on_ambient_mesh(
            equation, [x, *others], **rewriting.resized_params(equation, [ROWS.shape], [shape])
        )

    with contract('lets equations run with other sizes in their parameters', 'to run them on fewer rows'):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            mapped = jax.shard_map(run, in_specs=P(), out_specs=P(), check_vma=False)
            [result] = jax.eval_shape(mapped, ROWS)
        assert result.shape == shape


def test_an_equation_has_other_results() -> None:
    like, other = equation_in('sin', jnp.sin, X), equation_in('cos', jnp.cos, X)
    with contract('lets the results of an equation be replaced', 'to put another one in its place'):
        assert rewriting.with_results(like, other.outvars).outvars == other.outvars


def test_an_equation_gets_new_results() -> None:
    like = equation_in('sin', jnp.sin, X)
    with contract('makes variables of a type', 'to compute a value twice'):
        [result] = rewriting.with_new_results(like).outvars
        assert result is not like.outvars[0] and result.aval == like.outvars[0].aval


def test_an_equation_is_added() -> None:
    like = equation_in('sin', jnp.sin, X)
    with contract('makes one equation of a function of one operation', 'to add it to a jaxpr'):
        added = rewriting.trace_added_equation(jnp.cos, like, like.outvars)
        assert added.primitive.name == 'cos' and added.invars == like.outvars
        assert added.outvars[0].aval.shape == X.shape


def test_an_added_loop_takes_what_it_closes_over_in_its_own_order() -> None:
    operands = equation_in('select_n', lambda x: jnp.where(x > 0, x, 2 * x), X).invars[1:]
    like = equation_in('sin', jnp.sin, X)

    def looped(x: Any, y: Any, first: Any) -> Any:
        return jax.lax.scan(lambda carried, _: (carried * y + x, None), first, length=2)[0]

    with contract('makes one equation of a loop', 'to add it to a jaxpr'):
        added = rewriting.trace_added_equation(looped, like, [*operands, like.invars[0]])
        assert added.primitive.name == 'scan'
        # The body multiplies by `y` before it adds `x`, so `y` is its first captured value.
        assert [*map(id, added.invars)] == [id(operands[1]), id(operands[0]), id(like.invars[0])]


def test_rows_that_are_looked_up_one_by_one_keep_their_sizes() -> None:
    def looked_up(x: Any, i: Any) -> Any:
        return jnp.take_along_axis(x, i, 1, mode='clip')

    equation = equation_in('gather', looked_up, MANY, np.zeros((6, 1), np.int32))
    with contract(
        'has slices of one element along dimensions that indices have too', 'to look up fewer rows'
    ):
        sizes = rewriting.resized_params(equation, [(3, 4)], [(3, 1)])
        assert sizes == {'slice_sizes': equation.params['slice_sizes']}


def test_equations_inside_are_rewritten() -> None:
    def fun(x: Any) -> Any:
        inner = jax.jit(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))
        return lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]

    def cosine(equation: Any) -> Any:
        replacements = {'sin': jnp.cos}
        replacement = replacements.get(equation.primitive.name)
        return equation if replacement is None else rewriting.trace_equation(replacement, equation)

    jaxpr = jax.make_jaxpr(fun)(X)
    with contract('takes other jaxprs for calls, loops and branches', 'to change equations inside'):
        changed = rewriting.Rewriter(cosine).jaxpr(jaxpr)
        np.testing.assert_allclose(
            rewriting.eval_jaxpr(changed, [X + 1])[0], np.cos(np.cos(X + 1)), rtol=1e-6
        )
        assert rewriting.Rewriter(lambda eqn: eqn).jaxpr(jaxpr) is jaxpr


def test_calls_are_inlined() -> None:
    @jax.jit
    def twice(x: Any) -> Any:
        return jnp.sin(jax.jit(jnp.cos)(x)), x, 1.0

    def fun(x: Any) -> Any:
        return twice(x), twice(x + 1)

    jaxpr = jax.make_jaxpr(fun)(X)
    with contract('lets equations have other operands and results', 'to inline calls'):
        inlined = rewriting.inline_calls(jaxpr, lambda eqn: True)
        assert [eqn.primitive.name for eqn in open_jaxpr(inlined).eqns] == [
            'cos',
            'sin',
            'add',
            'cos',
            'sin',
        ]
        expected = jax.tree.leaves(fun(X))
        for actual_leaf, expected_leaf in zip(rewriting.eval_jaxpr(inlined, [X]), expected, strict=True):
            np.testing.assert_allclose(actual_leaf, expected_leaf, rtol=1e-6)
