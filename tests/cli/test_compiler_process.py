"""Commands that compile run in a separate process: the message of its crash, and other ways to end it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from scalax._planning.compiler import running_compilations
from scalax.cli import ExitCode, _arguments, _compiler_process, main_process
from tests.support import ROOT

JOB = """
import ctypes, os, signal, time
import jax
from scalax.sharding import PartitionSpec as P

def make_step(helper):
    def step(w, x):
        return x @ w
    step = helper.sjit(step, in_shardings=P(), out_shardings=P())
    return step, (jax.ShapeDtypeStruct((8, 8), 'float32'),) * 2

def replace_compiler(act):
    jax.stages.Lowered.compile = lambda *args, **kwargs: act()

def make_crash(helper):
    replace_compiler(lambda: ctypes.string_at(0))
    return make_step(helper)

def make_endless(helper):
    def compile():
        time.sleep(0.2)  # until the main thread waits for this one
        print('compiling', os.getpid(), flush=True)
        time.sleep(500)
    replace_compiler(compile)
    return make_step(helper)

def make_counted(helper):
    try:
        print('waiting', flush=True)
        for _ in range(50_000):  # Python does not see a signal that comes just before a sleep until it ends
            time.sleep(0.01)
    except KeyboardInterrupt:
        time.sleep(1)  # where a second signal would end it
        print('one Ctrl-C', flush=True)
        raise
"""

MESH = ('--mesh', 'fsdp=4,tp=2')


@pytest.fixture
def job(tmp_path):
    path = tmp_path / 'job.py'
    path.write_text(JOB)
    return path


IN_A_TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


def start(*arguments, terminal=False, **variables):
    """Starts a command without a terminal that would send it Ctrl-C, or in a new terminal."""
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]), **variables}
    env.pop('JAX_NUM_CPU_DEVICES', None)
    command = [sys.executable, '-W', 'error', '-m', 'scalax', *map(str, arguments)]
    return subprocess.Popen(
        [sys.executable, '-c', IN_A_TERMINAL, *command] if terminal else command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_of(process):
    """Returns the exit code and the output, after all processes have closed the output."""
    try:
        out, err = process.communicate(timeout=500)
    finally:
        process.kill()
    return process.returncode, out, err


COMPILING = "'step' for 8 'cpu' devices (fsdp=4, tp=2)"
FAULT_OF_THE_COMPILER = (
    'What to do: this is a bug in the compiler, which may have printed more above. Remove parts of the '
    'function until you know which operation causes it, and write that operation in another way. Other '
    'programs may compile: for another topology or mesh (--sizes leaves meshes out), with --quick, which '
    'skips the last passes of the compiler for TPUs, or without --topology, for simulated devices. Please '
    'report it: '
    'https://github.com/openxla/xla/issues'
)


@pytest.mark.medium
def test_a_crash_is_an_error_of_the_command_and_leaves_no_files(job, tmp_path):
    folder = tmp_path / 'temporary'
    folder.mkdir()
    code, out, err = end_of(start('plan', f'{job}:make_crash', *MESH, TMPDIR=str(folder)))
    assert not [*folder.glob('scalax-plan-*')]
    assert (code, out) == (ExitCode.CRASHED, '')
    assert err == (
        f"error: the compiler crashed (SIGSEGV, segmentation fault) for '{job}:make_crash' on simulated "
        f'devices: it was compiling {COMPILING}\n{FAULT_OF_THE_COMPILER}\n'
    )


@pytest.mark.parametrize(
    ('number', 'compilations', 'message'),
    [
        (
            signal.SIGILL,
            f"'loss' for 4 'cpu' devices (fsdp=4), and {COMPILING}",
            "error: the compiler crashed (SIGILL, illegal instruction) for 'a.py:f' on v5e:2x4: it was "
            f"compiling 'loss' for 4 'cpu' devices (fsdp=4), and {COMPILING}\n{FAULT_OF_THE_COMPILER}",
        ),
        (
            signal.SIGKILL,
            COMPILING,
            "error: the process of the compiler was killed (SIGKILL, killed) for 'a.py:f' on v5e:2x4: it was "
            f'compiling {COMPILING}\n'
            'What to do: the system kills a process if memory runs out (see the system log). Provide more '
            'memory, or compile less: --quick, or a smaller mesh.',
        ),
        (
            signal.SIGABRT,
            '',
            "error: the process crashed (SIGABRT, aborted) for 'a.py:f' on v5e:2x4: no compiler was running\n"
            'What to do: look for native code that the function calls; `python -X faulthandler -m scalax` '
            'prints the line of the crash.',
        ),
    ],
)
def test_messages(number, compilations, message):
    assert _compiler_process._crash_message(number, compilations, 'a.py:f', 'v5e:2x4') == message


@pytest.mark.parametrize(
    ('arguments', 'topology'),
    [
        (('plan', *MESH), None),
        (('verify', *MESH), None),
        (('plan', '--topology', 'v5e:2x4', *MESH), 'v5e:2x4'),
        (('search', '--topology', 'v5e:2x4', '--axes', 'fsdp'), 'v5e:2x4'),
        (('autoshard', '--topology', 'v5e:2x4', '--batch', '1'), 'v5e:2x4'),
    ],
)
def test_commands_that_compile(monkeypatch, arguments, topology):
    started = []
    monkeypatch.setattr(_arguments, 'run_in_compiler_process', lambda *args: started.append(args) or 5)
    monkeypatch.setattr(sys, 'argv', ['scalax', *arguments, 'job.py:make'])
    assert main_process() == 5
    assert started == [('job.py:make', topology)]


def test_commands_that_do_not_compile(monkeypatch, capsys):
    monkeypatch.setattr(_arguments, 'run_in_compiler_process', lambda *args: pytest.fail('started'))
    monkeypatch.setattr(sys, 'argv', ['scalax', 'topologies'])
    assert main_process() == 0 and 'v5e' in capsys.readouterr().out


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ('number', 'code', 'message'),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED, 'interrupted\n'),
        (signal.SIGTERM, -signal.SIGTERM, ''),
        (signal.SIGKILL, -signal.SIGKILL, ''),
    ],
    ids=['SIGINT', 'SIGTERM', 'SIGKILL'],
)
def test_who_ends_the_command_ends_the_compiler(job, number, code, message):
    process = start('plan', f'{job}:make_endless', *MESH)
    try:
        word, compiler = process.stdout.readline().split()
        assert word == 'compiling' and int(compiler) != process.pid
        process.send_signal(number)
    finally:
        ended = end_of(process)  # the compiler has the same stdout: it has ended, too
    assert ended == (code, '', message)
    for _ in range(1000):
        try:
            os.kill(int(compiler), 0)
        except ProcessLookupError:
            return
        if stat_of(compiler) == 'Z':  # its exit code was not collected
            return
        time.sleep(0.01)
    pytest.fail('the compiler goes on')


@pytest.mark.slow
def test_ctrl_c_of_a_terminal_interrupts_once(job):
    """The terminal sends it to both processes."""
    process = start('plan', f'{job}:make_counted', *MESH, terminal=True)
    try:
        assert process.stdout.readline() == 'waiting\n'
        process.stdin.write('\x03')
        process.stdin.flush()
        code, out, _ = end_of(process)
    finally:
        process.kill()
    assert (code, out.replace('^C', '')) == (ExitCode.INTERRUPTED, 'one Ctrl-C\ninterrupted\n')


@pytest.mark.parametrize(
    ('terminal', 'group', 'foreground'),
    [
        (os.devnull, 'own', True),
        (os.devnull, 'other', False),
        (os.devnull, None, False),
        ('/none', 'own', False),
    ],
    ids=['in the foreground', 'in the background', 'another terminal', 'no terminal'],
)
def test_which_processes_get_ctrl_c_from_the_terminal(monkeypatch, terminal, group, foreground):
    """The command only passes it on to the compiler if the terminal does not send it to both."""

    def group_of(_):
        if group is None:
            raise OSError
        return os.getpgrp() + (group == 'other')

    monkeypatch.setattr(os, 'ctermid', lambda: terminal)
    monkeypatch.setattr(os, 'tcgetpgrp', group_of)
    assert _compiler_process._is_in_foreground() == foreground


def test_the_exit_code_where_a_signal_does_not_end_the_command(monkeypatch):
    """As for the first process of a container, which a signal without a handler does not end."""
    before, sent = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(os, 'kill', lambda *args: sent.append(args))
    try:
        code = _compiler_process._terminate_by(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, sent) == (143, [(os.getpid(), signal.SIGTERM)])


def stat_of(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0]
    except OSError:
        return ''


@pytest.mark.parametrize(
    ('started', 'arguments', 'restartable'),
    [
        (['python', '-m', 'scalax', 'plan', 'a'], ['/x/scalax/__main__.py', 'plan', 'a'], True),
        (['python', '-W', 'error', '-m', 'scalax'], ['/x/scalax/__main__.py'], True),
        (['python', '/bin/scalax', 'plan', 'a'], ['/bin/scalax', 'plan', 'a'], True),
        # Programs that call the command line with their arguments.
        (['python', 'mine.py', 'a'], ['mine.py', 'a'], False),
        (['python', '-m', 'pdb', '-m', 'scalax', 'plan'], ['/x/scalax/__main__.py', 'plan', 'b'], False),
        (['python', '-c', 'pass'], ['-c'], False),
        (['python'], [''], False),
    ],
)
def test_which_command_is_started_again(monkeypatch, started, arguments, restartable):
    monkeypatch.setattr(sys, 'orig_argv', started)
    monkeypatch.setattr(sys, 'argv', arguments)
    assert _compiler_process._own_command() == ([sys.executable, *started[1:]] if restartable else None)


def test_compilations_that_run(monkeypatch):
    seen = []
    monkeypatch.setattr(running_compilations, '_watchers', [])
    running_compilations.watch(lambda texts: seen.append([*texts]))
    with running_compilations.compiling('a'):
        with pytest.raises(ValueError), running_compilations.compiling('b'):
            raise ValueError
        with running_compilations.compiling('a'):
            pass
    assert seen == [['a'], ['a', 'b'], ['a'], ['a', 'a'], ['a'], []]


@pytest.mark.medium
def test_closed_streams(job):
    """The two processes do not write output to their other files, and do not read from them."""
    start_closed = (
        'import os, sys; os.closerange(0, 2); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])'
    )
    process = subprocess.run(
        [sys.executable, '-c', start_closed, '-m', 'scalax', 'plan', f'{job}:make_step', *MESH],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])},
        stderr=subprocess.PIPE,
        text=True,
        timeout=500,
    )
    assert (process.returncode, process.stderr) == (ExitCode.DONE, '')
