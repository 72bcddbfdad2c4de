"""Jobs that were not ended when others were started in their place: the second run of `faults.py`.

Time and again, a job of two processes is started on the checkpoints of another that goes on meanwhile, or
that was stopped in the middle of a save, as on a host that cannot be reached, and goes on later. What has to
hold:

- the new job goes on from the last checkpoint that was complete when it started, or from a later one; where
  the old one has saved another since, the new one's first save is refused, and so is the old one's next: the
  new one is started once more;
- the old one ends with an error that names process 0 of a newer job, and none of its steps come after that;
- no step holds arrays of two jobs, and every step is, by its checksums, what was written;
- the losses and the parameters are, to the last bit, those of a run that nobody disturbed.
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
# A step takes long enough, and is kept long enough, for the next job to restore it meanwhile.
OPTIONS = ('--keep=30', '--pause=0.1')
HOWS = ('training', 'stopped in a save')
NEWEST = 6  # so many steps are looked at behind each start


def replace_jobs(
    folder: Path, restarts: int, chance: random.Random, end: float, jobs: list[Training]
) -> Counter[str]:
    """Starts so many jobs, each in place of one that is not ended, or as many as are possible before *end*.

    Args:
        folder: for all that is written.
        restarts: how many jobs are replaced.
        chance: of the moments.
        end: by ``time.monotonic()``.
        jobs: gets the trainings, the last of which was started when all others had ended.

    Returns:
        How often which kind of old job ended how.
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
    """Until a job has saved two steps; returns that from which it goes on."""
    job.wait_for(lambda: bool(job.lines()), START_S, f'the start of job {number}')
    first = int(job.lines()[0][0])
    job.wait_for(lambda: job.reached() > first + 3 * SAVE_EVERY, START_S, f'a save of job {number}')
    return first


def send(job: Training, number: signal.Signals) -> None:
    for pid in job.latest().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ended(old: Training, jobs: list[Training]) -> str:
    """Waits for the end of a job that has been replaced; returns how that was."""
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
    """That the newest steps are whole, and those behind *first* the newest job's."""
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
            continue  # a newer one has come
        job = job_of([state[name] for name in MARKS])
        if step > first and job != number:
            raise Failed(f'step {step} is of job {job}, and job {number} has gone on from step {first}')
