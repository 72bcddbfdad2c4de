"""Memory of a program, as the compiler reports it."""

from __future__ import annotations

import dataclasses

from scalax._plan.hlo import HOST, MAIN, Module
from scalax._plan.layout import Layout


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a program runs, as the compiler counts them.

    Attributes:
        arguments: the arguments.
        outputs: the outputs, without those that take over the buffers of donated arguments.
        temporaries: everything else, with the gaps between arrays.
        donated: the bytes of arguments whose buffers outputs take over.
        estimated: whether the count is only a guide, because it is that of XLA for CPUs, which stand in for
            other hardware.
        peak: the most that arrays hold at a time. A program takes `total` of a device; the rest are gaps
            between arrays, for arrays of other times. `total` if the compiler gives no such number.
        limit: the memory of the device that a program can use; None if unknown.
        host: what the program holds in the memory of the host, for one device.
    """

    arguments: int
    outputs: int
    temporaries: int
    donated: int = 0
    estimated: bool = True
    peak: int = 0
    limit: int | None = None
    host: int = 0

    def __post_init__(self) -> None:
        if not self.peak:
            object.__setattr__(self, 'peak', self.total)

    @property
    def total(self) -> int:
        """Arguments, outputs and temporaries together: what the program takes of a device."""
        return self.arguments + self.outputs + self.temporaries


def assigned_memory(layout: Layout) -> Memory:
    """The memory of a program that a compiler for TPUs has laid out."""
    arguments = donated = outputs = 0
    for allocation in layout.of(MAIN):
        arguments += allocation.bytes if allocation.parameter else 0
        donated += allocation.bytes if allocation.parameter and allocation.output else 0
        outputs += allocation.bytes if allocation.output and not allocation.parameter else 0
    return Memory(
        arguments,
        outputs,
        max(0, layout.totals[MAIN] - arguments - outputs),
        donated,
        estimated=False,
        peak=sum(size for size, _ in layout.held),
        host=layout.totals.get(HOST, 0),
    )


def constant_bytes(module: Module) -> int:
    """The bytes of array constants in a program."""
    return sum(
        instruction.bytes
        for _, instruction in module.instructions()
        if instruction.opcode == 'constant' and any(array.dims for array in instruction.arrays)
    )
