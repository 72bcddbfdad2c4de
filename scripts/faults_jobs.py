"""Trainings that the runs of `faults.py` disturb: helpers to start, watch and end them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
START_S = 120  # the longest time from a start to the first step
ENDLESS = 10**6
MORE = 20  # steps after the last fault
STARTED = re.compile(r'^launcher: process (\d+) has id (\d+)$', re.MULTILINE)


class Failed(Exception):
    """A checked property does not hold."""


class Training:
    """A training under the launcher, in a separate folder; the end of the ``with`` block ends it.

    Args:
        folder: the folder of its output.
        goal: the step at which it ends.
        starts: the maximum number of restarts.
        steps: the folder of the checkpoints; in *folder* by default.
        options: options of ``faults_training.py``.
        launch: options of the launcher, instead of ``--processes``.
    """

    def __init__(
        self,
        folder: Path,
        goal: int,
        starts: int,
        steps: Path | None = None,
        options: Sequence[str] = (),
        launch: Sequence[str] = (f'--processes={PROCESSES}',),
    ) -> None:
        self.folder, self.log, self.steps = folder, folder / 'said', steps or folder / 'steps'
        folder.mkdir()
        self.aim_at(goal)
        command = [sys.executable, '-m', 'examples.launch.local', *launch, '--devices=2']
        command += [f'--restarts={starts}', '--', 'scripts/faults_training.py', str(folder)]
        command += [f'--steps={self.steps}', *options]
        env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
        with self.log.open('wb') as out:
            self.launcher = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self.launcher.poll() is None:
            self.launcher.terminate()  # prevents further restarts
            for pid in self.latest().values():
                kill(pid)
        self.launcher.wait(timeout=60)

    def aim_at(self, goal: int) -> None:
        """Sets the step at which the next start, and later ones, end."""
        (self.folder / 'goal').write_text(str(goal))

    def started(self) -> list[tuple[int, int]]:
        """Returns all processes so far: (index, id)."""
        matches = STARTED.findall(self.log.read_text(errors='replace'))
        return [(int(index), int(pid)) for index, pid in matches]

    def latest(self) -> dict[int, int]:
        """Returns the ids of the processes of the latest start, by index."""
        ids: dict[int, int] = {}
        for index, pid in self.started():
            ids = {index: pid} if index == 0 else {**ids, index: pid}
        return ids

    def lines(self) -> list[list[str]]:
        """Returns the complete lines that the training has written: [step, loss] or [step, 'resumed']."""
        path = self.folder / 'losses'
        text = path.read_text() if path.exists() else ''
        return [line.split() for line in text[: text.rfind('\n') + 1].splitlines()]

    def complete(self) -> int:
        """Returns the last step with a complete checkpoint; 0 if there is none."""
        names = [path.name for path in self.steps.iterdir()] if self.steps.exists() else []
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def saving(self) -> bool:
        """Returns whether a checkpoint is being written."""
        return self.steps.exists() and any('tmp' in path.name for path in self.steps.iterdir())

    def wait_for(self, condition: Callable[[], bool], seconds: float, event: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > end:
                raise Failed(f'{event} did not come.\n{self.log.read_text(errors="replace")[-4000:]}')
            time.sleep(0.002)

    def reached(self) -> int:
        """Returns the last step whose loss was written."""
        return max((int(step) for step, entry in self.lines() if entry != 'resumed'), default=0)

    def norm(self) -> str:
        """Returns the norm of the parameters that the training logs at its end."""
        match = re.search(r'the norm of the parameters is (\S+)', self.log.read_text(errors='replace'))
        if match is None:
            raise Failed(f'the training did not end well:\n{self.log.read_text(errors="replace")[-4000:]}')
        return match[1]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def losses(*trainings: Training) -> dict[int, str]:
    """Returns the loss of each step.

    Raises:
        Failed: two starts computed different losses for a step, or a step is missing.
    """
    loss_of_step: dict[int, str] = {}
    for step, value in (line for training in trainings for line in training.lines()):
        if value != 'resumed' and loss_of_step.setdefault(int(step), value) != value:
            before, now = float.fromhex(loss_of_step[int(step)]), float.fromhex(value)
            raise Failed(f'the loss of step {step} was {before!r}, and {now!r} when it was done again')
    if missing := set(range(1, max(loss_of_step) + 1)) - set(loss_of_step):
        raise Failed(f'steps without a loss: {sorted(missing)[:10]}')
    return loss_of_step
