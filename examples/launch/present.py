"""Starts a program in those pods of a Kubernetes Job that are there, and tells each which process it is.

    python -m examples.launch.present --folder=/saved/starts/7 --pods=4 --address='host-{}:1234' -- train.py

After a node was lost a JobSet starts all pods again, and one of them is pending until there is another node.
So each pod writes its index into a folder that all of them see, and that belongs to this start. When all
are there, or the first of them has waited long enough, it writes down who takes part. A pod that comes later
ends with exit code 75, as if it had been preempted: the JobSet asks all to save, and starts all again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

_FOLDER = flags.DEFINE_string('folder', None, 'A folder of this start, which all pods see.', required=True)
_PODS = flags.DEFINE_integer('pods', None, 'How many pods the Job has.', lower_bound=1, required=True)
_ADDRESS = flags.DEFINE_string(
    'address', None, 'Host of a pod, with {} for its index, and a port that is free there.', required=True
)
_WAIT = flags.DEFINE_float('wait', 120, 'Seconds to wait for pods that are not there.', lower_bound=0)

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
    own = {
        'JAX_COORDINATOR_ADDRESS': _ADDRESS.value.format(present[0]),
        'JAX_NUM_PROCESSES': str(len(present)),
        'JAX_PROCESS_ID': str(present.index(index)),
    }
    os.execve(sys.executable, [sys.executable, *argv[1:]], {**os.environ, **own})


def agree(folder: Path, pods: int, wait: float) -> list[int]:
    """The pods that take part: all that are there when the first has seen all, or has waited long enough."""
    end, decided = time.monotonic() + wait, folder / 'present'
    while not (decided.exists() and (text := decided.read_text()).endswith('\n')):  # all of it is written
        present = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
        if len(present) == pods or time.monotonic() > end:
            with contextlib.suppress(FileExistsError), decided.open('x') as file:  # one pod decides
                file.write(' '.join(map(str, present)) + '\n')
        else:
            time.sleep(POLL_S)
    return [int(number) for number in text.split()]


if __name__ == '__main__':
    app.run(main)
