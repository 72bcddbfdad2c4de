"""Runs that lose processes at every stage of a start and of a save, and continue on the remaining ones."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import Running, compiled, started

# The training, stopped at HELD: 'save:0/3' stops process 0 of 3 before it writes its part of a step.
HELD = """
import os, time
from absl import app
from examples.llama import train
from scalax.checkpoint import _save
me = os.environ['JAX_PROCESS_ID'] + '/' + os.environ['JAX_NUM_PROCESSES']

def held(owner, name, where):
    call = getattr(owner, name)

    def wrapper(*args, **kwargs):
        here = where(*args) + ':' + me
        if here in os.environ['HELD'].split():
            print('held in ' + here, flush=True)
            time.sleep(600)
        return call(*args, **kwargs)

    setattr(owner, name, wrapper)

held(train.distributed, 'initialize', lambda: 'start')
held(train.Checkpoints, 'restore', lambda self: 'restore')
held(train.distributed, 'should_stop', lambda step: f'step{step}')
held(_save.SaveThread, '_write_local', lambda self: 'save')
app.run(train.main)
"""
SMALL = [
    '--width=48',
    '--heads=4',
    '--layers=1',
    '--sequence_length=32',
    '--batch_size=24',
    '--steps=30',
    '--save_every=9',
]
IDS = re.compile(r'^launcher: process (\d) has id (\d+)$', re.MULTILINE)
SHRINK = ['-m', 'examples.launch.local', '--processes=4', '--devices=2', '--on_loss=shrink', '--']


@pytest.fixture(scope='module', autouse=True)
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('text') / 'fox.txt'
    path.write_text('the quick brown fox jumps over the lazy dog; ' * 100)
    return path


def losses(output: Path) -> np.ndarray:
    return np.asarray(json.loads((output / 'numbers.json').read_text())['train_losses'])


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> np.ndarray:
    """Returns the losses of one process with eight devices."""
    output = tmp_path_factory.mktemp('one')
    flags = [*SMALL, '--strategy=fsdp', '--devices=8', f'--output={output}', '--text', str(text)]
    with started(['-m', 'examples.llama.train', *flags], env=[compiled()]) as run:
        assert run.wait() == (0,), run.output()
    return losses(output)


def strike(launcher: Running, where: str, number: signal.Signals) -> None:
    """Sends a signal to the process that waits at this point."""
    launcher.wait_for(f'held in {where}')
    index, _, count = where.partition(':')[2].partition('/')
    os.kill(int(dict(IDS.findall(launcher.output())[-int(count) :])[index]), number)


def lose(tmp_path: Path, text: Path, wheres: list[str], number: signal.Signals, *flags: str) -> str:
    """Returns the output of a run that loses its waiting processes one after another."""
    command = [
        *SMALL,
        *flags,
        f'--output={tmp_path}',
        f'--checkpoints={tmp_path / "saved"}',
        '--text',
        str(text),
    ]
    env = {**compiled(), 'HELD': ' '.join(wheres)}
    with started([*SHRINK, '-c', HELD, *command], env=[env]) as launcher:
        for where in wheres:
            strike(launcher, where, number)
        assert launcher.wait() == (0,), launcher.output()
        for _, pid in IDS.findall(launcher.output()):
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)
        return launcher.output()


def assert_goes_on(output: str, code: str, lost: list[int]) -> None:
    """Asserts that the run reports each lost process, and reaches a step on fewer devices."""
    matches = re.findall(
        rf'a process ended with {code}; lost: process (\d); \d more starts on (\d) process', output
    )
    assert matches == [(str(index), str(3 - position)) for position, index in enumerate(lost)]
    restarted = re.findall(r'restarted (\d+\.\d) s from the loss to step (\d+): (.*)$', output, re.MULTILINE)
    for seconds, _, stages in restarted:
        parts = dict(part.rsplit(' ', 1) for part in stages.split(', '))
        assert list(parts) == ['start', 'mesh', 'restore', 'first step']
        assert sum(map(float, parts.values())) == pytest.approx(float(seconds), abs=0.25)
    resumed = re.findall(r'resumed   after step (\d+)', output) or ['0']  # or nothing was saved
    assert [int(step) for _, step, _ in restarted] == [int(step) + 1 for step in resumed]


@pytest.mark.slow
def test_processes_are_killed_in_a_step_in_a_save_and_in_a_restore(
    tmp_path: Path, text: Path, undisturbed: np.ndarray
) -> None:
    wheres = ['step12:2/4', 'save:0/3', 'restore:1/2']
    output = lose(tmp_path, text, wheres, signal.SIGKILL, '--strategy=fsdp')
    assert_goes_on(output, 'SIG[A-Z]+', [2, 0, 1])
    assert re.findall(r'devices   (\d) x cpu', output) == ['8', '6', '4', '2']
    assert re.findall(r'resumed   after step (\d+)', output) == ['9', '9']
    np.testing.assert_allclose(losses(tmp_path), undisturbed, atol=1e-5)


@pytest.mark.slow
def test_runs_continue_without_silent_processes(tmp_path: Path, text: Path, undisturbed: np.ndarray) -> None:
    table = '8: fsdp=4,tp=2; 6: fsdp=3,tp=2; 4: fsdp=4'
    output = lose(
        tmp_path, text, ['step12:1/4', 'save:0/3'], signal.SIGSTOP, '--strategy=fsdp_tp', f'--mesh={table}'
    )
    assert_goes_on(output, 'SIGABRT', [1, 0])
    assert re.findall(r'Helper\((.*?)\)', output)[:3] == ['fsdp=4, tp=2', 'fsdp=3, tp=2', 'fsdp=4, tp=1']
    np.testing.assert_allclose(losses(tmp_path), undisturbed, atol=1e-5)


@pytest.mark.slow
def test_the_mesh_is_searched_by_all_that_are_left(
    tmp_path: Path, text: Path, undisturbed: np.ndarray
) -> None:
    output = lose(tmp_path, text, ['start:3/4'], signal.SIGKILL, '--strategy=fsdp_tp', '--mesh=search')
    assert_goes_on(output, 'SIGKILL', [3])
    assert len(re.findall(r'6 x cpu, MeshShardingHelper\(fsdp=\d, tp=\d\)', output)) == 1
    np.testing.assert_allclose(losses(tmp_path), undisturbed, atol=1e-5)
