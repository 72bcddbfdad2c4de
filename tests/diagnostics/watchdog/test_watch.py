"""Reports about real processes that are stopped or hang."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from examples.launch.ports import held_port
from scalax._diagnostics.watchdog.state import ProcessState
from scalax.cli import ExitCode, main
from tests.support import ROOT
from tests.support.processes import Running, started

PROGRAM = ROOT / 'tests' / 'support' / 'watched_program.py'
HEAD = re.compile(r'\d+ s have passed since step (\d+)( \(a step usually takes [\d.]+ s\))?')


def line_of(text: str, position: int = 0) -> str:
    """Returns a line of the program as reports show it."""
    lines = PROGRAM.read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if text in line]
    return f'{PROGRAM.name}:{numbers[position]}'


@contextlib.contextmanager
def training(*arguments: str, slurm: bool = False, secret: str = '') -> Iterator[tuple[Running, str]]:
    """Starts two processes of the program; yields them and the address of process 0."""
    with held_port() as port:
        address = f'localhost:{port}'
        env = [
            {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': str(index)}
            for index in range(2)
        ]
        if slurm:  # JAX detects the others without a message
            job = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2'}
            env = [
                {**job, 'SLURM_PROCID': i, 'SLURM_LOCALID': i, 'JAX_COORDINATOR_PORT': str(port)}
                for i in '01'
            ]
        program = [str(PROGRAM), *arguments]
        env = [{**variables, 'JAX_NUM_CPU_DEVICES': '1', 'SCALAX_RUN_TOKEN': secret} for variables in env]
        with started(program, program, env=env) as two:
            try:
                yield two, address
            finally:
                for process in two.processes:  # no other signal ends a stopped process
                    process.kill()


def report_of(two: Running, index: int, text: str = '') -> str:
    """Waits for the report of a process that contains a text, and returns it without its seconds.

    If a busy machine delays a step for seconds, there is a report of that first.
    """
    lines = rf'^\d+ s have passed(?:(?!^What to do: ).)*{re.escape(text)}.*?^What to do: [^\n]*\n'
    pattern = re.compile(lines, re.MULTILINE | re.DOTALL)
    two.wait_for(pattern, index)
    report = pattern.search(two.output(index))
    assert report
    return re.sub(r'\d+ s\b', 'N s', re.sub(r'takes [\d.]+ s', 'takes N s', report[0].rstrip('\n')))


def expected(stuck: Running, index: int, how: str, phase: str, address: str) -> str:
    pid, host = stuck.processes[index].pid, os.uname().nodename
    return (
        f'N s have passed since step 12 (a step usually takes N s):\n'
        f'  process {index} (host {host}, pid {pid}){how}: {phase}\n'
        f'What to do: `py-spy dump --pid {pid}` on {host} shows its threads; '
        f'`scalax doctor --run {address}` shows all processes.'
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ('how', 'index', 'phase'),
    [
        ('loading', 1, f'loading for N s at {line_of("sleep(STUCK)")} in read_shard'),
        ('callback', 0, f'in Python that JAX calls for N s at {line_of("sleep(STUCK)", 1)} in look_up'),
        ('python', 1, f'in Python for N s at {line_of("sleep(STUCK)", 2)} in report'),
        ('exit', 1, 'ending for N s'),
    ],
)
def test_all_processes_report_which_one_is_behind(how: str, index: int, phase: str) -> None:
    with training(how, '2') as (two, address):
        for process in range(2):
            text = re.sub(r', [a-zA-Z ]+ before that', '', report_of(two, process))
            assert text == expected(two, index, ' is behind', f'{phase}, after step 12', address)
        assert main(['doctor', '--run', address]) == ExitCode.FOUND


SECRET = 'of this run, and long enough'
FAILED = (
    'error: process 0 does not answer at {} (timed out): see the logs of the others. What to do: if '
    'SCALAX_RUN_TOKEN is set in the run, set it here to the same value; a run on several hosts without it '
    'does not answer\n'
)


@pytest.mark.medium
@pytest.mark.parametrize(('index', 'slurm', 'secret'), [(0, False, ''), (1, True, ''), (1, True, SECRET)])
def test_a_stopped_process_is_reported(
    index: int, slurm: bool, secret: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under SLURM the address is not a loopback address, so it needs a secret."""
    monkeypatch.delenv('SCALAX_RUN_TOKEN', raising=False)
    with training('nothing', '2', slurm=slurm, secret=secret) as (two, _):
        two.wait_for('did 12\n', index)
        two.processes[index].send_signal(signal.SIGSTOP)
        pid = two.processes[index].pid
        text = report_of(two, 1 - index, f'pid {pid}) is stopped, ')
        assert f'pid {pid}) is stopped, dead or out of reach; last: ' in text
        assert re.search(r', after step \d+.*; silent for N s\n', text)
        assert text.count('process ') == 1
        if slurm and not secret:  # process 0 has created one
            assert text.endswith(
                '; in a run for which SCALAX_RUN_TOKEN is set, `scalax doctor --run` shows all processes.'
            )
            return
        address = re.search(r'--run (\S+)`', text)[1]
        if index == 0 or secret:
            assert main(['doctor', '--run', address]) == ExitCode.FAILED
            assert capsys.readouterr().err == FAILED.format(address)
        if secret:
            monkeypatch.setenv('SCALAX_RUN_TOKEN', secret)
            assert main(['doctor', '--run', address]) == ExitCode.FOUND
            assert f'pid {pid}) is stopped, dead or out of reach' in capsys.readouterr().out
            two.wait_for('a message from ')


@pytest.mark.slow
def test_a_slow_step_is_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    with training('slow') as (two, address):
        two.wait_for('did 12\n')
        assert main(['doctor', '--run', address]) == ExitCode.DONE
        head, _, *rows = capsys.readouterr().out.splitlines()
        assert head.split() == [*ProcessState._fields]
        # The last phase of a busy process may need several lines.
        assert [row.split()[:3] for row in rows if row[:1].isdigit()] == [
            [str(index), os.uname().nodename, str(process.pid)] for index, process in enumerate(two.processes)
        ]
        for index in range(2):
            two.wait_for('did 14\n', index)
            assert 'have passed' not in two.output(index)
        assert main(['doctor', '--run', address, '--json']) == ExitCode.DONE
        report = json.loads(capsys.readouterr().out)
        assert report['report'] == ''
        assert [line['pid'] for line in report['processes']] == [process.pid for process in two.processes]
