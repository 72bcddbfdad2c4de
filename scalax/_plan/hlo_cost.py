"""Work of one device: its flops and the bytes it moves, counted in the program after partitioning.

The flops of a whole step (`flops`), divided by the devices, are the work of each only if nothing is computed
twice. Work that is not divided is repeated by every device: that shows only here, where shapes are those of
one device.

Bytes follow the book's model of a matrix product (https://jax-ml.github.io/scaling-book/roofline, "Matrix
multiplication"): both operands are read from memory and the result is written to it. A collective reads its
operand and writes its result. Everything else is assumed to be fused into these.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from scalax._plan.collective_runs import KINDS, distinct
from scalax._plan.formulas import Counted, fft_flops, product_flops, window_overlaps
from scalax._plan.hlo import Array, Instruction, Module
from scalax._plan.hlo_loops import visits

_DIGITS = re.compile(r'\d+')


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one device in one call.

    Attributes:
        flops: the floating-point operations of its matrix products, convolutions and FFTs.
        bytes: the bytes that these and its collectives read from its memory and write to it.
        counted: how well both are known.
    """

    flops: int = 0
    bytes: int = 0
    counted: Counted = Counted.EXACTLY


def work_of(module: Module) -> Work:
    """The work of one device when it runs a program."""
    flops = moved = 0
    counted = Counted.EXACTLY
    for visit in visits(module):
        for instruction in distinct(visit.computation, module.partitions):
            count = _COUNTS.get(instruction.opcode)
            if count is None and instruction.opcode not in KINDS:
                continue
            operands = visit.computation.operands_of(instruction)
            flops += visit.count * (count(instruction, operands) if count else 0)
            moved += visit.count * (instruction.bytes + sum(array.bytes for array in operands))
            if visit.counted is not Counted.EXACTLY:
                counted = counted.along(visit.counted)
    return Work(flops, moved, counted)


def _dot(instruction: Instruction, operands: list[Array]) -> int:
    contracted = _integers(instruction.attribute('lhs_contracting_dims'))
    if not contracted:
        return 0  # an elementwise product
    inner = math.prod(operands[0].dims[i] for i in contracted)
    return _product(math.prod(instruction.arrays[0].dims) * inner, operands)


def _convolution(instruction: Instruction, operands: list[Array]) -> int:
    labels = re.match(r'(\w+)_(\w+)->(\w+)', instruction.attribute('dim_labels') or '')
    assert labels is not None  # XLA writes the labels of every convolution
    given, kernel, result = labels.groups()
    sizes = [operands[0].dims, operands[1].dims, instruction.arrays[0].dims]
    window = dict(re.findall(r'(\w+)=([\dx_\-]+)', instruction.attribute('window') or ''))
    taken = 1
    for place, label in enumerate(sorted(set(result) - {'b', 'f'})):
        size, width, out = (
            dims[text.index(label)] for dims, text in zip(sizes, (given, kernel, result), strict=True)
        )
        stride, hole, gap = (
            int(window[key].split('x')[place]) if key in window else 1
            for key in ('stride', 'lhs_dilate', 'rhs_dilate')
        )
        low = int(window['pad'].split('x')[place].partition('_')[0]) if 'pad' in window else 0
        taken *= window_overlaps(size, width, out, stride, low, hole, gap)
    outputs = sizes[2][result.index('b')] * sizes[2][result.index('f')]
    return _product(outputs * sizes[1][kernel.index('i')] * taken, operands)


def _fft(instruction: Instruction, operands: list[Array]) -> int:
    lengths = _integers(instruction.attribute('fft_length'))
    complex_ = operands[0].dtype.startswith('c') and instruction.arrays[0].dtype.startswith('c')
    return fft_flops(operands[0].dims, lengths, complex_)


def _integers(text: str | None) -> list[int]:
    return [int(number) for number in _DIGITS.findall(text or '')]


def _product(count: int, operands: list[Array]) -> int:
    return product_flops(count, all(array.dtype.startswith('c') for array in operands[:2]))


_COUNTS: dict[str, Callable[[Instruction, list[Array]], int]] = {
    'dot': _dot,
    'convolution': _convolution,
    'fft': _fft,
}
