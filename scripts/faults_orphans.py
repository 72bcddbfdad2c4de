"""Jobs that still run while their replacements start: the second run of `faults.py`.

Again and again, a job of two processes starts on the checkpoints of another job that keeps running, or that
was stopped in the middle of a save, as on an unreachable host, and continues later. These properties are
checked:

- the new job continues from the last checkpoint that was complete when it started, or from a later one. If
  the old job has saved another since, the new job's first save fails, and so does the old job's next save;
  the new job is then started once more;
- the old job ends with an error that names process 0 of a newer job, and saves no steps after that;
- no step holds arrays of two jobs, and the checksums of every step match;
- the losses and the parameters are bit-identical to those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from faults_jobs import ENDLESS, MORE, START_S, Failed, Training
from faults_training import MARKS, SAVE_EVERY, WIDTH, job_of

from scalax.checkpoint import Checkpointer
from scalax.errors import CheckpointError
from scalax.sharding import MeshShardingHelper, PartitionSpec

REFUSED = ', from another run or from later in this one'
TAKEN = re.compile(r'now has another writer: process (\d+) on host')
# Steps are slow enough, and kept long enough, for the next job to restore one.
OPTIONS = ('--keep=30', '--pause=0.1')
HOWS = ('training', 'stopped in a save')
NEWEST = 6  # the number of steps to check after each start


def replace_jobs(
    folder: Path, restarts: int, chance: random.Random, end: float, jobs: list[Training]
) -> Counter[str]:
    """Starts up to this many jobs while their predecessors still run, or until *end*.

    Args:
        folder: the folder of all output.
        restarts: the number of jobs to replace.
        chance: draws the moments.
        end: the time limit, by ``time.monotonic()``.
        jobs: the list to append trainings to; the last one starts when all others have ended.

    Returns:
        The counts of old jobs by kind and end.
    """
    ends = Counter[str]()
    with contextlib.ExitStack() as stack:
        while not jobs or (ends.total() < restarts and (not ends or time.monotonic() < end)):
            how = chance.choices(HOWS, weights=(3, 1))[0]
            old, number = (jobs[-1] if jobs else None), len(jobs)
            if old is not None:
                time.sleep(chance.uniform(0, 3))
                if how != 'training':
                    old.wait_for(old.saving, START_S, 'a save')
                    send(old, signal.SIGSTOP)
            complete = old.complete() if old is not None else 0
            jobs.append(stack.enter_context(start(folder, number, ENDLESS)))
            try:
                first = wait_for_saves(jobs[-1], number)
            except Failed as error:
                if REFUSED not in str(error):
                    raise
                number += 1
                jobs.append(stack.enter_context(start(folder, number, ENDLESS)))
                first = wait_for_saves(jobs[-1], number)
            if first < complete:
                raise Failed(f'job {number} goes on from step {first}, and {complete} was complete')
            if old is not None:
                send(old, signal.SIGCONT)
                ends[f'{how}: {ended(old, jobs)}'] += 1
                print(f'{number:3} the old one {how}, the new one from step {first} on', flush=True)
            check(folder, first, number)
    reached = max(job.reached() for job in jobs)
    with start(folder, len(jobs), reached + MORE) as last:
        jobs.append(last)
        last.launcher.wait(timeout=START_S)
    return ends


def start(folder: Path, number: int, goal: int) -> Training:
    options = (*OPTIONS, f'--job={number}')
    return Training(folder / f'job-{number}', goal, starts=0, steps=folder / 'steps', options=options)


def wait_for_saves(job: Training, number: int) -> int:
    """Waits until a job has saved two steps; returns the step from which it continues."""
    job.wait_for(lambda: bool(job.lines()), START_S, f'the start of job {number}')
    first = int(job.lines()[0][0])
    job.wait_for(lambda: job.reached() > first + 3 * SAVE_EVERY, START_S, f'a save of job {number}')
    return first


def send(job: Training, number: signal.Signals) -> None:
    for pid in job.latest().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ended(old: Training, jobs: list[Training]) -> str:
    """Waits until a replaced job has ended; returns how it ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        old.launcher.wait(timeout=START_S)
    text = old.log.read_text(errors='replace')
    if old.launcher.poll() is None:
        raise Failed(f'the old job has not ended:\n{text[-4000:]}')
    named = {int(pid) for pid in TAKEN.findall(text)}
    first = {pid for job in jobs[jobs.index(old) + 1 :] for index, pid in job.started() if index == 0}
    if named and named <= first:
        return 'the error named the new one'
    if not named and 'heartbeat' in text:
        return 'JAX had ended it'
    raise Failed(f'the old job ended otherwise, naming {named}, not one of {first}:\n{text[-4000:]}')


def check(folder: Path, first: int, number: int) -> None:
    """Checks that the newest steps are complete, and that steps after *first* belong to the newest job."""
    like = {
        'mark': jax.ShapeDtypeStruct((WIDTH,), np.int32),
        'marks': {'mark': jax.ShapeDtypeStruct((4, WIDTH), np.int32)},
    }
    helper = MeshShardingHelper([1], ['x'], devices=jax.devices()[:1])
    steps = sorted(int(path.name) for path in (folder / 'steps').iterdir() if path.name.isdecimal())
    for step in steps[-NEWEST:]:
        try:
            state = Checkpointer(folder / 'steps').restore(
                helper, PartitionSpec(), like, step, only='^marks?(/|$)', verify=True
            )
        except CheckpointError as error:
            if (folder / 'steps' / str(step)).exists():
                raise Failed(f'step {step}: {error}') from error
            continue  # a newer job has started
        job = job_of([state[name] for name in MARKS])
        if step > first and job != number:
            raise Failed(f'step {step} is of job {job}, and job {number} has gone on from step {first}')
