"""The cost of a program on one device: FLOPs and HBM bytes, counted in the program that the device runs.

The FLOPs of a step (`flops`) divided by the devices are the cost of each device only if nothing is computed
twice. This module counts in local shapes, so that redundant computation shows. Optimized programs also show
what the compiler removed (equal or unused matmuls) or recomputes. There matmuls are inside fusions, and on
TPUs they are convolutions.

Of several branches the largest counts: for FLOPs the one with the most FLOPs, for bytes the one with the most
bytes. `hbm_traffic` counts the bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping

import numpy as np

from scalax._planning.cost.flop_formulas import fft_flops, multiply_add_flops, window_overlaps
from scalax._planning.cost.hbm_traffic import Traffic
from scalax._planning.program.call_tree import (
    ComputationInstance,
    computation_instances,
    measured_instructions,
)
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.hlo import Array, Instruction, Module, integers
from scalax._planning.program.module_scopes import ScopeCost, Scopes
from scalax._planning.program.phase_finder import PhaseFinder
from scalax._planning.program.phases import PHASES, Phase

# Custom calls of kernels on TPUs and GPUs, and of libraries except those counted below.
_KERNELS = re.compile(
    r'custom_call_target="(?:tpu_custom_call"|__gpu\$xla\.gpu\.triton"'
    r'|__cu(?:dnn|blas)\$(?!conv|fmha|gemm|lt\$matmul))|"kind":"__cudnn\$'
)
# Matmuls of cuBLAS, and convolutions of cuDNN.
_LIBRARY = re.compile(r'custom_call_target="__(?:cublas\$(?:lt\$matmul|gemm)|cudnn\$conv(\w+))')
# Attention of cuDNN, forward and backward.
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w*)"')
_PAIRS = re.compile(r'"intermediate_tensor_shape":\s*{[^{}]*?"dimensions":\s*\[([^\]]*)\]')
_MASK = re.compile(r'"mask_type":\s*"(\w+)"')
_WINDOW = re.compile(r'"sliding_window_length":\s*(\d+)')
_PACKED = re.compile(r'"max_seg_per_batch":\s*(?!1\b)\d|"is_paged_attention":\s*true')
# The indices of input, kernel and output among the operands (0, 1) and the result (2) of a convolution.
_CONVOLUTION_ROLES = {'BackwardInput': (2, 1, 0), 'BackwardFilter': (0, 2, 1)}


@dataclasses.dataclass(frozen=True)
class DeviceCost:
    """The cost of one call on one device.

    Attributes:
        flops: the FLOPs of matmuls, convolutions and FFTs.
        bytes: a lower bound of the bytes that its instructions read from its memory and write to it.
        exactness: the exactness of both.
        by_phase: the FLOPs of each phase that has any: ``'forward'``, ``'backward'``, ``'recomputed'``,
            ``'update'`` for computations with gradients, such as an optimizer's update, and ``'other'`` for
            the rest, as in a program without a gradient.
        by_scope: the FLOPs and bytes of each module or named scope, in the order of the program, with a row
            for each phase.
        bytes_by_phase: the bytes of each phase that has any.
        kernels: the number of kernels that run, whose FLOPs are not included: Pallas kernels, and the
            compiler's own kernels, such as those of ragged matmuls on TPUs.
    """

    flops: int = 0
    bytes: int = 0
    exactness: Exactness = Exactness.EXACT
    by_phase: Mapping[Phase, int] = dataclasses.field(default_factory=dict)
    kernels: int = 0
    by_scope: tuple[ScopeCost, ...] = ()
    bytes_by_phase: Mapping[Phase, int] = dataclasses.field(default_factory=dict)


def device_cost_of(module: Module) -> DeviceCost:
    """Counts the cost of a program on one device.

    Args:
        module: the program, after partitioning or after all optimizations.
    """
    scopes, phases, traffic = Scopes(module), PhaseFinder(module), Traffic(module)
    exactness = Exactness.EXACT
    rows: dict[tuple[str, Phase], list[int]] = collections.defaultdict(lambda: [0, 0])
    for column, measure in enumerate((flops_of, traffic.bytes_of)):
        for instance, instruction, amount in measured_instructions(module, measure):
            named = named_in(module, instruction)
            scope = scopes.of(instance.op_name(named) or instance.scope, named.frame)
            rows[scope, phases.of(instance, instruction)][column] += amount
            exactness = exactness.combine(instance.exactness).combine(_flops_exactness(instruction))
    if not module.scheduled:
        _add_boundary(rows, module, traffic, phases)
    by_scope = tuple(ScopeCost(*key, *amounts) for key, amounts in rows.items())
    by_phase, bytes_by_phase = (
        {
            phase: total
            for phase in PHASES
            if (total := sum(of(row) for row in by_scope if row.phase == phase))
        }
        for of in (operator.attrgetter('flops'), operator.attrgetter('bytes'))
    )
    kernels = sum(
        count for _, _, count in measured_instructions(module, lambda _, instruction: _is_kernel(instruction))
    )
    flops, hbm_bytes = sum(by_phase.values()), sum(bytes_by_phase.values())
    return DeviceCost(flops, hbm_bytes, exactness, by_phase, kernels, by_scope, bytes_by_phase)


def named_in(module: Module, instruction: Instruction) -> Instruction:
    """Returns the instruction itself; for a fusion without an op name, the last one inside that has one."""
    if instruction.opcode != 'fusion' or instruction.op_name:
        return instruction
    fused = (item for called in module.calls(instruction) for item in called.instructions.values())
    return next((item for item in reversed([*fused]) if item.op_name), instruction)


def _add_boundary(
    rows: dict[tuple[str, Phase], list[int]], module: Module, traffic: Traffic, phases: PhaseFinder
) -> None:
    """Adds the bytes of reading arguments and writing results, beyond what matmuls read and write."""
    names: dict[Phase, set[tuple[str, str]]] = collections.defaultdict(set)
    for instance in computation_instances(module):
        for instruction in instance.computation.instructions.values():
            key = instance.computation.name, instruction.name
            names[phases.of(instance, instruction)].add(key)
    main_phase: Phase = 'forward' if 'backward' in names else 'other'
    # An argument that the update also reads may be read once.
    update, total = traffic.boundary(names['update']), traffic.boundary(set().union(*names.values()))
    for phase, boundary in ((main_phase, total - update), ('update', update)):
        is_update = phase == 'update'
        counted = sum(amounts[1] for (_, of), amounts in rows.items() if (of == 'update') == is_update)
        if boundary > counted:
            rows['', phase][1] += boundary - counted


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode in ('custom-call', 'fusion') and bool(_KERNELS.search(instruction.attributes))


def flops_of(instance: ComputationInstance, instruction: Instruction) -> int:
    """Returns the FLOPs of one instruction, without computations that it calls."""
    count = _FLOPS_OF.get(instruction.opcode)
    return count(instruction, instance.computation.operands_of(instruction)) if count else 0


def _dot(instruction: Instruction, operands: list[Array]) -> int:
    return _matmul(integers(instruction.attribute('lhs_contracting_dims') or ''), instruction, operands)


def _matmul(contracted: list[int], instruction: Instruction, operands: list[Array]) -> int:
    if not contracted:
        return 0  # an elementwise product
    size = math.prod(operands[0].dims[i] for i in contracted)
    return _multiply_adds(math.prod(instruction.arrays[0].dims) * size, operands)


def _library_call(instruction: Instruction, operands: list[Array]) -> int:
    """Returns the FLOPs of a library call, whose result is the first of its arrays."""
    if attention := _ATTENTION.search(instruction.attributes):
        return _attention(instruction, operands, 'Backward' in attention[1])
    target = _LIBRARY.search(instruction.attributes)
    if target is None:
        return 0
    if target[1] is None:
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        return _matmul(integers(dims[1]) if dims else [], instruction, operands)
    arrays = *operands[:2], instruction.arrays[0]
    image, kernel, result = (arrays[i] for i in _CONVOLUTION_ROLES.get(target[1], (0, 1, 2)))
    return _convolution(dataclasses.replace(instruction, arrays=(result,)), [image, kernel])


def _attention(instruction: Instruction, operands: list[Array], backward: bool) -> int:
    """Returns the FLOPs of an attention call: two matmuls forward, or five backward.

    The backward pass recomputes the scores, and computes the gradients of queries, keys, values and weights.
    With a causal or a window mask only the visible pairs count, because cuDNN skips hidden blocks. Other
    masks are arrays, for which cuDNN skips nothing.
    """
    shape = _PAIRS.search(instruction.attributes)
    assert shape is not None  # every call of cuDNN has it
    *heads, queries, keys = integers(shape[1])
    mask, window = _MASK.search(instruction.attributes), _WINDOW.search(instruction.attributes)
    ends = np.full(queries, keys)
    if mask and 'CAUSAL' in mask[1]:
        ends = np.minimum(np.arange(queries) + 1, keys)
    width = int(window[1]) if window else 0
    starts = np.maximum(np.arange(queries) + 1 - width, 0) if width else 0
    pairs = math.prod(heads) * int(np.maximum(ends - starts, 0).sum())
    query_size, value_size = operands[0].dims[-1], operands[2].dims[-1]
    return 2 * pairs * ((3 * query_size + 2 * value_size) if backward else query_size + value_size)


def _flops_exactness(instruction: Instruction) -> Exactness:
    """Returns the exactness of an instruction's FLOPs; an upper bound for attention with unknown masks."""
    if instruction.opcode != 'custom-call' or not _ATTENTION.search(instruction.attributes):
        return Exactness.EXACT
    mask = _MASK.search(instruction.attributes)
    is_static = mask is not None and mask[1] in ('NO_MASK', 'CAUSAL')
    return Exactness.EXACT if is_static and not _PACKED.search(instruction.attributes) else Exactness.AT_MOST


def _convolution(instruction: Instruction, operands: list[Array]) -> int:
    labels = re.match(r'(\w+)_(\w+)->(\w+)', instruction.attribute('dim_labels') or '')
    assert labels is not None  # XLA writes the labels of every convolution
    image, kernel, result = labels.groups()
    sizes = [operands[0].dims, operands[1].dims, instruction.arrays[0].dims]
    window = dict(re.findall(r'(\w+)=([\dx_\-]+)', instruction.attribute('window') or ''))
    overlaps = 1
    for i, label in enumerate(sorted(set(result) - {'b', 'f'})):
        size, width, out = (
            dims[text.index(label)] for dims, text in zip(sizes, (image, kernel, result), strict=True)
        )
        stride, hole, gap = (
            int(window[key].split('x')[i]) if key in window else 1
            for key in ('stride', 'lhs_dilate', 'rhs_dilate')
        )
        low = int(window['pad'].split('x')[i].partition('_')[0]) if 'pad' in window else 0
        overlaps *= window_overlaps(size, width, out, stride, low, hole, gap)
    outputs = sizes[2][result.index('b')] * sizes[2][result.index('f')]
    return _multiply_adds(outputs * sizes[1][kernel.index('i')] * overlaps, operands)


def _fft(instruction: Instruction, operands: list[Array]) -> int:
    lengths = integers(instruction.attribute('fft_length') or '')
    complex_ = operands[0].dtype.startswith('c') and instruction.arrays[0].dtype.startswith('c')
    return fft_flops(operands[0].dims, lengths, complex_)


def _multiply_adds(count: int, operands: list[Array]) -> int:
    return multiply_add_flops(count, all(array.dtype.startswith('c') for array in operands[:2]))


_FLOPS_OF: dict[str, Callable[[Instruction, list[Array]], int]] = {
    'dot': _dot,
    'convolution': _convolution,
    'custom-call': _library_call,
    'fft': _fft,
}
