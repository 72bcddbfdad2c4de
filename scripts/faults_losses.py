"""Jobs that lose processes permanently: the third run of `faults.py`.

A job of four processes loses one after the other, and continues on three, two and one; the next job starts
on four again, from the same checkpoints. A process is killed, or stopped as on an unreachable host, while it
joins the others, restores, compiles, trains or saves. These properties are checked:

- the launcher detects the lost process, and each start has one process less;
- each start continues from the last checkpoint that was complete at the loss, or from a later one;
- every loss equals that of an undisturbed run up to rounding, since the order of sums depends on the devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from faults_jobs import ENDLESS, MORE, START_S, Failed, Training
from faults_training import SAVE_EVERY

HOSTS = 4
STAGES = ('joining', 'restoring', 'compiling', 'training', 'saving')
NEXT_S = 240  # from a loss to the next step: the others wait for a process that stopped while joining
ROUNDING = 1e-4


@dataclasses.dataclass(frozen=True)
class Loss:
    """A lost process: its stage and index, and the time until the next step ended."""

    stage: str
    stopped: bool
    whom: int
    left: int
    complete: int  # the last complete checkpoint
    seconds: float

    def __str__(self) -> str:
        how = 'stopped' if self.stopped else 'killed'
        return (
            f'process {self.whom} {how} while {self.stage}, with step {self.complete} saved: the next step '
            f'on {self.left} after {self.seconds:.1f} s'
        )


def lose_processes(
    folder: Path, count: int, chance: random.Random, end: float, jobs: list[Training]
) -> list[Loss]:
    """Loses up to this many processes, or until *end*; appends the trainings to *jobs*."""
    lost: list[Loss] = []
    while len(lost) < count and (not lost or time.monotonic() < end):
        with start(folder, jobs, ENDLESS) as job:
            for left in range(HOSTS - 1, 0, -1):
                if len(lost) < count:
                    lost.append(lose(job, left, chance))
                    print(f'{len(lost):3} {lost[-1]}', flush=True)
    with start(folder, jobs, max(job.reached() for job in jobs) + MORE) as last:
        last.launcher.wait(timeout=START_S)
    return lost


def start(folder: Path, jobs: list[Training], goal: int) -> Training:
    number = len(jobs)
    launch = (f'--processes={HOSTS}', '--on_loss=shrink')
    options = (f'--job={number}', '--any-number')
    jobs.append(
        Training(folder / f'job-{number}', goal, HOSTS, folder / 'steps', options=options, launch=launch)
    )
    return jobs[-1]


def lose(job: Training, left: int, chance: random.Random) -> Loss:
    """Waits for a random moment of the latest start, which has one process more than *left*, and ends one."""
    stage = chance.choice(STAGES)
    job.wait_for(lambda: len(job.latest()) == left + 1, START_S, f'a start on {left + 1}')
    if stage == 'joining':
        time.sleep(chance.uniform(0, 3))
    elif stage in ('restoring', 'compiling'):
        expected_text = 'joined' if stage == 'restoring' else 'restored'
        job.wait_for(lambda: expected_text in since_start(job), START_S, expected_text)
        time.sleep(chance.uniform(0, 0.5))
    else:
        job.wait_for(lambda: has_done_a_step(job, left + 1), START_S, 'a step')
        before = job.reached()
        job.wait_for(lambda: job.reached() > before + SAVE_EVERY, START_S, 'more steps')
        time.sleep(chance.uniform(0, 1))
    if stage == 'saving':
        job.wait_for(job.saving, START_S, 'a save')
    whom, stopped = chance.randrange(left + 1), chance.random() < 0.2
    complete, line = job.complete(), len(job.lines())
    begun = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(job.latest()[whom], signal.SIGSTOP if stopped else signal.SIGKILL)
    job.wait_for(lambda: has_done_a_step(job, left), NEXT_S, f'a step on {left}')
    seconds = time.monotonic() - begun
    resumed = [int(step) for step, entry in job.lines()[line:] if entry == 'resumed'][-1]
    if resumed < complete:
        raise Failed(f'step {complete} was complete, and the start after went on from step {resumed}')
    return Loss(stage, stopped, whom, left, complete, seconds)


def has_done_a_step(job: Training, processes: int) -> bool:
    return bool(re.search(rf'step \d+ on {processes} processes', since_start(job)))


def since_start(job: Training) -> str:
    """Returns the log since the latest start."""
    return job.log.read_text(errors='replace').rpartition('launcher: process 0 has id')[2]


def farthest(trainings: Sequence[Training]) -> float:
    """Returns the largest relative difference between two losses of one step.

    Raises:
        Failed: it is larger than rounding.
    """
    losses_of_step: dict[int, list[float]] = {}
    for step, value in (line for training in trainings for line in training.lines()):
        if value != 'resumed':
            losses_of_step.setdefault(int(step), []).append(float.fromhex(value))
    spread = {step: (max(values) - min(values)) / abs(min(values)) for step, values in losses_of_step.items()}
    step, far = max(spread.items(), key=lambda item: item[1])
    if far > ROUNDING:
        raise Failed(f'step {step} has the losses {losses_of_step[step]}')
    return far


def summary(lost: Sequence[Loss]) -> str:
    """Returns the number of lost processes by stage, and the seconds until the next step ended."""
    stages = Counter(loss.stage for loss in lost)
    lines = [f'{len(lost)} processes lost: {", ".join(f"{stages[name]} while {name}" for name in STAGES)}.']
    for name, stopped in (('killed', False), ('stopped', True)):
        if seconds := [loss.seconds for loss in lost if loss.stopped == stopped]:
            lines.append(
                f'Seconds until the next step had ended, of {len(seconds)} {name}: median '
                f'{statistics.median(seconds):.1f}, at most {max(seconds):.1f}.'
            )
    return '\n'.join(lines)
