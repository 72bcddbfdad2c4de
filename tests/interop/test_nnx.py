"""`scalax.interop.nnx`: compiled functions that update modules in place."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalax.errors import ArgumentError, ShardingError, StructureError
from scalax.interop import nnx
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    TreePathShardingRule,
    with_sharding_annotation,
)
from tests.support import gpu_compiler

FSDP = FSDPShardingRule(min_fsdp_size=1)
TP = TreePathShardingRule(('up/kernel', P('fsdp', 'tp')), ('down/kernel', P('tp', 'fsdp')), ('.*', P()))


class Block(flax_nnx.Module):
    """A block with all kinds of state: running means, dropout keys, and two names for one layer."""

    def __init__(self, rngs):
        self.up = flax_nnx.Linear(16, 32, rngs=rngs)
        self.down = flax_nnx.Linear(32, 16, rngs=rngs)
        self.norm = flax_nnx.BatchNorm(16, rngs=rngs)
        self.dropout = flax_nnx.Dropout(0.5, rngs=rngs)
        self.up_again = self.up

    def __call__(self, x):
        x = self.norm(x + self.down(self.dropout(flax_nnx.relu(self.up(x)))))
        return self.down(self.up_again(x))


def make(key):
    model = Block(flax_nnx.Rngs(key))
    return model, flax_nnx.Optimizer(model, optax.adamw(1e-2), wrt=flax_nnx.Param)


def train_step(model, optimizer, x):
    loss, grads = flax_nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def rows(count=64):
    return np.random.default_rng(0).normal(size=(count, 16)).astype('float32')


def helper():
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


@pytest.mark.slow
@pytest.mark.parametrize('rule', [FSDP, TP], ids=['fsdp', 'tp'])
@pytest.mark.parametrize('donated', [(), (0, 1)])
def test_training_gives_the_results_of_one_device(rule, donated):
    model, optimizer = make(jax.random.key(0))
    single_device = flax_nnx.jit(train_step)
    expected = [float(single_device(model, optimizer, rows())) for _ in range(4)]
    sharded = nnx.sjit(helper(), make, out_shardings=rule)(jax.random.key(0))
    step = nnx.sjit(
        helper(), train_step, in_shardings=(rule, rule, P('fsdp')), donate_argnums=donated, batch_argnums=-1
    )
    np.testing.assert_allclose([step(*sharded, rows()) for _ in range(4)], expected, rtol=2e-4)
    assert sharded[0].up is sharded[0].up_again
    pairs = zip(jax.tree.leaves(sharded), jax.tree.leaves((model, optimizer)), strict=True)
    for leaf, expected_leaf in pairs:
        np.testing.assert_allclose(numbers(leaf), numbers(expected_leaf), rtol=1e-2, atol=1e-5)
    assert 'fsdp' in sharded[0].up.kernel[...].sharding.spec
    assert int(sharded[1].step[...]) == 4


@pytest.mark.medium
def test_the_step_is_partitioned_along_its_batch_and_planned():
    mesh = helper()
    model, optimizer = nnx.sjit(mesh, make, out_shardings=FSDP)(jax.random.key(0))
    step = nnx.sjit(mesh, train_step, in_shardings=(FSDP, FSDP, P('fsdp')))
    report = step.explain_propagation(model, optimizer, rows(4096))
    assert (report.axes, report.batch) == (('fsdp',), ('x',))
    assert 'weight model/up/kernel/value for dot_general' in {row.reason for row in report.collectives}
    assert step.lower(model, optimizer, rows(4096)).as_text() == (
        step.pure.lower(*step.arguments(model, optimizer, rows(4096))).as_text()
    )
    plan = mesh.plan(step, model, optimizer, rows(4096))
    assert plan == mesh.plan(step.pure, *step.arguments(model, optimizer, rows(4096)))
    assert plan.name == 'train_step' and plan.propagation == report
    assert 'model/up/kernel/value' in [row.path for row in plan.inputs.rows]


@pytest.mark.slow
@gpu_compiler.needed
def test_a_step_is_planned_from_shapes_for_devices_that_are_not_attached():
    node = MeshShardingHelper.from_topology('h100:8', [4, 2], ['fsdp', 'tp'])
    step = nnx.sjit(node, train_step, in_shardings=(TP, TP, P('fsdp')), donate_argnums=(0, 1))
    model, optimizer = flax_nnx.eval_shape(make, jax.random.key(0))
    plan = node.plan(step, model, optimizer, jax.ShapeDtypeStruct((64, 16), 'float32'), quick=True)
    assert plan.fits and plan.device_cost.by_phase['backward'] > 0
    with pytest.raises(ArgumentError, match='train_step was called with x=: give each argument by its'):
        node.plan(step, model, optimizer, x=rows())


@pytest.mark.slow
@pytest.mark.parametrize('compiled', [train_step, flax_nnx.jit(train_step)], ids=['plain', 'nnx.jit'])
def test_a_decorator_and_a_step_that_is_compiled_for_one_device(compiled):
    model, optimizer = nnx.sjit(helper(), make, out_shardings=FSDP)(jax.random.key(0))
    before = np.asarray(model.down.kernel[...])
    step = nnx.sjit(helper(), in_shardings=(FSDP, FSDP, P('fsdp')), donate_argnums=(0, 1))(compiled)
    assert step(model, optimizer, rows()) > 0
    assert np.any(before != model.down.kernel[...])
    assert model.down.kernel[...].sharding.spec == P('fsdp')
    assert step.explain_propagation(model, optimizer, rows()).axes == ('fsdp',)


@pytest.mark.medium
def test_one_rule_for_all_and_arguments_without_modules():
    step = nnx.sjit(helper(), lambda model, scale: model(jnp.ones((8, 16))) * scale['by'], in_shardings=FSDP)
    model, _ = make(jax.random.key(0))
    assert step(model, {'by': 2.0}).shape == (8, 16)
    assert int(model.dropout.rngs.count[...]) == 1


def test_modules_within_a_tree():
    def double(tree, x):
        tree['block'][0].down.bias[...] += 1
        return x * 2

    model, _ = make(jax.random.key(0))
    out = nnx.sjit(helper(), double, in_shardings=(FSDP, P('fsdp')))({'block': [model]}, rows())
    np.testing.assert_array_equal(out, rows() * 2)
    np.testing.assert_array_equal(model.down.bias[...], 1)


def refused(function, *args, **options):
    with pytest.raises(ArgumentError) as caught:
        nnx.sjit(helper(), function, **options)(*args)
    return str(caught.value)


def test_errors():
    model, optimizer = make(jax.random.key(0))

    def adds(model):
        model.part = flax_nnx.Linear(16, 32, rngs=flax_nnx.Rngs(0))
        return model.part

    for returns in (
        adds,
        lambda model: [model.up],
        lambda model: model.up.kernel,
        lambda model: flax_nnx.List([model.up.kernel]),
    ):
        assert 'returns a module or a variable that it was given' in refused(returns, model)
    with pytest.raises(
        ArgumentError, match='train_step was called with optimizer=: give each argument by its'
    ):
        nnx.sjit(helper(), train_step)(model, optimizer=optimizer, x=rows())
    with pytest.raises(StructureError, match="there is no argument 'modle'"):
        nnx.sjit(helper(), train_step, in_shardings={'modle': FSDP})
    assert refused(lambda *models: None, in_shardings=(FSDP,), static_argnums=-1) == (
        'static_argnums=-1: <lambda> takes any number of arguments: count it from the start, or give '
        'in_shardings as one rule or a dict by name'
    )
    assert refused(train_step, model, optimizer, 3, in_shardings=(FSDP,), static_argnames='x') == (
        'train_step was called with 2 arguments besides static ones, and in_shardings are for 1'
    )
    # The static argument is the third one, which this call leaves out.
    assert refused(train_step, model, optimizer, in_shardings=(FSDP,), static_argnums=2) == (
        'train_step was called with 2 arguments besides static ones, and in_shardings are for 1'
    )
    assert refused(train_step, model, optimizer, in_shardings=(FSDP, FSDP, P('fsdp'))) == (
        'train_step was called with 2 arguments, and in_shardings are for 3'
    )


def test_sjit_has_the_parameters_of_the_helper():
    parameters, expected = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()][1:]
        for function in (nnx.sjit, MeshShardingHelper.sjit)
    )
    assert parameters == expected


@pytest.mark.medium
def test_options_by_position():
    def step(model, scale, x):
        model.down.bias[...] += scale
        return with_sharding_annotation(model(x), 'out')

    model, _ = nnx.sjit(helper(), make, P(), FSDP)(jax.random.key(0))
    constraint, bound = (FSDP, P('fsdp')), {'out': P('tp')}
    compiled = nnx.sjit(helper(), step, (FSDP, P()), P('fsdp'), 1, constraint, bound)
    by_name = nnx.sjit(helper(), step, (FSDP, P()), P('fsdp'), static_argnames='scale')
    out = compiled(model, 2, rows())
    assert out.sharding.spec == P('fsdp')
    assert model.down.bias[...].sharding.spec == P('fsdp')
    np.testing.assert_array_equal(model.down.bias[...], 2)
    plan = helper().plan(compiled, model, 2, rows())
    assert plan.inputs.rows[-1].spec == P()
    by_name(model, 3, rows())
    np.testing.assert_array_equal(model.down.bias[...], 5)


@pytest.mark.parametrize(
    ('option', 'hint'),
    [
        ('in_sharding', "did you mean 'in_shardings'?"),
        ('donate_argnum', "did you mean 'donate_argnums'?"),
        ('compiler_option', "did you mean 'compiler_options'?"),
    ],
)
@pytest.mark.parametrize('function', [None, train_step], ids=['decorator', 'function'])
def test_unknown_options_are_rejected_at_once(function, option, hint):
    with pytest.raises(ArgumentError) as raised:
        nnx.sjit(helper(), function, **{option: P()})
    assert str(raised.value) == f'sjit has no option {option!r} ({hint})'


@pytest.mark.parametrize('option', ['donate_argnums', 'batch_argnums', 'static_argnums'])
@pytest.mark.parametrize('position', [-3, 2, 'x', 1.5])
def test_positions_refer_to_the_function(option, position):
    def call(model, x):
        return model(x)

    with pytest.raises(ArgumentError) as raised:
        nnx.sjit(helper(), call, **{option: position})
    assert str(raised.value) == f'{option}={position}: call takes 2 positional arguments (model, x)'
    nnx.sjit(helper(), call, **{option: np.int64(-1)})


def appends(tree, x):
    tree['blocks'].append(flax_nnx.Linear(16, 16, rngs=flax_nnx.Rngs(0)))


def replaces(tree, x):
    tree['blocks'][0] = flax_nnx.Linear(16, 16, rngs=flax_nnx.Rngs(0))


@pytest.mark.parametrize('change', [appends, replaces])
def test_a_list_around_modules_cannot_be_changed(change):
    block = Block(flax_nnx.Rngs(0))
    tree = {'blocks': [block]}
    assert refused(change, tree, rows()) == (
        f'{change.__name__} changes a list, tuple or dict around the modules that it was given, which is a '
        "copy of the caller's: return the new one, or use nnx.List and nnx.Dict, which are changed in place"
    )
    assert tree['blocks'] == [block]


class Noisy(flax_nnx.Module):
    """A module whose computation differs by mode, with few operations to compile."""

    def __init__(self, rngs):
        self.scale = flax_nnx.Param(jnp.ones(16))
        self.dropout = flax_nnx.Dropout(0.5, rngs=rngs)
        self.norm = flax_nnx.BatchNorm(16, use_bias=False, use_scale=False, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dropout(x * self.scale))


def trains(model, x):
    model.train()
    return model(x)


def evaluates(model, x):
    model.eval()
    return model(x)


def trains_and_evaluates(model, x):
    model.train()
    y = model(x)
    model.eval()
    return y + model(x)


def switches(model, x):
    model.set_attributes(deterministic=not model.dropout.deterministic)
    return model(x)


def sows(model, x):
    model.sow(flax_nnx.Intermediate, 'squares', jnp.mean(x**2))
    return model(x)


def sows_a_sum(model, x):
    model.sow(flax_nnx.Intermediate, 'total', jnp.sum(x), init_fn=lambda: 0.0, reduce_fn=jnp.add)
    return model(x)


def sows_in_a_gradient(model, x):
    grads = flax_nnx.grad(lambda model: jnp.sum(sows(model, x) ** 2))(model)
    return grads['scale'][...]


def sows_and_pops(model, x):
    y = sows(model, x)
    [squares] = jax.tree.leaves(flax_nnx.pop(model, flax_nnx.Intermediate))
    return y + squares


def captures(model, x):
    y, captured = flax_nnx.capture(sows, flax_nnx.Intermediate)(model, x)
    return y + sum(jax.tree.leaves(captured))


# The mode of the module before the first call, and a step that changes the module's structure.
STRUCTURES = [
    ('train', trains),
    ('eval', trains),
    ('train', evaluates),
    ('eval', trains_and_evaluates),
    ('eval', switches),
    ('eval', sows),
    ('eval', sows_a_sum),
    ('eval', sows_in_a_gradient),
    ('eval', sows_and_pops),
    ('eval', captures),
]
sow_outside_of_capture = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


@pytest.mark.medium
@pytest.mark.sampled(3)
@sow_outside_of_capture
@pytest.mark.parametrize('mode, fun', STRUCTURES, ids=lambda case: getattr(case, '__name__', case))
def test_modes_and_sown_values_match_nnx_jit(mode, fun):
    def three_calls(compiler):
        traces = []

        def step(model, x):
            traces.append(model.dropout.deterministic)
            return fun(model, x)

        model = Noisy(flax_nnx.Rngs(0))
        getattr(model, mode)()
        variables, compiled, outputs = [model.scale, model.norm.mean], compiler(step), []
        for _ in range(3):
            outputs.append(compiled(model, rows(8)))
            outputs.append((model.dropout.deterministic, model.norm.use_running_average))
        assert model.scale is variables[0] and model.norm.mean is variables[1]
        return model, outputs, traces

    model, outputs, traces = three_calls(
        lambda step: nnx.sjit(helper(), step, in_shardings=(FSDP, P('fsdp')))
    )
    expected_model, expected_outputs, expected_traces = three_calls(flax_nnx.jit)
    assert traces == expected_traces
    for values, expected_values in ((outputs, expected_outputs), (model, expected_model)):
        expected_leaves, expected_structure = jax.tree.flatten(jax.tree.map(numbers, expected_values))
        leaves, structure = jax.tree.flatten(jax.tree.map(numbers, values))
        assert structure == expected_structure
        for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-4)


def numbers(leaf):
    """A leaf as an array of numbers, also if it is a random key."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@pytest.mark.medium
@sow_outside_of_capture
def test_sown_values_have_the_shardings_of_the_rule():
    def step(model, x):
        model.sow(flax_nnx.Intermediate, 'features', x)
        return model(x)

    rule = TreePathShardingRule(('features', P('fsdp')), ('.*', P()))
    compiled = nnx.sjit(helper(), step, in_shardings=(rule, P('fsdp')), donate_argnums=0)
    model = Block(flax_nnx.Rngs(0))
    for count in (1, 2):
        compiled(model, rows())
        assert [value.sharding.spec for value in model.features.get_value()] == [P('fsdp')] * count


@sow_outside_of_capture
def test_a_rule_without_an_answer_for_a_sown_value():
    def step(model, x):
        model.sow(flax_nnx.Intermediate, 'features', x)

    rule = TreePathShardingRule(('kernel|bias', P()))
    model = flax_nnx.Linear(16, 16, rngs=flax_nnx.Rngs(0))
    with pytest.raises(ShardingError) as caught:
        nnx.sjit(helper(), step, in_shardings=(rule, P('fsdp')))(model, rows())
    assert str(caught.value) == (
        "One leaf of the outputs of 'step' (out_shardings) cannot be sharded as asked (mesh: fsdp=4, tp=2):\n"
        '  0/0/features/value/0: float32[64, 16]\n'
        "    no regex of the rule matches the path 'features/value/0' (inside '0/0')\n"
        '    rule: TreePathShardingRule with 1 regex\n'
        "What to do: add a pair for these leaves, end with ('.*', PartitionSpec()), or pass strict=False to "
        'replicate unmatched leaves.'
    )
    assert not hasattr(model, 'features')


@pytest.mark.medium
def test_modules_that_are_added_removed_and_tied():
    def change(model, tree):
        model.added = flax_nnx.Linear(16, 32, rngs=flax_nnx.Rngs(0))
        model.up_again = model.added
        model.former_norm, model.norm = model.norm, flax_nnx.BatchNorm(16, rngs=flax_nnx.Rngs(1))
        del model.dropout
        tree['count'] += 1
        tree['calls'][...] += 1

    model, tree = Block(flax_nnx.Rngs(0)), {'calls': flax_nnx.Variable(jnp.zeros(())), 'count': jnp.zeros(())}
    up, norm, calls = model.up, model.norm, tree['calls']
    nnx.sjit(helper(), change, in_shardings=(FSDP, None))(model, tree)
    assert model.up is up and model.former_norm is norm and model.norm is not norm
    assert model.up_again is model.added and not hasattr(model, 'dropout')
    assert model.added.kernel[...].sharding.spec == P(None, 'fsdp')
    assert tree['calls'] is calls and float(calls[...]) == float(tree['count']) == 1


def replaces_a_layer(model):
    model.up = flax_nnx.Linear(16, 32, rngs=flax_nnx.Rngs(1))


def copies_a_layer(model):
    model.up = flax_nnx.clone(model.up_again)


def replaces_a_variable(model):
    model.down.kernel = flax_nnx.Param(2 * model.down.kernel[...])


def exchanges_variables(model):
    model.up.kernel, model.other.kernel = model.other.kernel, model.up.kernel


@pytest.mark.medium
@pytest.mark.parametrize(
    'change', [replaces_a_layer, copies_a_layer, replaces_a_variable, exchanges_variables]
)
def test_replacing_by_an_equal_object_is_a_change(change):
    # The structure of the modules is the same before and after.
    def change_and_apply(model, x):
        change(model)
        return model(x)

    results = []
    for step in (
        flax_nnx.jit(change_and_apply),
        nnx.sjit(helper(), change_and_apply, in_shardings=(FSDP, P())),
    ):
        model = Block(flax_nnx.Rngs(0))
        model.up_again = flax_nnx.Linear(16, 32, rngs=flax_nnx.Rngs(2))
        model.other = flax_nnx.Linear(16, 32, rngs=flax_nnx.Rngs(3))
        before = [model.up, model.up.kernel, model.down.kernel, model.other.kernel]
        values = [*map(np.asarray, before[1:])]
        outputs = [step(model, rows(8)) for _ in range(3)]  # an odd number of exchanges
        after = [model.up, model.up.kernel, model.down.kernel, model.other.kernel]
        same = [[new is old for old in before] for new in after]
        # The caller's references keep their values.
        unchanged = [np.array_equal(old, value) for old, value in zip(before[1:], values, strict=True)]
        results.append((same, unchanged, outputs))
    expected, result = results
    assert result[:2] == expected[:2]
    assert not all(result[0][i][i] for i in range(4))
    np.testing.assert_allclose(result[2], expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('new_for_each_epoch', [False, True])
def test_an_optimizer_for_each_epoch_is_traced_for_each_epoch(new_for_each_epoch):
    """The functions of an optax optimizer are part of the structure of an `nnx.Optimizer`."""

    def traces(compiler):
        count = 0

        def step(model, optimizer, x):
            nonlocal count
            count += 1
            return train_step(model, optimizer, x)

        compiled, model = compiler(step), flax_nnx.Linear(16, 16, rngs=flax_nnx.Rngs(0))
        transform = optax.adamw(1e-2)
        for _ in range(2):
            if new_for_each_epoch:
                transform = optax.adamw(1e-2)
            optimizer = flax_nnx.Optimizer(model, transform, wrt=flax_nnx.Param)
            for _ in range(2):
                compiled(model, optimizer, rows())
        return count

    expected = traces(flax_nnx.jit)
    assert traces(lambda step: nnx.sjit(helper(), step, in_shardings=(FSDP, FSDP, P('fsdp')))) == expected
    assert expected == (2 if new_for_each_epoch else 1)


@pytest.mark.medium
def test_switches_between_calls():
    model, _ = make(jax.random.key(0))
    step = nnx.sjit(helper(), lambda model, x: model(x), in_shardings=(FSDP, P('fsdp')))
    model.eval()
    np.testing.assert_array_equal(step(model, rows()), step(model, rows()))
    model.train()
    assert np.any(step(model, rows()) != step(model, rows()))


class Doubled(flax_nnx.Module):
    def __call__(self, x):
        return 2 * x


@pytest.mark.medium
def test_arguments_that_share_all_they_have_or_have_nothing():
    model, _ = make(jax.random.key(0))

    def step(model, part, none, x):
        part.bias[...] += 1
        return none(x)

    out = nnx.sjit(helper(), step, in_shardings=(FSDP, FSDP, FSDP, P('fsdp')))(
        model, model.up, Doubled(), rows()
    )
    np.testing.assert_array_equal(out, 2 * rows())
    np.testing.assert_array_equal(model.up.bias[...], 1)


@pytest.mark.slow
def test_variables_and_states_as_arguments_and_results():
    model, optimizer = make(jax.random.key(0))
    calls = flax_nnx.Variable(jnp.zeros((), 'int32'))

    def gradients(model, calls, x):
        calls[...] += 1
        return flax_nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

    grads = nnx.sjit(helper(), gradients, in_shardings=(FSDP, None, P('fsdp')), out_shardings=FSDP)(
        model, calls, rows()
    )
    before = np.asarray(model.up.kernel[...])
    nnx.sjit(helper(), lambda model, optimizer, grads: optimizer.update(model, grads), in_shardings=FSDP)(
        model, optimizer, grads
    )
    assert int(calls[...]) == int(optimizer.step[...]) == 1
    assert np.any(before != model.up.kernel[...])


@pytest.mark.medium
def test_shardings_by_name():
    def step(model, graph, scale=2.0):
        return model(graph) * scale

    model, _ = make(jax.random.key(0))
    model.eval()
    step = nnx.sjit(
        helper(),
        step,
        in_shardings={'model': FSDP, 'graph': P('fsdp')},
        static_argnums=2,
        batch_argnums=1,
    )
    np.testing.assert_allclose(step(model, rows()) * 2, step(model, rows(), 4.0), rtol=1e-6)
    assert model.up.kernel[...].sharding.spec == P(None, 'fsdp')


@pytest.mark.medium
def test_after_an_error_modules_are_as_before():
    def fails(model, x):
        model(x)
        raise RuntimeError('stop')

    model, _ = make(jax.random.key(0))
    with pytest.raises(RuntimeError, match='stop'):
        nnx.sjit(helper(), fails, donate_argnums=0)(model, rows())
    assert int(model.dropout.rngs.count[...]) == 0
    assert model(rows()).shape == (64, 16)


def test_errors_name_the_arguments_of_the_function():
    model, optimizer = make(jax.random.key(0))
    step = nnx.sjit(helper(), train_step, in_shardings=(FSDP, FSDP, P('fsdp')))
    with pytest.raises(ShardingError, match=r"(?s)'train_step'.*x: float32\[9, 16\]"):
        step(model, optimizer, rows(9))


MODEL = flax_nnx.Linear(16, 16, rngs=flax_nnx.Rngs(0))


def test_a_module_that_is_no_argument_cannot_be_changed():
    def around(x):
        MODEL.kernel[...] *= 2
        return MODEL(x)

    text = (
        r'(?s)around changes a module that is not one of its arguments: .* \(Cannot mutate .*\)\.\n'
        r'What to do: make the module an argument, also of inner functions \(nnx\.grad, nnx\.scan\)\. Inside '
        r'jax\.grad, jax\.lax\.scan and microbatch, merge a copy: nnx\.merge\(\.\.\., copy=True\)\.'
    )
    with pytest.raises(ArgumentError, match=text):
        nnx.sjit(helper(), around)(rows())

    def inside(model, x):
        def loss(x):
            model.kernel[...] *= 2
            return model(x).sum()

        return flax_nnx.grad(loss)(x)

    with pytest.raises(ArgumentError, match='inside changes a module that is not one of its arguments'):
        nnx.sjit(helper(), inside)(flax_nnx.Linear(16, 16, rngs=flax_nnx.Rngs(0)), rows())


def test_constraints_have_the_names_of_arguments():
    explicit = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=AxisType.Explicit)
    model, types = flax_nnx.Linear(16, 16, rngs=flax_nnx.Rngs(0)), []

    def step(model, x, y=None):
        types.append([jax.typeof(array).sharding.spec for array in (model.kernel[...], x)])
        return x.sum()

    nnx.sjit(explicit, step, args_sharding_constraint={'x': P('fsdp')})(model, rows())
    assert types.pop() == [P(None, None), P('fsdp', None)]
