"""The doctor: its findings about processes that hang, crash or disagree."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import pytest

from examples.launch.ports import held_port
from scalax._diagnostics.doctor import (
    Diagnosis,
    device_process,
    devices,
    diagnose,
    diagnosis,
    environment,
)
from scalax._diagnostics.doctor.devices import Opened, _disagreements, _known_cure, open_devices
from scalax._diagnostics.doctor.environment import Finding
from tests.support import ROOT

LONG = 200  # seconds, on a busy machine


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Makes the process that opens the devices run given code first, in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)

    def write(text):
        (tmp_path / 'sitecustomize.py').write_text(text)
        monkeypatch.setenv('PYTHONPATH', f'{tmp_path}{os.pathsep}{ROOT}')

    return write


@pytest.mark.medium
def test_a_healthy_process_runs_a_program_on_each_device(monkeypatch):
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '3')
    before = dict(os.environ)
    opened = open_devices({}, LONG)
    assert opened.findings == []
    assert opened.summary.startswith('3 x cpu (cpu), opened in ')
    assert (opened.values['stage'], opened.values['processes'], opened.values['everywhere']) == ('', 1, 3)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('import os\nprint("almost", flush=True)\nos.abort()', 'starting Python failed (signal SIGABRT)'),
        ('import os\nprint("almost", flush=True)\nos._exit(3)', 'starting Python failed (exit code 3)'),
    ],
    ids=['a crash', 'an exit'],
)
def test_a_process_that_fails(begin, text, message):
    begin(text)
    [finding] = open_devices({}, LONG).findings
    assert finding.what.splitlines()[:2] == [message, '     almost']
    assert finding.cure == 'see its output above, which comes from JAX and its plugins'


@pytest.mark.medium
def test_scalax_is_found_without_an_installation(begin):
    begin(
        'import atexit, os, sys\n'
        'def leave():\n'
        '    print(sys.path[-1], flush=True)\n'
        '    os._exit(3)\n'
        'atexit.register(leave)\n'
    )
    [finding] = open_devices({}, LONG).findings
    assert finding.what.endswith(f'\n     {ROOT}')


@pytest.mark.medium
def test_process_that_prints_an_endless_line(begin):
    # Searching the entire output with the patterns would take hours.
    begin('import os\nprint("x" * (1 << 21), flush=True)\nos._exit(3)')
    [finding] = open_devices({}, LONG).findings
    assert finding.what.startswith('starting Python failed (exit code 3)') and len(finding.what) < 1000


@pytest.mark.slow
def test_hanging_process_is_ended_with_its_children(begin, tmp_path):
    # The process ignores all signals that it can, and so does its child.
    child = 'import time; open("alive", "w").close(); time.sleep(300)'
    text = (
        'import os, signal, subprocess, sys, time\n'
        'signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
        f'child = subprocess.Popen([sys.executable, "-E", "-c", {child!r}])\n'
        'open("pid", "w").write(str(child.pid))\n'
        'while not os.path.exists("alive"): time.sleep(0.1)\n'
        'open("both", "w").close()\n'
        'time.sleep(300)\n'
    )
    begin(text)
    [finding] = open_devices({}, 20).findings
    assert finding.what.startswith('starting Python has not ended after ')
    assert finding.cure == 'try again, with a longer --timeout'
    assert (tmp_path / 'both').exists()
    pid, deadline = int((tmp_path / 'pid').read_text()), time.monotonic() + 60
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(pid)


@pytest.mark.medium
def test_no_wait_for_a_child_that_left_the_group(begin, tmp_path):
    begin(
        'import os, time\n'
        'pid = os.fork()\n'
        'if not pid:\n'
        '    os.setsid()\n'
        '    time.sleep(1000)\n'
        'open("pid", "w").write(str(pid))\n'
        'os._exit(0)\n'
    )
    try:
        [finding] = open_devices({}, LONG).findings
        assert finding.what == 'starting Python failed (exit code 0)'
    finally:
        os.kill(int((tmp_path / 'pid').read_text()), signal.SIGKILL)


def _runs(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


@pytest.mark.medium
@pytest.mark.parametrize(
    ('name', 'value', 'message'),
    [
        ('XLA_FLAGS', '--xla_no_such_flag=1', 'in XLA_FLAGS: --xla_no_such_flag=1'),
        ('XLA_FLAGS', 'xla_dump_to=/tmp', 'Could not open file "xla_dump_to=/tmp" to read flags'),
        ('JAX_PLATFORMS', 'nonsense', "Unable to initialize backend 'nonsense'"),
    ],
)
def test_variables_that_break_opening_devices(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    [finding] = open_devices({}, LONG).findings
    assert message in finding.what and finding.cure == _known_cure(finding.what)


def no_driver():
    raise RuntimeError('no driver')


@pytest.mark.parametrize(
    ('memory_stats', 'expected'),
    [(lambda: {'bytes_limit': 5}, 5), (dict, None), (lambda: None, None), (no_driver, None)],
    ids=['known', 'not stated', 'no message', 'an error'],
)
def test_memory_of_a_device(memory_stats, expected):
    assert device_process.memory(SimpleNamespace(memory_stats=memory_stats)) == expected


@pytest.fixture
def pair(monkeypatch):
    """Returns the environment variables of a program of two processes."""
    with held_port() as port:
        monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', f'127.0.0.1:{port}')
        monkeypatch.setenv('JAX_NUM_PROCESSES', '2')
        monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)
        yield


@pytest.mark.medium
def test_processes_that_disagree(pair):
    code = (
        'import sys; from scalax._diagnostics.doctor.devices import open_devices\n'
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
    outputs = [process.communicate(timeout=LONG * 2)[0].splitlines() for process in running]
    for index, lines in enumerate(outputs):
        assert lines[:2] == [
            str(index),
            'the processes disagree about jax: 0.10.0 on process 0; 0.10.1 on process 1 1',
        ]
        assert lines[2].startswith('1 x cpu (cpu) here, 2 in all, opened in ')


@pytest.mark.slow
def test_process_that_waits_for_others(pair, monkeypatch):
    monkeypatch.setenv('JAX_PROCESS_ID', '1')
    [finding] = open_devices({}, 25).findings
    assert finding.what.startswith('joining the other processes ')
    assert 'waiting for the other processes at 127.0.0.1' in finding.what


def test_disagreements():
    rows = [{'jax': '1'} for _ in range(8)] + [{'jax': '2'}]
    [finding] = _disagreements(rows)
    assert finding.what.endswith('jax: 1 on processes 0, 1, 2, 3 and 4 more; 2 on process 8')
    assert not [*_disagreements(rows[:8])] and not [*_disagreements(())]
    [finding] = _disagreements([{}, {'a': 'x'}])
    assert finding.what.endswith('a: not set on process 0; x on process 1')


# Lines from reports of users.
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
def test_known_error_messages(line):
    assert REPORTED[line] in _known_cure(f'I0000 something before\n{line}\nsomething {{after}}')


def test_unknown_error_messages():
    assert _known_cure('I0000 all is well {0}\n') == ''


def test_this_installation():
    assert {'jax', 'jaxlib', 'numpy'} <= set(environment.installed())


@pytest.mark.parametrize(
    ('environ', 'present', 'messages'),
    [
        ({'JAX_ENABLE_X46': '1'}, (), ['JAX_ENABLE_X46 is set, but JAX has no such setting']),
        ({'JAX_ENABLE_X64': '1', 'JAX_PROCESS_ID': '0', 'JAX_ZZ': ''}, (), []),
        ({'JAX_PLATFORMS': 'cpu'}, (), []),
        ({'JAX_PLATFORMS': 'cpu'}, ('TPU',), ['JAX_PLATFORMS=cpu hides the TPU devices of this machine']),
        ({'JAX_PLATFORMS': 'tpu,cpu'}, ('TPU',), []),
    ],
)
def test_variables(environ, present, messages):
    settings = ['jax_enable_x64', 'jax_platforms', 'check_vma']
    findings = environment.wrong_variables(environ, settings, present)
    assert [finding.what for finding in findings] == messages


def test_devices_without_a_package():
    assert not [*environment.missing_plugins(['TPU', 'NVIDIA'], ['libtpu', 'jax-cuda13-plugin'])]
    [finding] = environment.missing_plugins(['TPU', 'NVIDIA'], ['libtpu', 'jax'])
    assert 'NVIDIA' in finding.what and 'jax[cuda13]' in finding.cure


def test_compilers_that_jax_does_not_load():
    assert not [*environment.wrong_compilers({'jaxlib': '1.2', 'jax-cuda12-pjrt': '1.2'})]
    [finding] = environment.wrong_compilers({'jaxlib': '1.2', 'jax-cuda12-pjrt': '1.1'})
    assert finding == (
        'jax-cuda12-pjrt 1.1 does not fit jaxlib 1.2',
        'pip install jax-cuda12-plugin==1.2',
    )


@pytest.mark.medium
def test_a_diagnosis(monkeypatch):
    monkeypatch.setenv('JAX_ENABLE_X46', '\x1b[31m1')
    result = diagnose(LONG)
    assert isinstance(result, Diagnosis)
    text = str(result)
    assert '\x1b' not in text and 'JAX_ENABLE_X46=\\x1b[31m1' in text
    assert '1. JAX_ENABLE_X46 is set, but JAX has no such setting' in text and '   cure: did you mean' in text
    values = result.to_dict()
    assert values['process'] == 0
    assert {'what': 'JAX_ENABLE_X46 is set, but JAX has no such setting'}.items() <= values['findings'][
        0
    ].items()


ONLY_THE_CPU = Finding(
    'this machine has TPU devices, but JAX opens only the CPU\n     the last line',
    'run with JAX_PLATFORMS=tpu (or cuda, rocm): its error then gives the reason',
)
OTHER = Finding('the processes disagree about jax: 1 on process 0; 2 on process 1', 'install the same')


@pytest.mark.parametrize(
    ('present', 'platform', 'opened', 'expected'),
    [
        ({'TPU': 4}, 'cpu', [], [ONLY_THE_CPU]),
        ({'TPU': 4}, 'cpu', [OTHER], [OTHER]),  # which may be why
        ({'TPU': 4}, 'tpu', [], []),
        ({}, 'cpu', [], []),
    ],
)
def test_devices_not_opened_by_jax(monkeypatch, present, platform, opened, expected):
    values = {'devices': [[platform, platform, None]], 'processes': 1, 'opened': 0.5}
    monkeypatch.setattr(diagnosis, 'open_devices', lambda *_: Opened(values, opened, '\n     the last line'))
    monkeypatch.setattr(environment, 'accelerators', lambda: present)
    for name in ('missing_plugins', 'wrong_compilers', 'wrong_variables'):
        monkeypatch.setattr(environment, name, lambda *_: [])
    assert diagnose().findings == tuple(expected)


WRITES_ITS_ID = (
    'import os, time\nopen("pid", "w").write(str(os.getpid()))\nopen("both", "w").close()\ntime.sleep(300)\n'
)


@pytest.mark.medium
def test_ctrl_c_ends_the_other_process(begin, tmp_path):
    begin(WRITES_ITS_ID)

    def waits_for_the_process():
        top = sys._current_frames()[threading.main_thread().ident]
        return any(frame.f_code is subprocess.Popen.wait.__code__ for frame, _ in traceback.walk_stack(top))

    def press():
        while not ((tmp_path / 'both').exists() and waits_for_the_process()):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        open_devices({}, LONG)
    assert not _runs(int((tmp_path / 'pid').read_text()))


@pytest.mark.medium
def test_ctrl_c_before_the_wait_ends_the_other_process(begin, tmp_path, monkeypatch):
    begin(WRITES_ITS_ID)

    class Interrupted(threading.Thread):
        def start(self):
            while not (tmp_path / 'both').exists():
                time.sleep(0.1)
            raise KeyboardInterrupt

        def join(self, timeout=None):
            pass

    monkeypatch.setattr(devices, 'threading', SimpleNamespace(Thread=Interrupted))
    with pytest.raises(KeyboardInterrupt):
        open_devices({}, LONG)
    assert not _runs(int((tmp_path / 'pid').read_text()))


def test_no_findings():
    assert str(Diagnosis({'versions': 'Python 3'}, ())) == 'nothing is wrong\n\nversions  Python 3'
    text = str(Diagnosis({'versions': 'Python 3'}, (Finding('it failed\n     why', 'mend it'),)))
    assert text.endswith('\n1. it failed\n     why\n   cure: mend it')
