#!/usr/bin/env python
"""Kills processes of a training at random moments, and checks that nothing was lost or changed.

    make faults
    python scripts/faults.py --kills 50 --seed 3

Two processes train (`faults_training.py`) under the local launcher, which starts both again if one dies.
Time and again, one of them is killed with SIGKILL: the coordinator, the other, or both; while it starts,
trains, or is in the middle of a save. What has to hold:

- each start goes on from a step that is no earlier than the last checkpoint that was complete at the kill;
- every loss, whichever start computed it, and the parameters at the end have, to the last bit, the value
  that they have in a run that nobody disturbs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
WHERE = ('starting', 'training', 'saving')
START_S = 120  # the longest that a start may take until it trains
ENDLESS = 10**6
MORE = 20  # steps after the last kill
STARTED = re.compile(r'^launcher: process (\d+) has id (\d+)$', re.MULTILINE)


class Failed(Exception):
    """What was to hold does not."""


class Training:
    """A training under the launcher, in a folder of its own; ended with the ``with`` block."""

    def __init__(self, folder: Path, goal: int, starts: int) -> None:
        self.folder, self.said = folder, folder / 'said'
        folder.mkdir()
        self.aim_at(goal)
        command = [sys.executable, '-m', 'examples.launch.local', f'--processes={PROCESSES}', '--devices=2']
        command += [f'--restarts={starts}', '--', 'scripts/faults_training.py', str(folder)]
        env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
        with self.said.open('wb') as out:
            self.launcher = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self.launcher.poll() is None:
            self.launcher.terminate()  # so that it starts nothing again
            for _, pid in self.started()[-PROCESSES:]:
                kill(pid)
        self.launcher.wait(timeout=60)

    def aim_at(self, goal: int) -> None:
        """The step at which the next start, and those after it, end."""
        (self.folder / 'goal').write_text(str(goal))

    def started(self) -> list[tuple[int, int]]:
        """All processes so far: (index, id)."""
        found = STARTED.findall(self.said.read_text(errors='replace'))
        return [(int(index), int(pid)) for index, pid in found]

    def lines(self) -> list[list[str]]:
        """What the training has written down: [step, loss] or [step, 'resumed'], as far as it is whole."""
        path = self.folder / 'losses'
        text = path.read_text() if path.exists() else ''
        return [line.split() for line in text[: text.rfind('\n') + 1].splitlines()]

    def complete(self) -> int:
        """The last step of which there is a complete checkpoint; 0 where there is none."""
        steps = self.folder / 'steps'
        names = [path.name for path in steps.iterdir()] if steps.exists() else []
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        steps = self.folder / 'steps'
        return steps.exists() and any('tmp' in path.name for path in steps.iterdir())

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > end:
                raise Failed(f'{what} did not come.\n{self.said.read_text(errors="replace")[-4000:]}')
            time.sleep(0.002)

    def norm(self) -> str:
        """What the training says of its parameters at the end."""
        found = re.search(r'the norm of the parameters is (\S+)', self.said.read_text(errors='replace'))
        if found is None:
            raise Failed(f'the training did not end well:\n{self.said.read_text(errors="replace")[-4000:]}')
        return found[1]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill: when, of whom, and what there was at that moment."""

    where: str
    whom: tuple[int, ...]
    complete: int  # the last complete checkpoint
    reached: int  # the last step whose loss was written
    line: int  # how many lines were written

    def __str__(self) -> str:
        whom = ' and '.join('the coordinator' if index == 0 else f'process {index}' for index in self.whom)
        return f'while {self.where}, {whom} after step {self.reached}, with step {self.complete} saved'


def strike(training: Training, start: int, chance: random.Random, last: bool) -> Kill:
    """Waits for a random moment of the latest start, and kills one process of it, or both."""
    training.wait_for(lambda: len(training.started()) == PROCESSES * start, START_S, f'start {start}')
    before = len(training.lines())
    where = chance.choices(WHERE, weights=(1, 2, 3))[0]
    if where == 'starting':
        time.sleep(chance.uniform(0, 6))
    else:  # 'resumed', and the losses of two steps
        training.wait_for(lambda: len(training.lines()) > before + 2, START_S, 'a step')
        time.sleep(chance.uniform(0, 2))
    if where == 'saving':
        training.wait_for(training.saving, START_S, 'a save')
        time.sleep(chance.uniform(0, 0.1))
    whom = chance.choice([(0,), (1,), (0, 1)])
    if last:
        training.aim_at(steps_done(training) + MORE)
    ids = dict(training.started()[-PROCESSES:])
    for index in whom:
        kill(ids[index])
    return Kill(where, whom, training.complete(), steps_done(training), len(training.lines()))


def steps_done(training: Training) -> int:
    return max((int(step) for step, what in training.lines() if what != 'resumed'), default=0)


def losses(training: Training) -> dict[int, str]:
    """The loss of each step.

    Raises:
        Failed: two starts found different values for a step, or a step is missing.
    """
    found: dict[int, str] = {}
    for step, value in training.lines():
        if value != 'resumed' and found.setdefault(int(step), value) != value:
            before, now = float.fromhex(found[int(step)]), float.fromhex(value)
            raise Failed(f'the loss of step {step} was {before!r}, and {now!r} when it was done again')
    if missing := set(range(1, max(found) + 1)) - set(found):
        raise Failed(f'steps without a loss: {sorted(missing)[:10]}')
    return found


def disturb(training: Training, kills: int, chance: random.Random, end: float) -> list[Kill]:
    """Kills so many times, or as often as is possible before *end*; returns when the training has ended."""
    done: list[Kill] = []
    while not done or (len(done) < kills and time.monotonic() < end):
        last = len(done) == kills - 1 or time.monotonic() > end - START_S
        done.append(strike(training, len(done) + 1, chance, last))
        print(f'{len(done):3} {done[-1]}', flush=True)
        if last:
            break
    training.launcher.wait(timeout=START_S)
    return done


def check_resumes(training: Training, kills: list[Kill]) -> int:
    """That each start goes on from what was complete; returns the most steps that had to be done again."""
    lines, most = training.lines(), 0
    for number, one in enumerate(kills, 1):
        resumed = next(int(step) for step, what in lines[one.line :] if what == 'resumed')
        if resumed < one.complete:
            raise Failed(
                f'kill {number}, {one}: went on from step {resumed}, and step {one.complete} was complete'
            )
        most = max(most, one.reached - resumed)
    return most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kills', type=int, default=50, help='how many')
    parser.add_argument('--seed', type=int, default=0, help='of the moments and of who is killed')
    parser.add_argument('--minutes', type=float, default=20, help='the longest that all of it may take')
    options = parser.parse_args()
    begun = time.monotonic()
    # The undisturbed run comes last, and takes less: it starts once.
    end = begun + 60 * options.minutes * 0.75
    with tempfile.TemporaryDirectory(prefix='faults-') as folder:
        try:
            with Training(Path(folder) / 'disturbed', ENDLESS, starts=options.kills + 1) as disturbed:
                kills = disturb(disturbed, options.kills, random.Random(options.seed), end)
                norm, curve = disturbed.norm(), losses(disturbed)
                most = check_resumes(disturbed, kills)
            print(f'{len(curve)} steps. The same without faults ...', flush=True)
            with Training(Path(folder) / 'undisturbed', len(curve), starts=0) as undisturbed:
                undisturbed.launcher.wait(timeout=max(begun + 60 * options.minutes - time.monotonic(), 1))
                if (undisturbed.norm(), losses(undisturbed)) != (norm, curve):
                    other = [step for step, loss in losses(undisturbed).items() if curve[step] != loss]
                    raise Failed(
                        f'not as without faults: the parameters, and the losses of steps {other[:10]}'
                    )
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f'FAILED after {time.monotonic() - begun:.0f} s: {error}')
            return 1
    where = Counter(one.where for one in kills)
    whom = Counter(one.whom for one in kills)
    print(
        f'{len(kills)} kills: {", ".join(f"{where[name]} while {name}" for name in WHERE)}; the coordinator '
        f'{whom[(0,)]}, the other {whom[(1,)]}, both {whom[(0, 1)]}.\n'
        f'{len(curve)} losses and the parameters are, to the last bit, those of an undisturbed run. Every '
        f'start went on from the last complete checkpoint; at most {most} steps were done again. '
        f'{time.monotonic() - begun:.0f} s.'
    )
    if len(kills) < options.kills:
        print(f'FAILED: only {len(kills)} of {options.kills} kills fitted into {options.minutes:g} minutes')
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
