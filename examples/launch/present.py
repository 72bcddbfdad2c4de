"""Starts a program in the running pods of a Kubernetes Job, with the process index of each pod.

    python -m examples.launch.present --folder=/saved/starts/7 --pods=4 --address='host-{}:1234' -- train.py

After the loss of a node, a JobSet restarts all pods, and one of them is pending until another node is
available. So each pod writes its index to a folder that is shared by all pods and specific to this start.
When all pods are running, or the first one has waited long enough, it writes the list of participants. A pod
that starts later exits with code 75, as if it had been preempted: the JobSet makes all pods save, and
restarts them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

_FOLDER = flags.DEFINE_string('folder', None, 'A folder for this start, shared by all pods.', required=True)
_PODS = flags.DEFINE_integer('pods', None, 'The number of pods of the Job.', lower_bound=1, required=True)
_ADDRESS = flags.DEFINE_string(
    'address', None, 'Host of a pod, with {} for its index, and a free port.', required=True
)
_WAIT = flags.DEFINE_float('wait', 120, 'Seconds to wait for pods that are not running.', lower_bound=0)

LATE = 75  # scalax.distributed.PREEMPTED, without importing JAX
POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    index, folder = int(os.environ['JOB_COMPLETION_INDEX']), Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(index)).touch()
    present = agree(folder, _PODS.value, _WAIT.value)
    if index not in present:
        print(f'pod {index} is late: the run has begun on {present}', file=sys.stderr)
        return LATE
    print(f'pod {index} is process {present.index(index)} of {len(present)}', file=sys.stderr, flush=True)
    variables = {
        'JAX_COORDINATOR_ADDRESS': _ADDRESS.value.format(present[0]),
        'JAX_NUM_PROCESSES': str(len(present)),
        'JAX_PROCESS_ID': str(present.index(index)),
    }
    os.execve(sys.executable, [sys.executable, *argv[1:]], {**os.environ, **variables})


def agree(folder: Path, pods: int, wait: float) -> list[int]:
    """Returns the participating pods: all pods that are running when the first one stops waiting."""
    end, decided = time.monotonic() + wait, folder / 'present'
    while not (decided.exists() and (text := decided.read_text()).endswith('\n')):  # complete
        present = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
        if len(present) == pods or time.monotonic() > end:
            with contextlib.suppress(FileExistsError), decided.open('x') as file:  # exactly one pod decides
                file.write(' '.join(map(str, present)) + '\n')
        else:
            time.sleep(POLL_S)
    return [int(number) for number in text.split()]


if __name__ == '__main__':
    app.run(main)
