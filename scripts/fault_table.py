"""Measures how a fault of one of two processes affects the other: the table of docs/multihost.md.

    python -m scripts.fault_table [--only NAME]

There is no launcher, since it would end the other process at once. Two processes run steps with a collective
on simulated devices. Seconds count from the fault to the end of the other process, and to its report of the
process that is behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from examples.launch.ports import held_port

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 150

TRAINING = """
import os, sys, time
sys.path.insert(0, ROOT)
from scalax import distributed
distributed.initialize(initialization_timeout=15)
import jax, numpy as np
from scalax.checkpoint import Checkpointer
from scalax.sharding import MeshShardingHelper, PartitionSpec
helper = MeshShardingHelper([-1], ['data'])
step_fun = helper.sjit(lambda x: x.sum(), in_shardings=PartitionSpec('data'), out_shardings=PartitionSpec())
batch = helper.local_data_to_global_array(np.ones(2))
wide = helper.local_data_to_global_array(np.ones((2, 2**16)))
me = jax.process_index()
class Slow:  # in the middle of what it does when the fault comes
    def get_state(self):
        time.sleep(5 * me)
        return {}
    def load(self):
        time.sleep(5 * me)
        yield np.ones(2)
    def like(self):
        time.sleep(5 * me)
        return {'x': batch}
checkpoints = Checkpointer(FOLDER)
for step in range(1, 10_000):
    float(step_fun(batch))
    if distributed.should_stop(step):
        sys.exit(distributed.PREEMPTED)
    if step == 5:
        print('running', flush=True)
    AT_STEP
    time.sleep(0.01)
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row of the table: the fault, its process and its step."""

    name: str
    whom: int
    at_step: str = 'pass'
    signal: int = 0
    starts: tuple[int, ...] = (0, 1)


SAVING = "step == 5 and checkpoints.save(step, {'x': batch}, data=Slow())"
RESTORING = (
    "step == 4 and (checkpoints.save(step, {'x': batch}), checkpoints.wait()); "
    "step == 5 and checkpoints.restore(helper, PartitionSpec('data'), Slow().like)"
)
RESHARDING = (  # longer than the time until the fault
    "step == 5 and [helper.reshard(wide, PartitionSpec(None, 'data'), memory='1KiB') for _ in range(1000)]"
)
LOADING = 'step == 5 and next(helper.prefetch(Slow().load()))'

FAULTS = [
    Fault('kill -9 of a worker', 1, signal=signal.SIGKILL),
    Fault(
        'the same, while the other is busy outside of JAX',
        1,
        at_step='time.sleep(600 * (step == 5 and me == 0))',
        signal=signal.SIGKILL,
    ),
    Fault('kill -9 of the coordinator', 0, signal=signal.SIGKILL),
    Fault('a worker that hangs (SIGSTOP)', 1, signal=signal.SIGSTOP),
    *(
        Fault(f'{how} {name}', 1, at_step=where, signal=number)
        for name, where in (
            ('in a save', SAVING),
            ('at a restart', RESTORING),
            ('in a reshard', RESHARDING),
            ('while loading', LOADING),
        )
        for how, number in (('kill -9', signal.SIGKILL), ('SIGSTOP', signal.SIGSTOP))
    ),
    Fault('an exception in one process', 1, at_step="assert not (me == 1 and step == 50), 'wrong'"),
    Fault(
        'sys.exit(1) in one process',
        1,
        at_step="me == 1 and step == 50 and (print('Traceback', flush=True), sys.exit(1))",
    ),
    Fault('os._exit(1) in one process', 1, at_step='me == 1 and step == 50 and os._exit(1)'),
    Fault('SIGTERM to one process', 1, signal=signal.SIGTERM),
    Fault('a peer that never comes (initialization_timeout=15)', 1, starts=(0,)),
]


def measure(fault: Fault) -> tuple[float, str, str, str, str]:
    """Returns the times to the report and the end of the other process, exit codes, and its last message."""
    with tempfile.TemporaryDirectory() as folder, held_port() as port:
        code = f'ROOT, FOLDER = {str(ROOT)!r}, {folder + "/steps"!r}\n'
        code += TRAINING.replace('AT_STEP', fault.at_step)
        logs = [Path(folder, str(index)) for index in range(2)]
        processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for index in fault.starts:
                env = {
                    'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
                    'JAX_NUM_PROCESSES': '2',
                    'JAX_PROCESS_ID': str(index),
                }
                env |= {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '2'}
                with logs[index].open('wb') as out:
                    processes[index] = subprocess.Popen(
                        [sys.executable, '-c', code], env={**os.environ, **env}, stdout=out, stderr=out
                    )
            begun = time.monotonic()
            if fault.whom in processes:
                await_(lambda: all('running' in log.read_text(errors='replace') for log in logs))
                if fault.signal:
                    time.sleep(0.5)
                    begun = time.monotonic()
                    processes[fault.whom].send_signal(fault.signal)
                else:
                    await_(lambda: reached(logs[fault.whom], processes[fault.whom]))
                    begun = time.monotonic()
            other = processes[1 - fault.whom]
            log, named = logs[1 - fault.whom], ''
            while other.poll() is None and time.monotonic() < begun + LONGEST_S:
                if not named and 'have passed since' in log.read_text(errors='replace'):
                    named = f'{time.monotonic() - begun:.1f} s'
                time.sleep(0.02)
            seconds = time.monotonic() - begun
            if other.returncode is None:
                return seconds, named, 'runs on', '', ''
            exit_of_faulty = ''
            if fault.whom in processes and fault.signal != signal.SIGSTOP:
                exit_of_faulty = describe(processes[fault.whom].wait(LONGEST_S))
            return seconds, named, describe(other.returncode), exit_of_faulty, last_words(log)
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()


def reached(log: Path, process: subprocess.Popen[bytes]) -> bool:
    """Returns whether a process has reached its fault: it says so, or has ended."""
    return process.poll() is not None or 'Traceback' in log.read_text(errors='replace')


def await_(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f'exit code {code}'


def last_words(log: Path) -> str:
    text = log.read_text(errors='replace')
    errors = re.findall(r'^(?:jax\.errors\.\w+|\w+Error).*$', text, re.MULTILINE)
    fatal = re.findall(r'^F\d+ .*?\] (.*)$|.*(Terminating process.*)$', text, re.MULTILINE)
    words = [*errors, *(first or second for first, second in fatal)]
    return (words[0] if words else '')[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', default='', help='faults whose name holds this')
    only = parser.parse_args().only
    print(
        '| fault | the other process ends after | names it after | with | the one itself | last words |\n'
        '|---|---|---|---|---|---|'
    )
    for fault in FAULTS:
        if only in fault.name:
            seconds, named, other, exit_of_faulty, words = measure(fault)
            print(
                f'| {fault.name} | {seconds:.1f} s | {named} | {other} | {exit_of_faulty} | {words} |',
                flush=True,
            )


if __name__ == '__main__':
    main()
