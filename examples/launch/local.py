"""Starts a program as several processes on this machine, and starts all of them again if one dies.

    python -m examples.launch.local --processes=2 --devices=4 -- -m examples.llama.train --steps=100
    python -m examples.launch.local --processes=4 --devices=2 --on_loss=shrink -- -m examples.llama.train ...

The arguments after `--` are the arguments of `python`. Environment variables contain the index of each
process, and `scalax.distributed.initialize()` reads them. The processes of a program depend on each other: if
one is lost, the others cannot continue, so all are restarted, and continue from their last checkpoint.
`LOST_AT` is the time of the loss, in seconds since the epoch.

With `--on_loss=shrink`, each process stands for a host: a process that was killed is not restarted, nor is
one that is unresponsive while at least as many others have ended because of it. The remaining ones are
restarted.

SIGTERM and Ctrl-C ask all processes to end, and a second Ctrl-C kills them. If the launcher itself is killed
with SIGKILL, they continue, and have to be ended by the process ids that it has printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from absl import app, flags

from examples.launch.ports import held_port

_PROCESSES = flags.DEFINE_integer('processes', 2, 'Processes to start.', lower_bound=1)
_DEVICES = flags.DEFINE_integer(
    'devices', None, 'Devices that each process simulates if there is only a CPU.', lower_bound=1
)
_ON_LOSS = flags.DEFINE_enum(
    'on_loss',
    'restart',
    ['restart', 'shrink'],
    'Restart a lost process, or continue with the remaining ones.',
)
_RESTARTS = flags.DEFINE_integer('restarts', 3, 'Number of restarts before giving up.', lower_bound=0)
_GRACE = flags.DEFINE_float(
    'grace', 60, 'Seconds for saving after a signal, before processes are killed.', lower_bound=0
)

REFUSED = 2
PREEMPTED = 75  # scalax.distributed.PREEMPTED, without importing JAX
INTERRUPTED = 130
# Exit codes for which a restart is pointless: success, bad flags, a request to stop.
FINAL = (0, REFUSED, PREEMPTED, INTERRUPTED)
POLL_S = 0.05
# Processes that end because another one is unresponsive do so at about the same time.
SETTLE_S = 3.0
# By then JAX has ended all processes that wait for a lost one: the heartbeat_timeout of scalax.distributed is
# 20 s.
HEARTBEAT_S = 30.0


class Launcher:
    """Runs a program until it succeeds, rejects its flags, is asked to stop, or has failed too often."""

    def __init__(
        self, command: Sequence[str], processes: int, devices: int | None, grace: float, shrink: bool = False
    ) -> None:
        self.command, self.processes, self.devices, self.grace = command, processes, devices, grace
        self.shrink = shrink
        self.deadline: float | None = None  # set when a signal asks to end
        self.interrupted = False  # by Ctrl-C
        self.running: list[subprocess.Popen[bytes]] = []
        self.lost_at: float | None = None

    def run(self, restarts: int) -> int:
        """Returns the exit code of the first process that failed (128 + n after signal n), or 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.forward_signal)
        for attempt in range(restarts + 1):
            code, lost = self.run_once()
            if code in FINAL or self.deadline is not None:
                break
            self.processes -= len(lost)
            which = f'; lost: process {", ".join(map(str, lost))}' if lost else ''
            plural = '' if self.processes == 1 else 'es'
            on = f' on {self.processes} process{plural}' if self.shrink else ''
            say(f'a process ended with {describe(code)}{which}; {restarts - attempt} more starts{on}')
            if not self.processes:
                break
        return code if code >= 0 else 128 - code

    def run_once(self) -> tuple[int, list[int]]:
        """Starts all processes, and waits until all have ended, or one has failed and the others are killed.

        Returns:
          The exit code, and the indices of the processes that are not restarted.
        """
        with held_port() as port:
            try:
                for index in range(self.processes):
                    if self.deadline is not None:  # a signal was received between two starts
                        return INTERRUPTED, []
                    self.running.append(self.start(index, f'localhost:{port}'))
                code = self.wait()
                self.lost_at = time.time()
                return code, self.find_lost() if self.shrink and code not in FINAL else []
            finally:
                for process in self.running:
                    if process.poll() is None:
                        process.kill()
                    process.wait()
                self.running = []

    def start(self, index: int, address: str) -> subprocess.Popen[bytes]:
        variables = {
            'JAX_COORDINATOR_ADDRESS': address,
            'JAX_NUM_PROCESSES': str(self.processes),
            'JAX_PROCESS_ID': str(index),
        }
        if self.devices is not None:
            variables['JAX_NUM_CPU_DEVICES'] = str(self.devices)
        if self.lost_at is not None:
            variables['LOST_AT'] = str(self.lost_at)
        # In a new session, so that only the launcher receives a terminal's Ctrl-C, and forwards it once.
        process = subprocess.Popen(
            [sys.executable, *self.command], env={**os.environ, **variables}, start_new_session=True
        )
        say(f'process {index} has id {process.pid}')
        return process

    def wait(self) -> int:
        while True:
            codes = [process.poll() for process in self.running]
            if failed := [code for code in codes if code]:
                # Processes that stop on request stop together, each after saving.
                final = [code for code in failed if code in FINAL]
                if not final or len(final) < len(failed):
                    return next(code for code in failed if code not in FINAL)
                self.deadline = self.deadline or time.monotonic() + self.grace
            if None not in codes:
                return failed[0] if failed else 0
            if self.deadline is not None and time.monotonic() > self.deadline:
                say('still running after the request to end: killed')
                return failed[0] if failed else INTERRUPTED
            time.sleep(POLL_S)

    def find_lost(self) -> list[int]:
        """Returns, after a failure, the processes that were killed, or else the unresponsive ones."""
        start = time.monotonic()
        while True:
            codes = [process.poll() for process in self.running]
            # JAX ends processes that wait for a lost process with SIGABRT.
            killed = [i for i, code in enumerate(codes) if code and code < 0 and code != -signal.SIGABRT]
            running = [i for i, code in enumerate(codes) if code is None]
            if killed or not running:
                return killed
            aborted, waited = codes.count(-signal.SIGABRT), time.monotonic() - start
            if waited > SETTLE_S and aborted < len(
                running
            ):  # one has failed, and the others still wait for it
                return []
            # If both groups have equal size, JAX also ends the waiting ones.
            if waited > (SETTLE_S if aborted > len(running) else HEARTBEAT_S):
                return running
            time.sleep(POLL_S)

    def forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Forwards a signal as SIGTERM: all processes stop at the same step. A second Ctrl-C kills them."""
        if number == signal.SIGINT and self.interrupted:
            self.deadline = time.monotonic()
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.deadline = self.deadline or time.monotonic() + self.grace
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def say(text: str) -> None:
    # One write, unlike print(): the processes write to the same stream.
    sys.stderr.write(f'launcher: {text}\n')
    sys.stderr.flush()


def describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f'exit code {code}'


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print('error: no program given. Write it after --, as in -- -m examples.llama.train', file=sys.stderr)
        return REFUSED
    shrink = _ON_LOSS.value == 'shrink'
    launcher = Launcher(argv[1:], _PROCESSES.value, _DEVICES.value, _GRACE.value, shrink)
    return launcher.run(_RESTARTS.value)


if __name__ == '__main__':
    app.run(main)
