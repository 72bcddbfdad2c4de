"""Test of the devices in a separate process, which may hang or crash and is ended after a timeout."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from scalax._diagnostics.doctor import device_process
from scalax._diagnostics.doctor.environment import Finding

_ROOT = Path(__file__).resolve().parents[3]
_MAX_LINES = 6  # output lines in a message
_MAX_CHARACTERS = 300  # per line
_MAX_OUTPUT = 1 << 20  # bytes of output that are searched
_GRACE = 5  # seconds for a process to end: one that waits in a driver may not
# Error messages of JAX, XLA and vendor libraries that give no advice.
_CURES = {
    r'TPU.{0,40}in use|libtpu\S* (?:is )?already in use': (
        'end the process that has the TPU: sudo lsof -w /dev/accel* /dev/vfio/* names it; if there is none, '
        'a process that crashed has left /tmp/libtpu_lockfile'
    ),
    r'Unknown (?:command line )?flag|Could not open file ".*" to read flags': (
        'write XLA_FLAGS and LIBTPU_INIT_ARGS as --name=value, with spaces between them; flags come and go '
        'with versions of jaxlib and libtpu'
    ),
    r'PJRT API version|libtpu version': 'pip install "jax[tpu]" or "jax[cuda13]" installs a plugin that fits',
    r'CuDNN library|cuBLAS version|Found cu\w+ version': (
        'unset LD_LIBRARY_PATH, so that JAX uses the CUDA libraries that pip installed with it'
    ),
    r'driver version is insufficient|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH|no CUDA-capable device': (
        'nvidia-smi shows the driver: update it, or install the plugin for an older CUDA: jax[cuda12]'
    ),
    r'CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED': (
        'nvidia-smi names the processes that hold the memory: end them, or set XLA_PYTHON_CLIENT_MEM_FRACTION'
    ),
    r'Unable to initialize backend|[Uu]nknown backend|assert _default_backend is not None': (
        'install the plugin of the platform, or remove it from JAX_PLATFORMS (if that is empty, JAX '
        'takes the best that works)'
    ),
}
_JOINING = 'joining the other processes'
_HANGS = {
    _JOINING: (
        'start `scalax doctor` for all processes at the same time, as you start the program (srun, mpirun, '
        'gcloud --worker=all); each must reach the port of the coordinator, without an http_proxy in '
        'between (no_proxy)'
    ),
    'opening the devices': (
        'on a slice of several hosts, start it on all hosts at the same time; otherwise another process may '
        'hold the devices (lsof /dev/accel* /dev/vfio/*, nvidia-smi), or they need a restart'
    ),
    'running a program on each device': (
        'the device accepts programs and does not respond: restart the machine, or return it'
    ),
    'comparing the processes': (
        'devices of different hosts do not reach one another, or their programs differ: compare the facts '
        'above on each host; check the network between the hosts (NCCL_DEBUG=INFO logs the actions of NCCL)'
    ),
}


@dataclasses.dataclass
class Opened:
    """The result of opening the devices.

    Attributes:
        values: the values that the process has written.
        findings: the faults.
        last_lines: the last lines of its output.
    """

    values: dict[str, Any]
    findings: list[Finding]
    last_lines: str

    @property
    def summary(self) -> str:
        """The devices of this process in one line; empty if they were not opened."""
        if 'devices' not in self.values:
            return ''
        counts = Counter((platform, kind, memory) for platform, kind, memory in self.values['devices'])
        devices = ', '.join(
            f'{count} x {kind} ({platform}{f", {memory / 2**30:.1f} GiB" if memory else ""})'
            for (platform, kind, memory), count in counts.items()
        )
        more = '' if self.values['processes'] == 1 else f' here, {self.values["everywhere"]} in all'
        return f'{devices}{more}, opened in {self.values["opened"]:.1f} s'


def open_devices(facts: Mapping[str, str], timeout: float) -> Opened:
    """Opens the devices of this machine in another process, and runs a program on each.

    If the environment configures several processes, that process joins the others and compares their facts.

    Args:
        facts: name -> text that must be the same on every process.
        timeout: the maximum seconds, after which the process is ended.
    """
    read_end, write_end = os.pipe()
    arguments = json.dumps([write_end, str(_ROOT), max(1, int(timeout)), dict(facts)])
    # With preallocation, it would take most of the memory of a GPU from programs that run there.
    variables = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', **os.environ}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                # Unbuffered (-u), so that the output before a crash is not lost.
                [sys.executable, '-u', device_process.__file__, arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                env=variables,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        messages: list[dict[str, Any]] = []
        # The thread also closes the pipe: if a process keeps the other end open, only the thread waits.
        reader = threading.Thread(target=_read, args=(read_end, messages), daemon=True)
        start = time.monotonic()
        try:
            reader.start()
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            code = process.poll()
            _end(process)
        reader.join(1)
        text = _tail(log)
    values: dict[str, Any] = {}
    for message in list(messages):
        values.update(message)
    seconds = time.monotonic() - start
    return Opened(values, [*_findings(values, code, text, seconds)], _last_lines(text))


def _tail(log: BinaryIO) -> str:
    """Returns the end of the output of a process, with long lines cut, because patterns search all of it."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - _MAX_OUTPUT))
    return '\n'.join(line[: 4 * _MAX_CHARACTERS] for line in log.read().decode(errors='replace').splitlines())


def _read(descriptor: int, messages: list[dict[str, Any]]) -> None:
    # A process that is ended may leave an incomplete line.
    with contextlib.suppress(ValueError, OSError), os.fdopen(descriptor) as lines:
        for line in lines:
            messages.append(json.loads(line))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its child processes, which share its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)


def _findings(values: dict[str, Any], code: int | None, text: str, seconds: float) -> Iterator[Finding]:
    """Finds faults from the values, the exit code (None: it was ended) and the output of a process."""
    stage = values.get('stage', 'starting Python')
    if code is None:
        cure = _HANGS.get(stage, 'try again, with a longer --timeout')
        yield Finding(f'{stage} has not ended after {seconds:.0f} s{_last_lines(text)}', cure)
    elif code or stage:
        code_text = f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'
        cure = 'see its output above, which comes from JAX and its plugins'
        cure = _HANGS[_JOINING] if stage == _JOINING else cure
        yield Finding(f'{stage} failed ({code_text}){_last_lines(text)}', _known_cure(text) or cure)
    yield from _disagreements(values.get('facts', ()))


def _known_cure(text: str) -> str:
    """Returns the fix of an error in the output of a process; empty if it is not known."""
    return next((cure for pattern, cure in _CURES.items() if re.search(pattern, text)), '')


def _last_lines(text: str) -> str:
    """Returns the last lines of the output of a process, indented."""
    lines = [line.rstrip()[:_MAX_CHARACTERS] for line in text.splitlines() if line.strip()][-_MAX_LINES:]
    return ''.join(f'\n     {line}' for line in lines)


def _disagreements(facts_by_process: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Finds the facts that are not the same on every process."""
    names = dict.fromkeys(name for facts in facts_by_process for name in facts)
    for name in names:
        processes_by_value: dict[str, list[int]] = {}
        for process, facts in enumerate(facts_by_process):
            processes_by_value.setdefault(facts.get(name, 'not set'), []).append(process)
        if len(processes_by_value) > 1:
            listed = '; '.join(
                f'{value} on {_process_text(processes)}' for value, processes in processes_by_value.items()
            )
            yield Finding(
                f'the processes disagree about {name}: {listed}',
                'start all of them with the same installation and variables: otherwise they compile '
                'different programs, and wait for one another',
            )


def _process_text(indices: Sequence[int]) -> str:
    listed = ', '.join(map(str, indices[:4]))
    more = f' and {len(indices) - 4} more' if len(indices) > 4 else ''
    return f'process{"es" if len(indices) > 1 else ""} {listed}{more}'
