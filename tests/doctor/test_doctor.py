"""`scalax._doctor`: what it finds in processes that hang, crash, begin too late or disagree."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from examples.launch.ports import held_port
from scalax._doctor import Diagnosis, device_process, diagnose, environment
from scalax._doctor.devices import _disagreements, _known_cure, open_devices
from scalax._doctor.environment import Finding
from tests.support import ROOT

LONG = 200  # seconds, on a busy machine


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a file of a user, and goes to its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)

    def write(text):
        (tmp_path / 'train.py').write_text(text)
        return 'train.py'

    return write


def whats(found):
    return [finding.what.replace(f'{os.getcwd()}/', '') for finding in found]


@pytest.mark.long
def test_a_healthy_process_runs_a_program_on_each_device(monkeypatch):
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '3')
    before = dict(os.environ)
    opened = open_devices({}, LONG)
    assert opened.findings == []
    assert opened.summary.startswith('3 x cpu (cpu), opened in ')
    assert (opened.values['stage'], opened.values['processes'], opened.values['everywhere']) == ('', 1, 3)
    assert dict(os.environ) == before


@pytest.mark.long
def test_a_step_of_training_on_all_devices(monkeypatch):
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '4')
    opened = open_devices({}, LONG, verify=True)
    assert opened.findings == []
    assert opened.values['verified'] == (
        'train_step on fsdp=2, tp=2 computes what one device computes: 4 results, 2 steps in a row, 3 seeds'
    )
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
    opened = open_devices({}, LONG, verify=True)
    assert (opened.findings, opened.values['verified']) == ([], 'not run: there is only one device')


# Stands for devices of which each has another part of the sum.
WRONG_DEVICES = """
import os
os.environ['JAX_NUM_CPU_DEVICES'] = '2'
import jax
import jax.numpy as jnp
from scalax._doctor import training_step

def of_one_device(params, batch):
    def loss(x, y, up, bias, down):
        return jnp.mean((jax.nn.gelu(x @ up + bias) @ down - y) ** 2)
    rows, all = jax.P('fsdp'), jax.P()
    mapped = jax.shard_map(loss, in_specs=(rows, rows, all, all, all), out_specs=all, check_vma=False)
    return mapped(batch['x'], batch['y'], params['up'], params['bias'], params['down'])

training_step._loss = of_one_device
"""


@pytest.mark.long
def test_devices_that_compute_something_else(file):
    [found] = open_devices({}, LONG, file(WRONG_DEVICES), verify=True).findings
    first, *more = found.what.splitlines()
    assert first.startswith('train_step on fsdp=2, tp=1 does not compute what one device computes: ')
    assert (
        more[0].startswith('     shard_map at train.py:')
        and ' is the first operation that differs' in more[0]
    )
    assert any(line.startswith('     loss is ') and line.endswith(' on one device') for line in more)
    assert found.cure.startswith('do not train on this machine. ')


LATE = """
import os
os.environ['JAX_ENABLE_X64'] = '1'  # in time
import jax
import scalax.sharding
os.environ['JAX_ENABLE_X64'] = '1'  # as it is
os.environ['JAX_DEBUG_NANS'] = '1'
os.environ['JAX_COORDINATOR_BIND_ADDRESS'] = ''  # read when processes join
os.environ['XLA_FLAGS'] = '--xla_cpu_enable_fast_math=true'  # in time
key = jax.random.key(0)
os.environ['XLA_FLAGS'] = ''
os.environ.setdefault('NCCL_DEBUG', 'INFO')
os.environ['HOME'] = '/'
assert jax.config.jax_enable_x64
"""


@pytest.mark.long
def test_variables_that_are_set_too_late(file):
    opened = open_devices({}, LONG, file(LATE))
    assert whats(opened.findings) == [
        'train.py:7 sets JAX_DEBUG_NANS after JAX was imported: it has no effect',
        'train.py:11 sets XLA_FLAGS after JAX has used its devices: it has no effect',
        'train.py:12 sets NCCL_DEBUG after JAX has used its devices: it has no effect',
    ]
    assert opened.summary  # the rest is looked at all the same


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ('text', 'what', 'cure'),
    [
        (
            "import jax\njax.devices()\n\njax.config.update('jax_num_cpu_devices', 8)",
            'importing train.py failed (exit code 1)\n',
            'move that to the start of the program',
        ),
        (
            'import no_such_module',
            'importing train.py failed (exit code 1)\n',
            'fix the file',
        ),
        ('import os\nprint("almost")\nos.abort()', 'importing train.py failed (signal SIGABRT)', 'fix the'),
        ('raise SystemExit(3)', 'importing train.py failed (exit code 3)', 'fix the'),
    ],
    ids=['too late', 'an import', 'a crash', 'an exit'],
)
def test_files_that_fail(file, text, what, cure):
    [found] = open_devices({}, LONG, file(text)).findings
    assert found.what.startswith(what) and found.cure.startswith(cure)
    if 'almost' in text:
        assert 'almost' in found.what.splitlines()[1]
    if 'no_such' in text:
        assert found.what.endswith("\n     ModuleNotFoundError: No module named 'no_such_module'")


def test_scalax_is_found_where_it_is_not_installed(file):
    [found] = open_devices({}, LONG, file('import sys\nraise SystemExit(sys.path[-1])')).findings
    assert found.what.endswith(f'\n     {ROOT}')


@pytest.mark.long
def test_a_variable_that_is_set_too_late_before_the_file_fails(file):
    late, failed = open_devices({}, LONG, file(LATE + 'raise SystemExit(1)')).findings[2:]
    assert whats([late])[0].startswith('train.py:12 sets NCCL_DEBUG')
    assert failed.what == 'importing train.py failed (exit code 1)'


@pytest.mark.long
@pytest.mark.one_jax
def test_a_file_that_prints_a_line_without_end(file):
    # Patterns that search the whole of it take hours.
    opened = open_devices({}, LONG, file('import os\nprint("x" * (1 << 21), flush=True)\nos._exit(3)'))
    [found] = opened.findings
    assert found.what.startswith('importing train.py failed (exit code 3)') and len(found.what) < 1000


@pytest.mark.one_jax
@pytest.mark.slow
def test_what_hangs_is_ended_with_what_it_started(file, tmp_path):
    # Its own process ignores what can be ignored, and so does the one that it starts.
    child = 'import time; open("alive", "w").close(); time.sleep(300)'
    text = (
        'import os, signal, subprocess, sys, time\n'
        'signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
        f'child = subprocess.Popen([sys.executable, "-c", {child!r}])\n'
        'open("pid", "w").write(str(child.pid))\n'
        'while not os.path.exists("alive"): time.sleep(0.1)\n'
        'open("both", "w").close()\n'
        'time.sleep(300)\n'
    )
    [found] = open_devices({}, 20, file(text)).findings
    assert found.what.startswith('importing train.py has not ended after ')
    assert found.cure.startswith('the file does not end: put what it runs under')
    assert (tmp_path / 'both').exists()
    pid, deadline = int((tmp_path / 'pid').read_text()), time.monotonic() + 60
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(pid)


@pytest.mark.long
@pytest.mark.one_jax
def test_what_has_left_the_group_is_not_waited_for(file, tmp_path):
    named = file(
        'import os, time\n'
        'pid = os.fork()\n'
        'if not pid:\n'
        '    os.setsid()\n'
        '    time.sleep(1000)\n'
        'open("pid", "w").write(str(pid))\n'
        'raise SystemExit(0)\n'
    )
    try:
        [found] = open_devices({}, LONG, named).findings
        assert found.what == 'importing train.py failed (exit code 0)'
    finally:
        os.kill(int((tmp_path / 'pid').read_text()), signal.SIGKILL)


def _runs(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.parametrize(
    ('name', 'value', 'what'),
    [
        ('XLA_FLAGS', '--xla_no_such_flag=1', 'in XLA_FLAGS: --xla_no_such_flag=1'),
        ('XLA_FLAGS', 'xla_dump_to=/tmp', 'Could not open file "xla_dump_to=/tmp" to read flags'),
        ('JAX_PLATFORMS', 'nonsense', "Unable to initialize backend 'nonsense'"),
    ],
)
def test_variables_with_which_nothing_opens(monkeypatch, name, value, what):
    monkeypatch.setenv(name, value)
    [found] = open_devices({}, LONG).findings
    assert what in found.what and found.cure == _known_cure(found.what)


def no_driver():
    raise RuntimeError('no driver')


@pytest.mark.parametrize(
    ('memory_stats', 'expected'),
    [(lambda: {'bytes_limit': 5}, 5), (dict, None), (lambda: None, None), (no_driver, None)],
    ids=['known', 'not said', 'nothing said', 'an error'],
)
def test_memory_of_a_device(memory_stats, expected):
    assert device_process.memory(SimpleNamespace(memory_stats=memory_stats)) == expected


@pytest.fixture
def pair(monkeypatch):
    """The variables of a program of two processes."""
    with held_port() as port:
        monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', f'127.0.0.1:{port}')
        monkeypatch.setenv('JAX_NUM_PROCESSES', '2')
        monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)
        yield


@pytest.mark.long
def test_processes_that_disagree(pair):
    code = (
        'import sys; from scalax._doctor.devices import open_devices\n'
        "opened = open_devices({'jax': '0.10.' + sys.argv[1], 'Python': '3.11'}, 200)\n"
        'print(opened.values["process"]); print(opened.findings[0].what, len(opened.findings)); '
        'print(opened.summary)'
    )
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, '-c', code, str(index)],
            env={**env, 'JAX_PROCESS_ID': str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    said = [process.communicate(timeout=LONG * 2)[0].splitlines() for process in running]
    for index, lines in enumerate(said):
        assert lines[:2] == [
            str(index),
            'the processes disagree about jax: 0.10.0 on process 0; 0.10.1 on process 1 1',
        ]
        assert lines[2].startswith('1 x cpu (cpu) here, 2 in all, opened in ')


@pytest.mark.slow
def test_a_process_that_waits_for_others_is_told_so(pair, monkeypatch):
    monkeypatch.setenv('JAX_PROCESS_ID', '1')
    [found] = open_devices({}, 25).findings
    assert found.what.startswith('joining the other processes ')
    assert 'waiting for the other processes at 127.0.0.1' in found.what


@pytest.mark.long
def test_a_file_that_uses_devices_before_processes_join(pair, file, monkeypatch):
    monkeypatch.setenv('JAX_PROCESS_ID', '1')
    [found] = open_devices({}, LONG, file('import jax\nkey = jax.random.key(0)')).findings
    assert found.what.startswith('joining the other processes failed (exit code 1)')
    assert 'jax.random.key' in found.cure


def test_who_disagrees():
    rows = [{'jax': '1'} for _ in range(8)] + [{'jax': '2'}]
    [found] = _disagreements(rows)
    assert found.what.endswith('jax: 1 on processes 0, 1, 2, 3 and 4 more; 2 on process 8')
    assert not [*_disagreements(rows[:8])] and not [*_disagreements(())]
    [found] = _disagreements([{}, {'a': 'x'}])
    assert found.what.endswith('a: not set on process 0; x on process 1')


# Lines as users have reported them.
REPORTED = {
    'ABORTED: The TPU is already in use by process with pid 176028. Not attempting to load libtpu.so': 'lsof',
    'libtpu.so already in use by another process probably owned by another user.': 'lsof',
    "RuntimeError: Unable to initialize backend 'cuda': Mismatched PJRT plugin PJRT API version": 'a plugin',
    'E0715 18:02 cuda_dnn.cc:523] Loaded runtime CuDNN library: 9.0.0 but source was compiled with: 9.1.1.': (
        'LD_LIBRARY_PATH'
    ),
    '    assert _default_backend is not None': 'JAX_PLATFORMS',
}


@pytest.mark.parametrize('line', REPORTED, ids=range(len(REPORTED)))
def test_lines_that_are_known(line):
    assert REPORTED[line] in _known_cure(f'I0000 something before\n{line}\nsomething {{after}}')


def test_lines_that_are_not_known():
    assert _known_cure('I0000 all is well {0}\n') == ''


def test_this_installation():
    assert {'jax', 'jaxlib', 'numpy'} <= set(environment.installed())


@pytest.mark.parametrize(
    ('environ', 'present', 'what'),
    [
        ({'JAX_ENABLE_X46': '1'}, (), ['JAX_ENABLE_X46 is set, but JAX has no such setting']),
        ({'JAX_ENABLE_X64': '1', 'JAX_PROCESS_ID': '0', 'JAX_ZZ': ''}, (), []),
        ({'JAX_PLATFORMS': 'cpu'}, (), []),
        ({'JAX_PLATFORMS': 'cpu'}, ('TPU',), ['JAX_PLATFORMS=cpu hides the TPU devices of this machine']),
        ({'JAX_PLATFORMS': 'tpu,cpu'}, ('TPU',), []),
    ],
)
def test_variables(environ, present, what):
    settings = ['jax_enable_x64', 'jax_platforms', 'check_vma']
    assert whats(environment.wrong_variables(environ, settings, present)) == what


def test_devices_without_a_package():
    assert not [*environment.missing_plugins(['TPU', 'NVIDIA'], ['libtpu', 'jax-cuda13-plugin'])]
    [found] = environment.missing_plugins(['TPU', 'NVIDIA'], ['libtpu', 'jax'])
    assert 'NVIDIA' in found.what and 'jax[cuda13]' in found.cure


def test_compilers_that_jax_does_not_load():
    assert not [*environment.wrong_compilers({'jaxlib': '1.2', 'jax-cuda12-pjrt': '1.2'})]
    [found] = environment.wrong_compilers({'jaxlib': '1.2', 'jax-cuda12-pjrt': '1.1'})
    assert found == (
        'jax-cuda12-pjrt 1.1 does not fit jaxlib 1.2',
        'pip install jax-cuda12-plugin==1.2',
    )


def test_a_diagnosis(monkeypatch):
    monkeypatch.setenv('JAX_ENABLE_X46', '\x1b[31m1')
    found = diagnose(LONG)
    assert isinstance(found, Diagnosis)
    text = str(found)
    assert '\x1b' not in text and 'JAX_ENABLE_X46=\\x1b[31m1' in text
    assert '1. JAX_ENABLE_X46 is set, but JAX has no such setting' in text and '   cure: did you mean' in text
    values = found.to_dict()
    assert values['process'] == 0
    assert {'what': 'JAX_ENABLE_X46 is set, but JAX has no such setting'}.items() <= values['findings'][
        0
    ].items()


@pytest.mark.long
@pytest.mark.one_jax
def test_ctrl_c_ends_the_other_process(file, tmp_path):
    named = file(
        'import os, time\n'
        'open("pid", "w").write(str(os.getpid()))\n'
        'open("both", "w").close()\n'
        'time.sleep(300)\n'
    )

    def press():
        while not (tmp_path / 'both').exists():
            time.sleep(0.1)
        os.kill(os.getpid(), 2)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        open_devices({}, LONG, named)
    assert not _runs(int((tmp_path / 'pid').read_text()))


def test_nothing_is_wrong():
    assert str(Diagnosis({'versions': 'Python 3'}, ())) == 'nothing is wrong\n\nversions  Python 3'
    text = str(Diagnosis({'versions': 'Python 3'}, (Finding('it failed\n     why', 'mend it'),)))
    assert text.endswith('\n1. it failed\n     why\n   cure: mend it')
