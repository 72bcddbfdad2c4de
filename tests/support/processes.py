"""Runs checks in several real processes, joined by ``jax.distributed`` on localhost.

Every process imports a module of checks, and runs its functions ``check_*`` in the order of the file.
Starting costs seconds, so many checks share one start::

    outcome = run_checks('tests.support.data_checks', processes=2, devices=4)
    outcome.passed  # the names of the checks that passed on every process

With ``names=asked_for(request)`` a fixture skips the checks whose tests are not selected.

No wait is unbounded: all processes end, or are killed by their ids, within the timeout.
"""

import contextlib
import dataclasses
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from examples.launch.ports import held_port
from tests.support import ROOT

# Less than the time limit of a test (pyproject.toml), so that the output of the processes is shown.
LONGEST_S = 500


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a run by process: exit codes, output, and the checks that passed."""

    codes: tuple[int | None, ...]
    outputs: tuple[str, ...]
    checks: tuple[frozenset[str], ...]

    @property
    def passed(self) -> frozenset[str]:
        """The checks that passed on every process."""
        return frozenset.intersection(*self.checks)

    def __str__(self) -> str:
        return '\n'.join(
            f'--- process {index} (exit code {code}) ---\n{text}'
            for index, (code, text) in enumerate(zip(self.codes, self.outputs, strict=True))
        )


def names_of_checks(module: str) -> list[str]:
    """Returns the checks of a module, in the order of the file."""
    return [name for name in vars(importlib.import_module(module)) if name.startswith('check_')]


def asked_for(request: pytest.FixtureRequest) -> list[str]:
    """Returns the values of `name` in the selected tests that use this fixture."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    using = [item for item in items if item.path == request.path and request.fixturename in item.fixturenames]
    return [item.callspec.params['name'] for item in using if 'name' in item.callspec.params]


def run_checks(
    modules: str | Sequence[str],
    processes: int,
    devices: int,
    names: Sequence[str] = (),
    timeout: float = LONGEST_S,
) -> Outcome:
    """Runs checks of modules, or all, in this many processes with this many simulated devices each."""
    modules = [modules] if isinstance(modules, str) else modules
    checks = [
        f'{module}:{name}'
        for module in modules
        for name in names_of_checks(module)
        if not names or name in names
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths)}
    # Unbuffered, to keep the output of a process that is killed.
    env |= {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices), 'PYTHONUNBUFFERED': '1'}
    env['XLA_FLAGS'] = _flags_but_of_devices()
    with tempfile.TemporaryDirectory() as folder, held_port() as port:
        command = [sys.executable, '-W', 'error', '-m', 'tests.support.processes']
        command += [str(processes), str(port)]
        # The printed output is only for people: other libraries print too, in the middle of lines.
        printed = [Path(folder, f'{index}.txt') for index in range(processes)]
        passed = [Path(folder, f'{index}.passed') for index in range(processes)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(processes):
                passed[index].touch()
                with printed[index].open('wb') as out:
                    full = [*command, str(index), str(passed[index]), *checks]
                    running.append(subprocess.Popen(full, env=env, stdout=out, stderr=subprocess.STDOUT))
            _wait(running, timeout)
        finally:
            # Each by its id; processes that have ended are skipped.
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return Outcome(
            tuple(process.returncode for process in running),
            tuple(file.read_text(errors='replace') for file in printed),
            tuple(frozenset(file.read_text().split()) for file in passed),
        )


class Running:
    """Programs that run at the same time, and their output so far."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], files: list[Path]) -> None:
        self.processes, self._files = processes, files

    def output(self, index: int = 0) -> str:
        return self._files[index].read_text(errors='replace')

    def wait(self, timeout: float = LONGEST_S) -> tuple[int, ...]:
        """Returns the exit codes, once all programs have ended."""
        end = time.monotonic() + timeout
        return tuple(process.wait(max(end - time.monotonic(), 0)) for process in self.processes)

    def wait_for(self, message: str | re.Pattern[str], index: int = 0, timeout: float = LONGEST_S) -> None:
        """Waits until a process prints a message: a text, or a match of a pattern."""
        pattern = re.compile(re.escape(message)) if isinstance(message, str) else message
        end = time.monotonic() + timeout
        while True:
            has_ended = self.processes[index].poll() is not None  # before the last output is read
            if pattern.search(self.output(index)):
                return
            assert not has_ended and time.monotonic() < end, self.output(index)
            time.sleep(0.02)


def compiled() -> dict[str, str]:
    """Returns the variables with which processes share a compilation cache, in a folder of this test run.

    A partial entry, for example of a killed writer, is compiled again.
    """
    quiet = [f'ignore:Error {action} persistent compilation cache entry' for action in ('reading', 'writing')]
    warnings = [*filter(None, [os.environ.get('PYTHONWARNINGS')]), *quiet]
    folder = os.environ['SCALAX_TESTS_COMPILED']
    return {'JAX_COMPILATION_CACHE_DIR': folder, 'PYTHONWARNINGS': ','.join(warnings)}


@contextlib.contextmanager
def started(*programs: Sequence[str], env: Sequence[Mapping[str, str]] = ({},)) -> Iterator[Running]:
    """Starts Python programs with separate environment variables, and ends those that still run at the end.

    They get a signal first, so that a launcher can end the processes that it has started.

    Args:
        *programs: the arguments of ``python``, for each program.
        env: further environment variables for each program.
    """
    common = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': '1'}
    common['XLA_FLAGS'] = _flags_but_of_devices()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files: list[Path] = []
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for index, (program, variables) in enumerate(zip(programs, env, strict=True)):
            files.append(Path(folder, f'{index}.txt'))
            with files[-1].open('wb') as out:
                process = subprocess.Popen(
                    [sys.executable, *program],
                    cwd=ROOT,
                    env={**common, **variables},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        yield Running(processes, files)


def _flags_but_of_devices() -> str:
    """Returns XLA_FLAGS without the number of devices, which JAX_NUM_CPU_DEVICES or the process sets."""
    flags = os.environ.get('XLA_FLAGS', '').split()
    return ' '.join(flag for flag in flags if 'device_count' not in flag)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends running processes, each by its id: two Ctrl-C, as a user would, and then SIGKILL."""
    for patience in (1, 9):
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        end = time.monotonic() + patience
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            time.sleep(0.02)
    for process in processes:
        process.kill()  # has no effect on a process that has ended
        process.wait()


def _wait(running: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Waits until all have ended, one has failed and the others only wait for it, or the time is over."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in running]
        if None not in codes:
            return
        if any(codes):  # gives other failing processes a moment to report their errors
            end = min(end, time.monotonic() + 3)
        time.sleep(0.05)


def _main(processes: str, port: str, index: str, passed: str, *checks: str) -> int:
    """Runs in each process."""
    import jax

    warnings.simplefilter('error')
    address = f'localhost:{port}'
    jax.distributed.initialize(
        address, int(processes), int(index), initialization_timeout=300, shutdown_timeout_seconds=60
    )
    for module, _, name in (check.partition(':') for check in checks):
        check: Callable[[], None] = getattr(importlib.import_module(module), name)
        start = time.monotonic()
        try:
            check()
        except BaseException:
            traceback.print_exc()
            print(f'{name} failed', flush=True)
            # Ends without waiting, because the other processes may never get here.
            os._exit(1)
        with open(passed, 'a') as file:
            print(name, file=file)
        print(f'{name}: {time.monotonic() - start:.1f} s', flush=True)
    jax.distributed.shutdown()
    return 0


if __name__ == '__main__':
    sys.exit(_main(*sys.argv[1:]))
