"""`helper.verify` compares a step on a mesh with one device: its arguments, reports and errors."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from scalax._verification import compare
from scalax.errors import ArgumentError
from scalax.interop import nnx
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, with_sharding_annotation
from scalax.testing import VerificationReport, assert_equal_to_one_device

S = jax.ShapeDtypeStruct
RULE = FSDPShardingRule(min_fsdp_size=1)
ADAM = optax.adamw(1e-2)


@pytest.fixture
def helper():
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def train_step(state, batch):
    params, opt_state = state

    def loss(params):
        hidden = jnp.tanh(batch['x'] @ params['up'])
        hidden = with_sharding_annotation(hidden, 'hidden')
        return jnp.mean((hidden @ params['down'] - batch['y']) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def arguments():
    params = {'up': S((16, 32), 'float32'), 'down': S((32, 16), 'float32')}
    return (params, jax.eval_shape(ADAM.init, params)), dict.fromkeys('xy', S((16, 16), 'float32'))


def compiled(helper, function=train_step, **options):
    defaults = {'in_shardings': (RULE, P('fsdp')), 'out_shardings': (RULE, P()), 'donate_argnums': 0}
    return helper.sjit(function, **{**defaults, **options})


def summed(helper):
    """A wrong step: devices sum their local rows, and the sums are not reduced over the mesh."""

    @helper.sjit(in_shardings=(P(), P('fsdp')))
    def total(w, x):
        rows = jax.shard_map(lambda x: x.sum(0), in_specs=P('fsdp'), out_specs=P(), check_vma=False)(
            jnp.tanh(x @ w)
        )
        return {'rows': rows, 'count': x.shape[0] * jnp.ones((), 'int32')}

    return total, (S((8, 4), 'float32'), S((16, 8), 'float32'))


# --- What is equal -----------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_training_step_matches_one_device(axis_type):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=axis_type)
    if axis_type is AxisType.Explicit:
        step, args = (
            helper.sjit(lambda w, x: jnp.tanh(x) * w.sum(), in_shardings=(P(), P('fsdp'))),
            (S((8,), 'float32'), S((16, 8), 'float32')),
        )
    else:
        step, args = compiled(helper, annotation_shardings={'hidden': P('fsdp', 'tp')}), arguments()
    report = helper.verify(step, *args, seeds=2)
    assert report.ok, str(report)
    assert not report.differences


@pytest.mark.medium
def test_report_counts_results_seeds_and_steps(helper):
    report = helper.verify(compiled(helper), *arguments(), seeds=2, steps=3)
    assert (report.ok, report.results, report.seeds, report.steps) == (True, 8, 2, 3)
    assert str(report).startswith(
        'train_step on fsdp=4, tp=2 matches one device: 8 results, 3 consecutive steps, 2 seeds'
    )
    assert 'argument of sqrt in test_verify.py' in str(report)


@pytest.mark.medium
def test_concrete_arguments_keep_their_values(helper):
    seen = []

    def step(x, count, key, on):
        jax.debug.callback(lambda *values: seen.append(values), x, count, on)
        return x * jnp.where(on, count, 0) + jax.random.normal(key, x.shape)

    values = np.full((8, 4), 3.0, 'float32'), np.int32(7), jax.random.key(5), np.asarray(True)
    report = helper.verify(helper.sjit(step, in_shardings=P()), *values, seeds=2)
    assert report.ok, str(report)
    jax.effects_barrier()
    # The callback is called on the mesh, and not on one device, where the step runs several times.
    assert len(seen) == 2
    assert (seen[0][0] == 3.0).all() and int(seen[0][1]) == 7 and bool(seen[0][2])


@pytest.mark.medium
def test_static_arguments_and_keywords(helper):
    def layer(x, w, *, power, scale=None, kind='relu'):
        y = getattr(jax.nn, kind)(x @ w) ** power
        return y if scale is None else y * scale

    step = helper.sjit(
        layer, in_shardings={'x': P('fsdp'), 'w': P(None, 'tp')}, static_argnames=('power', 'kind')
    )
    x, w = S((16, 8), 'float32'), S((8, 4), 'float32')
    assert helper.verify(step, x, w, power=2).ok
    assert helper.verify(step, x, w=w, power=3, scale=S((), 'float32'), kind='gelu').ok


@pytest.mark.medium
def test_functions_of_jax_jit(helper):
    sharding = jax.NamedSharding(helper.mesh, P('fsdp'))
    step = jax.jit(lambda x, n: x * n, in_shardings=(sharding, None), static_argnums=())
    assert helper.verify(step, S((8, 4), 'float32'), 3).ok
    placed = jax.device_put(np.arange(32.0).reshape(8, 4), sharding)
    assert helper.verify(jax.jit(jnp.cumsum), placed).ok
    assert helper.verify(jax.jit(jnp.cumsum), S((8, 4), 'float32', sharding=sharding)).ok


def test_functions_that_are_not_compiled(helper):
    placed = helper.shard(np.arange(32.0).reshape(8, 4), P('fsdp'))
    assert helper.verify(jnp.cumsum, placed).ok


@pytest.mark.medium
def test_modules_of_nnx(helper):
    def step(model, optimizer, x):
        def loss(model):
            return jnp.mean(model(x) ** 2)

        value, grads = flax_nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    model = flax_nnx.eval_shape(lambda: flax_nnx.Linear(8, 16, rngs=flax_nnx.Rngs(0)))
    optimizer = flax_nnx.eval_shape(lambda: flax_nnx.Optimizer(model, ADAM, wrt=flax_nnx.Param))
    compiled = nnx.sjit(helper, step, in_shardings=(RULE, RULE, P('fsdp')))
    report = helper.verify(compiled, model, optimizer, S((16, 8), 'float32'), seeds=1)
    assert report.ok, str(report)


@pytest.mark.medium
def test_a_step_of_any_helper(helper):
    def make(helper):
        @helper.sjit(in_shardings=P('fsdp'))
        def total(x):
            rows = helper.shard_map(
                lambda x: jax.lax.psum(x.sum(0), 'fsdp'), in_specs=P('fsdp'), out_specs=P()
            )
            return rows(x), jax.lax.with_sharding_constraint(
                x, jax.NamedSharding(helper.mesh, P('fsdp', 'tp'))
            )

        return total, (S((16, 8), 'float32'),)

    assert helper.verify(make).ok
    step, args = make(helper)
    assert helper.verify(step, *args).ok


def mapped_directly(helper):
    return helper.shard_map(sum_of_rows, P('fsdp'), P())


def mapped_inside(helper):
    return lambda x: 2 * helper.shard_map(sum_of_rows, P('fsdp'), P())(x)


def mapped_and_differentiated(helper):
    return jax.grad(lambda x: mapped_directly(helper)(x).sum())


def compiled_inside(helper):
    return helper.sjit(lambda x: jnp.tanh(x) * 2, in_shardings=P('fsdp'), out_shardings=P('fsdp'))


def annotated_inside(helper):
    def step(x):
        with helper.get_context({'hidden': P('fsdp', 'tp')}):
            return with_sharding_annotation(2 * x, 'hidden')

    return step


def sum_of_rows(x):
    return jax.lax.psum(x.sum(0), 'fsdp')


@pytest.mark.medium
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    'make',
    [mapped_directly, mapped_inside, mapped_and_differentiated, compiled_inside, annotated_inside],
    ids=lambda make: make.__name__,
)
def test_code_that_uses_its_helper(make, axis_type):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=axis_type)
    report = helper.verify(helper.sjit(make(helper), in_shardings=P('fsdp')), S((16, 8), 'float32'), seeds=1)
    assert report.ok, str(report)


@pytest.mark.medium
@pytest.mark.parametrize(
    'make', [mapped_inside, compiled_inside, annotated_inside], ids=lambda make: make.__name__
)
def test_code_that_uses_a_helper_of_another_mesh(helper, make):
    other = MeshShardingHelper([8, 1], ['fsdp', 'tp'])
    step = helper.sjit(make(other), in_shardings=P('tp'))
    report = helper.verify(step, S((16, 8), 'float32'), seeds=1)
    assert report.ok, str(report)


@pytest.mark.medium
def test_a_fault_under_a_helper_of_another_mesh(helper):
    mapped = MeshShardingHelper([8], ['rows']).shard_map(lambda x: x.sum(0), P('rows'), P(), check_vma=False)
    assert not helper.verify(helper.sjit(lambda x: mapped(x) * 2), S((16, 8), 'float32'), seeds=1).ok


def sum_along_another_axis(x):
    y = x.sum(0)
    return jax.lax.psum(y, 'tp')


@pytest.mark.medium
def test_first_difference_in_a_shard_map_has_its_source_line(helper):
    mapped = helper.shard_map(sum_along_another_axis, P('fsdp'), P(), check_vma=False)
    report = helper.verify(helper.sjit(mapped, in_shardings=P('fsdp')), S((16, 8), 'float32'), seeds=1)
    assert not report.ok
    first = sum_along_another_axis.__code__.co_firstlineno
    assert report.first_difference.line == f'test_verify.py:{first + 1} sum_along_another_axis'
    line = f'test_verify.py:{first + 2} sum_along_another_axis'
    assert report.first_difference.device_dependent_ops == (f'psum along tp at {line}',)
    assert f'(inside: psum along tp at {line}) is the first operation that differs' in ' '.join(
        str(report).split()
    )


@pytest.mark.slow
def test_table_of_many_arguments_is_shortened(helper):
    def step(layers, others, x, rows):
        return sum(w.sum() for w in layers) + sum(leaf.sum() for leaf in others.values()) + x[rows].sum()

    names = [f'{first}{second}' for first in 'abcd' for second in 'abcdefgh']
    others = {name: S((4 + i,), 'float32') for i, name in enumerate(names)}
    layers = [S((8, 8), 'float32')] * 90
    compiled_step = helper.sjit(step, in_shardings=(P(), P(), P('fsdp'), P()))
    report = helper.verify(compiled_step, layers, others, S((16, 8), 'float32'), S((4,), 'int32'), seeds=1)
    text = str(report).splitlines()
    assert text[0].startswith('step on fsdp=4, tp=2 matches one device')
    listed = text[text.index('Values of the arguments:') + 3 :]
    assert len(listed) == 11
    assert listed[0].startswith('rows '), listed  # it has a reason
    assert listed[1].split() == ['layers/{0..89}', 'float32[8,8]', 'number']
    assert listed[-1] == '... and 25 more'
    assert len(report.arguments) == len(report.to_dict()['arguments']) == 124


def test_shapes_that_depend_on_the_mesh(helper):
    blocks = helper.shard_map(lambda x: jax.lax.psum(x, 'fsdp'), P('fsdp'), P())
    with pytest.raises(ArgumentError) as error:
        helper.verify(helper.sjit(blocks, in_shardings=P('fsdp')), S((16, 8), 'float32'))
    assert str(error.value) == (
        '<lambda> returns arrays of other shapes on the mesh than on one device:\n'
        '  (the result itself): float32[4,8] on the mesh, and float32[16,8] on one device\n'
        'What to do: return global arrays, whose shapes are the same on any mesh; the out_specs of a '
        'shard_map concatenate local shards along the mesh axes over which they differ.'
    )


@pytest.mark.medium
@pytest.mark.parametrize('shape', [(8,), (2, 2, 2), (1, 8)])
def test_other_meshes(shape):
    helper = MeshShardingHelper(shape, [*'abc'[: len(shape)]])
    rule = P([*'abc'][len(shape) - 1])
    assert helper.verify(helper.sjit(jnp.sort, in_shardings=rule), S((16, 4), 'float32')).ok


@pytest.mark.medium
def test_dimensions_that_do_not_divide(helper):
    helper = MeshShardingHelper.from_mesh(helper.mesh, on_indivisible='replicate')
    assert helper.verify(helper.sjit(jnp.cumsum, in_shardings=P('fsdp')), S((7, 3), 'float32')).ok


@pytest.mark.medium
def test_python_scalars_in_a_state(helper):
    def step(state, x):
        return {'w': state['w'] * state['rate'], 'rate': state['rate'] * 0.9, 'count': state['count'] + 1}, x

    compiled_step = helper.sjit(step, in_shardings=(RULE, P('fsdp')))
    for count in (0, np.int64(0)):
        state = {'w': np.ones((8, 4), 'float32'), 'rate': 0.5, 'count': count}
        report = helper.verify(compiled_step, state, np.ones((8,), 'float32'), seeds=2, steps=3)
        assert report.ok, str(report)
        assert report.steps == 3


@pytest.mark.medium
def test_float8_weights(helper):
    def step(w, x):
        return (x.astype(w.dtype).astype('float32') @ w.astype('float32')).astype(w.dtype) + w[0]

    compiled_step = helper.sjit(step, in_shardings=(P(), P('fsdp')))
    report = helper.verify(compiled_step, S((8, 4), jnp.float8_e4m3fn), S((16, 8), 'float32'), seeds=2)
    assert report.ok, str(report)


@pytest.mark.medium
def test_explicit_axis_types_take_shardings_from_arguments():
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=AxisType.Explicit)

    @helper.sjit(in_shardings=(P(), P('fsdp')))
    def step(w, x):
        def body(h, w):
            return jnp.tanh(jnp.einsum('bd,df->bf', h, w, out_sharding=P('fsdp', None))), None

        return jax.lax.scan(body, x, w)[0]

    report = helper.verify(step, S((3, 8, 8), 'float32'), S((16, 8), 'float32'), seeds=1)
    assert report.ok, str(report)


def test_results_without_elements(helper):
    step = helper.sjit(lambda x: (x[:0], x), in_shardings=P('fsdp'))
    report = helper.verify(step, S((8, 4), 'float32'), seeds=1)
    assert report.ok, str(report)


# --- What is not -------------------------------------------------------------------------------------


@pytest.mark.medium
def test_report_names_the_result_that_differs(helper):
    step, args = summed(helper)
    report = helper.verify(step, *args)
    assert not report.ok
    [difference] = report.differences
    assert (difference.path, difference.array, difference.spec) == ('rows', 'float32[4]', P())
    assert difference.seeds == report.seeds == 3
    assert difference.error > 1000 * difference.tolerance > 0
    assert difference.actual != difference.expected
    assert (report.first_difference.primitive, report.first_difference.device_dependent_ops) == (
        'shard_map',
        (),
    )
    assert report.first_difference.line.startswith('test_verify.py:')
    assert {ablation.change: ablation.still_differs for ablation in report.ablations}[
        'with no argument sharded along fsdp'
    ]


@pytest.mark.slow
def test_first_difference_is_not_an_operation_with_other_rounding(helper):
    def step(params, x):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p['w']) @ p['v']) ** 2))(params)
        grads['w'] = jax.shard_map(
            lambda g: jax.lax.psum(g, 'tp'), in_specs=P(), out_specs=P(), check_vma=False
        )(grads['w'])
        return grads, value

    compiled_step = helper.sjit(step, in_shardings=(RULE, P('fsdp')), out_shardings=(RULE, P()))
    params = {'w': S((16, 32), 'float32'), 'v': S((32, 8), 'float32')}
    for seeds in (1, 2, 3):
        report = helper.verify(compiled_step, params, S((32, 16), 'float32'), seeds=seeds)
        assert [difference.path for difference in report.differences] == ['0/w']
        assert report.first_difference.primitive == 'shard_map'


@pytest.mark.medium
def test_replicated_results_that_differ_between_devices(helper):
    """Devices have different values of a replicated result, and the first device has the right value."""

    @helper.sjit(in_shardings=P())
    def step(x):
        def with_an_error_on_one_device(x):
            return x + jnp.where(jax.lax.axis_index('fsdp') == 2, 1.0, 0.0)

        return jax.shard_map(with_an_error_on_one_device, in_specs=P(), out_specs=P(), check_vma=False)(x)

    [difference] = helper.verify(step, S((4,), 'float32'), seeds=1).differences
    assert difference.error == pytest.approx(1.0)


@pytest.mark.medium
def test_exact_values_have_to_be_equal(helper):
    @helper.sjit(in_shardings=P('fsdp'))
    def step(x):
        def on_each_device(x):
            first = jax.lax.axis_index('fsdp') == 3
            return x > 0, x.astype('int32').at[0, 0].add(first.astype('int32'))

        return jax.shard_map(on_each_device, in_specs=P('fsdp'), out_specs=P('fsdp'), check_vma=False)(x)

    [difference] = helper.verify(step, S((16, 4), 'float32')).differences
    assert (difference.path, difference.error, difference.tolerance) == ('1', 1.0, 0.0)
    assert difference.index == (12, 0)


@pytest.mark.medium
def test_integers_computed_from_rounded_sums_have_a_tolerance(helper):
    def step(w, x):
        def count(y):
            return jax.lax.psum((y > 0).sum(), 'tp')

        y = x @ w
        return y, jax.shard_map(count, in_specs=P('fsdp'), out_specs=P(), check_vma=False)(y)

    compiled_step = helper.sjit(step, in_shardings=(P(), P('fsdp')))
    report = helper.verify(compiled_step, S((8, 8), 'float32'), S((64, 8), 'float32'), seeds=1)
    [difference] = report.differences
    assert difference.path == '1'
    assert difference.error == abs(difference.actual - difference.expected)


@pytest.mark.medium
def test_difference_in_a_later_step(helper):
    def step(state, x):
        count, total = state
        device_index = jax.shard_map(
            lambda x: jax.lax.axis_index('fsdp') * jnp.ones(()),
            in_specs=P('fsdp'),
            out_specs=P(),
            check_vma=False,
        )(x)
        return (count * 2, total + jnp.where(count > 4, device_index, 0) + x.mean()), x.sum()

    state = np.int32(4), np.float32(0)
    compiled_step = helper.sjit(step, in_shardings=(RULE, P('fsdp')), out_shardings=(RULE, P()))
    report = helper.verify(compiled_step, state, np.ones((8, 2), 'float32'), seeds=1, steps=3)
    [difference] = report.differences
    assert (difference.path, difference.step) == ('0/1', 2)
    assert report.first_difference is None
    assert 'the results of the first step are equal' in report.why_not_localized


@pytest.mark.medium
def test_donated_argument_becomes_the_state_of_the_next_step(helper):
    def step(state, x):
        local_sum = jax.shard_map(lambda x: x.sum(), in_specs=P('fsdp'), out_specs=P(), check_vma=False)(x)
        return jnp.where(state > 100, local_sum, 200.0)

    compiled_step = helper.sjit(step, in_shardings=P('fsdp'), out_shardings=P('fsdp'), donate_argnums=0)
    [difference] = helper.verify(
        compiled_step, np.ones(8, 'float32'), S((8,), 'float32'), seeds=1
    ).differences
    assert difference.step == 2


@pytest.mark.medium
def test_step_that_raises_only_on_the_mesh(helper):
    calls = []

    def step(state, x):
        calls.append(1)
        return jax.tree.map(lambda leaf: leaf + x.mean(), state), x.sum()

    compiled_step = compiled(helper, step)

    def once(state, x):
        if len(calls) > 3:
            raise RuntimeError('Array has been deleted')
        calls.extend([1, 1, 1])
        return compiled_step(state, x)

    once.trace = compiled_step.trace
    once.__wrapped__ = step
    report = helper.verify(
        once, {'a': S((8,), 'float32'), 'b': S((8,), 'float32')}, S((16, 4), 'float32'), seeds=1
    )
    assert not report.ok
    assert 'step 2 raises on the mesh, but not on one device: RuntimeError: Array has been deleted' in str(
        report
    )


@pytest.mark.medium
def test_inside_compares_intermediate_values(helper):
    def step(x):
        local_sum = jax.shard_map(lambda x: x.sum(0), in_specs=P('fsdp'), out_specs=P(), check_vma=False)(x)
        return x + 0 * local_sum

    compiled_step = helper.sjit(step, in_shardings=P('fsdp'))
    assert helper.verify(compiled_step, S((16, 4), 'float32')).ok
    report = helper.verify(compiled_step, S((16, 4), 'float32'), compare_intermediates=True)
    assert not report.ok
    assert report.first_difference.primitive == 'shard_map'
    assert 'the results are equal, but intermediate values are not' in str(report)


@pytest.mark.medium
def test_inside_needs_a_compiled_step(helper):
    placed = helper.shard(np.arange(32.0).reshape(8, 4), P('fsdp'))

    def step(x):
        return jnp.cumsum(x)

    assert helper.verify(step, placed, seeds=1).ok
    report = helper.verify(step, placed, seeds=1, compare_intermediates=True)
    assert not report.ok
    assert 'in 1 of 1 result; intermediate values were not compared' in str(report)
    assert 'intermediate values were not compared: ArgumentError: step is not compiled' in str(report)


@pytest.mark.slow
def test_first_difference_inside_a_scan(helper):
    def step(w, x):
        def body(h, w):
            h = jnp.tanh(h @ w)
            h = jax.shard_map(
                lambda h: h / (1 + jnp.abs(h).max()), in_specs=P('fsdp'), out_specs=P('fsdp'), check_vma=False
            )(h)
            return h + 1, None

        return jax.lax.scan(body, x, w)[0]

    compiled_step = helper.sjit(step, in_shardings=(P(), P('fsdp')))
    report = helper.verify(compiled_step, S((3, 8, 8), 'float32'), S((16, 8), 'float32'))
    assert report.first_difference.primitive == 'shard_map'
    assert report.first_difference.difference.array == 'float32[3,16,8]'
    assert len(report.first_difference.difference.index) == 3


# --- What cannot be compared ------------------------------------------------------------------------


def test_nonfinite_results_are_not_compared(helper):
    step = helper.sjit(lambda x: (jnp.log(-jnp.abs(x) - 1), x), in_shardings=P('fsdp'))
    report = helper.verify(step, S((8, 4), 'float32'))
    assert (report.ok, report.nonfinite, report.differences) == (False, ('0',), ())
    assert 'not finite on one device: 0' in str(report)


def test_nondeterministic_results_are_not_compared(helper):
    rng = np.random.default_rng(0)
    step = helper.sjit(lambda x: (x + rng.normal(), 2 * x), in_shardings=P('fsdp'))
    report = helper.verify(step, S((8, 4), 'float32'))
    assert (report.ok, report.nondeterministic, report.differences) == (False, ('0',), ())


def test_results_of_a_nondeterministic_callback_are_not_compared(helper):
    rng = np.random.default_rng(0)

    def noise(x):
        return rng.normal(size=x.shape).astype(x.dtype)

    step = helper.sjit(lambda x: (jax.pure_callback(noise, x, x), 2 * x), in_shardings=P('fsdp'))
    report = helper.verify(step, S((8, 4), 'float32'))
    assert (report.ok, report.nondeterministic, report.differences) == (False, ('0',), ())


def test_callbacks_with_results_are_rejected(helper):
    def step(x):
        return jax.experimental.io_callback(lambda x: x, S((8, 4), 'float32'), x)

    with pytest.raises(ArgumentError, match=r'io_callback at test_verify.py:\d+ step would be called'):
        helper.verify(helper.sjit(step, in_shardings=P('fsdp')), S((8, 4), 'float32'))


def test_pure_callbacks_are_compared(helper):
    def step(x):
        return jax.pure_callback(np.sin, S(x.shape, x.dtype), x, vmap_method='expand_dims')

    assert helper.verify(helper.sjit(step, in_shardings=P()), S((8, 4), 'float32'), seeds=1).ok


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda h: h.verify(3), 'verify takes a function first, got int'),
        (lambda h: h.verify(h.sjit(jnp.sin)), 'verify got no arguments for sin'),
        (
            lambda h: h.verify(jnp.sin, S((8,), 'float32'), seeds=0),
            'seeds has to be a positive integer, got 0',
        ),
        (
            lambda h: h.verify(jnp.sin, S((8,), 'float32'), steps=True),
            'steps has to be a positive integer, got True',
        ),
        (
            lambda h: h.verify(lambda helper: 3),
            'has to return the step and the tuple of its arguments, got int',
        ),
        (
            lambda h: h.verify(jnp.sin, S((8,), 'float32'), config={}),
            'config is only for a function that makes',
        ),
        (lambda h: h.verify(lambda x, seeds: x, S((8,), 'float32'), seeds=3), "'seeds' is an option of"),
        (lambda h: assert_equal_to_one_device(jnp.sin, 3), 'give helper=..., because sjit did not make'),
    ],
)
def test_bad_input(helper, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(helper)


def test_a_mesh_of_one_device():
    helper = MeshShardingHelper([1, 1], ['fsdp', 'tp'], devices=jax.devices()[:1])
    with pytest.raises(ArgumentError, match='the mesh has one device'):
        helper.verify(helper.sjit(jnp.sin), S((8,), 'float32'))


# --- Reports ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_assert_equal_to_one_device(helper):
    step, args = summed(helper)
    with pytest.raises(AssertionError, match='total on fsdp=4, tp=2 does not match one device'):
        assert_equal_to_one_device(step, *args)
    assert_equal_to_one_device(compiled(helper), *arguments(), seeds=1)


@pytest.mark.medium
def test_json_and_pages(helper, tmp_path):
    step, args = summed(helper)
    report = helper.verify(step, *args, seeds=1)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain['ok'] is False
    assert plain['differences'][0]['path'] == 'rows'
    assert plain['first_difference']['primitive'] == 'shard_map'
    report.to_html(tmp_path / 'verified.html')
    page = (tmp_path / 'verified.html').read_text()
    assert 'does not match one device' in page
    assert 'float32[4]' in page


@pytest.mark.medium
def test_keyboard_interrupt_returns_a_partial_report(helper, monkeypatch):
    calls = []
    differing = compare.Comparison.run

    def interrupted(self, seed, *args):
        calls.append(seed)
        if seed == 1:
            raise KeyboardInterrupt
        differing(self, seed, *args)

    monkeypatch.setattr(compare.Comparison, 'run', interrupted)
    report = helper.verify(compiled(helper), *arguments())
    assert (report.ok, report.interrupted, report.seeds) == (False, True, 1)
    assert 'matches one device: 8 results' in str(report)
    assert 'stopped early' in str(report)
    assert calls == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        assert_equal_to_one_device(compiled(helper), *arguments())


# --- Steps that are too large ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 16384
    rows: int = 1024


def make_large(helper, config=Config()):
    def step(w, x):
        return jnp.tanh(x @ w).sum(0)

    shapes = S((config.width, config.width), 'float32'), S((config.rows, config.width), 'float32')
    return helper.sjit(step, in_shardings=(P('tp', 'fsdp'), P('fsdp'))), shapes


def large():
    return MeshShardingHelper.from_mesh(
        AbstractMesh((64, 8), ('fsdp', 'tp'), axis_types=(AxisType.Auto,) * 2)
    )


@pytest.mark.medium
@pytest.mark.parametrize('by', ['config', 'maker', 'arguments'])
def test_step_for_many_devices_is_downscaled(by):
    helper = large()
    step, args = make_large(helper)
    report = {
        'config': lambda: helper.verify(make_large, config=Config(), seeds=1),
        'maker': lambda: helper.verify(make_large, seeds=1),
        'arguments': lambda: helper.verify(step, *args, seeds=1),
    }[by]()
    assert isinstance(report, VerificationReport)
    assert report.ok, str(report)
    assert report.mesh == {'fsdp': 4, 'tp': 2}
    assert '16384 -> ' in report.downscaling[1]


def test_keyword_arguments_cannot_be_downscaled():
    helper = large()
    step, (w, x) = make_large(helper)
    with pytest.raises(ArgumentError, match='has to be downscaled'):
        helper.verify(step, w, x=x)


def test_a_step_without_results_is_not_equal(helper):
    report = helper.verify(helper.sjit(lambda x: None, in_shardings=P('fsdp')), S((8, 4), 'float32'))
    assert not report.ok
    assert 'was not compared: ' in str(report)
    assert 'it returns no arrays' in str(report)


@pytest.mark.medium
def test_steps_and_arguments_of_other_meshes(helper):
    other = MeshShardingHelper([2, 4], ['a', 'b'])
    with pytest.raises(ArgumentError, match=r'the mesh \(a=2, b=4\) of another helper'):
        helper.verify(other.sjit(jnp.sort, in_shardings=P('a')), S((8, 4), 'float32'))
    placed = other.shard(np.ones((8, 4), 'float32'), P('b'))
    assert helper.verify(helper.sjit(jnp.cumsum, in_shardings=P('fsdp')), placed, seeds=1).ok
    assert helper.verify(helper.sjit(jnp.cumsum), placed, seeds=1).ok
