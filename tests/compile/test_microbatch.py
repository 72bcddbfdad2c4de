"""`scalax.microbatch`: microbatches give the gradient of the batch, and no example moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from scalax import microbatch
from scalax.errors import ArgumentError, DataError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
HELPERS = {
    'auto': MeshShardingHelper([4, 2], ['data', 'tp']),
    'explicit': MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=EXPLICIT),
    'mixed': MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=[EXPLICIT, AUTO]),
}
each_mesh = pytest.mark.parametrize('helper', HELPERS.values(), ids=HELPERS)


@pytest.fixture
def params(rng):
    return {'w': rng.normal(size=(16, 8)).astype(np.float32)}


@pytest.fixture
def batch(rng):
    x = rng.normal(size=(64, 16)).astype(np.float32)
    return {'x': x, 'y': rng.normal(size=(64, 8)).astype(np.float32)}


def loss(params, batch):
    return ((jnp.tanh(batch['x'] @ params['w']) - batch['y']) ** 2).mean()


def assert_close(tree, expected, tolerance=1e-6):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@each_mesh
@pytest.mark.parametrize('where', [P(), P('data')], ids=['replicated', 'fsdp'])
def test_the_gradient_of_the_full_batch(helper, where, params, batch):
    full_batch_step = helper.sjit(jax.value_and_grad(loss), in_shardings=(where, P('data')))
    expected, plan = full_batch_step(params, batch), helper.plan(full_batch_step, params, batch)
    summed_once = where == P() and helper is HELPERS['auto']
    options = {'in_shardings': (where, P('data')), **({'batch_argnums': 1} if summed_once else {})}
    for n in (1, 2, 16):
        parts = helper.sjit(microbatch(jax.value_and_grad(loss), n), **options)
        assert_close(parts(params, batch), expected)
        # Splitting the batch sends nothing: the collectives of one batch run n times. If parameters are
        # replicated, gradients are reduced once.
        times = 1 if summed_once else n
        counts = {kind: times * plan.count(kind) for kind in ('all-gather', 'all-reduce', 'reduce-scatter')}
        assert_collectives(
            parts,
            params,
            batch,
            all_to_all=0,
            collective_permute=0,
            **{kind.replace('-', '_'): count for kind, count in counts.items()},
        )


@pytest.mark.medium
@each_mesh
def test_the_function_is_traced_once(helper, params, batch):
    traces = []

    def counted(params, batch):
        traces.append(batch['x'].shape)
        return loss(params, batch)

    helper.sjit(microbatch(jax.grad(counted), 4), in_shardings=(P(), P('data')))(params, batch)
    assert traces == [(16, 16)]


def test_the_name_of_the_function_shows_in_the_program(batch):
    def my_loss(scale, batch):
        return scale * batch['x'].sum()

    parts = microbatch(functools.partial(my_loss, 2.0), 4, batch='batch')
    assert 'func private @my_loss' in jax.jit(lambda batch: parts(batch)).lower(batch).as_text()


def test_examples_are_interleaved(batch):
    parts = microbatch(lambda batch: batch['x'].sum(), 4, batch=0, reduce='sum')
    assert_close(parts(batch), jnp.sum(batch['x']), 1e-4)
    seen = []

    def look(x):
        jax.debug.callback(lambda x: seen.append(x.tolist()), x)
        return x.sum()

    microbatch(look, 2, batch='x', reduce='sum')(np.arange(6.0, dtype=np.float32))
    jax.effects_barrier()
    assert sorted(seen) == [[0, 2, 4], [1, 3, 5]]


def test_another_batch_axis_and_arguments_by_name(params, batch):
    def turned(params, *, x, y):
        return loss(params, {'x': x.T, 'y': y.T})

    parts = microbatch(jax.grad(turned), 4, batch=['x', 'y'], batch_axis=-1)
    assert_close(parts(params, x=batch['x'].T, y=batch['y'].T), jax.grad(loss)(params, batch))


@pytest.mark.medium
def test_an_auxiliary_output(params, batch):
    def with_aux(params, batch):
        value = loss(params, batch)
        return value, {'twice': 2 * value}

    grads_of = jax.value_and_grad(with_aux, has_aux=True)
    assert_close(microbatch(grads_of, 4)(params, batch), grads_of(params, batch))


@pytest.mark.medium
def test_weights(params, batch, rng):
    """The documented form for means over weighted examples."""
    batch = {**batch, 'weight': rng.integers(0, 2, 64).astype(np.float32)}

    def sums(params, batch):
        losses = ((batch['x'] @ params['w'] - batch['y']) ** 2).mean(1)
        return (losses * batch['weight']).sum(), batch['weight'].sum()

    grads_of = jax.value_and_grad(sums, has_aux=True)
    (_, weight), grads = microbatch(grads_of, 8, reduce='sum')(params, batch)

    def mean(params):
        value, weight = sums(params, batch)
        return value / weight

    expected = jax.grad(mean)(params)
    assert_close(jax.tree.map(lambda g: g / weight, grads), expected)
    (_, _), wrong = microbatch(grads_of, 8)(params, batch)
    assert float(abs(wrong['w'] / 8 - expected['w']).max()) > 1e-3


def test_sums_are_kept_in_float32():
    ones = np.ones((1024, 1), jnp.bfloat16)
    summed = microbatch(lambda x: x.sum(), 1024, batch=0, reduce='sum')
    assert summed(ones) == 1024
    narrow = microbatch(lambda x: x.sum(), 1024, batch=0, reduce='sum', accumulate_dtype=jnp.bfloat16)
    assert narrow(ones) == 256  # bfloat16 cannot count beyond this by ones
    assert summed(ones).dtype == jnp.bfloat16


@pytest.mark.medium
@pytest.mark.parametrize('dtype', ['float16', 'float8_e4m3fn', 'float8_e5m2', 'float4_e2m1fn'])
@pytest.mark.parametrize(('reduce', 'expected'), [('sum', 6), ('mean', 1.5)])
def test_narrow_floats(dtype, reduce, expected):
    parts = microbatch(lambda x: x[0], 4, batch=0, reduce=reduce)(np.array([0, 1, 2, 3], dtype))
    assert (parts.dtype, float(parts)) == (jnp.dtype(dtype), expected)


def test_positions_refer_to_positional_parameters():
    def scaled(scale, rows, *, weights):
        return (scale * rows * weights.sum()).sum()

    rows, weights = np.arange(6, dtype=np.float32), np.ones(2, np.float32)
    parts = microbatch(scaled, 3, batch=-1, reduce='sum')(2.0, rows, weights=weights)
    assert float(parts) == 2 * 15 * 2


def test_all_extra_arguments_are_split_by_name():
    def total(*args):
        return args[0].sum() + args[1].sum()

    rows = np.arange(6, dtype=np.float32)
    assert float(microbatch(total, 3, batch='args', reduce='sum')(rows, rows)) == 30


@pytest.mark.medium
def test_keys_are_folded(rng):
    def noise(x, key):
        return jax.random.normal(key, ()) + 0 * x.sum()

    key = jax.random.key(3)
    parts = microbatch(noise, 4, batch=0, rng='key')(np.ones(8, np.float32), key)
    expected = jnp.stack([jax.random.normal(jax.random.fold_in(key, i), ()) for i in range(4)]).mean()
    assert_close(parts, expected)


def test_keys_in_a_tree_and_defaults():
    ones = np.ones(8, np.float32)

    def noise(x, rngs, scale=ones):
        return jax.random.normal(rngs['dropout'], ()) + 0 * x.sum() + scale.sum()

    rngs = {'dropout': jax.random.key(3), 'other': jax.random.key(4)}
    parts = microbatch(noise, 4, batch=['x', 'scale'], rng='rngs')(np.ones(8, np.float32), rngs)
    keys = [jax.random.fold_in(rngs['dropout'], i) for i in range(4)]
    assert_close(parts, 2 + jnp.stack([jax.random.normal(key, ()) for key in keys]).mean())


@pytest.mark.medium
def test_inside_shard_map(params, batch):
    helper = HELPERS['auto']
    grads_of = microbatch(jax.value_and_grad(loss), 2)

    def block(params, batch):
        return jax.lax.pmean(grads_of(params, batch), ('data', 'tp'))

    mapped = helper.shard_map(block, (P(), P(('data', 'tp'))), P(), check_vma=False)
    assert_close(mapped(params, batch), jax.value_and_grad(loss)(params, batch))


def test_examples_that_are_not_divisible_on_each_device(params, batch):
    parts = microbatch(jax.grad(loss), 32)
    with pytest.raises(DataError, match=r'batch/x: float32\[64, 16\]: each device has 16 examples'):
        HELPERS['explicit'].sjit(parts, in_shardings=(P(), P('data')))(params, batch)
    # On Auto axes a trace does not know the shardings; XLA moves examples, and the gradient is still right.
    assert_close(
        HELPERS['auto'].sjit(parts, in_shardings=(P(), P('data')))(params, batch),
        jax.grad(loss)(params, batch),
    )


def test_outside_of_compiled_functions_it_is_compiled_once(params, batch):
    traces = []

    def counted(params, batch, power=2, note=None):
        traces.append(note)
        return (loss(params, batch) ** power).sum()

    by_parts = microbatch(jax.grad(counted), 4)
    first = by_parts(params, batch)
    for _ in range(3):
        again = by_parts(params, batch)
    assert traces == [None]
    jax.tree.map(np.testing.assert_array_equal, first, again)
    with pytest.raises(TypeError, match='note'):
        by_parts(params, batch, note='a string')


@pytest.mark.medium
@pytest.mark.parametrize('dtype', ['bfloat16', 'float8_e4m3fn', 'int4', 'float16', 'int8', 'bool'])
def test_data_of_all_dtypes_is_not_constant_folded(dtype):
    traces = []

    def total(rows):
        traces.append(rows.dtype)
        return rows.astype(np.float32).sum()

    by_parts = microbatch(total, 2, batch=0, reduce='sum')
    for number in (0, 1):
        assert float(by_parts(np.full(6, number, jnp.dtype(dtype)))) == 6 * number
    assert traces == [dtype]


def test_floats_are_not_static(batch):
    traces = []

    def scaled(batch, by):
        traces.append(1)
        return (batch['x'] * by).sum()

    by_parts = microbatch(scaled, 2, batch=0, reduce='sum')
    total = np.sum(batch['x'])
    for kinds in ((0.5, 2.0, -0.0), (0.5j, 2j), (np.float32(0.5), np.float32(3))):
        traces.clear()
        for by in kinds:
            np.testing.assert_allclose(by_parts(batch, by), total * by, rtol=1e-4)
            assert by_parts(batch, by).dtype == (np.complex64 if isinstance(by, complex) else np.float32)
        assert len(traces) == 1


def test_boolean_results_are_counted():
    assert int(microbatch(lambda x: x.all(), np.int64(3), batch=0, reduce='sum')(np.ones(6, bool))) == 3


def test_integer_results_are_summed():
    count = microbatch(lambda x: (x > 2).sum(), 2, batch=0, reduce='sum')
    assert int(count(np.arange(6))) == 3


ROWS = np.ones((6, 2), np.float32)
ERRORS = {
    'not a number': (
        lambda: microbatch(loss, 0),
        ArgumentError,
        'microbatch(fun, n): n is the number of microbatches, at least 1, got 0',
    ),
    'another reduction': (
        lambda: microbatch(loss, 2, reduce='max'),
        ArgumentError,
        "microbatch: reduce is 'mean' or 'sum', got 'max'",
    ),
    'sums of integers': (
        lambda: microbatch(loss, 2, accumulate_dtype=np.int32),
        ArgumentError,
        'microbatch: accumulate_dtype is a floating-point dtype, or None, got int32',
    ),
    'no dtype': (
        lambda: microbatch(loss, 2, accumulate_dtype='flot32'),
        ArgumentError,
        "microbatch: accumulate_dtype is a floating-point dtype, or None, got 'flot32'",
    ),
    'keys that are the batch': (
        lambda: microbatch(loss, 2, rng=('params', 'batch')),
        ArgumentError,
        'microbatch: batch cannot be both the batch (batch=...) and PRNG keys (rng=...)',
    ),
    'another argument': (
        lambda: microbatch(loss, 2, batch='bach'),
        ArgumentError,
        "microbatch: loss(params, batch) has no argument 'bach' (did you mean 'batch'?)",
    ),
    'a position among extra arguments': (
        lambda: microbatch(lambda *args: args[0].sum(), 2, batch=0),
        ArgumentError,
        'microbatch: <lambda>(*args) has no argument 0 (give its name)',
    ),
    'a gradient of flax nnx': (
        lambda: microbatch(nnx.value_and_grad(loss), 2),
        ArgumentError,
        'microbatch: grad_wrapper(*args, **kwargs) has no argument 1 (microbatch takes functions of arrays: '
        'nnx.split the model, and take jax.value_and_grad of a function that merges it, '
        'nnx.merge(graph, params, rest, copy=True))',
    ),
    'a position that no argument has': (
        lambda: microbatch(loss, 2, batch=(1, 2)),
        ArgumentError,
        'microbatch: loss(params, batch) has no argument 2 (give its name)',
    ),
    'rows that are not divisible': (
        lambda: microbatch(loss, 4)({}, {'x': ROWS, 'y': ROWS, 'n': 3}),
        DataError,
        'the batch of loss cannot be split into 4 microbatches along axis 0:\n'
        '  batch/n: int32[]: no axis 0\n'
        '  batch/x: float32[6, 2]: size 6 is not divisible by 4\n'
        '  batch/y: float32[6, 2]: size 6 is not divisible by 4\n'
        'What to do: choose a number of microbatches that divides the number of examples (on each device, so '
        'that none have to move), or name the arguments that are the batch (batch=...).',
    ),
    'nothing to split': (
        lambda: microbatch(loss, 4)({}, {'x': None}),
        DataError,
        'the batch of loss (batch) holds no arrays: all microbatches would be the same. Name the arguments '
        'that are the batch (batch=...)',
    ),
    'a mean of counts': (
        lambda: microbatch(lambda x: (x > 0).sum(), 2, batch=0)(ROWS),
        ArgumentError,
        'microbatch: cannot average leaves of the result that are not floating-point numbers:\n'
        '  (the leaf itself): int32[]\n'
        "What to do: return floating-point numbers, or sums and divide them (reduce='sum').",
    ),
}


@pytest.mark.parametrize('case', ERRORS.values(), ids=ERRORS)
def test_errors(case):
    act, kind, message = case
    with pytest.raises(kind) as error:
        act()
    assert str(error.value) == message
