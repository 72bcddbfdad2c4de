"""Compilation of a lowered function, with the HLO programs and the memory tables that the compiler dumps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from scalax._core.context.thread_state import run_in_thread
from scalax._jax.error_texts import is_out_of_memory
from scalax._planning.compiler import running_compilations
from scalax._planning.cost.memory import Memory, MemoryLayout, MemoryTables, assigned_memory, read_layout
from scalax._planning.program.hlo import devices_of
from scalax._planning.time.schedule import COST_MODEL_OPTION
from scalax.errors import PlanError

_PASS = 'spmd-partitioning'
_DUMP = {'xla_dump_hlo_pass_re': f'.*{_PASS}', 'xla_dump_hlo_as_text': True}
# The compiler for TPUs has a prefix in the name of the pass.
_AFTER_PASS = re.compile(rf'\.after_(?:[a-z]+-)?{_PASS}\.')
# The memory that the scheduler and the rematerialization pass may use, in percent of the size of the device.
_MEMORY_PERCENT_OPTIONS = (
    'xla_tpu_scheduler_percent_shared_memory_limit',
    'xla_jf_rematerialization_percent_shared_memory_limit',
)
_MEMORY_SIZE_OPTION = 'xla_tpu_max_hbm_size_mib'
QUICK_PLAN_OPTIONS = (_MEMORY_SIZE_OPTION, *_MEMORY_PERCENT_OPTIONS)
"""Options for quick plans, which only the compiler for TPUs has."""
_OPTIMIZATION_LEVEL = 'xla_backend_optimization_level'
CUBLAS_OPTIONS = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
"""Options with which XLA uses the matmuls of cuBLAS. It chooses between these and its own kernels by
measuring
them on a GPU. Without a GPU it uses its own kernels, with untuned tiles, and compiles three times as long."""
_OPTION = re.compile(r'(?m)^(xla_(?!cpu_|dump_|force_host_)\w+): "?(.*?)"?$')
_FLAG_OF_JAX = '--xla_tpu_use_enhanced_launch_barrier='
_MIB = 2**20
_UNLIMITED = 2**40
_TABLES = ('memory-usage-report', 'buffer-assignment', 'live-range')


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        partitioned: the HLO after SPMD partitioning; empty for one device.
        optimized: the HLO after all optimizations; empty for CPUs, which stand in for other hardware.
        devices: the number of devices that it runs on. It is one if neither arguments nor outputs have
            shardings.
        memory: see `Memory`.
        executable: the ``jax.stages.Compiled``; None for programs that do not fit, and for quick plans.
        refusal: the error of the compiler for a program that does not fit into memory.
        layout: the layout in memory; None if the compiler does not write it.
        flags: as `Plan.flags`.
    """

    partitioned: str
    optimized: str
    devices: int
    memory: Memory
    executable: Any
    refusal: str = ''
    layout: MemoryLayout | None = None
    flags: tuple[str, ...] = ()

    @property
    def runs_on(self) -> set[Any]:
        """The devices of the arguments and outputs; none without an executable."""
        if self.executable is None:
            return set()
        shardings = jax.tree.leaves((self.executable.input_shardings, self.executable.output_shardings))
        return {device for sharding in shardings for device in sharding.device_set}


class _Dump(NamedTuple):
    """The result of a compilation, an executable or a refusal, and the files that the compiler dumped."""

    executable: Any
    refusal: str
    partitioned: str
    optimized: str
    tables: MemoryTables
    options: str


def compile_lowered(
    lowered: Any,
    platform: str,
    *,
    limit: int | None = None,
    layout_for: int | None = None,
    attached: bool = True,
    user_options: Iterable[str] = (),
) -> Compiled:
    """Compiles a lowered function, and reads the files that the compiler dumps.

    Args:
        lowered: a ``jax.stages.Lowered``.
        platform: the platform of the devices, such as ``'cpu'``.
        limit: the memory of a device that a program can use, if known.
        layout_for: the bytes of the arguments on a device, for a quick plan: the compiler for TPUs only
            assigns memory and generates no code, and that for CPUs does not optimize the code.
        attached: whether the devices are attached. For other GPUs, matmuls are those of cuBLAS, unless
            XLA_FLAGS or *user_options* set these options.
        user_options: the names of the compiler options of the function, which take precedence.

    Raises:
        PlanError: the compiler did not dump the partitioned program.
        jax.errors.JaxRuntimeError: the compiler failed.
    """
    quick = platform == 'tpu' and layout_for is not None
    options: dict[str, Any] = _small_device_options(layout_for or 0, limit or _UNLIMITED) if quick else {}
    if platform == 'cpu' and layout_for is not None:
        options = {_OPTIMIZATION_LEVEL: 0}
    user_names = {*(flag[2:].partition('=')[0] for flag in xla_flags()), *user_options}
    if platform == 'gpu':
        options = {COST_MODEL_OPTION: True}
        if not attached:
            options |= {name: value for name, value in CUBLAS_OPTIONS.items() if name not in user_names}
    try:
        dump = _compile(lowered, options)
    except jax.errors.JaxRuntimeError:
        if not options.pop(COST_MODEL_OPTION, False):
            raise
        dump = _compile(lowered, options)  # XLA has no model of this GPU, or the error is another one
    is_executable = dump.executable is not None  # otherwise it is too large, or this is a quick plan
    devices = devices_of(dump.partitioned or dump.optimized or dump.executable.as_text())
    if is_executable and not (dump.partitioned if devices > 1 else dump.optimized or platform == 'cpu'):
        # The program came from a persistent compilation cache. This option only changes the cache key.
        cache_buster = {'xla_debug_buffer_assignment_show_max': time.time_ns() % 2**30 + 16}
        dump = _compile(lowered, {**options, **cache_buster})
    if not dump.partitioned and devices > 1:
        raise PlanError(
            'the compiler did not dump the program after partitioning, which contains the collectives '
            f'(pass {_PASS!r})'
        )
    layout: MemoryLayout | None = None
    if platform in ('tpu', 'gpu') or not is_executable:
        # An executable reports its memory, although less exactly: including the vector memory of a chip.
        with contextlib.suppress(*([PlanError] if is_executable else [])):
            layout = read_layout(dump.tables, platform == 'gpu')
    return Compiled(
        dump.partitioned,
        '' if platform == 'cpu' else dump.optimized,
        devices,
        _reported_memory(dump.executable, platform) if layout is None else assigned_memory(layout),
        dump.executable,
        refusal='' if quick else dump.refusal,
        layout=layout,
        flags=_nondefault_flags(dump.options, user_names) if platform == 'gpu' else _libtpu_flags(platform),
    )


def xla_flags() -> list[str]:
    """Returns the flags in XLA_FLAGS, or in the file that it names."""
    text = os.environ.get('XLA_FLAGS', '').strip()
    if text and not text.startswith('-'):
        with contextlib.suppress(OSError):  # XLA ignores an unreadable file
            text = Path(text).read_text(encoding='utf-8', errors='replace')
    return text.split()


def _libtpu_flags(platform: str) -> tuple[str, ...]:
    """Returns the flags in LIBTPU_INIT_ARGS, without the one that JAX adds; none for other platforms."""
    flags = os.environ.get('LIBTPU_INIT_ARGS', '').split() if platform == 'tpu' else []
    return tuple(flag for flag in flags if not flag.startswith(_FLAG_OF_JAX))


def _nondefault_flags(options: str, user_names: Container[str]) -> tuple[str, ...]:
    r"""Returns the compiler options for GPUs without the defaults, and other options that the user set.

    Leaves out the options that plans set, and the folder of CUDA, which JAX sets.

    Example:
        >>> _nondefault_flags('xla_gpu_autotune_level: 0\nxla_foo: A\nxla_foo: B\nxla_bar: 1', {'xla_foo'})
        ('--xla_gpu_autotune_level=0', '--xla_foo=A,B')
        >>> _nondefault_flags('xla_gpu_cuda_data_dir: None', ())
        ()
    """
    values: dict[str, list[str]] = {}
    for name, value in _OPTION.findall(options):
        if name in user_names or (
            name.startswith('xla_gpu_') and name not in (COST_MODEL_OPTION, 'xla_gpu_cuda_data_dir')
        ):
            values.setdefault(name, []).append(value)
    return tuple(f'--{name}={",".join(settings)}' for name, settings in values.items())


def _reported_memory(executable: Any, platform: str) -> Memory:
    """Returns the memory that an executable reports, for compilers that write no tables."""
    stats = executable.memory_analysis()
    return Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        estimated=platform == 'cpu',
        # The peak on CPUs says nothing about other hardware.
        peak=0 if platform == 'cpu' else getattr(stats, 'peak_memory_in_bytes', 0),
    )


def _small_device_options(size: int, limit: int) -> dict[str, str]:
    """Returns options with which the compiler assigns *limit* bytes of memory, but generates no code.

    A compiler spends most of its time on generating code, after it has assigned memory. These options pretend
    that the device has only *size* bytes, so that it refuses the program, with percentages of this size that
    equal the memory of the real device. The closer the size is to the needs of the program, the closer the
    layout is to the real one. The size of the arguments is close enough. A program that fits into it is
    compiled completely.
    """
    size = max(_MIB, size - size % _MIB)
    return {
        _MEMORY_SIZE_OPTION: str(size // _MIB),
        **dict.fromkeys(_MEMORY_PERCENT_OPTIONS, str(-(-100 * limit // size))),
    }


def _compile(lowered: Any, options: dict[str, Any]) -> _Dump:
    """Compiles a function, and reads the files that the compiler dumps."""
    # After Ctrl-C a compiler may still be running, and write files.
    with tempfile.TemporaryDirectory(
        prefix='scalax-plan-', dir=running_compilations.dump_folder(), ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        executable, refusal = None, ''
        try:
            options = {'xla_dump_to': name, **_DUMP, **options}
            # Ctrl-C does not interrupt a compiler in the main thread. This thread continues after Ctrl-C, and
            # Python waits for it at exit, because stopping a compiler halfway would abort the process.
            executable = run_in_thread('scalax-plan', lambda: lowered.compile(compiler_options=options))
        except jax.errors.JaxRuntimeError as error:
            refusal = str(error)
            if not is_out_of_memory(error) or not _last_file(folder, f'{_TABLES[0]}.txt'):
                raise
        files = sorted(path for path in folder.iterdir() if _AFTER_PASS.search(path.name))
        text = files[-1].read_text(encoding='utf-8') if files else ''
        tables = MemoryTables(*(_last_file(folder, f'{table}.txt') for table in _TABLES))
        return _Dump(
            executable,
            refusal.partition('\n')[0],
            text,
            _last_file(folder, 'after_optimizations.txt'),
            tables,
            _last_file(folder, 'debug_options'),
        )


def _last_file(folder: Path, suffix: str) -> str:
    """Returns the text of the last module's file with a suffix; empty without such a file."""
    files = sorted(folder.glob(f'*{suffix}'))
    return files[-1].read_text(encoding='utf-8') if files else ''
