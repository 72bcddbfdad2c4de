"""Compilation of a lowered function: its programs and its memory."""

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
# The compiler for TPUs has another name for the pass.
_AFTER_PASS = re.compile(rf'\.after_(?:[a-z]+-)?{_PASS}\.')
# The memory that instructions may hold while the compiler schedules or rematerializes them, in percent of
# the memory that it believes there is.
_SHARES = (
    'xla_tpu_scheduler_percent_shared_memory_limit',
    'xla_jf_rematerialization_percent_shared_memory_limit',
)
_SIZE = 'xla_tpu_max_hbm_size_mib'
QUICK_PLAN_OPTIONS = (_SIZE, *_SHARES)
"""Options for quick plans, which only the compiler for TPUs knows."""
_OPTIMIZATION = 'xla_backend_optimization_level'
CUBLAS_OPTIONS = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
"""Options with which products of GPUs are those of cuBLAS. XLA chooses between these and its own kernels by
measuring, for which it needs a GPU; without one it takes its own, with tiles that no measurement chose, and
compiles three times as long."""
_OPTION = re.compile(r'(?m)^(xla_(?!cpu_|dump_|force_host_)\w+): "?(.*?)"?$')
_MIB = 2**20
_PLENTY = 2**40
_TABLES = ('memory-usage-report', 'buffer-assignment', 'live-range')


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        partitioned: the HLO after SPMD partitioning; empty for one device.
        optimized: the HLO after all optimizations, of the same compilation. That of XLA for CPUs, which stand
            in for other hardware, is left out: empty.
        devices: the number of devices that it runs on: one, if neither arguments nor outputs have shardings.
        memory: see `Memory`.
        executable: the ``jax.stages.Compiled``; None for programs that do not fit, and for quick plans.
        refusal: the error of the compiler for a program that does not fit into memory.
        layout: where arrays are in memory; None if the compiler does not say so.
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
        """The devices of the arguments and outputs of the executable; none without an executable."""
        if self.executable is None:
            return set()
        placed = jax.tree.leaves((self.executable.input_shardings, self.executable.output_shardings))
        return {device for sharding in placed for device in sharding.device_set}


class _Dump(NamedTuple):
    """The outcome of a compilation: an executable or a refusal, and what the compiler wrote."""

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
    given: Iterable[str] = (),
) -> Compiled:
    """Compiles a lowered function, and keeps what the compiler wrote about its program.

    Args:
        lowered: a ``jax.stages.Lowered``.
        platform: the kind of the devices, such as ``'cpu'``.
        limit: the bytes that a program can use of a device, if known.
        layout_for: the bytes of the arguments on a device, for a quick plan: the compiler for TPUs only lays
            the program out, and makes no code; that for CPUs does not optimize the code.
        attached: whether the devices are here. For GPUs that are not, products are those of cuBLAS, unless
            XLA_FLAGS or the function say otherwise.
        given: the compiler options that the function has. Those that are added here would be in their place.

    Raises:
        PlanError: the compiler did not write the partitioned program.
        jax.errors.JaxRuntimeError: the compiler failed.
    """
    quick = platform == 'tpu' and layout_for is not None
    small: dict[str, Any] = _small_device(layout_for or 0, limit or _PLENTY) if quick else {}
    if platform == 'cpu' and layout_for is not None:
        small = {_OPTIMIZATION: 0}
    said = {*(flag[2:].partition('=')[0] for flag in xla_flags()), *given}
    if platform == 'gpu':
        own = {} if attached else {name: on for name, on in CUBLAS_OPTIONS.items() if name not in said}
        small = {COST_MODEL_OPTION: True, **own}
    try:
        dump = _compile(lowered, small)
    except jax.errors.JaxRuntimeError:
        if not small.pop(COST_MODEL_OPTION, False):
            raise
        dump = _compile(lowered, small)  # XLA has no models of this GPU, or the error comes again
    runs = dump.executable is not None  # else it is too large, or this is a quick plan
    devices = devices_of(dump.partitioned or dump.optimized or dump.executable.as_text())
    if runs and not (dump.partitioned if devices > 1 else dump.optimized or platform == 'cpu'):
        # The program came from a persistent compilation cache. This option changes only its key.
        dump = _compile(
            lowered, {**small, 'xla_debug_buffer_assignment_show_max': time.time_ns() % 2**30 + 16}
        )
    if not dump.partitioned and devices > 1:
        raise PlanError(
            'the compiler did not write the program after partitioning, from which the collectives '
            f'are read (pass {_PASS!r})'
        )
    layout: MemoryLayout | None = None
    if platform in ('tpu', 'gpu') or not runs:
        # Without a layout less is known of one that runs: the vector memory of a chip counts too.
        with contextlib.suppress(*([PlanError] if runs else [])):
            layout = read_layout(dump.tables, platform == 'gpu')
    return Compiled(
        dump.partitioned,
        '' if platform == 'cpu' else dump.optimized,
        devices,
        _reported_memory(dump.executable, platform) if layout is None else assigned_memory(layout),
        dump.executable,
        refusal='' if quick else dump.refusal,
        layout=layout,
        flags=_flags(dump.options, said) if platform == 'gpu' else (),
    )


def xla_flags() -> list[str]:
    """Returns the flags in XLA_FLAGS, or in the file that it names."""
    text = os.environ.get('XLA_FLAGS', '').strip()
    if text and not text.startswith('-'):
        with contextlib.suppress(OSError):  # XLA reads none, either
            text = Path(text).read_text(encoding='utf-8', errors='replace')
    return text.split()


def _flags(options: str, said: Container[str]) -> tuple[str, ...]:
    r"""The options that are not the compiler's defaults: all of those for GPUs, and others that users *said*.

    Not those that a plan itself needs, and where CUDA is, which JAX always says.

    Example:
        >>> _flags('xla_gpu_autotune_level: 0\nxla_foo: A\nxla_foo: B\nxla_bar: 1', {'xla_foo'})
        ('--xla_gpu_autotune_level=0', '--xla_foo=A,B')
        >>> _flags('xla_gpu_cuda_data_dir: None', ())
        ()
    """
    values: dict[str, list[str]] = {}
    for name, value in _OPTION.findall(options):
        if name in said or (
            name.startswith('xla_gpu_') and name not in (COST_MODEL_OPTION, 'xla_gpu_cuda_data_dir')
        ):
            values.setdefault(name, []).append(value)
    return tuple(f'--{name}={",".join(each)}' for name, each in values.items())


def _reported_memory(executable: Any, platform: str) -> Memory:
    """The memory of a program as a compiler reports it that writes no tables."""
    stats = executable.memory_analysis()
    return Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        estimated=platform == 'cpu',
        # That of XLA for CPUs says nothing about other hardware.
        peak=0 if platform == 'cpu' else getattr(stats, 'peak_memory_in_bytes', 0),
    )


def _small_device(size: int, limit: int) -> dict[str, str]:
    """Options with which the compiler lays out a program for *limit* bytes, and refuses to make code.

    A compiler spends most of its time on code, which it makes after the layout. So it is told of a device of
    only *size* bytes, and of shares of it, in percent, that equal the memory of the real device. The closer
    that size is to the needs of the program, the closer is the layout to the real one. The arguments alone
    are close enough. A program that fits nevertheless is compiled as a whole.
    """
    size = max(_MIB, size - size % _MIB)
    return {_SIZE: str(size // _MIB), **dict.fromkeys(_SHARES, str(-(-100 * limit // size)))}


def _compile(lowered: Any, options: dict[str, Any]) -> _Dump:
    """Compiles, and reads the files that the compiler wrote."""
    # A compiler that Ctrl-C left behind may still write.
    with tempfile.TemporaryDirectory(
        prefix='scalax-plan-', dir=running_compilations.dump_folder(), ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        executable, refusal = None, ''
        try:
            options = {'xla_dump_to': name, **_DUMP, **options}
            # Ctrl-C does not interrupt a compiler in the main thread. It leaves this thread behind, for which
            # Python waits at exit: stopping a compiler halfway would abort the process.
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


def _last_file(folder: Path, what: str) -> str:
    """The file with this ending, of the last module that was compiled; empty if there is none."""
    files = sorted(folder.glob(f'*{what}'))
    return files[-1].read_text(encoding='utf-8') if files else ''
