"""`python -m scalax verify`: its output, its downscaling, and its exit codes."""

import inspect
import json
import os
import signal

import jax
import pytest

from scalax._verification.compare import Comparison
from scalax._verification.verify import verify as verify_step
from scalax.cli import _commands, main
from scalax.errors import ArgumentError
from tests.support import tpu_compiler

JOB = """
import dataclasses
import jax
import jax.numpy as jnp
from scalax.sharding import PartitionSpec as P

print('a line of the file')

@dataclasses.dataclass
class Config:
    width: int = 16
    rows: int = 32

SMALL, LARGE = Config(), Config(4096, 8192)

def make(helper, config, last):
    def step(w, x):
        y = jnp.sin(x @ w)
        return {'w': w - 0.1 * y.T @ x, 'loss': last(helper, y)}
    step = helper.sjit(step, in_shardings=(P('fsdp', 'tp'), P('fsdp')))
    w = jax.ShapeDtypeStruct((config.width, config.width), 'float32')
    return step, (w, jax.ShapeDtypeStruct((config.rows, config.width), 'float32'))

def local_mean(helper, y):
    return jax.shard_map(jnp.mean, mesh=helper.mesh, in_specs=P('fsdp'), out_specs=P(), check_vma=False)(y)

def make_step(helper, config=SMALL):
    return make(helper, config, lambda helper, y: jnp.sum(y * y))

def make_wrong(helper, config=SMALL):
    return make(helper, config, local_mean)

def make_infinite(helper):
    return make(helper, SMALL, lambda helper, y: 1 / (0 * jnp.sum(y)))

def make_any(helper, config):
    return make(helper, config, lambda helper, y: jnp.sum(y * y))
"""
ON = ('--mesh', 'fsdp=4,tp=2', '--seeds', '1')


@pytest.fixture
def job(tmp_path):
    path = tmp_path / 'job.py'
    path.write_text(JOB)
    return path


def here(capsys, *arguments):
    """Verifies in this process; returns the output without what the file and JAX print."""
    code = main(['verify', *map(str, arguments)])
    message = capsys.readouterr()
    return code, message.out, message.err


@pytest.mark.medium
def test_a_step_that_is_right(job, capsys, tmp_path):
    page = tmp_path / 'page.html'
    code, out, err = here(capsys, f'{job}:make_step', *ON, '--html', page)
    assert code == 0 and 'a line of the file\n' in err
    message = 'step on fsdp=4, tp=2 matches one device: 2 results, 1 consecutive step, 1 seed'
    assert out.splitlines()[0] == message
    assert '<title>step on a mesh and on one device</title>' in page.read_text()


@pytest.mark.slow
def test_a_step_that_is_wrong(job, capsys):
    code, out, _ = here(capsys, f'{job}:make_wrong', *ON, '--json')
    report = json.loads(out)
    assert (code, report['ok'], report['downscaling']) == (4, False, [])
    assert [difference['path'] for difference in report['differences']] == ['loss']
    line = JOB[: JOB.index('jax.shard_map')].count('\n') + 1
    first = report['first_difference']
    assert (first['primitive'], first['line']) == ('shard_map', f'job.py:{line} local_mean')
    assert report['jax'] == jax.__version__


@pytest.mark.medium
def test_results_that_could_not_be_compared_are_not_equal(job, capsys):
    code, out, _ = here(capsys, f'{job}:make_infinite', *ON)
    assert code == 4
    assert 'not finite on one device: loss' in out


@pytest.mark.medium
@pytest.mark.parametrize(
    ('command', 'mesh'),
    [
        (('make_step', '--config', 'LARGE', '--mesh', 'fsdp=64,tp=8'), {'fsdp': 4, 'tp': 2}),
        (('make_step', '--config', 'LARGE', '--mesh', 'fsdp=4,tp=2'), {'fsdp': 4, 'tp': 2}),
        pytest.param(
            ('make_any', '--config', 'LARGE', '--topology', 'v5e:4x4', '--mesh', 'fsdp=-1,tp=4'),
            {'fsdp': 4, 'tp': 2},
            marks=tpu_compiler.needed,
        ),
    ],
    ids=['a mesh that is not here', 'arguments that are large', 'a topology'],
)
def test_a_large_step_is_downscaled(job, capsys, command, mesh):
    function, *options = command
    code, out, _ = here(capsys, f'{job}:{function}', *options, '--seeds', 1, '--json')
    report = json.loads(out)
    assert (code, report['ok'], report['mesh']) == (0, True, mesh)
    message = ' '.join(report['downscaling'])
    assert 'width 4096 -> ' in message and 'rows 8192 -> ' in message


@pytest.mark.medium
def test_a_small_step_is_not_downscaled(job, capsys):
    code, out, _ = here(capsys, f'{job}:make_any', '--config', 'SMALL', *ON, '--json')
    report = json.loads(out)
    assert code == 0 and [argument['array'] for argument in report['arguments']] == [
        'float32[16,16]',
        'float32[32,16]',
    ]


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        (
            ('make_any',),
            "'FILE:make_any' takes 'config' besides the helper: give --config the name of a value in its "
            'file',
        ),
        (
            ('make_any', '--config', 'SMAL'),
            "--config SMAL: there is no such value in the file (did you mean 'SMALL'?)",
        ),
        (
            ('make_infinite', '--config', 'SMALL'),
            "--config SMALL: 'FILE:make_infinite' takes no configuration besides the helper",
        ),
        (
            ('make_step', '--devices', '2'),
            'a mesh with the axes of (fsdp=4, tp=2) needs at least 4 devices, 2 along each of fsdp, tp, but '
            "there are 2: simulate them with jax.config.update('jax_num_cpu_devices', 4) before JAX is used",
        ),
    ],
)
def test_invalid_arguments(job, capsys, monkeypatch, command, message):
    function, *options = command
    if '--devices' in options:  # the tests' devices exist already
        monkeypatch.setattr(jax.config, 'update', lambda name, value: None)
        monkeypatch.setattr(jax, 'local_devices', lambda *args: jax.devices()[:2])
    code, out, err = here(capsys, f'{job}:{function}', *options, *ON)
    assert (code, out) == (2, '')
    assert err.splitlines()[-1].replace(str(job), 'FILE') == f'error: {message}'


def test_options_match_the_function(job, monkeypatch):
    options = {}

    def verify(*args, **keywords):
        options.update(keywords)
        raise ArgumentError('enough')

    monkeypatch.setattr(_commands, 'verify_step', verify)
    command = ['verify', f'{job}:make_infinite', '--mesh', 'fsdp=4,tp=2']
    assert main([*command, '--seeds', '7', '--steps', '5']) == 2
    assert options == {'seeds': 7, 'steps': 5, 'compare_intermediates': False, 'config': None}
    assert main([*command, '--compare-intermediates']) == 2
    assert options == {'seeds': 3, 'steps': 2, 'compare_intermediates': True, 'config': None}
    parameters = inspect.signature(verify_step).parameters
    assert [parameters[name].default for name in ('seeds', 'steps', 'compare_intermediates')] == [3, 2, False]


@pytest.mark.medium
def test_ctrl_c_reports_the_comparisons_so_far(job, capsys, monkeypatch):
    run = Comparison.run

    def impatient(self, seed, *rest):
        if seed == 2:
            os.kill(os.getpid(), signal.SIGINT)
        run(self, seed, *rest)

    monkeypatch.setattr(Comparison, 'run', impatient)
    code, out, _ = here(capsys, f'{job}:make_wrong', '--mesh', 'fsdp=4,tp=2', '--seeds', 5)
    assert code == 130
    lines = out.splitlines()
    assert lines[0].endswith('does not match one device: 1 of 2 results, 1 consecutive step, 2 seeds')
    assert lines[1] == 'stopped early'
