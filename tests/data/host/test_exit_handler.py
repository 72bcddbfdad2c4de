"""Exit of programs of two real processes while data still move between them."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.launch.ports import held_port
from scalax._data.host import exit_handler
from tests.support import ROOT
from tests.support.processes import Running, started

PROGRAM = ROOT / 'scripts' / 'faults_exit_program.py'


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


def program(port: int, *arguments: str | Path) -> contextlib.AbstractContextManager[Running]:
    """Starts two processes of the program, with two devices each."""
    env = {
        'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
        'JAX_NUM_PROCESSES': '2',
        'JAX_NUM_CPU_DEVICES': '2',
    }
    command = [str(PROGRAM), *map(str, arguments)]
    return started(command, command, env=[{**env, 'JAX_PROCESS_ID': str(index)} for index in range(2)])


def outputs(two: Running) -> str:
    return '\n---\n'.join(map(two.output, range(2)))


@pytest.mark.medium
@pytest.mark.parametrize(
    ('move', 'options'),
    [
        ('local_data_to_global_array', 'late'),
        ('step', 'late dropped jax'),
        pytest.param('prefetch', 'late dropped', marks=pytest.mark.slow),
        pytest.param('step', 'late', marks=pytest.mark.slow),
        pytest.param('shard', 'dropped', marks=pytest.mark.slow),
        pytest.param('reshard', 'dropped', marks=pytest.mark.slow),
        pytest.param('save', 'dropped', marks=pytest.mark.slow),
    ],
)
def test_exit_waits_for_transfers(move: str, options: str, port: int, tmp_path: Path) -> None:
    with program(port, tmp_path, move, *options.split()) as two:
        assert two.wait() == (0, 0), outputs(two)
        for index in range(2):
            assert two.output(index).count('has waited') == 1, outputs(two)


@pytest.mark.medium
def test_ctrl_c_ends_the_wait(port: int, tmp_path: Path) -> None:
    """Nor does the exit handler of JAX wait after that, which could not be interrupted."""
    with program(port, tmp_path, 'local_data_to_global_array', 'never', '200') as two:
        deadline = time.monotonic() + 200
        while 'data still move' not in two.output() and time.monotonic() < deadline:
            time.sleep(0.1)
        two.processes[0].send_signal(signal.SIGINT)
        assert two.processes[0].wait(200) == exit_handler.INTERRUPTED, outputs(two)
        assert two.output().endswith(
            'Ctrl-C has ended this process while data still move: float32[16, 4] of processes 0, 1\n'
            f'{exit_handler._ADVICE}\n'
        ), outputs(two)


@pytest.mark.medium
def test_missing_process_is_named_and_ends_the_wait(port: int, tmp_path: Path) -> None:
    with program(port, tmp_path, 'local_data_to_global_array', 'never', '6') as two:
        assert two.processes[0].wait(200) == exit_handler.FAILED, outputs(two)
        text = two.output()
        assert 'has waited' not in text and 'has not waited' not in text  # no other handler ran
        logged = re.sub(r'\d+ s\b', 'N s', text)
        line = next(
            n for n, text in enumerate(PROGRAM.read_text().splitlines(), 1) if 'sleep(LONGEST_S)' in text
        )
        who = (
            f'  process 1 (host {os.uname().nodename}, pid {two.processes[1].pid}): in Python for N s at '
            f'{PROGRAM.name}:{line} in wait_for_process_0, after step 0'
        )
        message = 'N s after the end of the program, data still move: float32[16, 4] of processes 0, 1'
        message = f'{message}\n{who}'
        expected = f'{message}\n{exit_handler._ADVICE}\n'
        assert re.sub(r', [a-zA-Z ]+ before that', '', logged).endswith(expected), text


@pytest.mark.slow
def test_killed_process_is_named(port: int, tmp_path: Path) -> None:
    """JAX ends the process when the heartbeat of the other process is missing."""
    with program(port, tmp_path, 'local_data_to_global_array', 'never') as two:
        two.wait_for('data still move')
        two.processes[1].kill()
        assert two.processes[0].wait(200) not in (0, None), outputs(two)
        who = f'pid {two.processes[1].pid}) is stopped, dead or out of reach; last: in Python for '
        assert who in two.output(), two.output()
