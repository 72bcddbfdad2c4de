"""Tests of the table that compares auto-sharding with expert rules: its lines and its error messages."""

import types

import jax
import pytest

from benchmarks import auto_sharding, updates
from benchmarks.auto_sharding import Result, Task
from benchmarks.unchanged import decoders
from benchmarks.unchanged.measure import arguments, training_step
from scalax.errors import MissingDependencyError, PlanError
from scalax.sharding import PartitionSpec as P
from tests.support import tpu_compiler
from tests.support.benchmark_program import ended

MODELS = [[model] for model in decoders.models('large')[:2]]
GIB = 2**30


def plan_of(bound, estimate, gib, scheduled=None):
    schedule = None if scheduled is None else types.SimpleNamespace(seconds=scheduled)
    seconds = types.SimpleNamespace(overlapped=bound, serial=estimate)
    memory = types.SimpleNamespace(peak=gib * GIB, total=gib * GIB, limit=16 * GIB)
    return types.SimpleNamespace(
        memory=memory,
        collectives=[],
        schedule=schedule,
        roofline=lambda: types.SimpleNamespace(step_seconds=seconds),
    )


def known_results(models, task):
    """The fastest plan does not fit with the headroom of the search; the lowest mean of the others counts."""
    if models is MODELS[1]:
        return [Result.of('FSDP', plan_of(0.1, 0.1, 15))]
    return [
        Result.of('FSDP', plan_of(0.1, 0.1, 15)),
        Result.of('FSDP x TP 2', plan_of(0.2, 0.6, 4)),
        Result.of('FSDP x TP 4', plan_of(0.1, 0.8, 4)),
    ]


def search(model, task):
    plan = plan_of(0.25, 0.45, 15 if model is MODELS[1][0] else 2)
    return types.SimpleNamespace(mesh={'fsdp': 4, 'tp': 2}, plan=plan, num_trials=9, search_seconds=88.8)


def cells(line):
    return [cell.strip() for cell in line.split('|')[1:-1]]


def test_lines():
    head, rule, *rows = auto_sharding.lines(MODELS, Task('v5e:2x4'), known_results, search)
    assert {len(line) for line in (head, rule, *rows)} == {len(head)}
    assert cells(head) == list(auto_sharding.TITLES)
    assert cells(rows[0]) == [
        *(MODELS[0][0].name, 'FSDP x TP 2', '0.4', '0.2', '0.6', '-', '4 GiB'),
        *('fsdp 4 x tp 2', '0.875', '1.250', '0.750', '-', '2 GiB', '9', '89 s'),
    ]
    assert cells(rows[1]) == [
        *(MODELS[1][0].name, 'none fits', '', '', '', '', ''),
        *('fsdp 4 x tp 2: too large', '0.35 s', '0.25 s', '0.45 s', '-', '15 GiB', '9', '89 s'),
    ]


def test_gpu_rows_have_the_time_of_the_schedule():
    def of(seconds):
        return plan_of(0.1, 0.2, 4, scheduled=seconds)

    def search(model, task):
        return types.SimpleNamespace(mesh={'fsdp': 8}, plan=of(0.12), num_trials=1, search_seconds=1)

    *_, row = auto_sharding.lines(
        MODELS[:1], Task('h100:8'), lambda *_: [Result.of('FSDP', of(0.15))], search
    )
    assert cells(row)[5] == '0.15' and cells(row)[11] == '0.800'


def test_results_name_their_strategy_and_omit_rejected_plans(monkeypatch, capsys):
    model, task = MODELS[0][0], types.SimpleNamespace(topology='', strategies=[auto_sharding.FSDP])

    def plan(model, strategy, topology, variant):
        if variant == 'hand':
            raise PlanError('too odd')
        return plan_of(0.1, 0.2, 3)

    monkeypatch.setattr(auto_sharding, 'plan', plan)
    by_other = types.SimpleNamespace(name=f'{model.name}, by MaxText')
    results = auto_sharding.strategy_results([model, by_other], task)
    assert [result.name for result in results] == ['FSDP, partitioned', 'FSDP, by MaxText, partitioned']
    assert f'{model.name}, FSDP, hand: too odd' in capsys.readouterr().err


@pytest.mark.medium
def test_chosen_rows_include_all_variants_of_a_model():
    rows = auto_sharding.chosen('')
    assert [row[0].name for row in rows] == list(auto_sharding.NAMES)
    assert [model.name for model in auto_sharding.chosen('LLaMA-3 8B')[0]] == [
        *('LLaMA-3 8B', 'LLaMA-3 8B, by MaxText', 'LLaMA-3 8B, by MaxText, width over tp'),
    ]


@pytest.mark.medium
@pytest.mark.parametrize('model', updates.models(), ids=lambda model: model.name)
def test_models_with_large_updates_have_steps_and_rules(model):
    args = arguments(model, model.rows * 8)
    assert jax.eval_shape(training_step(model, model.loss), *args)[1].shape == ()
    params = args[0][0]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'float32'} and 0.9e9 < count < 2.7e9
    specs = jax.tree.leaves(model.columns_and_rows.apply(params), is_leaf=lambda leaf: isinstance(leaf, P))
    large = [spec for spec, leaf in zip(specs, jax.tree.leaves(params), strict=True) if leaf.size > 1e7]
    assert all(any(spec) for spec in large)


@tpu_compiler.needed
def test_strategies():
    one_slice, two_slices = Task('v5e:2x2').strategies, Task('v5e:2x2', slices=2).strategies
    assert [(strategy.name, strategy.mesh) for strategy in one_slice] == [
        ('FSDP', {'fsdp': -1}),
        ('FSDP x TP 2', {'fsdp': -1, 'tp': 2}),
        ('FSDP x TP 4', {'fsdp': -1, 'tp': 4}),
    ]
    assert [(strategy.name, strategy.mesh) for strategy in two_slices] == [
        ('HSDP, 2 slices', {'data': 2, 'fsdp': -1}),
        ('HSDP, 2 slices x TP 2', {'data': 2, 'fsdp': -1, 'tp': 2}),
        ('HSDP, 2 slices x TP 4', {'data': 2, 'fsdp': -1, 'tp': 4}),
    ]
    assert two_slices[1].helper('v5e:2x2').mesh.shape == {'data': 2, 'fsdp': 2, 'tp': 2}


def test_an_unknown_model_name_lists_the_names(monkeypatch):
    assert 'LLaMA-3 8B; ' in ended(monkeypatch, '--only', 'auto_sharding', '--model', 'nothing')


def test_without_the_tpu_compiler(monkeypatch):
    def lines(*_):
        raise MissingDependencyError('TPU topologies need the TPU compiler')

    monkeypatch.setattr(auto_sharding, 'lines', lines)
    assert ended(monkeypatch, '--only', 'auto_sharding').endswith(
        '`make bench ARGS="--only auto_sharding"` installs all that the table needs'
    )
