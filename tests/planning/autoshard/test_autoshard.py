"""`scalax.plan.autoshard`: its results, the leaves that it keeps, and how it ends."""

import functools
import json
import warnings
import xml.etree.ElementTree as ET
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalax._planning.autoshard import trial
from scalax._planning.autoshard.problem import Problem
from scalax._planning.autoshard.step import trace_step
from scalax.errors import ArgumentError, MeshError
from scalax.plan import autoshard
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support import tpu_compiler

# The trials are the same on all releases of JAX.
# The replicated state does not fit in it.
MEMORY = 2_000_000
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def init(width=64, hidden=256, layers=2):
    keys = iter(jax.random.split(jax.random.key(0), 3))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    layers = {'up': draw(layers, width, hidden), 'down': draw(layers, hidden, width)}
    return {'embed': draw(512, width), 'layers': layers, 'scale': jnp.ones(width)}


def loss(params, tokens):
    def block(x, w):
        return x + jax.nn.relu(x @ w['up']) @ w['down'], None

    x, _ = jax.lax.scan(block, params['embed'][tokens] * params['scale'], params['layers'])
    log_probs = jax.nn.log_softmax(x @ params['embed'].T)
    return -jnp.mean(jnp.take_along_axis(log_probs, jnp.roll(tokens, 1, 1)[..., None], -1))


def train_step(state, tokens):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, tokens)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def make_state():
    params = init()
    return params, OPTIMIZER.init(params)


def arguments(rows=64, length=16):
    return jax.eval_shape(make_state), jax.ShapeDtypeStruct((rows, length), 'int32')


def product(params, x):
    return x @ params['w']


def simple(rows=64):
    """Returns the arguments of `product`."""
    return {'w': jax.ShapeDtypeStruct((64, 256), 'float32')}, jax.ShapeDtypeStruct((rows, 64), 'float32')


def options(**others):
    return {'batch_argnums': 1, 'sizes': {'tp': 1}, **others}


@pytest.fixture(scope='module')
def search_result():
    return autoshard(train_step, arguments(), **options(donate_argnums=0, memory=MEMORY))


def losses(step, state, tokens, count=10):
    values = []
    for _ in range(count):
        state, value = step(state, tokens)
        values.append(float(value))
    return values


@pytest.mark.slow
def test_ten_steps_match_one_device(search_result):
    tokens = jax.random.randint(jax.random.key(1), (64, 16), 0, 512)
    helper = MeshShardingHelper([*search_result.mesh.values()], [*search_result.mesh], True)
    step = helper.sjit(
        train_step,
        in_shardings=(search_result.rule, search_result.batch_spec),
        out_shardings=(search_result.rule, None),
        batch_argnums=1,
    )
    state = helper.shard(make_state(), search_result.rule)
    expected = losses(jax.jit(train_step), make_state(), tokens)
    np.testing.assert_allclose(losses(step, state, tokens), expected, rtol=1e-4)
    assert expected[-1] < expected[0]


@pytest.mark.medium
def test_its_code_makes_the_program_of_the_plan(search_result):
    scope = {'train_step': train_step}
    exec(search_result.to_code(), scope)
    assert scope['rule'] == search_result.rule and dict(scope['helper'].mesh.shape) == dict(
        search_result.mesh
    )
    assert scope['helper'].plan(scope['step'], *arguments()).totals == search_result.plan.totals
    assert (
        eval(repr(search_result.rule), {'TreePathShardingRule': TreePathShardingRule, 'P': P})
        == search_result.rule
    )
    assert len(search_result.rule.rules) <= 4


@pytest.mark.slow
def test_its_code_offers_to_verify_the_step(search_result, capsys):
    code, offer = search_result.to_code(), 'print(helper.verify(step, *arguments))'
    assert code.endswith(f'\n# {offer}\n')
    exec(code.replace(f'# {offer}', offer), {'train_step': train_step, 'arguments': arguments()})
    message = 'train_step on fsdp=8 matches one device: 9 results, 2 consecutive steps, 3 seeds\n'
    assert capsys.readouterr().out.startswith(message)


@pytest.mark.medium
def test_its_text(search_result):
    text = search_result.to_text(120)
    assert ' on 8 cpu devices, batch ' in text and ': fits (' in text
    assert 'until nothing improved' in text and search_result.stop_reason == ''
    assert 'to compare its results with one device: helper.verify(step, *arguments)' in text
    assert search_result.fits is True and search_result.ideal_seconds is None
    assert {group.name for group in search_result.groups} == {'0/layers/down', '0/layers/up', '0/embed'}
    assert any(len(group.spec) for group in search_result.groups)
    assert all(
        group.next_spec is not None and group.next_spec != group.spec for group in search_result.groups
    )
    assert search_result.meshes[0].reason == '' and all(row.reason for row in search_result.meshes[1:])
    assert search_result.meshes[0].mesh == search_result.mesh == {'fsdp': 8}
    plain = json.loads(json.dumps(search_result.to_dict()))
    assert plain['num_trials'] == search_result.num_trials and plain['rule'] == repr(search_result.rule)


@pytest.mark.medium
def test_no_neighbour_costs_less(search_result):
    least = 0.002 * (search_result.overlapped_seconds + search_result.serial_seconds) / 2
    assert all(group.extra_seconds >= -least or not group.next_fits for group in search_result.groups)


@pytest.mark.slow
def test_it_is_deterministic():
    first, second = (autoshard(product, simple(), **options(sizes={'tp': [1, 2]})) for _ in range(2))
    assert {len(row.mesh) for row in first.meshes} == {1, 2}
    assert first.to_code() == second.to_code()
    assert (first.groups, first.meshes, first.num_trials) == (second.groups, second.meshes, second.num_trials)


@pytest.mark.medium
def test_pages_show_names_as_text(tmp_path):
    names = ['<script>alert(1)</script>', '</pre><img src=x>"\'&']

    def step(params, x):
        for name in names:
            x = x @ params[name]
        return x

    shape = jax.ShapeDtypeStruct((64, 64), 'float32')
    result = autoshard(step, (dict.fromkeys(names, shape), shape), **options())
    result.to_html(tmp_path / 'page.html')
    page = (tmp_path / 'page.html').read_text()
    assert '<script>alert' not in page and '&lt;script&gt;alert' in page
    assert ET.fromstring(page).findtext('head/title') == 'A rule for step'
    assert '<img' not in page and '<script>alert' not in result._repr_html_()


@pytest.mark.medium
def test_a_search_continues_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / 'trials.jsonl'
    first = autoshard(product, simple(), **options(file=file))
    lines = file.read_text().splitlines()
    assert len(lines) == first.num_trials
    edited = lines[-1].replace('"overlapped_seconds"', '"least"')  # the following line is valid
    # As if the machine crashed while it wrote the last line.
    file.write_text('\n'.join([*lines[:-1], '{}', 'null', '[1]', edited, lines[-1], lines[0][:40]]) + '\n')
    attempts, attempt = [], trial.run_trial
    monkeypatch.setattr(trial, 'run_trial', lambda *args: (attempts.append(args), attempt(*args))[1])
    few = autoshard(product, simple(), **options(file=file, sizes={'tp': 8}, budget_s=1e-6))
    assert (few.mesh, few.num_trials) == ({'fsdp': 1, 'tp': 8}, 1)  # trials of other meshes do not count
    attempts.clear()
    again = autoshard(product, simple(), **options(file=file))
    assert attempts == [] and (again.rule, again.num_trials) == (first.rule, first.num_trials)
    other = autoshard(product, simple(rows=128), **options(file=file))
    assert len(attempts) == other.num_trials > 0
    file.write_text('\n'.join([edited]) + '\n')
    attempts.clear()
    assert autoshard(product, simple(), **options(file=file)).num_trials == len(attempts) == first.num_trials


def test_ctrl_c_returns_the_best_result_so_far(monkeypatch):
    attempt, attempts = trial.run_trial, []

    def stopped(*args):
        attempts.append(args)
        if len(attempts) > least:
            raise KeyboardInterrupt
        return attempt(*args)

    monkeypatch.setattr(trial, 'run_trial', stopped)
    monkeypatch.setattr(trial, '_MAX_THREADS', 1)  # else the second layout may be tried before the first
    least = 1
    result = autoshard(product, simple(), **options())
    assert (result.stop_reason, result.num_trials) == ('interrupted', 1) and 'until it was stopped' in str(
        result
    )
    least = 0
    with pytest.raises(KeyboardInterrupt):
        autoshard(product, simple(), **options())


@pytest.mark.medium
def test_an_array_of_the_batch_without_examples_is_replicated():
    def step(w, x, mask):
        return jnp.sum(jnp.tanh(x @ w) * jnp.sum(mask))

    w, x, mask = (jax.ShapeDtypeStruct(shape, 'float32') for shape in [(64, 64), (64, 64), (20, 20)])
    search_result = autoshard(step, (w, x, mask), **options(batch_argnums=(1, 2), sizes={'tp': 1}))
    assert (
        search_result.batch_spec == P('fsdp') and 'in_shardings=(rule, batch, P())' in search_result.to_code()
    )


def test_filters_of_warnings_are_as_before():
    before = [*warnings.filters]
    autoshard(product, simple(), **options())
    assert warnings.filters == before


@pytest.mark.medium
def test_a_partial_gets_a_name_in_the_code():
    step = functools.partial(lambda scale, params, x: jnp.tanh(x @ params['w']) * scale, 2.0)
    assert '    your_step,\n' in autoshard(step, simple(), **options()).to_code()


@pytest.mark.medium
def test_gradients_of_integers_count_nothing():
    def step(params, x):
        return jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p['w'])), allow_int=True)(params)

    params = {'w': jnp.ones((64, 64)), 'steps': jnp.arange(4096)}
    assert autoshard(step, (params, jnp.ones((64, 64))), **options(budget_s=1e-6)).num_trials >= 1


def test_a_budget_that_is_too_small_gives_an_answer():
    result = autoshard(product, simple(), **options(budget_s=1e-6))
    assert result.stop_reason == 'budget' and 'larger budget_s' in str(result)
    assert result.num_trials >= 1


@pytest.mark.slow
def test_leaves_that_are_kept():
    keep = [('w', P('tp', 'fsdp'))]
    params = {'w': jnp.ones((64, 256)), 'v': jnp.ones((256, 64))}

    def step(params, x):
        return x @ params['w'] @ params['v']

    args = params, simple()[1]
    result = autoshard(step, args, **options(keep=keep, sizes={'tp': 2}))
    assert result.rule.apply(params)['w'] == P('tp', 'fsdp')
    assert [group.name for group in result.groups] == ['v']
    without = autoshard(step, args, **options(keep=keep))  # its mesh has no tp
    assert without.rule.apply(params)['w'] == P(None, 'fsdp')


@pytest.mark.medium
def test_names_of_axes():
    result = autoshard(product, simple(), **options(axis_names=['data', 'model'], sizes={'model': 2}))
    assert result.mesh == {'data': 4, 'model': 2} and result.batch_spec == P('data')


def test_rows_in_another_dimension():
    def step(params, x):
        return jnp.einsum('tbd,dh->tbh', x, params['w'])

    args = simple()[0], jax.ShapeDtypeStruct((3, 64, 64), 'float32')
    assert autoshard(step, args, **options(batch_dim=1)).batch_spec == P(None, 'fsdp')


def test_indivisible_batches_are_replicated_on_meshes_without_a_fitting_axis():
    result = autoshard(product, simple(rows=3), **options(sizes={'tp': 8}))
    assert result.mesh == {'fsdp': 1, 'tp': 8} and result.batch_spec == P()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'step': MeshShardingHelper([-1], ['fsdp']).sjit(product)},
            'product is already compiled for the mesh of a helper: pass the function itself',
        ),
        ({'step': 3}, 'autoshard takes a function for one device and its arguments, got int'),
        ({'args': 3}, 'the arguments of the step have to be a tuple, got int'),
        ({'args': (1, 2, 3)}, 'product cannot be traced for one device with these arguments: TypeError: '),
        ({'batch_argnums': 2}, 'batch_argnums=2: the step has 2 arguments'),
        ({'batch_argnums': None}, 'batch_argnums has to be the index of an argument, or several, got None'),
        ({'batch_argnums': ()}, 'batch_argnums has to name the arguments that hold a batch'),
        ({'donate_argnums': 'a'}, "donate_argnums='a': the step has 2 arguments"),
        ({'batch_argnums': (0, 1)}, 'product has nothing to find a rule for: its arguments are batches'),
        ({'keep': [('.*', P())]}, 'or fixed by keep'),
        ({'keep': [('w', P('tq'))]}, "keep names an unknown mesh axis 'tq' (known: 'fsdp', 'tp')"),
        ({'keep': [('v', P('tp'))]}, "keep: 'v' matches no leaf path"),
        (
            {'sizes': ['tp']},
            "sizes are given by mesh axis, such as {'tp': [1, 2, 4]}, or as a function of the sizes, got "
            "['tp']",
        ),
        ({'sizes': {'tp': None}}, "sizes of 'tp' have to be a size or several, such as [1, 2, 4], got None"),
        ({'axis_names': 5}, 'axis_names has to be 2 names of mesh axes, such as fsdp and tp, got 5'),
        ({'keep': [('w', None)]}, 'keep takes pairs of a regex and a PartitionSpec, got None'),
        ({'headroom': 1}, 'headroom has to be a fraction of the memory'),
        ({'optimizer_state': 'zero'}, "optimizer_state has to be 'as parameters' or 'zero1', got 'zero'"),
        ({'batch_dim': -1}, 'batch_dim has to be the index of a dimension, got -1'),
        ({'batch_dim': 2}, 'divides the batch dimension: dimension 2 of (64, 64)'),
        ({'axis_names': ['a']}, 'axis_names has to be 2 names of mesh axes, such as fsdp and tp'),
        ({'axis_names': 'ab'}, 'axis_names has to be 2 names of mesh axes, such as fsdp and tp'),
        ({'sizes': {'pt': 2}}, "sizes: 'pt' is not a mesh axis (known: 'fsdp', 'tp')"),
        ({'sizes': {'tp': 3}}, "no mesh of 8 devices in a slice has the sizes {'tp': 3}"),
        ({'num_slices': 0}, 'num_slices has to be a positive integer, got 0'),
        ({'num_slices': 2}, 'several slices need a topology'),
    ],
)
def test_bad_input(changes, message):
    call_options = options(**changes)
    step, args = call_options.pop('step', product), call_options.pop('args', simple())
    with pytest.raises(ArgumentError) as raised:
        autoshard(step, args, **call_options)
    assert message in str(raised.value)


def test_a_scalar_that_has_the_path_of_a_matrix():
    def step(w, x, rate):
        return x @ w * rate

    args = simple()[0]['w'], simple()[1], jax.ShapeDtypeStruct((), 'float32')
    result = autoshard(step, args, **options(memory=50_000))
    assert result.fits and result.rule.apply(args[0]) == result.groups[0].spec != P()


@pytest.mark.medium
def test_zero1_and_weights_that_are_computed_first():
    def step(state, x):
        params, momentum = state
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ (p['w'] * 2.0))))(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(jnp.subtract, params, momentum), momentum

    params, x = simple()
    state = params, params
    result = autoshard(step, (state, x), **options(optimizer_state='zero1', memory=100_000))
    assert [group.name for group in result.groups] == ['0/w']
    ours, statistics = result.rule.apply(state)
    assert ours['w'] == P() != statistics['w']


class Out(NamedTuple):
    params: Any
    loss: Any


@pytest.mark.medium
@pytest.mark.parametrize('kind', [Out, lambda params, loss: {'params': params, 'loss': loss}])
def test_results_in_a_named_tuple_or_a_dict(kind):
    def step(params, batch):
        out = batch['x'] @ params['w'] * batch['scale'] + batch['bias'][:, None]
        return kind({'w': params['w'] * 2}, out.sum())

    params, x = simple()
    batch = {
        'x': x,
        'bias': jax.ShapeDtypeStruct((64,), 'float32'),
        'scale': jax.ShapeDtypeStruct((), 'float32'),
    }
    result = autoshard(step, (params, batch), **options(memory=80_000))
    scope = {'step': step, 'Out': Out}
    exec(result.to_code(), scope)
    assert scope['helper'].plan(scope['step'], params, batch).totals == result.plan.totals
    [spec] = [row.spec for row in result.plan.outputs.rows if row.path.endswith('w')]
    assert spec == result.rule.apply(params)['w'] != P()


@pytest.mark.parametrize(
    ('out', 'expected'),
    [
        (lambda params, x: ({'w': params['w'] * 2}, x.sum()), ('of the state', None)),
        (lambda params, x: {'loss': x.sum(), 'state': params}, {'loss': None, 'state': 'of the state'}),
        (lambda params, x: {'w': params['w'] * 2}, 'of the state'),
        (lambda params, x: [params, x], None),
        (lambda params, x: x * 2, 'of the batch'),
        (lambda params, x: x.sum(), None),
    ],
)
def test_results_are_sharded_like_equal_arguments(out, expected):
    assert trace_step(out, simple(), 1).map_results(['of the state', 'of the batch']) == expected


def test_a_function_that_makes_a_step():
    def make_step():
        return (lambda params, x: x @ params['w']), simple()

    with pytest.raises(ArgumentError, match='batch_argnums=0: the step has 0 arguments'):
        autoshard(make_step, (), batch_argnums=0)
    assert autoshard(*make_step(), **options()).rule


def test_a_lambda_gets_a_name_in_the_code():
    result = autoshard(lambda params, x: x @ params['w'], simple(), **options())
    compile(result.to_code(), 'code', 'exec')
    assert 'your_step' in result.to_code()


@pytest.mark.medium
def test_larger_sizes_are_tried_as_long_as_they_pay():
    result = autoshard(product, simple(rows=8), **options(sizes={'tp': [1, 2, 4, 8]}))
    assert result.mesh == {'fsdp': 1, 'tp': 8}


@pytest.mark.medium
def test_a_part_of_the_memory_is_left_free():
    best = autoshard(product, simple(), **options())
    full_result = autoshard(product, simple(), **options(memory=best.memory, headroom=0))
    assert full_result.fits and full_result.memory == best.memory
    less = autoshard(product, simple(), **options(memory=best.memory, headroom=0.1))
    assert not less.fits or less.memory <= 0.9 * best.memory


def test_settings_of_jax_hold_in_trials():
    params, x = ({'w': jax.ShapeDtypeStruct((64, 256), 'float64')}, jax.ShapeDtypeStruct((64, 64), 'float64'))
    with jax.enable_x64(True):
        result = autoshard(product, (params, x), **options())
    assert result.memory == result.plan.memory.total


@pytest.mark.medium
def test_among_layouts_that_do_not_fit_a_compiled_one_is_best():
    result = autoshard(product, simple(), **options(memory=20_000, sizes={'tp': [1, 2]}))
    assert result.fits is False and result.overlapped_seconds < 1
    assert json.dumps(result.to_dict(), allow_nan=False)


def test_an_error_of_the_step_is_the_cause():
    def wrong(params, x):
        return params['no such key']

    with pytest.raises(ArgumentError, match='wrong cannot be traced for one device') as raised:
        autoshard(wrong, simple(), **options())
    assert isinstance(raised.value.__cause__, KeyError)


@tpu_compiler.needed
def test_a_topology_that_does_not_exist():
    with pytest.raises(MeshError):
        autoshard(product, simple(), 'v5q:2x4', **options())


def block_gradient(params, x):
    return jax.grad(lambda params: jnp.sum(jnp.tanh(x @ params['up']) @ params['down']))(params)


def block(width, hidden, rows):
    """Returns the arguments of `block_gradient`."""
    up, down = (jax.ShapeDtypeStruct(shape, 'bfloat16') for shape in ((width, hidden), (hidden, width)))
    return {'up': up, 'down': down}, jax.ShapeDtypeStruct((rows, width), 'bfloat16')


def test_errors_are_not_outcomes(monkeypatch):
    """Only programs that the compiler rejects are outcomes; a bug in scalax is not a rejected layout."""
    monkeypatch.setattr(Problem, 'batch_spec_of', lambda *_: {}['a mistake'])
    with pytest.raises(KeyError, match='a mistake') as raised:
        autoshard(product, simple(), **options())
    assert raised.value.__notes__ == ["This was raised by the candidate fsdp=8, batch P('fsdp')."]
    assert {'run_trial', 'plan', '<lambda>'} <= {
        entry.name for entry in raised.traceback
    }  # names the location


def test_equal_layouts_with_less_memory_are_better():
    assert trial.Trial(None, 1.0, 1.0, 900).rank < trial.Trial(None, 1.0, 1.0, 1000).rank
    assert trial.Trial(None, 1.0, 1.0, 1000).rank < trial.Trial(None, 1.0, 1.01, 900).rank
    too_large = trial.Trial(None, 1.0, 1.0, 1200, limit=1100)
    assert trial.Trial(None, 1.0, 2.0, 1000, limit=1100).rank < too_large.rank


@pytest.mark.medium
@tpu_compiler.needed
def test_an_indivisible_vocabulary_is_sharded_by_its_width():
    """The table is gathered, and its gradient is reduce-scattered; logits are not all-reduced."""

    def step(params, tokens):
        def loss(params):
            scores = params['embed'][tokens] @ params['head']
            return -jnp.mean(jax.nn.log_softmax(scores)[..., 0])

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    args = block(256, 50257, 1)[0]
    args = {'head': args['up'], 'embed': args['down']}, jax.ShapeDtypeStruct((16, 256), 'int32')
    kept = {'keep': [('embed', P())], 'sizes': {'tp': [1, 8]}}
    result = autoshard(step, args, 'v5e:2x4', **options(**kept))
    assert (result.mesh, result.batch_spec, result.groups[0].spec) == ({'fsdp': 8}, P('fsdp'), P('fsdp'))
    sums = {
        row.reason: (row.kind, row.bytes)
        for row in result.plan.collectives
        if row.kind in ('all-reduce', 'reduce-scatter') and row.bytes > 1e5
    }
    assert sums.keys() <= {'gradient of params/head', 'gradient of params/embed'}
    assert sums['gradient of params/head'] == ('reduce-scatter', 256 * 50257 * 2)


@pytest.mark.medium
@tpu_compiler.needed
def test_a_state_that_does_not_fit_is_reported():
    result = autoshard(block_gradient, block(1 << 18, 1 << 18, 64), 'v5e:2x4', **options())
    assert result.fits is False
    text = str(result)
    assert 'does not fit' in text and 'no layout that was tried fits' in text


@pytest.mark.slow
@tpu_compiler.needed
def test_tensor_parallelism_is_chosen_for_few_rows():
    """Gathering weights takes longer than moving 32 rows: one weight is column-, the other row-parallel."""
    args = block(4096, 16384, 32)
    result = autoshard(block_gradient, args, 'v5e:2x4', **options(sizes={'tp': [1, 8]}))
    specs = result.rule.apply(args[0])
    [axis] = [name for name, size in result.mesh.items() if size == 8]
    assert (specs['up'], specs['down']) == (P(None, axis), P(axis))
    assert result.fits and result.ideal_seconds <= result.overlapped_seconds
