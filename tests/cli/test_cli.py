"""`python -m scalax`: its output, and its exit codes."""

import inspect
import json
import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

import scalax
from scalax._core.mesh.gpu_topologies import GPU_KINDS
from scalax._core.mesh.topologies import TPU_SLICES, num_chips
from scalax._diagnostics.doctor import Diagnosis
from scalax._diagnostics.doctor.environment import Finding
from scalax.cli import ExitCode, _commands, main
from scalax.errors import ArgumentError
from scalax.plan import HARDWARE, Plan
from scalax.plan import autoshard as autoshard_step
from scalax.sharding import MeshShardingHelper, ShardingReport
from tests.support import ROOT, gpu_compiler, tpu_compiler

JOB = """
import jax
from scalax.sharding import PartitionSpec as P, TreePathShardingRule

RULES = TreePathShardingRule(('w', P('fsdp', 'tp')))

def make_state(helper):
    return {'w': jax.ShapeDtypeStruct((64, 32), 'float32')}, RULES

def make_step(helper, size=64):
    def step(w, x):
        return x @ w
    step = helper.sjit(step, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('fsdp', 'tp'))
    return step, (jax.ShapeDtypeStruct((size, size), 'bfloat16'),) * 2

def make_large(helper):
    return make_step(helper, 262144)

def make_odd(helper):
    return make_step(helper, 66)

def make_nothing(helper):
    return None

def make_trouble(helper):
    raise ValueError('no such model')

def make_one_device(size=64):
    return lambda w, x: x @ w, (jax.ShapeDtypeStruct((size, size), 'bfloat16'),) * 2

def make_too_much():
    return make_one_device(1 << 19)

def make_one(helper):
    return make_step, 3
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / 'job.py'
    path.write_text(JOB)
    return path


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='a disk that is full')
def test_a_plan_is_printed_though_its_page_cannot_be_written(job, capsys):
    done = here(capsys, 'plan', f'{job}:make_step', '--mesh', 'fsdp=4,tp=2', '--html', '/dev/full')
    assert done.returncode == 1 and 'memory of each device' in done.stdout
    assert done.stderr == "error: '/dev/full' cannot be written: No space left on device\n"


def run(*arguments):
    """Runs in a separate process, which may have other devices."""
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
    env.pop('JAX_NUM_CPU_DEVICES', None)
    command = [sys.executable, '-W', 'error', '-m', 'scalax', *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


def here(capsys, *arguments):
    """Runs in this process, which is faster."""
    code = main(list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())


@pytest.mark.medium
def test_plan_on_simulated_devices(job):
    done = run('plan', f'{job}:make_step', '--mesh', 'fsdp=2,tp=3')
    assert done.returncode == 2  # 64 is not divisible by 3
    assert done.stderr.startswith('error: ') and 'Traceback' not in done.stderr
    done = run('plan', f'{job}:make_step', '--mesh', 'fsdp=4,tp=2')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[0] == 'step on 8 cpu devices (fsdp=4, tp=2)'


USES_DEVICES = 'import jax\nKEY = jax.random.key(0)\n'


@pytest.mark.slow
@pytest.mark.parametrize('arguments', [('plan', 'make_step'), ('explain', 'make_state')])
def test_a_file_that_uses_devices_gets_the_devices_of_the_command(job, monkeypatch, arguments):
    command, function = arguments
    job.write_text(USES_DEVICES + JOB)
    monkeypatch.delenv('JAX_PLATFORMS')
    monkeypatch.setenv('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')  # otherwise it may wait silently
    done = run(command, f'{job}:{function}', '--mesh', 'fsdp=4,tp=2')
    assert (done.returncode, done.stderr) == (0, '')
    assert 'fsdp=4, tp=2' in done.stdout


def test_plan_as_json(job, capsys):
    done = here(capsys, 'plan', f'{job}:make_step', '--mesh', 'fsdp=4,tp=2', '--json')
    plan = Plan.load(done.stdout)
    assert (plan.mesh, plan.flops, plan.fits) == ({'fsdp': 4, 'tp': 2}, 2 * 64**3, None)
    assert Plan.load(plan.to_json()) == plan
    assert json.loads(done.stdout)['version'] == 1


@tpu_compiler.needed
def test_model_flops_and_mfu_need_no_option(job, capsys):
    on = ('--topology', 'v5e:2x4', '--mesh', 'fsdp=-1,tp=2', '--quick')
    done = here(capsys, 'plan', f'{job}:make_step', *on, '--json')
    plan = Plan.load(done.stdout)
    assert plan.model_flops == 2 * 64**3
    assert plan.roofline().phases == ()  # there is no gradient
    done = here(capsys, 'plan', f'{job}:make_step', *on)
    assert f'MFU at most {plan.roofline().mfu:.1%}: the model needs 524 kFLOPs' in done.stdout


def test_pages(job, capsys, tmp_path):
    page = tmp_path / 'plan.html'
    on = ('--mesh', 'fsdp=4,tp=2')
    done = here(capsys, 'plan', f'{job}:make_step', *on, '--html', page)
    assert done.returncode == 0
    assert '<title>Plan of step</title>' in page.read_text()
    done = here(capsys, 'explain', f'{job}:make_state', *on, '--html', page)
    assert done.returncode == 0 and "P('fsdp', 'tp')" in done.stdout
    assert '<title>Sharding report</title>' in page.read_text()


@tpu_compiler.needed
@pytest.mark.parametrize(
    ('function', 'fits', 'code'), [('make_step', True, 0), ('make_large', False, 3)], ids=['fits', 'does not']
)
def test_plan_for_tpus(job, capsys, function, fits, code):
    on = ('--topology', 'v5e:2x4', '--mesh', 'fsdp=-1,tp=2', '--quick', '--json')
    page = job.parent / 'plan.html'
    done = here(capsys, 'plan', f'{job}:{function}', *on, '--html', page)
    assert (done.returncode, done.stderr) == (code, '')
    plan = Plan.load(done.stdout)
    assert '<title>Plan of step</title>' in page.read_text()
    assert (plan.device_kind, plan.fits, plan.mesh) == ('TPU v5 lite', fits, {'fsdp': 4, 'tp': 2})


# Presses Ctrl-C when a compiler starts on a program that takes long to compile.
IMPATIENT = """
import os, signal

begin, pressed = jax.stages.Lowered.compile, []

def press_and_begin(*args, **kwargs):
    if not pressed:
        pressed.append(True)
        os.kill(os.getpid(), signal.SIGINT)
    return begin(*args, **kwargs)

jax.stages.Lowered.compile = press_and_begin

def make_slow(helper):
    def step(w, x):
        for _ in range(300):
            x = jax.nn.gelu(x @ w)
        return x
    step = helper.sjit(step, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('fsdp', 'tp'))
    return step, (jax.ShapeDtypeStruct((8192, 8192), 'bfloat16'),) * 2
"""


@pytest.mark.slow
def test_whoever_reads_may_have_read_enough():
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, 'wb') as out:
        command = [sys.executable, '-W', 'error', '-m', 'scalax', 'topologies']
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (1, '')


@pytest.mark.slow
@tpu_compiler.needed
def test_ctrl_c_leaves_the_compiler(job):
    job.write_text(JOB + IMPATIENT)
    on = ('--topology', 'v5e:2x2')
    done = run('plan', f'{job}:make_slow', *on, '--mesh', 'fsdp=-1,tp=2')
    assert (done.returncode, done.stdout, done.stderr) == (130, '', 'interrupted\n')
    done = run('search', f'{job}:make_slow', *on, '--axes', 'fsdp,tp', '--json')
    assert done.stderr == 'error: no mesh was planned: whether the step fits is unknown\n'
    assert done.returncode == 1 and json.loads(done.stdout)['candidates'] == []


@tpu_compiler.needed
def test_search(job, tmp_path, capsys):
    page, trials = tmp_path / 'search.html', tmp_path / 'trials.jsonl'
    on = ('--topology', 'v5e:2x2', '--axes', 'fsdp,tp', '--sizes', 'tp=1,2')
    done = here(capsys, 'search', f'{job}:make_step', *on, '--full', 0, '--html', page, '--file', trials)
    assert (done.returncode, done.stderr) == (0, '')
    lines = done.stdout.splitlines()
    assert lines[0] == '2 meshes on v5e:2x2: 2 planned quickly'
    assert {line.strip().split('  ')[1] for line in lines[4:6]} == {'fsdp=4, tp=1', 'fsdp=2, tp=2'}
    assert '<title>Meshes for step on v5e:2x2</title>' in page.read_text()
    done = here(capsys, 'search', f'{job}:make_step', *on, '--full', 0, '--file', trials)
    assert done.stdout.splitlines()[0] == '2 meshes on v5e:2x2: 2 read from the file'
    done = here(capsys, 'search', f'{job}:make_step', *on, '--file', job)
    assert done.returncode == 2 and f"error: '{job}' is not a file of trials: it begins with" in done.stderr


@pytest.mark.medium
@tpu_compiler.needed
def test_a_search_with_stages(capsys):
    staged = os.path.join(os.path.dirname(__file__), '..', 'planning', 'mesh_search', 'test_stages.py')
    on = ('--topology', 'v5e:2x2', '--slices', 2, '--axes', 'stage,data,fsdp', '--sizes', 'fsdp=4')
    done = here(
        capsys, 'search', f'{staged}:make_step', *on, '--dcn', 'stage,data', '--pipeline', 'stage=2,4'
    )
    assert (done.returncode, done.stderr) == (0, '')
    names = {' '.join(line.split()[1:5]) for line in done.stdout.splitlines()[4:]}
    assert {name for name in names if 'microbatches' in name} == {
        'stage=2, data=1, fsdp=4; num_microbatches=2',
        'stage=2, data=1, fsdp=4; num_microbatches=4',
    }


@tpu_compiler.needed
def test_a_search_in_which_nothing_fits(job, capsys, tmp_path):
    on = ('--topology', 'v5e:2x2', '--axes', 'fsdp,tp', '--sizes', 'tp=1,2', '--html', tmp_path / 'page.html')
    done = here(capsys, 'search', f'{job}:make_large', *on, '--json')
    assert (done.returncode, done.stderr) == (3, '')
    result = json.loads(done.stdout)
    assert result['candidates'] and all(' fit: ' in row['reason'] for row in result['candidates'])
    assert 'no mesh fits' in (tmp_path / 'page.html').read_text()


@pytest.mark.medium
@tpu_compiler.needed
def test_find(job, tmp_path, capsys):
    page, trials = tmp_path / 'found.html', tmp_path / 'trials.jsonl'
    on = ('--topology', 'v5e:2x2', '--batch', 1, '--sizes', 'tp=1,2', '--file', trials)
    done = here(capsys, 'autoshard', f'{job}:make_one_device', *on, '--html', page)
    assert (done.returncode, done.stderr) == (0, '')
    assert ' on v5e:2x2, batch ' in done.stdout.splitlines()[0] and 'rule = TreePath' in done.stdout
    assert '<title>A rule for &lt;lambda&gt;</title>' in page.read_text()
    tried = len(trials.read_text().splitlines())
    done = here(capsys, 'autoshard', f'{job}:make_one_device', *on, '--json')
    assert json.loads(done.stdout)['num_trials'] == tried == len(trials.read_text().splitlines()) > 1
    done = here(capsys, 'autoshard', f'{job}:make_one_device', *on, '--code')
    assert done.stdout.startswith('from scalax.sharding import MeshShardingHelper')
    done = here(capsys, 'autoshard', f'{job}:make_too_much', '--topology', 'v5e:2x2', '--batch', 1)
    assert done.returncode == 3 and 'does not fit' in done.stdout


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('--batch', 1, '--batch-dim', 7), 'divides the batch dimension: dimension 7'),
        (('--batch', 5), 'batch_argnums=(5,): the step has 2 arguments'),
        (('--batch', 1, '--sizes', 'tq=1'), "sizes: 'tq' is not a mesh axis"),
        (('--batch', 1, '--sizes', 'tp=1', '--sizes', 'tp=2'), '--sizes names an axis twice'),
    ],
)
@tpu_compiler.needed
def test_invalid_commands_of_find(job, capsys, arguments, message):
    done = here(capsys, 'autoshard', f'{job}:make_one_device', '--topology', 'v5e:2x2', *arguments)
    assert done.returncode == 2 and message in done.stderr


def test_options_of_autoshard_match_the_function(job, monkeypatch):
    options = {}

    def autoshard(step, arguments, topology, **keywords):
        options.update(keywords)
        raise ArgumentError('enough')

    monkeypatch.setattr(_commands, 'autoshard_step', autoshard)
    on = [
        '--topology',
        'v5e:2x2',
        '--batch',
        '1',
        '--batch-dim',
        '1',
        '--memory',
        '1.5 GiB',
        '--headroom',
        '0.05',
    ]
    kept = ['--keep', 'embed=fsdp,-', '--keep', 'a=b=', '--keep', 'head=-,fsdp+tp']
    assert main(['autoshard', f'{job}:make_one_device', *on, *kept, '--zero1']) == 2
    assert options['keep'] == [('embed', P('fsdp', None)), ('a=b', P()), ('head', P(None, ('fsdp', 'tp')))]
    assert (options['batch_dim'], options['memory'], options['headroom']) == (1, 3 * 2**29, 0.05)
    assert options['optimizer_state'] == 'zero1'
    main(['autoshard', f'{job}:make_one_device', '--topology', 'v5e:2x2', '--batch', '1'])
    left = inspect.signature(autoshard_step).parameters
    for name in ('batch_dim', 'memory', 'headroom', 'optimizer_state', 'budget_s', 'num_slices'):
        assert options[name] == left[name].default


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--memory', '16XB'], "'16XB' is not a memory size (as in 16GiB, 80GB, or bytes)"),
        (['--memory', '0'], "'0' is not a memory size"),
        (['--memory', '9' * 5000], 'is not a memory size'),
        (['--headroom', 'little'], "invalid float value: 'little'"),
        (['--batch-dim', '-1'], "'-1' is not an integer of at least 0"),
        (['--keep', 'a(=fsdp'], "'a(' is not a regex: missing )"),
        (['--keep', 'a=fs dp'], "'a=fs dp' is not of the form REGEX=SPEC (as in embed=fsdp,- or"),
        (['--keep', 'a'], "'a' is not of the form REGEX=SPEC"),
        (['--keep', '=fsdp'], "'=fsdp' is not of the form REGEX=SPEC"),
    ],
)
def test_usage_of_find(job, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(['autoshard', f'{job}:make_one_device', '--topology', 'v5e:2x2', '--batch', '1', *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ('arguments', 'advice'),
    [
        (
            ['verify', 'a.py:f', '--mesh', 'fsdp=8', '--python', '/usr/bin/python'],
            '--python was removed: start verify with the other interpreter: PATH -m scalax verify',
        ),
        (
            ['doctor', '--verify'],
            '--verify was removed: compare a step of yours: scalax verify FILE.py:make_step',
        ),
    ],
)
def test_a_removed_option_names_its_replacement(arguments, advice, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f'scalax {arguments[0]}: error: {advice}\n')
    with pytest.raises(SystemExit):
        main([arguments[0], '--help'])
    assert arguments[-1 if arguments[0] == 'doctor' else -2] not in capsys.readouterr().out


def test_version_and_no_command(capsys):
    for arguments, code in ((['--version'], 0), ([], 2), (['frobnicate'], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
    message = capsys.readouterr()
    assert message.out.startswith(f'scalax {scalax.__version__}, JAX {jax.__version__}, Python 3.')
    assert 'usage: ' in message.err and 'required: COMMAND' in message.err and "'doctor'" in message.err


@pytest.mark.parametrize(
    ('started', 'name'),
    [
        ('/bin/scalax', 'scalax'),
        ('/x/scalax/__main__.py', 'python -m scalax'),
        ('job.py', 'python -m scalax'),
    ],
)
def test_the_usage_is_that_of_the_command_which_was_typed(started, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [started])
    with pytest.raises(SystemExit):
        main(['--help'])
    assert capsys.readouterr().out.startswith(f'usage: {name} [-h]')


def test_exit_codes_are_in_the_help_and_in_the_docs(capsys):
    with pytest.raises(SystemExit):
        main(['--help'])
    listed = capsys.readouterr().out.partition('exit codes:\n')[2].splitlines()
    assert [line.split(None, 1) for line in listed] == [[str(int(code)), code.meaning] for code in ExitCode]
    page = (ROOT / 'docs' / 'command_line.md').read_text()
    rows = ''.join(f'| {int(code)} | {code.meaning} |\n' for code in ExitCode)
    assert f'|---|---|\n{rows}\n' in page


@pytest.mark.parametrize('process', [0, 1])
@pytest.mark.parametrize('findings', [(), (Finding('it is too late', 'sleep'),)], ids=['none', 'one'])
def test_doctor(capsys, monkeypatch, process, findings):
    calls = []

    def diagnose(*arguments):
        calls.append(arguments)
        return Diagnosis({'versions': 'Python'}, findings, process)

    monkeypatch.setattr(_commands, 'diagnose', diagnose)
    done = here(capsys, 'doctor', '--timeout', 7)
    assert done.returncode == (4 if findings else 0) and calls == [(7,)]
    silent = process and not findings
    assert done.stdout == ('' if silent else f'{Diagnosis({"versions": "Python"}, findings)}\n')
    done = here(capsys, 'doctor', '--json')
    assert calls[1:] == [(120,)]
    assert silent or json.loads(done.stdout)['findings'] == [finding._asdict() for finding in findings]


def test_doctor_for_a_program_that_does_not_run(capsys):
    done = here(capsys, 'doctor', '--run', 'localhost:1')
    assert done.returncode == 1
    assert done.stderr == (
        'error: process 0 does not answer at localhost:1 ([Errno 111] Connection refused): see the logs of '
        'the others. What to do: if SCALAX_RUN_TOKEN is set in the run, set it here to the same value; a '
        'run on several hosts without it does not answer\n'
    )


@pytest.mark.medium
def test_doctor_for_real(monkeypatch):
    monkeypatch.setenv('JAX_ENABLE_X46', '1')
    done = run('doctor')
    assert done.returncode == 4 and '1. JAX_ENABLE_X46 is set, but JAX has no such setting' in done.stdout


@tpu_compiler.needed
def test_plan_for_several_slices(job, capsys):
    where = ('--topology', 'v5e:2x2', '--mesh', 'fsdp=-1,tp=2', '--slices', 2, '--dcn', 'fsdp=2')
    done = here(capsys, 'plan', f'{job}:make_step', *where, '--quick')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[0] == 'step on 8 devices of v5e (fsdp=4, tp=2)'
    assert 'dcn:fsdp' in done.stdout


@tpu_compiler.needed
def test_axes_need_not_be_entire_torus_axes(job, capsys):
    # Each axis of the torus has four chips.
    where = ('--topology', 'v5p:2x4x4', '--mesh', 'data=2,fsdp=-1,tp=8', '--dcn', 'data=2')
    done = here(capsys, 'plan', f'{job}:make_step', *where, '--quick', '--json')
    assert (done.returncode, done.stderr) == (0, '')
    plan = Plan.load(done.stdout)
    assert plan.mesh == {'data': 2, 'fsdp': 4, 'tp': 8}
    assert [position.slice for position in plan.device_positions] == [0] * 32 + [1] * 32


@tpu_compiler.needed
def test_an_unknown_topology_is_named_with_its_neighbours(job, capsys):
    done = here(capsys, 'plan', f'{job}:make_step', '--topology', 'v5e:2x5', '--mesh', 'fsdp=-1,tp=2')
    assert done.returncode == 2
    assert done.stderr.startswith("error: the TPU compiler does not support the topology 'v5e:2x5': ")
    assert done.stderr.endswith(
        "did you mean 'v5e:2x4' or 'v5e:2x2'?\n`python -m scalax topologies` lists the known ones\n"
    )


@pytest.mark.medium
@pytest.mark.sampled(3)
@tpu_compiler.needed
@pytest.mark.parametrize('topology', TPU_SLICES)
def test_listed_topologies_match_the_compiler(topology):
    helper = MeshShardingHelper.from_topology(topology, [-1], ['x'], mesh_axis_splitting=True)
    hardware = HARDWARE[topology.partition(':')[0]]
    assert helper.mesh.size == num_chips(topology) * hardware.devices_per_chip
    assert helper.mesh.devices.flat[0].device_kind in hardware.device_kinds


def test_explain_needs_no_devices(job, capsys):
    assert main(['explain', f'{job}:make_state', '--mesh', 'fsdp=16,tp=4']) == 0
    assert "P('fsdp', 'tp')" in capsys.readouterr().out
    assert main(['explain', f'{job}:make_state', '--mesh', 'fsdp=16,tp=4', '--json']) == 0
    [row] = ShardingReport.load(capsys.readouterr().out).rows
    assert (row.path, row.bytes_per_device) == ('w', 64 * 32 * 4 // 64)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--sizes', 'tp=x'], "'tp=x' is not of the form NAME=N,N,... (as in tp=1,2,4)"),
        (['--sizes', 'tp=0,2'], "'0' is not an integer of at least 1"),
        (['--full', '-1'], "'-1' is not an integer of at least 0"),
    ],
)
def test_usage_of_search(job, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(['search', f'{job}:make_step', '--topology', 'v5e:2x2', '--axes', 'fsdp,tp', *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_sizes_of_an_axis_may_only_be_specified_once(job, capsys):
    on = ['--topology', 'v5e:2x2', '--axes', 'fsdp,tp', '--sizes', 'tp=1', '--sizes', 'tp=2']
    assert main(['search', f'{job}:make_step', *on]) == 2
    message = 'error: --sizes names an axis twice: give all of its sizes at once, as in tp=1,2,4\n'
    assert capsys.readouterr().err == message


@tpu_compiler.needed
def test_a_search_without_plans_does_not_report_that_nothing_fits(job, capsys):
    on = ['--topology', 'v5e:2x2', '--axes', 'fsdp,tp', '--sizes', 'tp=1']
    done = here(capsys, 'search', f'{job}:make_odd', *on)
    message = ' '.join(done.stdout.split())
    assert (
        '1 fsdp=4, tp=1 w: ' in message and 'dimension 0 of size 66 is not divisible by 4 (fsdp=4)' in message
    )
    assert done.stdout.splitlines()[0] == '1 mesh on v5e:2x2'
    assert (done.returncode, done.stderr) == (
        *(1, 'error: no mesh was planned: whether the step fits is unknown\n'),
    )
    # A mistake is not the mesh's fault.
    with pytest.raises(ValueError, match='no such model'):
        main(['search', f'{job}:make_trouble', *on])
    assert main(['search', f'{job}:make_nothing', *on]) == 2
    message = capsys.readouterr().err
    assert (
        message.endswith('\nThis was raised by the candidate fsdp=4, tp=1.\n') and 'make_nothing' in message
    )


def test_topologies(capsys):
    assert main(['topologies']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'h100       8  4x8' in lines and 'gb200      4  18x4' in lines
    assert main(['topologies', '--json']) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed.keys() == HARDWARE.keys()
    assert {f'{name}:{size}' for name in listed.keys() - GPU_KINDS for size in listed[name]} == {*TPU_SLICES}


@pytest.mark.slow
@gpu_compiler.needed
def test_plan_on_hosts_of_gpus(job, capsys):
    done = run('plan', f'{job}:make_step', '--topology', 'h100:2x4', '--mesh', 'fsdp=-1,tp=2')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[0] == 'step on 8 devices of h100 (fsdp=4, tp=2)'
    on = ('--topology', 'h100:4', '--mesh', 'fsdp=2,tp=4', '--dcn', 'fsdp=2', '--json')
    plan = Plan.load(here(capsys, 'plan', f'{job}:make_step', *on).stdout)
    assert [position.slice for position in plan.device_positions] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.medium
@gpu_compiler.needed
def test_search_and_find_on_hosts_of_gpus(job, capsys):
    on = ('--topology', 'h100:2x4', '--sizes', 'tp=2')
    done = here(capsys, 'search', f'{job}:make_step', '--axes', 'fsdp,tp', *on)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[0] == '1 mesh on h100:2x4: 1 planned'
    done = here(capsys, 'autoshard', f'{job}:make_one_device', '--batch', 1, *on)
    assert done.returncode == 0 and 'h100:2x4' in done.stdout


@pytest.mark.parametrize(
    ('topology', 'message'),
    [
        ('h100:16', 'write several hosts, as in h100:4x8'),
        ('gb200:36x4', 'write several domains, as in gb200:4x18x4'),
        ('v100:8', "no topology 'v100:8' is known"),
    ],
)
def test_invalid_gpu_topologies(job, capsys, topology, message):
    done = here(capsys, 'plan', f'{job}:make_step', '--topology', topology, '--mesh', 'fsdp=-1,tp=1')
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize('wrong', [('--slices', '2'), ('--dcn', 'fsdp=2')])
def test_explain_takes_no_slices_without_a_topology(job, capsys, wrong):
    assert main(['explain', f'{job}:make_state', '--mesh', 'fsdp=4,tp=2', *wrong]) == 2
    assert capsys.readouterr().err == 'error: --slices and --dcn are for TPUs and GPUs: give --topology\n'


WRONG = {
    'make_stap': "'FILE' has no function 'make_stap' (did you mean 'make_step' or 'make_state'?)",
    'make_nothing': "'FILE:make_nothing' has to return a tree and the rules for it; it returned NoneType",
    '3x': "'FILE:3x' does not name a function: write FILE.py:function",
}


@pytest.mark.parametrize('name', WRONG)
def test_a_function_that_does_not_exist(job, capsys, name):
    assert main(['explain', f'{job}:{name}', '--mesh', 'fsdp=4,tp=2']) == 2
    message = capsys.readouterr().err.replace(str(job), 'FILE')
    assert message == f'error: {WRONG[name]}\n'


def test_a_file_that_does_not_exist(capsys, tmp_path):
    assert main(['explain', f'{tmp_path}/none.py:make_state', '--mesh', 'fsdp=4']) == 2
    assert capsys.readouterr().err == f"error: there is no file '{tmp_path}/none.py'\n"


def test_a_file_named_like_a_module_does_not_shadow_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, 'path', [*sys.path])
    job = tmp_path / 'json.py'
    # A dataclass looks for its own module.
    job.write_text('from __future__ import annotations\nimport dataclasses\n' + JOB)
    job.write_text(job.read_text() + '\n@dataclasses.dataclass\nclass Sizes:\n    width: int = 64\n')
    assert main(['explain', f'{job}:make_state', '--mesh', 'fsdp=4,tp=2', '--json']) == 0
    assert json.loads(capsys.readouterr().out)['rows']
    assert sys.modules['json'] is json


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        (
            ('plan', 'make_too_much', '--mesh', 'fsdp=8'),
            'a MeshShardingHelper first (too many positional arguments); one without arguments is for '
            'autoshard',
        ),
        (
            ('autoshard', 'make_step', '--batch', '1', '--topology', 'v5e:2x2'),
            "no arguments (missing a required argument: 'helper'); one with a helper is for plan, search, "
            'verify and explain',
        ),
    ],
)
def test_a_function_for_another_command(job, capsys, command, message):
    name, function, *options = command
    assert main([name, f'{job}:{function}', *options]) == 2
    assert capsys.readouterr().err == f"error: '{job}:{function}' has to take {message}\n"


def test_arguments_of_invalid_types(job, capsys):
    done = here(capsys, 'plan', f'{job}:make_one', '--mesh', 'fsdp=8')
    assert done.returncode == 2
    assert done.stderr == (
        f"error: '{job}:make_one' has to return the step and the tuple of its arguments; "
        'the arguments are a int\n'
    )


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--mesh', 'fsdp'], "'fsdp' is not of the form NAME=N,NAME=N (as in fsdp=-1,tp=4)"),
        (['--mesh', 'a=2,a=3'], "'a=2,a=3' names 'a' twice"),
        (['--mesh', 'a=0'], "'a=0' is not of the form NAME=N,NAME=N (as in fsdp=-1,tp=4)"),
        (['--mesh', 'a=-2'], "'a=-2' is not of the form NAME=N,NAME=N (as in fsdp=-1,tp=4)"),
        (['--mesh', 'a=2', '--slices', '0'], "'0' is not an integer of at least 1"),
        (
            ['--mesh', 'a=2', '--html', 'no/such/p.html'],
            "'no/such/p.html' cannot be written: it is a folder, or its parent directory does not exist",
        ),
        ([], 'the following arguments are required: --mesh'),
    ],
)
def test_usage(job, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(['plan', f'{job}:make_step', *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['--mesh', 'fsdp=4', '--dcn', 'fdsp=2', '--topology', 'v5e:2x2'],
            "--dcn names 'fdsp', which is not an axis of --mesh (did you mean 'fsdp'?): give its whole size "
            'there',
        ),
        (['--mesh', 'fsdp=4', '--slices', '2'], '--slices and --dcn are for TPUs and GPUs: give --topology'),
        (
            ['--mesh', 'fsdp=-1'],
            'without --topology the number of devices is unknown: give every axis of --mesh a size',
        ),
    ],
)
def test_invalid_arguments(job, capsys, arguments, message):
    assert main(['plan', f'{job}:make_step', *arguments]) == 2
    assert capsys.readouterr().err == f'error: {message}\n'


@pytest.mark.parametrize('command', [('plan', '--mesh', 'a=8'), ('search', '--axes', 'a')])
def test_slices_need_mesh_axes(job, capsys, command):
    name, *options = command
    assert main([name, f'{job}:make_step', *options, '--topology', 'v5e:2x2', '--slices', '2']) == 2
    message = 'error: --slices 2 needs --dcn, the mesh axes across slices\n'
    assert capsys.readouterr().err == message
