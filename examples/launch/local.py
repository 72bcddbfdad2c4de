"""Starts a program as several processes on this machine, and starts all of them again if one dies.

    python -m examples.launch.local --processes=2 --devices=4 -- -m examples.llama.train --steps=100
    python -m examples.launch.local --processes=4 --devices=2 --on_loss=shrink -- -m examples.llama.train ...

After `--` comes what would come after `python`. Each process learns by environment variables
which one it is, and `scalax.distributed.initialize()` reads them. The processes of a program depend on one
another: where one is lost the others cannot go on, so all are started anew, and continue from what they
have saved. `LOST_AT` tells them since when they are wanted, in seconds since the epoch.

With `--on_loss=shrink` each process stands for a host: one that was killed does not come back, nor one that
is silent while as many others have ended for want of it. The others start on as many as are left.

SIGTERM and Ctrl-C ask all of them to end, and a second Ctrl-C ends them at once. Where the launcher itself is
killed with SIGKILL they go on, and have to be ended by the ids that it has printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # started as a file and not by -m: imports are from the root of the clone
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
    'devices', None, 'Devices that each process simulates, where there is only a CPU.', lower_bound=1
)
_ON_LOSS = flags.DEFINE_enum(
    'on_loss',
    'restart',
    ['restart', 'shrink'],
    'Start a lost process again, or go on with those that are left.',
)
_RESTARTS = flags.DEFINE_integer('restarts', 3, 'Times to start all again before giving up.', lower_bound=0)
_GRACE = flags.DEFINE_float('grace', 60, 'Seconds to save in, after a signal, before the end.', lower_bound=0)

REFUSED = 2
PREEMPTED = 75  # scalax.distributed.PREEMPTED, without importing JAX
INTERRUPTED = 130
# What another start would not change: success, bad flags, a wish to stop.
FINAL = (0, REFUSED, PREEMPTED, INTERRUPTED)
POLL_S = 0.05
# Processes that end because another is silent do so at about the same time.
SETTLE_S = 3.0
# By then JAX has ended all that wait for a lost one: 20 s is the heartbeat_timeout of scalax.distributed.
HEARTBEAT_S = 30.0


class Launcher:
    """Runs a program until it succeeds, refuses, or is told to stop; or too many starts have failed."""

    def __init__(
        self, command: Sequence[str], processes: int, devices: int | None, grace: float, shrink: bool = False
    ) -> None:
        self.command, self.processes, self.devices, self.grace = command, processes, devices, grace
        self.shrink = shrink
        self.deadline: float | None = None  # set once a signal asks for the end
        self.interrupted = False  # by Ctrl-C
        self.running: list[subprocess.Popen[bytes]] = []
        self.lost_at: float | None = None

    def run(self, restarts: int) -> int:
        """Returns the exit code: that of the first process which failed (128 + n after signal n), or 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.pass_on)
        for attempt in range(restarts + 1):
            code, gone = self.run_once()
            if code in FINAL or self.deadline is not None:
                break
            self.processes -= len(gone)
            which = f'; lost: process {", ".join(map(str, gone))}' if gone else ''
            plural = '' if self.processes == 1 else 'es'
            on = f' on {self.processes} process{plural}' if self.shrink else ''
            say(f'a process ended with {describe(code)}{which}; {restarts - attempt} more starts{on}')
            if not self.processes:
                break
        return code if code >= 0 else 128 - code

    def run_once(self) -> tuple[int, list[int]]:
        """Starts all processes; returns once all have ended, or one has failed and the others are ended.

        Returns:
          The exit code, and the processes that are not to be started again.
        """
        with held_port() as port:
            try:
                for index in range(self.processes):
                    if self.deadline is not None:  # a signal came between two starts
                        return INTERRUPTED, []
                    self.running.append(self.start(index, f'localhost:{port}'))
                code = self.wait()
                self.lost_at = time.time()
                return code, self.gone() if self.shrink and code not in FINAL else []
            finally:
                for process in self.running:
                    if process.poll() is None:
                        process.kill()
                    process.wait()
                self.running = []

    def start(self, index: int, address: str) -> subprocess.Popen[bytes]:
        own = {
            'JAX_COORDINATOR_ADDRESS': address,
            'JAX_NUM_PROCESSES': str(self.processes),
            'JAX_PROCESS_ID': str(index),
        }
        if self.devices is not None:
            own['JAX_NUM_CPU_DEVICES'] = str(self.devices)
        if self.lost_at is not None:
            own['LOST_AT'] = str(self.lost_at)
        # A session of its own: a terminal's Ctrl-C then comes here only, and is passed on once.
        process = subprocess.Popen(
            [sys.executable, *self.command], env={**os.environ, **own}, start_new_session=True
        )
        say(f'process {index} has id {process.pid}')
        return process

    def wait(self) -> int:
        while True:
            codes = [process.poll() for process in self.running]
            if failed := [code for code in codes if code]:
                # Those that stop on purpose stop together, each when it has saved.
                final = [code for code in failed if code in FINAL]
                if not final or len(final) < len(failed):
                    return next(code for code in failed if code not in FINAL)
                self.deadline = self.deadline or time.monotonic() + self.grace
            if None not in codes:
                return failed[0] if failed else 0
            if self.deadline is not None and time.monotonic() > self.deadline:
                say('still there after they were asked to end: ended now')
                return failed[0] if failed else INTERRUPTED
            time.sleep(POLL_S)

    def gone(self) -> list[int]:
        """After a failure, the processes that were killed; or else those that the others have given up."""
        begun = time.monotonic()
        while True:
            codes = [process.poll() for process in self.running]
            # By SIGABRT JAX ends those that wait for another in vain.
            killed = [i for i, code in enumerate(codes) if code and code < 0 and code != -signal.SIGABRT]
            silent = [i for i, code in enumerate(codes) if code is None]
            if killed or not silent:
                return killed
            aborted, waited = codes.count(-signal.SIGABRT), time.monotonic() - begun
            if waited > SETTLE_S and aborted < len(silent):  # one has failed, and the others wait for it
                return []
            # Of as many on each side, those that wait are ended too.
            if waited > (SETTLE_S if aborted > len(silent) else HEARTBEAT_S):
                return silent
            time.sleep(POLL_S)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on, as SIGTERM: all processes stop at the same step. A second Ctrl-C ends all."""
        if number == signal.SIGINT and self.interrupted:
            self.deadline = time.monotonic()
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.deadline = self.deadline or time.monotonic() + self.grace
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def say(text: str) -> None:
    print(f'launcher: {text}', file=sys.stderr, flush=True)


def describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f'exit code {code}'


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print('error: which program? Write it after --, as in -- -m examples.llama.train', file=sys.stderr)
        return REFUSED
    shrink = _ON_LOSS.value == 'shrink'
    launcher = Launcher(argv[1:], _PROCESSES.value, _DEVICES.value, _GRACE.value, shrink)
    return launcher.run(_RESTARTS.value)


if __name__ == '__main__':
    app.run(main)
