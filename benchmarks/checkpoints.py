"""Checkpoints against Orbax, and safetensors against reading the file: seconds, and host memory.

Memory is the peak of a process, so each contestant runs in a separate process; they take turns. Files are
written to a temporary folder (below ``TMPDIR``; the time of a disk varies by more than the differences that
are measured), and are evicted from the page cache before they are read, unless the folder is in memory. The
CPU time covers all threads of a process, and is meaningful on a busy machine too.

``python -m benchmarks.checkpoints WHAT MEBIBYTES FOLDER`` is one such process; it prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Row

ROOT = Path(__file__).resolve().parent.parent
_LEAVES = 32
_TIMEOUT_S = 900
_CHUNK = 1 << 24
_MIB = 2**20

Measured = dict[str, float]
"""``seconds``, ``cpu`` seconds, and ``peak``: by how many bytes the memory of the process grew at most."""


def checkpoints(rounds: int, mebibytes: int = 1024) -> list[Row]:
    """Saving and restoring, each compared with Orbax; and the time of checksums alone."""
    times = max(rounds // 400, 1)
    size = f'{mebibytes / 1024:g} GiB'
    figures = _alternating(
        ['save', 'save-by-hand', 'save-without-checksums', 'restore', 'restore-by-hand', 'verify'],
        mebibytes,
        times,
    )
    leaf = mebibytes / _LEAVES

    def row(name: str, ours: str, reference: str, aim: float | None = None, clock: str = 'seconds') -> Row:
        return Row(name, figures[ours][clock], figures[reference][clock], aim)

    def memory(name: str, ours: str, reference: str) -> Row:
        peak, hand = (round(figures[contestant]['peak'] / _MIB) for contestant in (ours, reference))
        return Row(f'{name}, MiB of host memory', peak, hand, round(hand + leaf), counted=True)

    save = f'save {size}, against Orbax by hand'
    restore = f'restore {size} onto another mesh, against Orbax by hand'
    plain = 'save-without-checksums'
    return [
        row(f'{save}, without checksums', plain, 'save-by-hand', 1.1),
        row(f'{save}, without checksums (CPU time)', plain, 'save-by-hand', 1.1, 'cpu'),
        row(f'{save}, with checksums', 'save', 'save-by-hand'),
        row(f'{save}, with checksums (CPU time)', 'save', 'save-by-hand', None, 'cpu'),
        row(restore, 'restore', 'restore-by-hand', 1.1),
        row(f'{restore} (CPU time)', 'restore', 'restore-by-hand', 1.1, 'cpu'),
        row(f'{restore}, verified', 'verify', 'restore-by-hand'),
        memory(f'save {size}', 'save', 'save-by-hand'),
        memory(f'restore {size}', 'restore', 'restore-by-hand'),
    ]


def safetensors(rounds: int, mebibytes: int = 1024) -> list[Row]:
    """Loading compared with reading the entire file, both from disk."""
    times = max(rounds // 1000, 1)
    size = f'{mebibytes / 1024:g} GiB'
    rows = []
    for cut in ('rows', 'columns'):
        figures = _alternating([f'load-{cut}', 'read'], mebibytes, times)
        name = f'load {size} of safetensors, cut by {cut}'
        for clock, note in (('seconds', ''), ('cpu', ' (CPU time)')):
            ours, reference = figures[f'load-{cut}'][clock], figures['read'][clock]
            rows.append(Row(f'{name}, against reading it{note}', ours, reference, 2))
    return rows


def _alternating(contestants: list[str], mebibytes: int, times: int) -> dict[str, Measured]:
    """Returns the medians of each contestant; each library restores its own checkpoint."""
    measurements: dict[str, list[Measured]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as folder:
        _in_a_process('prepare', mebibytes, folder)
        for turn in range(times):
            for name in contestants if turn % 2 else contestants[::-1]:
                measurements[name].append(_in_a_process(name, mebibytes, folder))
    return {
        name: {
            key: statistics.median(measurement[key] for measurement in measured)
            for key in ('seconds', 'cpu', 'peak')
        }
        for name, measured in measurements.items()
    }


def _in_a_process(contestant: str, mebibytes: int, folder: str) -> Measured:
    command = [sys.executable, '-m', 'benchmarks.checkpoints', contestant, str(mebibytes), folder]
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8'}
    env.pop('XLA_FLAGS', None)
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    )
    measured: Measured = json.loads(done.stdout.splitlines()[-1])
    return measured


# --- One process ---------------------------------------------------------------------------------


def run(contestant: str, mebibytes: int, folder: Path) -> Measured:
    """Measures one contestant once."""
    import orbax.checkpoint as ocp
    from safetensors.numpy import save_file

    from scalax.checkpoint import Checkpointer, load_safetensors
    from scalax.sharding import MeshShardingHelper, PartitionSpec

    rule = PartitionSpec('fsdp', 'tp')
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    other = MeshShardingHelper([2, 4], ['fsdp', 'tp'])
    columns = 4096 if mebibytes >= 128 else 64
    shape = (mebibytes * _MIB // _LEAVES // 4 // columns, columns)
    structs = {f'w{i}': jax.ShapeDtypeStruct(shape, np.float32) for i in range(_LEAVES)}
    directory, file = folder / 'whole', folder / 'model.safetensors'

    def state() -> Any:
        def make() -> Any:
            keys = [jax.random.key(i, impl='rbg') for i in range(_LEAVES)]  # quick to make, not to compress
            return {name: jax.random.uniform(key, shape) for name, key in zip(structs, keys, strict=True)}

        return jax.block_until_ready(helper.sjit(make, out_shardings=rule)())

    def by_hand(path: Path, tree: Any) -> None:
        with ocp.CheckpointManager(path, item_names=('state',)) as manager:
            manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(tree)))

    def ours(path: Path, tree: Any, **options: Any) -> None:
        with Checkpointer(path, **options) as checkpointer:
            checkpointer.save(1, tree)

    def restored_by_hand() -> Any:
        with ocp.CheckpointManager(directory, item_names=('state',)) as manager:
            like = ocp.args.StandardRestore(other.abstract(structs, rule))
            return manager.restore(1, args=ocp.args.Composite(state=like)).state

    if contestant == 'prepare':
        tree = state()
        ours(directory, tree)
        save_file({name: np.asarray(leaf) for name, leaf in tree.items()}, file)
        return {}
    if contestant.startswith('save'):
        tree = state()
        small = {name: jnp.zeros(8) for name in tree}
        options = {'checksums': False} if contestant == 'save-without-checksums' else {}
        with tempfile.TemporaryDirectory(dir=folder) as path:
            save = by_hand if contestant == 'save-by-hand' else ours
            save(Path(path, 'small'), small)  # the one-time setup of a process
            return _measured(lambda: save(Path(path, 'large'), tree, **options))
    if contestant in ('restore', 'verify'):
        return _measured(
            lambda: Checkpointer(directory).restore(other, rule, structs, verify=contestant == 'verify'),
            [directory],
        )
    if contestant == 'restore-by-hand':
        return _measured(restored_by_hand, [directory])
    if contestant == 'read':
        return _measured(lambda: _read(file), [file])
    both = ('fsdp', 'tp')
    cut = {'load-rows': PartitionSpec(both), 'load-columns': PartitionSpec(None, both)}[contestant]
    return _measured(lambda: load_safetensors(helper, file, cut), [file])


def _measured(action: Callable[[], Any], cold: list[Path] | None = None) -> Measured:
    """Runs *action* once; the files *cold* are evicted from the page cache first."""
    os.sync()
    for path in cold or []:
        for file in path.rglob('*') if path.is_dir() else [path]:
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    Path('/proc/self/clear_refs').write_text('5')  # resets the peak
    before = _memory('VmRSS')
    start, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(action())
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    del result
    # The kernel counts pages in batches, so the peak may read lower than the memory in use before.
    peak = max(0, _memory('VmHWM') - before)
    return {'seconds': seconds, 'cpu': cpu, 'peak': float(peak)}


def _memory(name: str) -> int:
    [line] = [line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def _read(file: Path) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    with file.open('rb', buffering=0) as opened:
        while opened.readinto(buffer):
            pass


if __name__ == '__main__':
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
