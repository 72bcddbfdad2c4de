"""The examples on several processes: the same losses as on one, also after faults."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from absl import app
from etils import epath

from examples import grain_input
from examples.llama import progress
from scalax.distributed import PREEMPTED
from tests.support.processes import Running, compiled, started

SMALL = [
    '--width=32',
    '--layers=1',
    '--sequence_length=32',
    '--batch_size=8',
    '--strategy=fsdp',
    '--steps=30',
]
TEXT = 'the quick brown fox jumps over the lazy dog; ' * 100
LAUNCH = ['-m', 'examples.launch.local', '--processes=2', '--devices=2', '--']
# The training waits at each step until the file GATE allows it, so the effect of a fault does not depend on
# the speed of the machine.
PACED = """
import os, time
from pathlib import Path
from absl import app
from examples.llama import train
ask, gate = train.distributed.should_stop, Path(os.environ['GATE'])

def should_stop(step):
    if step > int(gate.read_text()):
        print(f'waits at {step}', flush=True)
    while step > int(gate.read_text()):
        time.sleep(0.01)
    return ask(step)

train.distributed.should_stop = should_stop
app.run(train.main)
"""
IDS = re.compile(r'^launcher: process (\d) has id (\d+)$', re.MULTILINE)


@pytest.fixture(scope='module', autouse=True)
def one_folder_for_what_is_compiled() -> Iterator[None]:
    """Shares a compilation cache, because all runs train the same model."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in compiled().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope='module')
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('text') / 'fox.txt'
    path.write_text(TEXT)
    return path


def train(output: Path, text: Path, *flags: str) -> list[str]:
    return ['-m', 'examples.llama.train', *SMALL, f'--output={output}', *flags, '--text', str(text)]


def paced(output: Path, text: Path, *flags: str) -> list[str]:
    return ['-c', PACED, *train(output, text, *flags)[2:]]


class Gate:
    """Limits the number of steps of a `paced` training run."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / 'gate'
        self.env = {'GATE': str(self._path)}
        self.open(step)

    def open(self, step: int = 10**6) -> None:
        new = self._path.with_suffix('.new')
        new.write_text(str(step))
        new.replace(self._path)  # complete whenever it is read


def losses(output: Path) -> np.ndarray:
    return np.asarray(json.loads((output / 'numbers.json').read_text())['train_losses'])


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> np.ndarray:
    """Returns the losses of one process with eight devices, without checkpoints."""
    output = tmp_path_factory.mktemp('one')
    with started(train(output, text, '--devices=8')) as run:
        assert run.wait() == (0,), run.output()
    return losses(output)


def ids(launcher: Running) -> dict[int, int]:
    """Returns the ids of the last started processes."""
    return {int(index): int(pid) for index, pid in IDS.findall(launcher.output())[-2:]}


def wait_for_save(steps: Path, least: int) -> None:
    end = time.monotonic() + 500
    while not any(int(path.name) >= least for path in steps.glob('*') if path.name.isdecimal()):
        assert time.monotonic() < end, list(steps.glob('*'))
        time.sleep(0.01)


def is_said(launcher: Running, text: str, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while text not in launcher.output() and time.monotonic() < end:
        time.sleep(0.02)
    return text in launcher.output()


@pytest.mark.slow
def test_losses_after_kills_sigterm_and_resizing_match_one_process(
    tmp_path: Path, text: Path, undisturbed: np.ndarray
) -> None:
    saved = tmp_path / 'checkpoints'
    flags = f'--checkpoints={saved}', '--save_every=9'
    gate = Gate(tmp_path, 10)
    with started([*LAUNCH, *paced(tmp_path, text, *flags)], env=[gate.env]) as launcher:
        wait_for_save(saved / 'steps', 9)
        os.kill(ids(launcher)[0], signal.SIGKILL)  # the coordinator
        launcher.wait_for('resumed   after step 9')
        gate.open(19)
        wait_for_save(saved / 'steps', 18)
        os.kill(ids(launcher)[1], signal.SIGKILL)
        launcher.wait_for('resumed   after step 18')
        gate.open(20)
        launcher.wait_for(re.compile('(waits at 21.*){2}', re.DOTALL))
        os.kill(ids(launcher)[1], signal.SIGTERM)  # one process gets the signal; all stop
        # JAX checks for signals once a second, and nine quick steps take less.
        for step in range(21, 27):
            gate.open(step)
            if is_said(launcher, 'Told to end', within_s=3):
                break
        gate.open()
        assert launcher.wait() == (PREEMPTED,), launcher.output()
        text_of_it = launcher.output()
    assert text_of_it.count('launcher: a process ended') == text_of_it.count('a process ended with') == 2
    assert re.findall(r'resumed   after step (\d+)', text_of_it) == ['9', '18']
    [step] = re.findall(r'Told to end: saved after step (\d+)', text_of_it)
    assert int(step) < 27  # saved because of the signal
    assert not (tmp_path / 'numbers.json').exists()
    # On one process now, and on other devices.
    program = train(tmp_path, text, *flags)
    with started([*program, '--devices=8']) as run:
        assert run.wait() == (0,), run.output()
        assert f'resumed   after step {step}\n' in run.output()
    assert len(losses(tmp_path)) == 30
    np.testing.assert_allclose(losses(tmp_path), undisturbed, atol=1e-5)
    # Another run is not mixed up with it.
    with started([*program, '--devices=8', '--seed=1']) as other:
        assert other.wait() == (2,)
        message = other.output().partition('error: ')[2]
    assert message == (
        f'--checkpoints {saved} holds another run:\n'
        '  seed is 1, and was 0\n'
        'Give the flags of that run to continue it, or another folder to start a new one.\n'
    )


def test_a_kill_before_it_is_written_down_which_run_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = epath.Path(tmp_path) / 'saved' / 'run.json'
    with monkeypatch.context() as patch:

        def half(path: epath.Path, text: str) -> None:
            path.write_bytes(text[: len(text) // 2].encode())
            raise KeyboardInterrupt

        patch.setattr(type(file), 'write_text', half)
        with pytest.raises(KeyboardInterrupt):
            progress.require_same(file, {'seed': 1})
    progress.require_same(file, {'seed': 1})
    assert json.loads(file.read_text()) == {'seed': 1}
    assert [path.name for path in file.parent.iterdir()] == ['run.json']
    with pytest.raises(app.UsageError):
        progress.require_same(file, {'seed': 2})


@pytest.mark.medium
def test_an_error_in_one_process_ends_all(tmp_path: Path, text: Path) -> None:
    """The processes end without the launcher, and do not wait for the shutdown timeout."""
    code = """
import os, sys
from examples.llama import train
from absl import app
if os.environ['JAX_PROCESS_ID'] == '1':
    def fails(*arguments): raise OSError('the disk is gone')
    train.Corpus.batch = fails
sys.argv[1:] = {arguments}
app.run(train.main)
"""
    program = ['-c', code.format(arguments=train(tmp_path, text)[2:])]
    launch = [*LAUNCH[:-1], '--restarts=0', '--', *program]
    with started(launch) as launcher:
        assert launcher.wait() == (1,), launcher.output()
        assert 'OSError: the disk is gone' in launcher.output()


@pytest.mark.slow
def test_a_run_without_checkpoints_ends_at_sigterm(tmp_path: Path, text: Path) -> None:
    gate = Gate(tmp_path, 3)
    with started(paced(tmp_path, text), env=[gate.env]) as run:
        run.wait_for('waits at 4')
        run.processes[0].terminate()
        gate.open()
        assert run.wait() == (PREEMPTED,), run.output()
        assert 'Told to end: not saved (no --checkpoints) after step' in run.output()


@pytest.mark.slow
def test_faults() -> None:
    """A short form of `make faults`: processes are killed or lost, also during a save."""
    counts = ['--kills=2', '--orphans=1', '--losses=1']
    with started(['scripts/faults.py', *counts, '--seed=5', '--minutes=8']) as faults:
        assert faults.wait() == (0,), faults.output()
        assert re.search(r'^2 kills: ', faults.output(), re.MULTILINE), faults.output()
        assert re.search(r'^1 jobs were replaced', faults.output(), re.MULTILINE), faults.output()
        assert faults.output().count('to the last bit, those of an undisturbed run') == 2
        assert re.search(r'^1 processes lost: ', faults.output(), re.MULTILINE), faults.output()
        assert re.search(r'^\d+ losses are within \d\.\de-\d\d, ', faults.output(), re.MULTILINE)


# --- Input by Grain ------------------------------------------------------------------------------


class Numbers:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {'label': np.asarray(index)}


def numbers(rows: slice | np.ndarray = slice(None)) -> grain_input.grain.DatasetIterator:
    return grain_input.process_batches(Numbers(), 8, rows, steps=6, seed=3)


def test_grain_gives_each_process_its_rows_of_the_same_batches() -> None:
    batches = [batch['label'] for batch in numbers()]
    assert len(batches) == 6 and all(batch.shape == (8,) for batch in batches)
    epochs = np.concatenate(batches)
    assert sorted(epochs[:20]) == sorted(epochs[20:40]) == list(range(20))  # each digit once an epoch
    assert (epochs[:20] != epochs[20:40]).any() and (epochs[:20] != np.arange(20)).any()
    for rows in (slice(0, 4), slice(4, 8), np.array([0, 2, 3, 7])):
        for local_batch, batch in zip(numbers(rows), batches, strict=True):
            np.testing.assert_array_equal(local_batch['label'], batch[rows])


@pytest.mark.medium
def test_grain_continues_at_the_batch_after_its_state() -> None:
    batches = [batch['label'] for batch in numbers(slice(0, 4))]
    for count in range(6):
        first, again = numbers(slice(0, 4)), numbers(slice(0, 4))
        for _ in range(count):
            next(first)
        again.set_state(json.loads(json.dumps(first.get_state())))
        for next_batch, batch in zip(again, batches[count:], strict=True):
            np.testing.assert_array_equal(next_batch['label'], batch)


@pytest.mark.slow
def test_a_run_on_grain_goes_on_as_if_it_had_not_been_ended(tmp_path: Path) -> None:
    straight = grain_input.main(steps=30)
    saved = str(tmp_path / 'saved')
    assert grain_input.main(30, saved, stop_after=13).startswith('steps 0 to 13: loss ')
    assert grain_input.main(30, saved) == straight.replace('steps 0', 'steps 13')
    accuracy = straight.partition(', ')[2]
    assert grain_input.main(30, saved) == f'steps 30 to 30: nothing was left to do, {accuracy}'
    assert float(accuracy.removeprefix('test accuracy ').rstrip('%')) > 85


@pytest.mark.slow
def test_grain_on_two_processes(tmp_path: Path) -> None:
    with started(['-m', 'examples.grain_input', '--steps=30']) as run:
        assert run.wait() == (0,), run.output()
        straight = run.output().splitlines()[-1]
    saved = tmp_path / 'saved'
    program = ['-m', 'examples.grain_input', '--steps=30', f'--checkpoints={saved}']
    for flags, expected in (
        (['--stop_after=13'], 'steps 0 to 13: '),
        ([], straight.replace('steps 0', 'steps 13')),
    ):
        with started([*LAUNCH, *program, *flags]) as two:
            assert two.wait() == (0,), two.output()
            assert expected in two.output()
