"""Compilation of a lowered function: its program after SPMD partitioning, its memory and its shardings."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._plan.buffers import Buffer, largest_buffers
from scalax._plan.hlo import parse
from scalax._plan.host_moves import HostMoves, host_moves
from scalax._plan.layout import MemoryTables, read_layout
from scalax._plan.memory import Memory, assigned_memory
from scalax._trace.threads import in_a_thread
from scalax.errors import PlanError

_PASS = 'spmd-partitioning'
_DUMP = {'xla_dump_hlo_pass_re': f'.*{_PASS}', 'xla_dump_hlo_as_text': True}
# The compiler for TPUs has another name for the pass.
_AFTER_PASS = re.compile(rf'\.after_(?:[a-z]+-)?{_PASS}\.')
# Otherwise the partitioner for TPUs cuts products that wait for a collective into rounds of a loop.
_NO_WINDOWED_EINSUM = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
# A device without memory: the program is partitioned and laid out, and refused before code is made.
_NO_CODE = {'xla_tpu_max_hbm_size_mib': '1'}
# Skips optimizations, which take long.
_NO_EFFORT = {'xla_optimization_level': 'EFFORT_O0'}
# The memory that instructions may hold while the compiler schedules or rematerializes them, in percent of
# the memory that it believes there is.
_SHARES = (
    'xla_tpu_scheduler_percent_shared_memory_limit',
    'xla_jf_rematerialization_percent_shared_memory_limit',
)
_MIB = 2**20
_PLENTY = 2**40
_LARGE = 2**29
_NOTHING_MOVED = HostMoves()
_NO_TABLES = MemoryTables('', '', '')
_SHARDING = re.compile(r'#sdy\.sharding<@\w+, \[(.*?)\](?:, replicated=\{[^}]*\})?>')
_DIMENSION = re.compile(r'\{([^}]*)\}')
_CLOSED_AXES = re.compile(r'(?:"[^"]+"(?:, )?)*$')
_TABLES = ('memory-usage-report', 'buffer-assignment', 'live-range')


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        text: the HLO after SPMD partitioning; empty for one device.
        devices: the number of devices that it runs on: one, if neither arguments nor outputs have shardings.
        memory: see `Memory`.
        executable: the ``jax.stages.Compiled``; None for programs that do not fit, and for quick plans.
        refusal: the error of the compiler for a program that does not fit into memory.
        buffers: the arrays in memory at its peak; empty if the compiler does not report them.
        host_moves: what a device exchanges with its host; nothing if the compiler does not report it.
    """

    text: str
    devices: int
    memory: Memory
    executable: Any
    refusal: str = ''
    buffers: tuple[Buffer, ...] = ()
    host_moves: HostMoves = _NOTHING_MOVED


@dataclasses.dataclass(frozen=True)
class _Dump:
    """The outcome of a compilation: an executable or a refusal, and the files that the compiler wrote."""

    executable: Any
    refusal: str = ''
    text: str = ''
    optimized: str = ''
    tables: MemoryTables = _NO_TABLES


def compile_lowered(
    lowered: Any, platform: str, *, quick: bool = False, limit: int | None = None
) -> Compiled:
    """Compiles a lowered function, and keeps the program as the partitioner left it.

    Args:
        lowered: a ``jax.stages.Lowered``.
        platform: the kind of the devices, such as ``'cpu'``.
        quick: have the compiler for TPUs only lay the program out, without making code. Other compilers are
            quick anyway.
        limit: the bytes that a program can use of a device, if known.

    Raises:
        PlanError: the compiler did not write the partitioned program.
        jax.errors.JaxRuntimeError: the compiler failed.
    """
    if platform == 'tpu':
        # Collectives are read from a program with whole products, memory from the program as it will run.
        text = _compile(lowered, {**_NO_EFFORT, **_NO_WINDOWED_EINSUM, **_NO_CODE}).text
        dump = _compile_layout(lowered, limit or _PLENTY) if quick else _compile(lowered, {})
        dump = dataclasses.replace(dump, text=text)
    else:
        dump = _compile(lowered, {})
    if dump.executable is None:  # too large, or quick
        devices = _partitions(dump.text or dump.optimized)
        refusal = '' if quick else dump.refusal
        return Compiled(dump.text, devices, _memory(dump), None, refusal, *_read_optimized(dump))
    devices = _partitions(dump.text or dump.executable.as_text())
    if not dump.text and devices > 1:
        # The program came from a persistent compilation cache. This option changes only its key.
        dump = _compile(lowered, {'xla_debug_buffer_assignment_show_max': time.time_ns() % 2**30 + 16})
    if not dump.text and devices > 1:
        raise PlanError(
            'the compiler did not write the program after partitioning, from which the collectives '
            f'are read (pass {_PASS!r})'
        )
    if platform != 'tpu':
        return Compiled(dump.text, devices, _reported_memory(dump.executable, platform), dump.executable)
    try:
        memory = _memory(dump)
    except PlanError:  # less is known then: the vector memory of a chip counts too
        memory = _reported_memory(dump.executable, platform)
    return Compiled(dump.text, devices, memory, dump.executable, '', *_read_optimized(dump))


def _memory(dump: _Dump) -> Memory:
    return assigned_memory(read_layout(dump.tables))


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


def _compile_layout(lowered: Any, limit: int) -> _Dump:
    """The layout of a program in memory, scheduled for *limit* bytes; the compiler refuses to make code.

    A compiler spends most of its time on code, which it makes after the layout. So it is told of a device
    with too little memory, and of shares of it, in percent, that equal the memory of the real device. The
    closer that pretended memory is to the needs of the program, the closer the layout is to the real one;
    half of them is close enough.
    """
    first = _compile(lowered, _small_device(_MIB, limit))
    taken = 0 if first.executable else _memory(first).total
    # A program not much larger than the vector memory of a chip might be put there, and fit after all.
    return _compile(lowered, _small_device(taken // 2, limit)) if taken >= _LARGE else first


def _small_device(size: int, limit: int) -> dict[str, str]:
    size = max(_MIB, size - size % _MIB)
    return {
        'xla_tpu_max_hbm_size_mib': str(size // _MIB),
        **dict.fromkeys(_SHARES, str(-(-100 * limit // size))),
    }


def _read_optimized(dump: _Dump) -> tuple[tuple[Buffer, ...], HostMoves]:
    """What the program after all optimizations says of arrays and of the host."""
    # Optimized programs may hold syntax that is unknown here; a plan does without these rows then.
    with contextlib.suppress(PlanError):
        module = parse(dump.optimized)
        return largest_buffers(read_layout(dump.tables), module), host_moves(module)
    return (), _NOTHING_MOVED


def _partitions(text: str) -> int:
    """The number of devices of an HLO module, which its first line gives if there are several."""
    found = re.search(r'num_partitions=(\d+)', text.partition('\n')[0])
    return int(found[1]) if found else 1


def _compile(lowered: Any, options: dict[str, Any]) -> _Dump:
    """Compiles, and reads the files that the compiler wrote."""
    # A compiler that Ctrl-C left behind may still write.
    with tempfile.TemporaryDirectory(prefix='scalax-plan-', ignore_cleanup_errors=True) as name:
        folder = Path(name)
        executable, refusal = None, ''
        try:
            options = {'xla_dump_to': name, **_DUMP, **options}
            # Ctrl-C does not interrupt a compiler in the main thread. It leaves this thread behind, for which
            # Python waits at exit: stopping a compiler halfway would abort the process.
            executable = in_a_thread('scalax-plan', lambda: lowered.compile(compiler_options=options))
        except jax.errors.JaxRuntimeError as error:
            refusal = str(error)
            if 'RESOURCE_EXHAUSTED' not in refusal or not _last_file(folder, _TABLES[0]):
                raise
        files = sorted(path for path in folder.iterdir() if _AFTER_PASS.search(path.name))
        text = files[-1].read_text(encoding='utf-8') if files else ''
        tables = MemoryTables(*(_last_file(folder, table) for table in _TABLES))
        return _Dump(
            executable, refusal.partition('\n')[0], text, _last_file(folder, 'after_optimizations'), tables
        )


def _last_file(folder: Path, what: str) -> str:
    """The file with this ending, of the last module that was compiled; empty if there is none."""
    files = sorted(folder.glob(f'*{what}.txt'))
    return files[-1].read_text(encoding='utf-8') if files else ''


def lowered_shardings(
    lowered: Any, names: Sequence[str], mesh: Mesh
) -> tuple[list[NamedSharding | None], list[NamedSharding | None]]:
    """The shardings of arguments and results of a program that was lowered and not compiled.

    They are None where the choice is the compiler's.

    Args:
        lowered: a ``jax.stages.Lowered``.
        names: the names of the arguments in the traced program, including unused ones.
        mesh: the mesh of the program.
    """
    for operation in lowered.compiler_ir().body.operations:
        if str(operation.attributes['sym_name']) == '"main"':
            # Locations are written as ``loc("params['w']")``.
            arguments = [
                str(argument.location)[len('loc("') : -len('")')] for argument in operation.arguments
            ]
            known = dict(zip(arguments, _shardings_in(operation.attributes['arg_attrs'], mesh), strict=True))
            return [known.get(name) for name in names], list(
                _shardings_in(operation.attributes['res_attrs'], mesh)
            )
    return [None] * len(names), []


def _shardings_in(attributes: Iterable[Any], mesh: Mesh) -> Iterable[NamedSharding | None]:
    for attribute in attributes:
        spec = written_spec(str(attribute))
        yield None if spec is None else NamedSharding(mesh, spec)


def written_spec(text: str) -> PartitionSpec | None:
    """The spec in the attributes of an argument; None if there is none, or the compiler may add to it.

    Example:
        >>> written_spec('{sdy.sharding = #sdy.sharding<@mesh, [{}, {"data", "model"}]>}')
        P(None, ('data', 'model'))
        >>> written_spec('{sdy.sharding = #sdy.sharding<@mesh, [{"data", ?}]>}') is None
        True
    """
    found = _SHARDING.search(text)
    if found is None:
        return None
    dimensions = _DIMENSION.findall(found[1])
    if not all(_CLOSED_AXES.match(dimension) for dimension in dimensions):
        return None
    entries = [tuple(re.findall(r'"([^"]+)"', dimension)) for dimension in dimensions]
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))
