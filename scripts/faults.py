#!/usr/bin/env python
"""Kills processes of a training at random moments, or abandons them, and checks that nothing is lost.

    make faults
    python scripts/faults.py --kills 50 --orphans 0 --seed 3

Two processes train (`faults_training.py`) under the local launcher, which restarts both if one dies. Again
and again, one or both of them are killed with SIGKILL, while they start, train or save. These properties are
checked:

- each start continues from the last checkpoint that was complete at the kill, or from a later one;
- every loss, and the final parameters, are bit-identical to those of an undisturbed run.

Then the same training is started repeatedly while earlier ones are still running (`faults_orphans.py`), and
loses processes permanently, at each stage of a start and of a save (`faults_losses.py`). Last, programs end
while data still move between their processes (`faults_exits.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'  # before faults_orphans imports JAX

from faults_exits import end_early
from faults_jobs import ENDLESS, MORE, PROCESSES, START_S, Failed, Training, kill, losses
from faults_losses import farthest, lose_processes, summary
from faults_orphans import replace_jobs

WHERE = ('starting', 'training', 'saving')


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill: when it happened, its victims, and the progress of the training at that moment."""

    where: str
    whom: tuple[int, ...]
    complete: int  # the last complete checkpoint
    reached: int  # the last step whose loss was written
    line: int  # the number of lines that were written

    def __str__(self) -> str:
        whom = ' and '.join('the coordinator' if index == 0 else f'process {index}' for index in self.whom)
        return f'while {self.where}, {whom} after step {self.reached}, with step {self.complete} saved'


def strike(training: Training, start: int, chance: random.Random, last: bool) -> Kill:
    """Waits for a random moment of the latest start, and kills one or both of its processes."""
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
        training.aim_at(training.reached() + MORE)
    ids = training.latest()
    for index in whom:
        kill(ids[index])
    return Kill(where, whom, training.complete(), training.reached(), len(training.lines()))


def disturb(training: Training, kills: int, chance: random.Random, end: float) -> list[Kill]:
    """Kills up to this many times, or until *end*; returns when the training has ended."""
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
    """Checks that starts continue from complete checkpoints; returns the most steps repeated."""
    lines, most = training.lines(), 0
    for number, victim in enumerate(kills, 1):
        resumed = next(int(step) for step, entry in lines[victim.line :] if entry == 'resumed')
        if resumed < victim.complete:
            raise Failed(
                f'kill {number}, {victim}: continued from step {resumed}, although step {victim.complete} '
                'was complete'
            )
        most = max(most, victim.reached - resumed)
    return most


def undisturbed(folder: Path, steps: int, end: float) -> Training:
    """Runs that many steps undisturbed."""
    print(f'{steps} steps. The same without faults ...', flush=True)
    with Training(folder, steps, starts=0) as training:
        training.launcher.wait(timeout=max(end - time.monotonic(), 1))
    return training


def compare(folder: Path, last: Training, curve: dict[int, str], end: float) -> None:
    """Checks that losses and parameters equal those of an undisturbed run."""
    other = undisturbed(folder, len(curve), end)
    if (other.norm(), losses(other)) != (last.norm(), curve):
        unlike = [step for step, loss in losses(other).items() if curve[step] != loss]
        raise Failed(f'not as without faults: the parameters, and the losses of steps {unlike[:10]}')


def killed(folder: Path, count: int, seed: int, end: float) -> int:
    """Runs the training whose processes are killed; returns the number of kills."""
    with Training(folder / 'disturbed', ENDLESS, starts=count + 1) as training:
        # The undisturbed run comes last, and is faster, because it starts once.
        kills = disturb(training, count, random.Random(seed), end - 0.25 * (end - time.monotonic()))
        curve = losses(training)
        most = check_resumes(training, kills)
    compare(folder / 'undisturbed', training, curve, end)
    where, whom = Counter(victim.where for victim in kills), Counter(victim.whom for victim in kills)
    print(
        f'{len(kills)} kills: {", ".join(f"{where[name]} while {name}" for name in WHERE)}; the coordinator '
        f'{whom[(0,)]}, the other {whom[(1,)]}, both {whom[(0, 1)]}.\n'
        f'{len(curve)} losses and the parameters are, to the last bit, those of an undisturbed run. Every '
        f'start went on from the last complete checkpoint; at most {most} steps were done again.'
    )
    return len(kills)


def replaced(folder: Path, count: int, seed: int, end: float) -> int:
    """Runs jobs that replace jobs that have not ended; returns the number of replacements."""
    jobs: list[Training] = []
    ends = replace_jobs(folder, count, random.Random(seed), end - 0.25 * (end - time.monotonic()), jobs)
    curve = losses(*jobs)
    compare(folder / 'undisturbed', jobs[-1], curve, end)
    print(
        f'{ends.total()} jobs were replaced and not ended: '
        f'{", ".join(f"{number} {how}" for how, number in ends.items())}.\n'
        f'{len(curve)} losses and the parameters are, to the last bit, those of an undisturbed run. Every '
        'start went on from the last complete checkpoint, and no step was lost, or of two jobs.'
    )
    return ends.total()


def shrunk(folder: Path, count: int, seed: int, end: float) -> int:
    """Runs jobs that lose processes permanently; returns the number of losses."""
    jobs: list[Training] = []
    lost = lose_processes(folder, count, random.Random(seed), end - 0.25 * (end - time.monotonic()), jobs)
    steps = max(job.reached() for job in jobs)
    far = farthest([*jobs, undisturbed(folder / 'undisturbed', steps, end)])
    print(
        f'{summary(lost)}\n'
        f'{steps} losses are within {far:.1e}, relatively, of those of an undisturbed run. Every start went '
        'on from the last complete checkpoint.'
    )
    return len(lost)


def ended(folder: Path, count: int, seed: int, end: float) -> int:
    """Runs programs that end while data move; returns their number."""
    moves = end_early(folder, count, random.Random(seed), end)
    print(
        f'{moves.total()} programs ended while data moved: '
        f'{", ".join(f"{number} after {move}" for move, number in moves.items())}. None of them hung.'
    )
    return moves.total()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kills', type=int, default=50, help='how many')
    parser.add_argument('--orphans', type=int, default=50, help='how many jobs are replaced and not ended')
    parser.add_argument('--losses', type=int, default=50, help='how many processes are lost for good')
    parser.add_argument('--exits', type=int, default=100, help='how many programs end while data move')
    parser.add_argument('--seed', type=int, default=0, help='of the moments and of who is killed')
    parser.add_argument('--minutes', type=float, default=20, help='the longest that each of these may take')
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: ends the trainings
    runs = (
        (killed, options.kills),
        (replaced, options.orphans),
        (shrunk, options.losses),
        (ended, options.exits),
    )
    for run, count in runs:
        if not count:
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix='faults-') as folder:
            try:
                done = run(Path(folder), count, options.seed, begun + 60 * options.minutes)
            except (Failed, subprocess.TimeoutExpired) as error:
                print(f'FAILED after {time.monotonic() - begun:.0f} s: {error}')
                return 1
        print(f'{time.monotonic() - begun:.0f} s.')
        if done < count:
            print(f'FAILED: only {done} of {count} fitted into {options.minutes:g} minutes')
            return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
