"""The devices as a process of its own opens them: it may hang or crash, and is ended then."""

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
_LAST_LINES = 6
_LONGEST = 300  # characters of a line
_READ = 1 << 20  # bytes: the last that a process has written
_GRACE = 5  # seconds for a process to end: one that waits in a driver may not
# What JAX, XLA and the libraries of makers say where the cure is not plain from that.
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
        'start it for all processes at the same time, as the program is (srun, mpirun, gcloud --worker=all); '
        'each must reach the port of the coordinator, without an http_proxy in between (no_proxy)'
    ),
    'opening the devices': (
        'on a slice of several hosts, start it on all of them at the same time; else another process may '
        'hold the devices (lsof /dev/accel* /dev/vfio/*, nvidia-smi), or they need a restart'
    ),
    'running a program on each device': (
        'the device accepts programs and does not respond: restart the machine, or return it'
    ),
    'comparing the processes': (
        'devices of different hosts do not reach one another, or their programs differ: compare what is '
        'above on each of them; check the network between them (NCCL_DEBUG=INFO shows what NCCL does)'
    ),
}


@dataclasses.dataclass
class Opened:
    """What became of opening the devices.

    Attributes:
        values: what the process has said.
        findings: what is wrong.
        last_lines: the end of what it has printed.
    """

    values: dict[str, Any]
    findings: list[Finding]
    last_lines: str

    @property
    def summary(self) -> str:
        """The devices of this process in a line; empty if they were not opened."""
        if 'devices' not in self.values:
            return ''
        counts = Counter((platform, kind, memory) for platform, kind, memory in self.values['devices'])
        each = ', '.join(
            f'{count} x {kind} ({platform}{f", {memory / 2**30:.1f} GiB" if memory else ""})'
            for (platform, kind, memory), count in counts.items()
        )
        more = '' if self.values['processes'] == 1 else f' here, {self.values["everywhere"]} in all'
        return f'{each}{more}, opened in {self.values["opened"]:.1f} s'


def open_devices(facts: Mapping[str, str], timeout: float) -> Opened:
    """Opens the devices of this machine in another process, runs a program on each, and ends it.

    Where the environment says that there are several processes, it joins these, and compares what each says.

    Args:
        facts: what all processes have to have in common: name -> text.
        timeout: the seconds that this may take.
    """
    reading, writing = os.pipe()
    asked = json.dumps([writing, str(_ROOT), max(1, int(timeout)), dict(facts)])
    # Else it would take most of the memory of a GPU, which a program that runs needs.
    variables = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', **os.environ}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                # Unbuffered: what a crash would else take with it may say why.
                [sys.executable, '-u', device_process.__file__, asked],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                env=variables,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        said: list[dict[str, Any]] = []
        # It closes the pipe, too: only this thread waits for what holds the other end and never ends.
        reader = threading.Thread(target=_read, args=(reading, said), daemon=True)
        reader.start()
        start = time.monotonic()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            code = process.poll()
            _end(process)
        reader.join(1)
        text = _clipped(log)
    values: dict[str, Any] = {}
    for each in list(said):
        values.update(each)
    seconds = time.monotonic() - start
    return Opened(values, [*_findings(values, code, text, seconds)], _last_lines(text))


def _clipped(log: BinaryIO) -> str:
    """The end of what a process has written, without the rest of long lines: patterns search all of it."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - _READ))
    return '\n'.join(line[: 4 * _LONGEST] for line in log.read().decode(errors='replace').splitlines())


def _read(descriptor: int, said: list[dict[str, Any]]) -> None:
    # A process that is ended may leave half a line.
    with contextlib.suppress(ValueError, OSError), os.fdopen(descriptor) as lines:
        for line in lines:
            said.append(json.loads(line))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it has started, all of which have its id as their group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)


def _findings(values: dict[str, Any], code: int | None, text: str, seconds: float) -> Iterator[Finding]:
    """What is wrong, by what a process has said, its exit code (None: it was ended) and its output."""
    stage = values.get('stage', 'starting Python')
    if code is None:
        cure = _HANGS.get(stage, 'try again, with a longer --timeout')
        yield Finding(f'{stage} has not ended after {seconds:.0f} s{_last_lines(text)}', cure)
    elif code or stage:
        how = f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'
        cure = 'see its output above, which comes from JAX and its plugins'
        cure = _HANGS[_JOINING] if stage == _JOINING else cure
        yield Finding(f'{stage} failed ({how}){_last_lines(text)}', _known_cure(text) or cure)
    yield from _disagreements(values.get('rows', ()))


def _known_cure(text: str) -> str:
    """What to do about what a process has printed; empty where that is not known."""
    return next((cure for pattern, cure in _CURES.items() if re.search(pattern, text)), '')


def _last_lines(text: str) -> str:
    """The end of what a process has written, below a message about it."""
    lines = [line.rstrip()[:_LONGEST] for line in text.splitlines() if line.strip()][-_LAST_LINES:]
    return ''.join(f'\n     {line}' for line in lines)


def _disagreements(rows: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """What is not the same on all processes."""
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        values: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            values.setdefault(row.get(name, 'not set'), []).append(index)
        if len(values) > 1:
            said = '; '.join(f'{text} on {_processes(those)}' for text, those in values.items())
            yield Finding(
                f'the processes disagree about {name}: {said}',
                'start all of them with the same installation and variables: otherwise they compile '
                'different programs, and wait for one another',
            )


def _processes(indices: Sequence[int]) -> str:
    shown = ', '.join(map(str, indices[:4]))
    more = f' and {len(indices) - 4} more' if len(indices) > 4 else ''
    return f'process{"es" if len(indices) > 1 else ""} {shown}{more}'
