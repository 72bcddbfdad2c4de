"""What does a function compile to? The program after SPMD partitioning, and the memory that it takes."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from scalax.errors import PlanError

_PASS = 'spmd-partitioning'
_DUMP = {'xla_dump_hlo_pass_re': f'.*{_PASS}', 'xla_dump_hlo_as_text': True}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a program runs, as the compiler counts them.

    Attributes:
        arguments: the arguments.
        outputs: the outputs, without those that take over the buffers of donated arguments.
        temporaries: all else.
        donated: the bytes of arguments whose buffers outputs take over.
        estimated: whether it is the count of a compiler for other hardware than the one that is meant: that
            of XLA for CPUs is a guide, no more.
    """

    arguments: int
    outputs: int
    temporaries: int
    donated: int = 0
    estimated: bool = True

    @property
    def total(self) -> int:
        """All of them together."""
        return self.arguments + self.outputs + self.temporaries


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        text: the HLO after SPMD partitioning; empty for one device, where nothing is partitioned.
        devices: on how many devices it runs: on one, if nothing says where arguments or outputs lie.
        memory: see `Memory`.
        executable: what JAX compiled.
    """

    text: str
    devices: int
    memory: Memory
    executable: Any


def compile_lowered(lowered: Any, platform: str) -> Compiled:
    """Compiles what ``jax.jit(...).lower(...)`` gave, and keeps the program as the partitioner left it.

    Args:
        lowered: a ``jax.stages.Lowered``.
        platform: the kind of the devices, such as ``'cpu'``.

    Raises:
        PlanError: the compiler did not write that program down.
    """
    executable, text = _dumped(lowered, {})
    devices = _partitions(text or executable.as_text())
    if not text and devices > 1:
        # A persistent compilation cache has answered. Nothing is changed by this option but the key.
        unused = {'xla_debug_buffer_assignment_show_max': time.time_ns() % 2**30 + 16}
        executable, text = _dumped(lowered, unused)
    if not text and devices > 1:
        raise PlanError(
            'the compiler did not write down the program after partitioning, from which the collectives '
            f'are read (pass {_PASS!r})'
        )
    stats = executable.memory_analysis()
    memory = Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        estimated=platform == 'cpu',
    )
    return Compiled(text, devices, memory, executable)


def _partitions(text: str) -> int:
    """How many devices an HLO module is for; its first line says so, if there are several."""
    found = re.search(r'num_partitions=(\d+)', text.partition('\n')[0])
    return int(found[1]) if found else 1


def _dumped(lowered: Any, options: dict[str, Any]) -> tuple[Any, str]:
    """The executable, and the program behind the partitioner; empty where nothing was partitioned."""
    with tempfile.TemporaryDirectory(prefix='scalax-plan-') as folder:
        executable = lowered.compile(compiler_options={'xla_dump_to': folder, **_DUMP, **options})
        files = sorted(Path(folder).glob(f'*after_{_PASS}*'))
        return executable, files[-1].read_text(encoding='utf-8') if files else ''
