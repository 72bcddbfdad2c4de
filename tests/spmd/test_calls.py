"""Partitioned functions of all kinds, and all ways to call them: results, traces and collectives."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax import microbatch
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.compilations import anew
from tests.support.threads import in_threads

HELPER = MeshShardingHelper([8], ['fsdp'])
RULE, ROWS, COLUMNS = FSDPShardingRule(min_fsdp_size=1), P('fsdp'), P(None, 'fsdp')
RULES, BY_SPECS = (RULE, ROWS), (ROWS, ROWS)
W = np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)
X = np.linspace(0, 1, 1024, dtype=np.float32).reshape(64, 16) ** 2
EXPECTED = np.tanh(X @ W)
runs = []


@pytest.fixture(autouse=True)
def no_runs():
    runs.clear()


def layer(w, x):
    runs.append(1)
    return jnp.tanh(x @ w)


def wrapped(fun):
    @functools.wraps(fun)
    def inner(*args, **kwargs):
        return fun(*args, **kwargs)

    return inner


class Model:
    def apply(self, w, x):
        return layer(w, x)

    __call__ = apply
    method = HELPER.sjit(apply, in_shardings=RULES, out_shardings=COLUMNS, static_argnums=0)


def keywords_only(*, w, batch):
    return layer(w, batch)


def any_keywords(w, **batch):
    return layer(w, **batch)


def any_number(w, *batches):
    return sum((layer(w, x) for x in batches), start=0 * batches[0])


def nested(w, x):
    return HELPER.sjit(layer, in_shardings=RULES)(w, x)


def scaled(w, x, scale=2.0):
    return layer(w, x) * scale


def sjit(fun: Callable[..., Any], *args: Any, kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
    """A function, its options, and its calls."""
    options = {'in_shardings': RULES, 'out_shardings': COLUMNS, **options}
    return lambda: (HELPER.sjit(fun, **options), args or (() if kwargs else (W, X)), kwargs or {})


SAID = {'in_shardings': BY_SPECS, 'batch_argnums': 1}
NAMED = {'in_shardings': {'w': ROWS, 'x': ROWS}, 'batch_argnames': 'x'}
CALLS = {
    'function': sjit(layer),
    'bound method': sjit(Model().apply),
    'bound method, named': sjit(Model().apply, **NAMED),
    'object': sjit(Model()),
    'object, named': sjit(Model(), **NAMED),
    'method': lambda: (Model.method, (Model(), W, X), {}),
    'partial': sjit(functools.partial(layer, W), X, in_shardings=ROWS, batch_argnums=0),
    'partial of the object': sjit(functools.partial(Model.apply, Model())),
    'partial, named': sjit(
        functools.partial(layer, w=W), kwargs={'x': X}, in_shardings={'x': ROWS}, batch_argnames='x'
    ),
    'functools.wraps': sjit(wrapped(layer)),
    'functools.wraps, explicit': sjit(wrapped(layer), **SAID),
    'functools.wraps, named': sjit(wrapped(layer), **NAMED),
    'functools.wraps, from the end': sjit(wrapped(layer), in_shardings=BY_SPECS, batch_argnums=-1),
    'named_call': sjit(jax.named_call(layer, name='block')),
    'jit': sjit(jax.jit(layer)),
    'checkpoint': sjit(jax.checkpoint(layer)),
    'nested': sjit(nested),
    'by keyword': sjit(layer, W, kwargs={'x': X}),
    'by keyword, explicit': sjit(layer, W, kwargs={'x': X}, **SAID),
    'all by keyword, explicit': sjit(layer, kwargs={'x': X, 'w': W}, **SAID),
    'keyword only': sjit(keywords_only, kwargs={'w': W, 'batch': X}, in_shardings={'w': RULE, 'batch': ROWS}),
    'keyword only, explicit': sjit(
        keywords_only,
        kwargs={'w': W, 'batch': X},
        in_shardings={'w': ROWS, 'batch': ROWS},
        batch_argnames=['batch'],
    ),
    'any keywords': sjit(any_keywords, W, kwargs={'x': X}, **NAMED),
    'varargs': sjit(any_number),
    'varargs, from the end': sjit(any_number, in_shardings=BY_SPECS, batch_argnums=-1),
    'donated': sjit(layer, **SAID, donate_argnums=1),
    'static': sjit(scaled, W, X, 1.0, static_argnums=2),
    'number': sjit(scaled, W, X, 1, in_shardings=(RULE, ROWS, P())),
    'number without a rule': sjit(scaled, W, X, 1.0, in_shardings=(RULE, ROWS, None)),
    'constraint': sjit(layer, in_shardings=None, args_sharding_constraint=RULES),
    'constraint, not of the batch': sjit(layer, args_sharding_constraint=(RULE, None)),
    'constraint, not of the batch, explicit': sjit(
        layer, args_sharding_constraint=(RULE, None), batch_argnums=1
    ),
    'constraint of the batch': sjit(layer, in_shardings=(RULE, None), args_sharding_constraint=(None, ROWS)),
}


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('create', CALLS.values(), ids=CALLS)
def test_functions_and_calls_of_all_kinds(create):
    step, args, kwargs = create()
    step.clear_cache()  # equal functions share traces
    result = step(*args, **kwargs)
    np.testing.assert_allclose(result, EXPECTED, rtol=1e-5, atol=1e-5)
    assert result.sharding.spec == COLUMNS
    report = step.explain_propagation(*args, **kwargs)
    assert report.axes == ('fsdp',)
    assert {row.kind for row in report.gathered_examples} == {'all_to_all'}  # the columns of the result
    assert len(runs) == 1


@pytest.mark.medium
@pytest.mark.parametrize('name', ['method', 'partial', 'any keywords', 'nested', 'constraint'])
def test_plans_of_calls(name):
    """The plan counts the collectives of the call: a gather of the weight, an all-to-all of the columns."""
    step, args, kwargs = CALLS[name]()
    [totals] = HELPER.plan(step, *args, **kwargs).totals.values()
    weight = {} if name == 'partial' else {'all-gather': W.nbytes}  # it closes over the weight
    assert totals == {**weight, 'all-to-all': X.nbytes}


def grads(w, x):
    return jax.grad(lambda w: layer(w, x).sum())(w)


@pytest.mark.medium
def test_microbatch():
    expected = grads(W, X)
    inside = HELPER.sjit(microbatch(grads, 2, reduce='sum'), in_shardings=RULES)
    by_name = HELPER.sjit(
        microbatch(grads, 2, batch='x', reduce='sum'), in_shardings=BY_SPECS, batch_argnames='x'
    )
    outside = microbatch(HELPER.sjit(grads, in_shardings=RULES), 2, reduce='sum')
    runs.clear()
    for step in (inside, by_name, outside):
        np.testing.assert_allclose(step(W, X), expected, rtol=1e-5, atol=1e-5)
    assert len(runs) == 3
    for step in (inside, by_name):
        report = step.explain_propagation(W, X)
        assert (report.axes, report.gathered_examples) == (('fsdp',), ())


@contextlib.contextmanager
def compilations(name):
    """Returns the number of compilations of functions with this name so far."""
    names = []

    def listen(event, seconds, **metadata):
        if event == '/jax/core/compile/backend_compile_duration' and name in str(metadata.get('fun_name')):
            names.append(metadata['fun_name'])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.medium
def test_nothing_is_traced_or_compiled_more_often():
    """Compares calls of all kinds, one after the other, with a function that is not partitioned."""
    w, x = HELPER.shard(W, RULE), HELPER.shard(X, ROWS)
    counts = []
    for options in ({}, {'batch_argnums': ()}):

        def counted_layer(w, x):
            return layer(w, x)

        runs.clear()
        step = HELPER.sjit(counted_layer, in_shardings=RULES, out_shardings=ROWS, **options)
        calls = [
            lambda step=step: step(W, X),
            lambda step=step: step(w, x),
            lambda step=step: step(W, X),
            lambda step=step: step(w, X),
            lambda step=step: step.explain_propagation(W, X),
            lambda step=step: step.lower(w, x).compile(),
            lambda step=step: jax.jit(step)(w, x),
            lambda step=step: jax.grad(lambda w: step(w, X).sum())(W),
            lambda step=step: jax.grad(lambda w: step(w, X).sum())(W),
            lambda step=step: step(w, x),
        ]
        with anew(), compilations('counted_layer') as compiled:
            counts.append([])
            for call in calls:
                call()
                counts[-1].append((len(runs), len(compiled)))
    assert counts[0] == counts[1]
    assert counts[0][-1][0] == 1


def test_threads_that_make_the_first_call_together():
    def once(w, x):
        return layer(w, x)

    step = HELPER.sjit(once, in_shardings=RULES)
    with anew(), compilations('once') as compiled:
        results = in_threads(lambda _: np.asarray(step(W, X)), 8)
    assert (len(runs), len(compiled)) == (1, 1)
    for result in results:
        np.testing.assert_allclose(result, EXPECTED, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_without_jit():
    step = HELPER.sjit(layer, in_shardings=RULES)
    by_hand = jax.grad(lambda w: layer(w, X).sum())(W)
    with jax.disable_jit():
        np.testing.assert_allclose(step(W, X), EXPECTED, rtol=1e-5, atol=1e-5)
        gradient = jax.grad(lambda w: step(w, X).sum())(W)
        # These methods still trace.
        assert (
            str(step.explain_propagation(W, X))
            == 'layer is not partitioned along its batch: jax.disable_jit is active'
        )
        assert step.eval_shape(W, X).shape == X.shape
        assert HELPER.plan(step, W, X).totals
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-5, atol=1e-5)
    assert step.explain_propagation(W, X).axes == ('fsdp',)


def test_debug_nans_finds_nans_of_a_partitioned_step():
    step = HELPER.sjit(lambda w, x: jnp.log(layer(w, x) - 2), in_shardings=RULES)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r'nan.*log'):
        step(W, X)
    kept = HELPER.sjit(layer, in_shardings=RULES)
    with jax.debug_nans(True):
        np.testing.assert_allclose(kept(W, X), EXPECTED, rtol=1e-5, atol=1e-5)


def raised(w, x):
    raise KeyError('mine')


def concrete(w, x):
    return x if x.sum() > 0 else w


def no_array(w, x):
    return {'value': x @ w, 'name': object()}


@pytest.mark.parametrize('fun', [raised, concrete, no_array])
def test_errors_are_the_same_as_without_partitioning(fun):
    errors = []
    for options in ({}, {'batch_argnums': ()}):
        with pytest.raises(Exception) as error:  # compared with each other
            HELPER.sjit(fun, in_shardings=RULES, **options)(W, X)
        lines = [frame.lineno for frame in error.traceback if str(frame.path) == __file__]
        errors.append((type(error.value), str(error.value), lines[1:]))
    assert errors[0] == errors[1]


EXPLICIT, AUTO = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto


@pytest.mark.parametrize('types', [[EXPLICIT, EXPLICIT], [EXPLICIT, AUTO], [AUTO, EXPLICIT]], ids=str)
def test_explicit_axes_are_left_alone(types):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=types)
    step = helper.sjit(layer, in_shardings=(P(), ROWS), batch_argnums=1)
    np.testing.assert_allclose(step(W, X), EXPECTED, rtol=1e-5, atol=1e-5)
    assert step.explain_propagation(W, X).axes == ()


def test_inside_of_other_contexts():
    step = HELPER.sjit(layer, in_shardings=(P(), ROWS), batch_argnums=1)
    alone = HELPER.shard_map(lambda x: step(W, x), in_specs=ROWS, out_specs=ROWS)
    np.testing.assert_allclose(alone(X), EXPECTED, rtol=1e-5, atol=1e-5)
    for context in (jax.set_mesh(HELPER.mesh), HELPER.get_context()):
        with context:
            np.testing.assert_allclose(step(W, X), EXPECTED, rtol=1e-5, atol=1e-5)
            assert step.explain_propagation(W, X).axes == ('fsdp',)


GRID = MeshShardingHelper([2, 2, 2], ['data', 'fsdp', 'tp'])
BOTH = ('data', 'fsdp')
STACK = np.stack([X, -X, 2 * X, X / 2])
BATCHES = {
    'two axes': (lambda w, x: layer(w, x), (X,), (P(BOTH),), BOTH),
    'two dimensions': (
        lambda w, x: layer(w, x),
        (STACK,),
        (P('data', 'tp'),),
        ('data', 'tp'),
    ),
    'the second dimension': (
        lambda w, x: jax.lax.scan(lambda c, row: (layer(w, c + row), row), x[0], x)[0],
        (STACK,),
        (P(None, BOTH),),
        BOTH,
    ),
    'several arguments': (
        lambda w, x, y: layer(w, x) + layer(w, y),
        (X, 2 * X),
        (P('data'), P('fsdp')),
        BOTH,
    ),
    'trees of several ranks': (
        lambda w, batch, more: (
            layer(w, batch['x']) * batch['mask'][:, None] + more[0] * more[1][:, 0, 0, None]
        ),
        ({'x': X, 'mask': X[:, 0] > 0.1}, (np.float32(3), STACK.reshape(64, 8, 8))),
        ({'x': P(BOTH), 'mask': P(BOTH)}, (P(), P(BOTH))),
        BOTH,
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize('name', BATCHES)
def test_batches_of_all_shapes(name):
    fun, batches, specs, axes = BATCHES[name]
    step = GRID.sjit(fun, in_shardings=(RULE, *specs))
    report = step.explain_propagation(W, *batches)
    assert set(report.axes) == set(axes)
    # A sum of examples that are sharded over different axes.
    expected = {'add'} if name == 'several arguments' else set()
    assert {row.primitive for row in report.gathered_examples} == expected
    with jax.default_matmul_precision('highest'):
        np.testing.assert_allclose(step(W, *batches), jax.jit(fun)(W, *batches), rtol=1e-5, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('implementation', ['threefry2x32', pytest.param('rbg', marks=pytest.mark.slow)])
def test_integers_and_random_bits_are_exact(implementation):
    key = jax.random.key(0, impl=implementation)

    def fun(w, x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        integers = jnp.round(64 * x).astype(jnp.int32)
        matrix = jnp.round(8 * w).astype(jnp.int32)
        rows = jax.vmap(lambda key: jax.random.bits(key, (16,)))(jax.random.split(key, 64))
        products = jnp.where(keep, integers @ matrix, 0)
        sums = jax.lax.scan(lambda c, _: (c @ matrix % 91, c.sum()), products, None, length=3)
        return keep, products, sums, rows, jnp.argsort(products, axis=0), products.sum(), products.argmax(1)

    step = HELPER.sjit(fun, in_shardings=(*RULES, P()))
    assert step.explain_propagation(W, X, key).axes == ('fsdp',)
    for a, b in zip(*map(jax.tree.leaves, (step(W, X, key), jax.jit(fun)(W, X, key))), strict=True):
        np.testing.assert_array_equal(a, b)
