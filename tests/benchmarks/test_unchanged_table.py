"""Tests of the table of benchmarks/unchanged/tables.md: its lines and its error messages."""

import builtins
import sys
import types

import pytest

import benchmarks.__main__
from benchmarks.unchanged import actor_critic, decoders, measure, table
from benchmarks.unchanged.model import STRATEGIES, strategies
from scalax.errors import MissingDependencyError, PlanError
from tests.support import gpu_compiler, tpu_compiler
from tests.support.benchmark_program import ended

MODELS = decoders.models('large')


def measured(model, strategy, topology, variant):
    if model is MODELS[1] and variant == 'plain':
        raise PlanError('too large')
    size = {'hand': 1.0, 'partitioned': 1.0, 'plain': 4.0}[variant]
    return {'moved': 6.5 * size, 'peak': 1.25 * size, 'seconds': 0.125 * size, 'estimate': 0.1}


def test_lines(capsys):
    head, rule, *rows = table.lines(MODELS[:2], STRATEGIES[:1], 'v5p:4x4x4', measured)
    assert [cell.strip() for cell in head.split('|')[1:-1]] == [
        *('model', 'strategy', 'bytes by hand', 'partitioned', 'plain'),
        *('peak by hand', 'partitioned', 'plain', 'seconds by hand', 'partitioned', 'plain'),
    ]
    assert {len(line) for line in (head, rule, *rows)} == {len(head)}
    cells = [[cell.strip() for cell in row.split('|')[1:-1]] for row in rows]
    ratios = ['1.00', '4.00']
    assert cells[0] == [
        *(MODELS[0].name, 'FSDP', '6.5 GiB', *ratios, '1.25 GiB', *ratios, '0.125 s', *ratios)
    ]
    assert [cell for cell in cells[1] if cell == table.REFUSED] == [table.REFUSED] * 3
    assert f'{MODELS[1].name}, FSDP, plain: too large' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('kind', 'sent'),
    [
        ('all-gather', 3 * 20),
        ('reduce-scatter', 3 * 20),
        ('all-reduce', 6 * 20),
        ('collective-permute', 20),  # a ring step: three of them send as much as an all-gather
        ('all-to-all', 3 * 5),
    ],
)
def test_bytes_that_a_device_sends(kind, sent):
    row = types.SimpleNamespace(kind=kind, bytes=40, count=2, group=4)
    assert measure.sent(row) == sent


@pytest.mark.medium
def test_unknown_names_list_the_names(monkeypatch):
    monkeypatch.setattr(table, 'strategies', lambda topology: STRATEGIES)
    assert 'decoder, many heads; ' in ended(monkeypatch, '--only', 'unchanged', '--model', 'nothing')
    assert ended(monkeypatch, '--only', 'unchanged', '--strategy', 'DP').endswith(
        ': FSDP; FSDP x TP; HSDP, 2 slices'
    )


def test_without_the_tpu_compiler(monkeypatch):
    def strategies(topology):
        raise MissingDependencyError('TPU topologies need the TPU compiler')

    monkeypatch.setattr(table, 'strategies', strategies)
    assert ended(monkeypatch, '--only', 'unchanged') == (
        'TPU topologies need the TPU compiler\n'
        '`make bench ARGS="--only unchanged"` installs all that the table needs'
    )


def test_without_a_library_of_a_model(monkeypatch):
    import_ = builtins.__import__

    def without(name, *rest):
        if name == 'benchmarks.unchanged.catalogue':
            raise ModuleNotFoundError("No module named 'equinox'")
        return import_(name, *rest)

    monkeypatch.setattr(table, 'strategies', lambda topology: STRATEGIES)
    monkeypatch.setattr(builtins, '__import__', without)
    assert ended(monkeypatch, '--only', 'unchanged').startswith("No module named 'equinox'\n`make bench")


@tpu_compiler.needed
def test_an_unknown_topology(monkeypatch):
    assert "'v5p:0x0x0'" in ended(monkeypatch, '--only', 'unchanged', '--topology', 'v5p:0x0x0')


@pytest.mark.skipif(gpu_compiler.HERE, reason='the compiler for GPUs is installed')
def test_without_the_gpu_compiler(monkeypatch):
    output = ended(monkeypatch, '--only', 'unchanged', '--topology', 'h100:8x8')
    assert 'pip install "jax[cuda12-local]"' in output.splitlines()[0]


@pytest.mark.slow
@gpu_compiler.needed
def test_a_gpu_cell_has_the_time_of_the_schedule():
    """Seconds come from the compiler's schedule; HSDP replicates between hosts."""
    *_, over_hosts = strategies('h100:2x4')
    assert [(strategy.name, dict(strategy.mesh)) for strategy in strategies('h100:8')] == [
        ('FSDP', {'fsdp': -1}),
        ('FSDP x TP', {'fsdp': -1, 'tp': 4}),
    ]
    assert (over_hosts.name, dict(over_hosts.mesh)) == ('HSDP, 2 hosts', {'data': 2, 'fsdp': -1})
    model = actor_critic.models('large')[0]
    plan = measure.plan(model, over_hosts, 'h100:2x4', 'partitioned')
    cell = table.measure(model, over_hosts, 'h100:2x4', 'partitioned')
    assert cell['seconds'] == plan.schedule.seconds > cell['bound']
    assert any(row.networks == ('dcn',) for row in plan.collectives)


@pytest.mark.slow
@tpu_compiler.needed
def test_a_tpu_row(monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        'argv',
        ['program', '--only', 'unchanged', '--model', 'BERT', '--strategy', 'FSDP', '--topology', 'v5e:2x4'],
    )
    benchmarks.__main__.main()
    *_, row = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in row.split('|')[1:3]] == ['BERT', 'FSDP']
