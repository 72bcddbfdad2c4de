"""What does a function compile to? The program after SPMD partitioning, and the memory that it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from scalax._plan.hlo import parse
from scalax._plan.memory import Buffer, Memory, Tables, assigned_memory, largest_buffers
from scalax._trace.threads import in_a_thread
from scalax.errors import PlanError

_PASS = 'spmd-partitioning'
_DUMP = {'xla_dump_hlo_pass_re': f'.*{_PASS}', 'xla_dump_hlo_as_text': True}
# The compiler of TPUs calls the pass otherwise.
_AFTER = re.compile(rf'\.after_(?:[a-z]+-)?{_PASS}\.')
# The partitioner of TPUs itself cuts products that wait for a collective into rounds of a loop.
_WHOLE = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
# A device without memory: the program is partitioned and laid out, and refused before code is made of it.
_NO_CODE = {'xla_tpu_max_hbm_size_mib': '1'}
# Leaves out what makes code fast to run, and slow to make.
_NO_EFFORT = {'xla_optimization_level': 'EFFORT_O0'}
# What may be held while the compiler orders instructions, or computes again instead of keeping: percents of
# the memory that it believes there is.
_SHARES = (
    'xla_tpu_scheduler_percent_shared_memory_limit',
    'xla_jf_rematerialization_percent_shared_memory_limit',
)
_MIB = 2**20
_PLENTY = 2**40
_LARGE = 2**29
_NO_TABLES = Tables('', '', '')
_TABLES = ('memory-usage-report', 'buffer-assignment', 'live-range')


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        text: the HLO after SPMD partitioning; empty for one device, where nothing is partitioned.
        devices: on how many devices it runs: on one, if nothing says where arguments or outputs lie.
        memory: see `Memory`.
        executable: what JAX compiled; None where the compiler refused to, or was asked for no code.
        refusal: what the compiler says of a program that does not fit into memory.
        buffers: what takes most of the memory, the largest first; empty where the compiler does not say.
    """

    text: str
    devices: int
    memory: Memory
    executable: Any
    refusal: str = ''
    buffers: tuple[Buffer, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Dump:
    """What a compiler left behind: an executable or a refusal, and its files."""

    executable: Any
    refusal: str = ''
    text: str = ''
    optimized: str = ''
    tables: Tables = _NO_TABLES


def compile_lowered(
    lowered: Any, platform: str, *, quick: bool = False, limit: int | None = None
) -> Compiled:
    """Compiles what ``jax.jit(...).lower(...)`` gave, and keeps the program as the partitioner left it.

    Args:
        lowered: a ``jax.stages.Lowered``.
        platform: the kind of the devices, such as ``'cpu'``.
        quick: have the compiler of TPUs lay the program out, and make no code of it; others are quick anyway.
        limit: the bytes that a program can use of a device, where that is known.

    Raises:
        PlanError: the compiler did not write that program down.
        jax.errors.JaxRuntimeError: the compiler failed.
    """
    if platform == 'tpu':
        # Collectives are those of whole products, memory that of the program as it will run.
        text = _dumped(lowered, {**_NO_EFFORT, **_WHOLE, **_NO_CODE}).text
        dump = _laid_out(lowered, limit or _PLENTY) if quick else _dumped(lowered, {})
        dump = dataclasses.replace(dump, text=text)
    else:
        dump = _dumped(lowered, {})
    if dump.executable is None:
        return _without_code(dump, quick)
    devices = _partitions(dump.text or dump.executable.as_text())
    if not dump.text and devices > 1:
        # A persistent compilation cache has answered. Nothing is changed by this option but the key.
        dump = _dumped(lowered, {'xla_debug_buffer_assignment_show_max': time.time_ns() % 2**30 + 16})
    if not dump.text and devices > 1:
        raise PlanError(
            'the compiler did not write down the program after partitioning, from which the collectives '
            f'are read (pass {_PASS!r})'
        )
    stats = dump.executable.memory_analysis()
    memory = Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        estimated=platform == 'cpu',
        # That of XLA for CPUs is not one of the hardware that is meant.
        peak=0 if platform == 'cpu' else getattr(stats, 'peak_memory_in_bytes', 0),
    )
    buffers = _buffers(dump) if platform == 'tpu' else ()
    return Compiled(dump.text, devices, memory, dump.executable, buffers=buffers)


def _laid_out(lowered: Any, limit: int) -> _Dump:
    """A program as it is laid out in memory, ordered for *limit* bytes, but refused for want of memory.

    Code takes most of the time of a compiler, and is made when all is laid out. So the compiler is told of a
    device that has too little memory, of which instructions may hold so many percents that it comes to what
    the real device has. The nearer that memory is to what the program takes, the more the outcome is that of
    a real device; half of it is near enough.
    """
    first = _dumped(lowered, _small_device(_MIB, limit))
    peak = 0 if first.executable else assigned_memory(first.tables).peak
    # What is not much larger than the vector memory of a chip might be put there, and fit after all.
    return _dumped(lowered, _small_device(peak // 2, limit)) if peak >= _LARGE else first


def _small_device(size: int, limit: int) -> dict[str, str]:
    size = max(_MIB, size - size % _MIB)
    return {
        'xla_tpu_max_hbm_size_mib': str(size // _MIB),
        **dict.fromkeys(_SHARES, str(-(-100 * limit // size))),
    }


def _without_code(dump: _Dump, quick: bool) -> Compiled:
    """A program that the compiler refused, once it had laid it out: as it is too large, or to be quick."""
    memory = assigned_memory(dump.tables)
    refusal = '' if quick else dump.refusal
    return Compiled(
        dump.text, _partitions(dump.text or dump.optimized), memory, None, refusal, _buffers(dump)
    )


def _buffers(dump: _Dump) -> tuple[Buffer, ...]:
    # Optimized programs hold what no reader knows yet; the rest of a plan is worth more than these rows.
    with contextlib.suppress(PlanError):
        return largest_buffers(dump.tables, parse(dump.optimized))
    return ()


def _partitions(text: str) -> int:
    """How many devices an HLO module is for; its first line says so, if there are several."""
    found = re.search(r'num_partitions=(\d+)', text.partition('\n')[0])
    return int(found[1]) if found else 1


def _dumped(lowered: Any, options: dict[str, Any]) -> _Dump:
    """The executable, and the program behind the partitioner; empty where nothing was partitioned."""
    # A compiler that is left behind, as Ctrl-C does, may still write.
    with tempfile.TemporaryDirectory(prefix='scalax-plan-', ignore_cleanup_errors=True) as name:
        folder = Path(name)
        executable, refusal = None, ''
        try:
            executable = _interruptibly(lowered.compile, {'xla_dump_to': name, **_DUMP, **options})
        except jax.errors.JaxRuntimeError as error:
            refusal = str(error)
            if 'RESOURCE_EXHAUSTED' not in refusal or not _last(folder, _TABLES[0]):
                raise
        files = sorted(path for path in folder.iterdir() if _AFTER.search(path.name))
        text = files[-1].read_text(encoding='utf-8') if files else ''
        tables = Tables(*(_last(folder, table) for table in _TABLES))
        return _Dump(
            executable, refusal.partition('\n')[0], text, _last(folder, 'after_optimizations'), tables
        )


def _interruptibly(compile_: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Compiles in a thread of its own, as Python hears nothing of Ctrl-C while a compiler runs in its thread.

    The thread is left behind then. Python waits for it when it ends: a compiler that is ended halfway aborts
    the process.
    """
    return in_a_thread('scalax-plan', lambda: compile_(compiler_options=options))


def _last(folder: Path, what: str) -> str:
    """The file that ends so, of the last module that was compiled; empty if there is none."""
    files = sorted(folder.glob(f'*{what}.txt'))
    return files[-1].read_text(encoding='utf-8') if files else ''
