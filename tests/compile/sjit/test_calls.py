"""Calls of sjit functions: passing arguments, static and donated arguments, and decorators."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.axes import named_jit
from scalax.checkpoint import Checkpointer
from scalax.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    PlacementError,
    RuleError,
    ShardingError,
    StructureError,
)
from scalax.sharding import MeshShardingHelper, OptimizerStateShardingRule
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['data', 'model'])
X = np.arange(16, dtype=np.float32).reshape(8, 2)
Y = np.full((8,), 2, np.float32)


def f(x, y, scale=1.0, *rest, flag=False, power: int = 1, **named):
    """A function with every kind of parameter."""
    total = x.sum(1) * y * scale
    for extra in rest:
        total = total + extra
    for value in named.values():
        total = total + value
    return total**power if flag else total


def positional_only(x, /, y, *, z=3):
    return x.sum() + y.sum() + z


SPECS = (P('data'), P('data'))
CALLS = [
    pytest.param((X, Y), {}, id='positional'),
    pytest.param((X,), {'y': Y}, id='keyword'),
    pytest.param((), {'y': Y, 'x': X}, id='all keywords'),
    pytest.param((X, Y, 2.0), {}, id='explicit default'),
    pytest.param((X, Y), {'scale': 2.0}, id='default by keyword'),
    pytest.param((X, Y, 2.0, Y, Y), {}, id='varargs'),
    pytest.param((X, Y), {'a': Y, 'b': 3.0}, id='varkwargs'),
    pytest.param((X, Y), {'flag': True, 'power': 2}, id='static keywords'),
    pytest.param((X, Y, 1.0, Y), {'flag': True, 'power': 3, 'a': Y}, id='everything'),
]


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize(('args', 'kwargs'), CALLS)
@pytest.mark.parametrize(
    'in_shardings',
    [
        pytest.param(None, id='none'),
        pytest.param({'x': P('data', 'model'), 'y': P('data')}, id='dict'),
        pytest.param((P('data'), P('data'), None, P('data'), P('data')), id='tuple'),
        pytest.param([P('data'), P('data'), None, P('data'), P('data')], id='list'),
        pytest.param(P(), id='one'),
    ],
)
def test_every_call_returns_the_result_of_the_function(args, kwargs, in_shardings):
    if isinstance(in_shardings, tuple | list) and len(args) < 3:
        in_shardings = in_shardings[:3]
    if isinstance(in_shardings, tuple | list) and len(args) >= 3:
        in_shardings = in_shardings[: len(args)]
    compiled = HELPER.sjit(f, in_shardings, static_argnames=('flag', 'power'))
    for _ in range(2):
        np.testing.assert_allclose(compiled(*args, **kwargs), f(*args, **kwargs), rtol=1e-6)


def test_keyword_and_positional_calls_share_one_trace():
    traces = []

    @HELPER.sjit(in_shardings={'y': P('data')})
    def g(x, y):
        traces.append(1)
        return x + y

    g(Y, Y), g(Y, y=Y), g(x=Y, y=Y), g(y=Y, x=Y)
    assert len(traces) == 1


def test_positional_only_and_keyword_only():
    compiled = HELPER.sjit(positional_only, {'y': P('data')}, static_argnames='z')
    assert compiled(X, y=Y, z=4) == positional_only(X, Y, z=4)
    assert compiled(X, Y) == positional_only(X, Y)
    with pytest.raises(TypeError, match='positional-only'):
        compiled(x=X, y=Y)


def test_omitted_defaults_are_not_traced():
    def g(x, repeat=3):
        return [x] * repeat  # a traced repeat could not multiply a list

    assert len(HELPER.sjit(g)(X)) == 3


def test_default_omitted_before_a_keyword():
    def g(x, a=1.0, b=2.0, c=3.0):
        return x * a + b * c

    np.testing.assert_array_equal(HELPER.sjit(g)(X, b=5.0), X + 15)
    np.testing.assert_array_equal(HELPER.sjit(g)(X, c=5.0), X + 10)


@pytest.mark.medium
@pytest.mark.parametrize('static', [1, -2, (1,), (1, -1), (2, 1), [-1, 1]])
def test_static_argnums_in_any_form(static):
    def g(x, n, m):
        assert isinstance(n, int)
        return x * n + m

    compiled = HELPER.sjit(g, in_shardings=None, static_argnums=static)
    np.testing.assert_array_equal(compiled(X, 2, 3), X * 2 + 3)
    np.testing.assert_array_equal(compiled(X, m=3, n=4), X * 4 + 3)


def test_static_arguments_with_in_and_out_shardings():
    def g(x, kind, y):
        return {'sum': x + y, 'product': x * y}[kind]

    compiled = HELPER.sjit(g, (P('data'), P('data')), P('data'), static_argnums=1)
    for kind in ('sum', 'product', 'sum'):
        out = compiled(Y, kind, Y)
        np.testing.assert_array_equal(out, g(Y, kind, Y))
        assert out.sharding.spec == P('data')


def test_static_values_equal_but_of_another_type():
    seen = []

    @functools.partial(HELPER.sjit, static_argnums=1)
    def g(x, n):
        seen.append(type(n))
        return x * n

    for n in (1, True, 1.0, 1, True, 1.0):
        g(Y, n)
    assert seen == [int, bool, float]


def test_unhashable_static_argument(snapshot):
    def g(x, config):
        return x

    compiled = HELPER.sjit(g, static_argnames='config')
    with snapshot.raises(ArgumentError):
        compiled(Y, [1])


def test_static_name_among_extra_keywords():
    def g(x, **options):
        return x * 2 if options['mode'] == 'double' else x + options['shift']

    compiled = HELPER.sjit(g, static_argnames='mode')
    np.testing.assert_array_equal(compiled(Y, mode='double'), Y * 2)
    np.testing.assert_array_equal(compiled(Y, mode='shift', shift=Y), Y + Y)


def test_static_argnums_reach_into_varargs():
    def g(*args):
        return args[0] * args[1]

    compiled = HELPER.sjit(g, (P('data'),), static_argnums=1)
    np.testing.assert_array_equal(compiled(Y, 3), Y * 3)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            {'static_argnums': 2},
            'static_argnums=2: g takes 2 positional arguments (x, y)',
        ),
        (
            {'static_argnames': 'yy'},
            "static_argnames='yy': g has no such argument (did you mean 'y'?)",
        ),
        ({'static_argnums': 1, 'donate_argnums': 1}, 'g: y cannot be both static and donated'),
        (
            {'on_mismatch': 'move'},
            "on_mismatch is 'error' or 'reshard', got 'move'",
        ),
    ],
)
def test_bad_options(options, message):
    def g(x, y):
        return x

    with pytest.raises(ArgumentError) as error:
        HELPER.sjit(g, **options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    'in_shardings',
    [
        {'state': P()},
        {'n': P()},
        (P(), P(), P()),
        (P(),),
        jax.tree_util.Partial(max, P()),
    ],
)
def test_shardings_that_do_not_fit_the_arguments(in_shardings, snapshot):
    def g(x, y, n):
        return x

    with snapshot.raises(StructureError):
        HELPER.sjit(g, in_shardings, static_argnums=2)(Y, Y, 1)


@pytest.mark.parametrize('option', ['in_shardings', 'out_shardings', 'args_sharding_constraint'])
@pytest.mark.parametrize(
    ('rules', 'message'),
    [
        (
            'data',
            "the rules of {option} of g contain 'data' of type str, which is not a rule: give a "
            "ShardingRule, a PartitionSpec, a NamedSharding or None; write PartitionSpec('data')",
        ),
        (
            {'x': {'w': 8}},
            "the rules of {option} of g contain 8 of type int at 'x/w', which is not a rule: give a "
            'ShardingRule, a PartitionSpec, a NamedSharding or None',
        ),
    ],
    ids=['text', 'inside'],
)
def test_invalid_rules_are_errors_before_any_call(option, rules, message):
    def g(x):
        return x

    with pytest.raises(StructureError) as error:
        HELPER.sjit(g, **{option: rules})
    assert str(error.value) == message.format(option=option)


def test_names_that_python_does_not_take():
    for name in ('lambda', 'None', '<lambda>', 'class'):

        def f(x):
            return x * 2

        f.__name__ = name
        compiled = HELPER.sjit(f, in_shardings=P())
        assert compiled.__name__ == name
        np.testing.assert_array_equal(compiled(Y), Y * 2)


def test_leaves_that_are_not_arrays(snapshot):
    def g(x, config):
        return x

    with snapshot.raises(ArgumentError):
        HELPER.sjit(g)(Y, {'name': 'adam', 'rate': 0.1, 'hook': print, '': 'an empty key'})


def test_wrong_calls_fail_as_python_calls_do():
    compiled = HELPER.sjit(positional_only)
    with pytest.raises(TypeError, match=r"positional_only\(\) missing 1 required positional argument: 'y'"):
        compiled(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'w'"):
        compiled(X, Y, w=1)


def test_decorator_forms():
    @HELPER.sjit
    def plain(x):
        return x + 1

    @HELPER.sjit(in_shardings=P('data'))
    def called(x):
        return x + 1

    @functools.partial(HELPER.sjit, out_shardings=P('data'))
    def partial(x):
        return x + 1

    for compiled in (plain, called, partial, HELPER.sjit(lambda x: x + 1)):
        np.testing.assert_array_equal(compiled(Y), Y + 1)
    assert called(Y).sharding.spec == partial(Y).sharding.spec == P('data')


def test_not_a_function(snapshot):
    with snapshot.raises(ArgumentError):
        HELPER.sjit((P('data'),))


class Model:
    """A model whose step is compiled with a static ``self``."""

    def __init__(self, scale):
        self.scale = scale

    @functools.partial(HELPER.sjit, in_shardings=(P('data'),), static_argnums=0)
    def step(self, x, *, shift=0.0):
        """One step."""
        return x * self.scale + shift

    def __call__(self, x):
        return x * self.scale


def test_methods():
    two, three = Model(2), Model(3)
    np.testing.assert_array_equal(two.step(Y), Y * 2)
    np.testing.assert_array_equal(three.step(Y, shift=1.0), Y * 3 + 1)
    np.testing.assert_array_equal(two.step(Y), Y * 2)
    assert two.step.__doc__ == 'One step.'


def test_bound_methods_partials_and_callable_objects():
    model = Model(2)
    np.testing.assert_array_equal(HELPER.sjit(model, P('data'))(Y), Y * 2)
    np.testing.assert_array_equal(HELPER.sjit(model.__call__, P('data'))(Y), Y * 2)
    added = functools.partial(jnp.add, Y)
    np.testing.assert_array_equal(HELPER.sjit(added, P('data'))(Y), Y + Y)
    scaled = functools.partial(lambda x, *, by: x * by, by=3)
    np.testing.assert_array_equal(HELPER.sjit(scaled, P('data'))(Y), Y * 3)


def test_programs_have_the_name_of_the_function():
    def my_step(k, x):
        return x * k

    twice = functools.partial(functools.partial(my_step), 2)
    for fun, name in ((twice, 'my_step'), (Model(2), 'Model'), (lambda x: x, '_lambda')):
        assert f'module @jit_{name} ' in HELPER.sjit(fun).lower(Y).as_text()
    assert HELPER.sjit(twice).__name__ == 'my_step'


@HELPER.sjit(in_shardings=P('data'))
def module_level(x, y: float = 2.0) -> jax.Array:
    """Adds."""
    return x + y


def test_looks_like_the_function():
    assert module_level.__name__ == module_level.__qualname__ == 'module_level'
    assert module_level.__doc__ == 'Adds.'
    assert module_level.__module__ == __name__
    assert list(inspect.signature(module_level).parameters) == ['x', 'y']
    assert inspect.signature(module_level).parameters['y'].default == 2.0
    assert module_level.__wrapped__(1, 2) == 3


def test_lower_trace_and_eval_shape():
    def g(x, n, y=0.0):
        return {'out': x * n + y}

    compiled = HELPER.sjit(g, {'x': P('data')}, {'out': P('data')}, static_argnames='n')
    struct = jax.ShapeDtypeStruct((8,), np.float32)
    assert compiled.eval_shape(struct, n=2)['out'].shape == (8,)
    executable = compiled.lower(struct, n=2, y=1.0).compile()
    assert executable.output_shardings['out'].spec == P('data')
    assert 'mul' in str(compiled.trace(struct, 2).jaxpr)
    lowered = compiled.lower(struct, 2)
    assert 'jit_g' in lowered.as_text()


def test_shardings_for():
    def g(state, n, batch, extra=None):
        return state, batch.sum()

    compiled = HELPER.sjit(g, {'batch': P('data')}, (P('data'), None), static_argnums=1)
    state = {'a': jax.ShapeDtypeStruct((8,), np.float32)}
    inputs, outputs = compiled.shardings_for(state, 3, jax.ShapeDtypeStruct((16, 2), np.float32))
    assert [jax.tree.leaves(tree) for tree in inputs] == [[], [inputs[1]]]
    assert inputs[1].spec == P('data')
    assert outputs[0]['a'].spec == P('data')
    assert outputs[1] is None


def test_get_jitted_function_by_args():
    compiled = HELPER.sjit(f, {'x': P('data')}, static_argnames=('flag', 'power'))
    jitted = compiled.get_jitted_function_by_args(X, Y, flag=True, power=2)
    np.testing.assert_allclose(jitted(X, Y, flag=True, power=2), f(X, Y, flag=True, power=2))
    plain = HELPER.sjit(lambda x, y: x + y, (P('data'), P('data')))
    jitted = plain.get_jitted_function_by_args(Y, Y)
    assert jitted.lower(Y, Y).compile().input_shardings[0][0].spec == P('data')


def test_clear_cache():
    traces = []

    @HELPER.sjit(in_shardings=P('data'))
    def g(x):
        traces.append(1)
        return x

    g(Y)
    g.clear_cache()
    g(Y)
    assert len(traces) == 2


def test_no_arguments_at_all():
    init = HELPER.sjit(lambda: {'w': jnp.ones((8, 8))}, out_shardings=P('data'))
    assert init()['w'].sharding.spec == P('data')


AOT_CALLS = {
    'defaults': (((X,), {}), ((X,), {}), 6 * X),
    'a static one by position': (((X, 2), {}), ((X,), {}), 12 * X),
    'a value after a static one': (((X, 2, 3.0), {}), ((X, 3.0), {}), 18 * X),
    'extra ones and a static keyword': (
        ((X, 1, 2.0, 4.0), {'k': 4.0, 's': 'b'}),
        ((X, 2.0, 4.0), {'k': 4.0}),
        8 * X + 4,
    ),
    'keywords': (((X,), {'w': 1.0, 'y': 3.0}), ((X,), {'y': 3.0, 'w': 1.0}), 9 * X + 1),
}


@pytest.mark.parametrize(('lowered', 'called', 'expected'), AOT_CALLS.values(), ids=AOT_CALLS)
def test_executables_are_called_as_the_function_is(lowered, called, expected):
    @HELPER.sjit(static_argnames=('s', 'n'), in_shardings={'x': P('data')})
    def scaled(x, n=1, y=2.0, *more, k=3.0, s='a', **extra):
        return x * y * k * n + sum(more) + sum(extra.values())

    args, kwargs = lowered
    executable = scaled.lower(*args, **kwargs).compile()
    args, kwargs = called
    np.testing.assert_allclose(executable(*args, **kwargs), expected)
    assert executable.memory_analysis().argument_size_in_bytes >= X.nbytes // 8


def behind(x, y):
    return x + y


@functools.wraps(behind)
def with_rng(rng, *args):
    return behind(*args)


@functools.wraps(behind)
def with_rng_and_keywords(rng, *args, **kwargs):
    return behind(*args, **kwargs)


MISNAMED = {
    'in_shardings': ({'in_shardings': {'y': P('data')}}, 'in_shardings'),
    'args_sharding_constraint': ({'args_sharding_constraint': {'y': P('data')}}, 'args_sharding_constraint'),
    'donate_argnames': ({'donate_argnames': 'y'}, 'donate_argnames'),
    'static_argnames': ({'static_argnames': ('y',)}, 'static_argnames'),
}


@pytest.mark.parametrize(('options', 'option'), MISNAMED.values(), ids=MISNAMED)
def test_wrapped_names_with_other_parameters_are_rejected(options, option):
    for fun in (with_rng, with_rng_and_keywords):
        with pytest.raises((ArgumentError, StructureError), match=f'{option}.* no (such )?argument'):
            HELPER.sjit(fun, **options)
    compiled = HELPER.sjit(with_rng, (None, None, P('data')), donate_argnums=2)
    x, y = HELPER.shard(Y, P('data')), HELPER.shard(Y, P('data'))
    np.testing.assert_array_equal(compiled(0, x, y), 2 * Y)
    assert (x.is_deleted(), y.is_deleted()) == (False, True)


def test_misspelled_wrapped_names():
    def step(state, batch, *, states=None):
        return state + batch

    @functools.wraps(step)
    def wrapper(*args, timer=None, **kwargs):
        return step(*args, **kwargs)

    hint = r"\(did you mean 'state' or 'states'\?\)|\(did you mean 'state'\?\)"
    with pytest.raises(StructureError, match=f"in_shardings of step: there is no argument 'stat' {hint}"):
        HELPER.sjit(wrapper, in_shardings={'stat': P('dp')})
    with pytest.raises(ArgumentError, match=f"donate_argnames='statee': step has no such argument {hint}"):
        HELPER.sjit(wrapper, donate_argnames='statee')
    # Names of the wrapped function, of the wrapper, and names that a wrapper may pop from its keywords.
    HELPER.sjit(wrapper, in_shardings={'state': P('dp'), 'states': P(), 'timer': P(), 'mask': P()})


@pytest.mark.parametrize(('options', 'option'), MISNAMED.values(), ids=MISNAMED)
def test_wrapped_names_if_the_wrapper_adds_an_argument(options, option):
    @functools.wraps(behind)
    def with_log(*args, **kwargs):
        return behind(*args[1:], **kwargs)

    option = option if 'sharding' in option else 'an option'
    with pytest.raises(
        ArgumentError, match=f"behind: {option} names 'y', and the wrapper is called with more"
    ):
        HELPER.sjit(with_log, **options)(1.0, Y, Y)
    by_position = HELPER.sjit(with_log, in_shardings=(None, P('data'), P('data')), donate_argnums=1)
    x = HELPER.shard(Y, P('data'))
    np.testing.assert_array_equal(by_position(1.0, x, Y), 2 * Y)
    assert x.is_deleted()


def test_too_large_integers_are_listed():
    compiled = HELPER.sjit(lambda tree: tree)
    with pytest.raises(OverflowError) as caught:
        compiled({'a': 2**40, 'b': 1, 'c': -(2**40)})
    text = 'got numbers that are too large (Python int {} too large to convert to int32):\n{}'
    leaves = '  tree/a: Python int\n  tree/c: Python int'
    assert str(caught.value) == f'<lambda> {text.format(2**40, leaves)}'
    with pytest.raises(ArgumentError, match='not arrays:\n  tree/a: str\nWhat'):
        compiled({'a': 'text', 'b': 2**40})


def test_rules_of_a_call_that_omits_a_wrapped_argument():
    with pytest.raises(StructureError, match=r'has 2 entries, but this call has 1 positional argument \(x\)'):
        HELPER.sjit(jax.grad(lambda x, y=2.0: (x * y).sum()), (P('data'), None))(Y)


def refused_as_misplaced():
    x = HELPER.shard(Y, P())
    with pytest.raises(PlacementError):
        HELPER.sjit(lambda x: x + 1, P('data'))(x)
    return weakref.ref(x)


def refused_as_misplaced_later():
    x, compiled = HELPER.shard(Y, P()), HELPER.sjit(lambda x: x + 1, P('data'))
    compiled(Y)
    with pytest.raises(PlacementError):
        compiled(x)
    return weakref.ref(x)


def refused_as_deleted():
    x, compiled = jnp.array(Y), HELPER.sjit(lambda x, y: x + y)
    compiled(x, Y)
    gone = jnp.array(Y)
    gone.delete()
    with pytest.raises(ArgumentError, match='deleted'):
        compiled(x, gone)
    return weakref.ref(x)


def refused_as_donated_twice():
    x, compiled = HELPER.shard(Y, P('data')), HELPER.sjit(lambda x, y: x + y, P('data'), donate_argnums=0)
    compiled(Y, Y)
    with pytest.raises(ArgumentError, match='in several places'):
        compiled(x, x)
    return weakref.ref(x)


REFUSED = [refused_as_misplaced, refused_as_misplaced_later, refused_as_deleted, refused_as_donated_twice]


@pytest.mark.parametrize('refused', REFUSED)
def test_an_error_keeps_no_argument_alive(refused):
    gc.collect()
    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()


def test_negative_positions_count_in_the_wrapped_function():
    def step(state, old=None):
        return state * 2 if old is None else state + old

    @functools.wraps(step)
    def wrapper(*args, **kwargs):
        return step(*args, **kwargs)

    compiled = HELPER.sjit(wrapper, donate_argnums=-1)
    state, by_position, by_name = (HELPER.shard(Y, P('data')) for _ in range(3))
    np.testing.assert_array_equal(compiled(state), 2 * Y)
    compiled(state, by_position)
    compiled(state, old=by_name)
    assert [value.is_deleted() for value in (state, by_position, by_name)] == [False, True, True]

    @functools.wraps(behind)
    def with_log(*args):
        return behind(*args[1:])

    x, y = (HELPER.shard(Y, P('data')) for _ in range(2))
    HELPER.sjit(with_log, donate_argnums=-1)(1.0, x, y)
    assert (x.is_deleted(), y.is_deleted()) == (False, True)


def test_wrapped_positions_with_such_a_wrapper_have_no_names():
    compiled = HELPER.sjit(with_rng_and_keywords, donate_argnums=2)
    x, y = HELPER.shard(Y, P('data')), HELPER.shard(Y, P('data'))
    compiled(0, x, y=y)
    assert not x.is_deleted()
    assert not y.is_deleted()


def test_a_parameter_may_be_called_like_a_builtin():
    def clashing(Exception, tuple, *, error=2):
        return Exception + tuple + error

    compiled = HELPER.sjit(clashing)
    for _ in range(2):
        np.testing.assert_array_equal(compiled(Y, tuple=Y), 2 * Y + 2)


@pytest.mark.medium
@pytest.mark.parametrize('static', [None, 0])
def test_calls_with_varying_numbers_of_extra_arguments(static):
    """A program for fewer arguments would ignore some of them, and return a wrong result."""
    compiled = HELPER.sjit(lambda *args: sum(args), static_argnums=static)
    for count in (1, 2, 3, 1, 2, 4):
        assert compiled(*range(1, count + 1)) == sum(range(1, count + 1))


def test_fewer_extra_arguments_after_more():
    compiled = HELPER.sjit(lambda *args: sum(args))
    assert [compiled(1, 2), compiled(1), compiled()] == [3, 1, 0]


@pytest.mark.parametrize(
    ('option', 'hint'),
    [
        ('in_sharding', "did you mean 'in_shardings'?"),
        ('donate_argnum', "did you mean 'donate_argnums'?"),
        ('compiler_option', "did you mean 'compiler_options'?"),
        (
            'zzz',
            "known: 'in_shardings', 'out_shardings', 'static_argnums', 'args_sharding_constraint', "
            "'annotation_shardings', 'static_argnames', 'donate_argnums', 'donate_argnames', "
            "'batch_argnums', 'batch_argnames', ...",
        ),
    ],
)
@pytest.mark.parametrize('function', [None, f], ids=['decorator', 'function'])
def test_unknown_options_are_rejected_at_once(function, option, hint):
    with pytest.raises(ArgumentError) as error:
        HELPER.sjit(function, **{option: P()})
    assert str(error.value) == f'sjit has no option {option!r} ({hint})'


@pytest.mark.parametrize('option', [{'keep_unused': True}, {'inline': False}, {'compiler_options': {}}])
def test_options_of_jit_are_accepted(option):
    assert HELPER.sjit(f, **option)(X, Y).shape == HELPER.sjit(**option)(f)(X, Y).shape == (8,)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (
            lambda: HELPER.plan(f2, X, quik=True),
            "neither plan nor 'f2' has an argument 'quik' (did you mean 'quick'?)",
        ),
        (
            lambda: HELPER.verify(HELPER.sjit(f2), X, seed=3),
            "neither verify nor 'f2' has an argument 'seed' (did you mean 'seeds'?)",
        ),
    ],
)
def test_a_misspelt_option_beside_arguments_of_the_function(call, message):
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value) == message


def f2(x):
    return x * 2


OF_MODULES = (
    'A module of equinox holds functions too: equinox.partition(module, equinox.is_array) gives its arrays '
    'and the rest, and equinox.combine joins them; equinox.filter_shard places all of its arrays alike; '
    'scalax.axes.named_jit takes entire modules.'
)
OF_LEAVES = 'shard trees of arrays, and take other leaves out (a function may close over them).'


@pytest.mark.medium
@pytest.mark.parametrize(
    ('take', 'kind', 'advice'),
    [
        (
            lambda module, _: HELPER.sjit(lambda module, x: module(x))(module, X[0]),
            ArgumentError,
            'leaves of a tree that also holds arrays cannot be static: take them out, and close over them.',
        ),
        (lambda module, _: HELPER.shard(module, P()), ShardingError, OF_LEAVES),
        (lambda module, _: HELPER.abstract(module, P()), ShardingError, OF_LEAVES),
        (lambda module, _: HELPER.explain(module, P()), ShardingError, OF_LEAVES),
        (lambda module, _: HELPER.match_sharding_rule(P(), module), ShardingError, OF_LEAVES),
        (lambda module, _: HELPER.make_shard_and_gather_fns(module, P()), ShardingError, OF_LEAVES),
        (lambda module, _: HELPER.visualize(module, P()), ShardingError, OF_LEAVES),
        (lambda module, _: HELPER.visualize(module), ShardingError, 'visualize a tree of arrays only.'),
        (
            lambda module, _: HELPER.reshard(module, P()),
            ArgumentError,
            'helper.shard moves arrays from and to host memory.',
        ),
        (lambda module, _: HELPER.broadcast_from(0, module), DataError, ''),
        (
            lambda module, _: OptimizerStateShardingRule(P(), module),
            RuleError,
            'which is not an array; pass the parameters that the optimizer was initialised with.',
        ),
        (lambda module, path: _save(module, path), CheckpointError, ''),
        (lambda module, path: Checkpointer(path).restore(HELPER, P(), module), ShardingError, OF_LEAVES),
    ],
)
def test_errors_about_modules_name_alternatives(take, kind, advice, tmp_path):
    eqx = pytest.importorskip('equinox')
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    with pytest.raises(kind) as error:
        take(model, tmp_path)
    message = str(error.value)
    assert 'activation' in message
    assert message.endswith(f'{advice} {OF_MODULES}' if advice else f'\nWhat to do: {OF_MODULES}')


def _save(module, path):
    with Checkpointer(path) as checkpoints:
        checkpoints.save(0, module)


@pytest.mark.medium
def test_alternatives_for_modules():
    eqx = pytest.importorskip('equinox')
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    by_hand = HELPER.sjit(lambda arrays, x: eqx.combine(arrays, rest)(x))
    np.testing.assert_allclose(by_hand(HELPER.shard(arrays, P()), X[0]), model(X[0]), rtol=1e-5)
    placed = eqx.filter_shard(model, HELPER.match_sharding_rule(P(), X))
    assert len(placed.layers[0].weight.sharding.device_set) == 8
    with HELPER.get_context():
        np.testing.assert_allclose(named_jit(lambda model, x: model(x))(model, X[0]), model(X[0]), rtol=1e-5)


def test_an_error_about_a_traced_flag_has_a_note_that_names_it():
    eqx = pytest.importorskip('equinox')

    class Model(eqx.Module):
        dropout: eqx.nn.Dropout
        scale: jax.Array

        def __call__(self, x, key):
            return self.scale * self.dropout(x, key=key)

    def apply(model, x, key):
        return model(x, key)

    model = Model(eqx.nn.Dropout(0.5), jnp.ones(8))
    for argument, leaf in ((model, 'Python bool'), (HELPER.shard(model, P()), 'bool[]')):
        with pytest.raises(jax.errors.TracerBoolConversionError) as error:
            HELPER.sjit(apply)(argument, X[0], jax.random.key(0))
        assert [note for note in error.value.__notes__ if note.startswith('apply')] == [
            'apply got flags in trees, and traces them like arrays (sjit and helper.shard make arrays of '
            f'Python bools):\n  model/dropout/inference: {leaf}\n'
            'What to do: take flags out of the tree before helper.shard, and close over them. For a module '
            'of equinox, equinox.partition(module, equinox.is_array) gives the arrays and the rest, and '
            'equinox.combine joins them inside the function; scalax.axes.named_jit takes entire modules.'
        ]
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        HELPER.sjit(lambda x, rows: x if x.any() else rows['x'])(X, {'x': X})
    assert 'flags' not in ''.join(getattr(error.value, '__notes__', []))


def test_a_function_that_calls_itself_ends_in_a_recursion_error():
    @HELPER.sjit
    def endless(x):
        return endless(x)

    with pytest.raises(RecursionError, match='endless calls itself'):
        endless(X)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason='jax.jit takes any value')
def test_invalid_options_of_jax_are_rejected_at_once():
    with pytest.raises(ValueError, match='inline'):
        HELPER.sjit(positional_only, inline='perhaps')


@pytest.mark.filterwarnings('ignore:Explicitly requested dtype')  # JAX warns and continues
@pytest.mark.parametrize('question', ['lower', 'trace', 'eval_shape', 'shardings_for'])
def test_structs_of_wide_dtypes(question):
    compiled = HELPER.sjit(lambda x: x * 2, P('data'))
    getattr(compiled, question)(jax.ShapeDtypeStruct((8,), np.float64))
    assert HELPER.abstract(np.ones(8), P('data')).dtype == np.float32


@pytest.mark.medium
def test_wrappers_are_called_with_their_own_parameters():
    def tenfold(fun):
        @functools.wraps(fun)
        def wrapper(*args, **kwargs):
            return fun(*args, **kwargs) * (10 if 'scale' in kwargs else 1)

        return wrapper

    def with_rng(fun):
        @functools.wraps(fun)
        def wrapper(x):
            return fun(x, rng=jax.random.key(0))

        return wrapper

    scaled = tenfold(lambda x, scale=1: x * scale)
    compiled = HELPER.sjit(scaled, in_shardings={'x': P('data')}, static_argnames='scale')
    for args, kwargs in (((X,), {}), ((X,), {'scale': 2}), ((X, 2), {}), ((), {'x': X, 'scale': 3})):
        np.testing.assert_array_equal(compiled(*args, **kwargs), scaled(*args, **kwargs))
    assert compiled.shardings_for(X)[0][0].spec == P('data')
    drawn = with_rng(lambda x, rng: x + jax.random.uniform(rng))
    np.testing.assert_allclose(HELPER.sjit(drawn)(X), drawn(X))


@pytest.mark.parametrize(
    ('bindings', 'message'),
    [
        (P('data'), 'annotation_shardings is a dict of annotation name -> rule, got {kind}'),
        ({1: P()}, 'annotation names are strings, got 1 in annotation_shardings'),
        (
            {'h': 'data'},
            "the rules of annotation_shardings['h'] contain 'data' of type str, which is not a rule: give a "
            "ShardingRule, a PartitionSpec, a NamedSharding or None; write PartitionSpec('data')",
        ),
    ],
)
def test_bindings_are_checked(bindings, message):
    for make in (
        lambda: HELPER.get_context(bindings),
        lambda: HELPER.sjit(lambda x: x, annotation_shardings=bindings),
    ):
        with pytest.raises(StructureError) as error:
            make()
        assert str(error.value) == message.format(kind=P.__name__)


def test_messages_of_jax_name_the_users_function():
    def returns_text(x):
        return 'text'

    with pytest.raises(TypeError, match=r'returns_text at .*test_calls\.py'):
        HELPER.sjit(returns_text)(X)


def test_donated_names_among_extra_keywords():
    compiled = HELPER.sjit(lambda **k: k['x'] + k['y'], {'x': P('data')}, donate_argnames='y')
    y = HELPER.shard(X, P('data'))
    np.testing.assert_array_equal(compiled(x=X, y=y), X + X)
    assert y.is_deleted()


def test_arguments_named_like_internal_names():
    def f(self, row, call):
        return self + row + call

    compiled = HELPER.sjit(f, P('data'))
    np.testing.assert_array_equal(compiled(self=X, row=X, call=X), 3 * X)
    assert compiled.lower(self=X, row=X, call=X).compile() is not None
    assert HELPER.sjit(lambda x, n: x * n, static_argnums=np.int64(1))(X, 2).shape == X.shape
