"""Programs that end while their data still move: the fourth run of `faults.py`.

Again and again, two processes start a transfer between them, in each of the ways of
`faults_exit_program.py`, and end without waiting for it. This property is checked:

- both end, within `LONGEST_S`, with exit code 0.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from faults_jobs import ROOT, Failed

from examples.launch.ports import held_port

PROGRAM = ROOT / 'scripts' / 'faults_exit_program.py'
MOVES = ('local_data_to_global_array', 'prefetch', 'step', 'shard', 'reshard', 'save')
KINDS = [(move, *options) for options in ((), ('dropped',), ('jax',), ('dropped', 'jax')) for move in MOVES]
LONGEST_S = 90  # on a very busy machine


def end_early(folder: Path, count: int, chance: random.Random, end: float) -> Counter[str]:
    """Ends up to this many programs, or until *end*; returns how many ended with each move.

    Raises:
        Failed: a process did not end, or ended with an error.
    """
    ended = Counter[str]()
    order = chance.sample(KINDS, len(KINDS))
    for number, kind in enumerate(itertools.islice(itertools.cycle(order), count), 1):
        if ended and time.monotonic() > end:
            break
        seconds = run(folder / str(number), kind)
        ended[kind[0]] += 1
        print(f'{number:3} {" ".join(kind)}: ended after {seconds:.1f} s', flush=True)
    return ended


def run(folder: Path, kind: tuple[str, ...]) -> float:
    """Runs the program in two processes; returns the seconds that it took."""
    folder.mkdir()
    logs = [folder / f'said-{index}' for index in range(2)]
    begun, processes = time.monotonic(), list[subprocess.Popen[bytes]]()
    try:
        with held_port() as port:
            env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'JAX_NUM_CPU_DEVICES': '2'}
            env |= {'JAX_COORDINATOR_ADDRESS': f'localhost:{port}', 'JAX_NUM_PROCESSES': '2'}
            for index, log in enumerate(logs):
                command = [sys.executable, str(PROGRAM), str(folder), *kind]
                with log.open('wb') as out:
                    process_env = {**env, 'JAX_PROCESS_ID': str(index)}
                    processes.append(
                        subprocess.Popen(command, env=process_env, stdout=out, stderr=subprocess.STDOUT)
                    )
            for process in processes:
                process.wait(max(begun + LONGEST_S - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        pass
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    if codes != [0, 0]:
        outputs = '\n---\n'.join(log.read_text(errors='replace')[-2000:] for log in logs)
        raise Failed(f'{" ".join(kind)}: the exit codes are {codes}, where None has not ended:\n{outputs}')
    return time.monotonic() - begun
