"""Work of one device: its flops and the bytes it moves, counted in the program that it runs.

The flops of a whole step (`flops`), divided by the devices, are the work of each only if nothing is computed
twice. Work that is not divided is repeated by every device: that shows only here, where shapes are those of
one device. In an optimized program, products stand inside fusions, and those of TPUs are convolutions; what
the compiler removed (equal products, unused ones) or computes once more shows only there.

`hbm_traffic` says which bytes are moved.

Of branches, the largest counts: for flops the one with the most flops, for bytes the one with the most bytes.
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

# What the compilers for TPUs and GPUs call for kernels; of libraries all but what is counted below.
_KERNELS = re.compile(
    r'custom_call_target="(?:tpu_custom_call"|__gpu\$xla\.gpu\.triton"'
    r'|__cu(?:dnn|blas)\$(?!conv|fmha|gemm|lt\$matmul))|"kind":"__cudnn\$'
)
# Products of cuBLAS, and convolutions of cuDNN.
_LIBRARY = re.compile(r'custom_call_target="__(?:cublas\$(?:lt\$matmul|gemm)|cudnn\$conv(\w+))')
# Attention of cuDNN, forward and backward, as JAX describes it to XLA.
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w*)"')
_PAIRS = re.compile(r'"intermediate_tensor_shape":\s*{[^{}]*?"dimensions":\s*\[([^\]]*)\]')
_MASK = re.compile(r'"mask_type":\s*"(\w+)"')
_WINDOW = re.compile(r'"sliding_window_length":\s*(\d+)')
_PACKED = re.compile(r'"max_seg_per_batch":\s*(?!1\b)\d|"is_paged_attention":\s*true')
# Where the input, the kernel and the output of a convolution are among its operands and its result (2).
_OF_CONVOLUTION = {'BackwardInput': (2, 1, 0), 'BackwardFilter': (0, 2, 1)}


@dataclasses.dataclass(frozen=True)
class DeviceCost:
    """The work of one device in one call.

    Attributes:
        flops: the floating-point operations of its matrix products, convolutions and FFTs.
        bytes: the bytes that all of its instructions at least read from its memory and write to it.
        exactness: how well both are known.
        by_phase: the flops of each part that has any: ``'forward'``, ``'backward'``, ``'recomputed'``,
            ``'update'`` for what is computed with the gradients, such as an optimizer's update, and
            ``'other'`` for what is none of these, as in a program without a gradient.
        by_scope: the flops and bytes of each module or named scope, in the order of the program; forward,
            backward and recomputed ones apart.
        bytes_by_phase: the bytes of each part that has any.
        kernels: how many kernels run, whose flops are not among these: those of Pallas, and products for
            which the compiler has kernels of its own, such as ragged ones on TPUs.
    """

    flops: int = 0
    bytes: int = 0
    exactness: Exactness = Exactness.EXACT
    by_phase: Mapping[Phase, int] = dataclasses.field(default_factory=dict)
    kernels: int = 0
    by_scope: tuple[ScopeCost, ...] = ()
    bytes_by_phase: Mapping[Phase, int] = dataclasses.field(default_factory=dict)


def device_cost_of(module: Module) -> DeviceCost:
    """The work of one device when it runs a program.

    Args:
        module: the program after partitioning; optimized, if it is to count what runs.
    """
    scopes, phases, traffic = Scopes(module), PhaseFinder(module), Traffic(module)
    exactness = Exactness.EXACT
    rows: dict[tuple[str, Phase], list[int]] = collections.defaultdict(lambda: [0, 0])
    for place, measure in enumerate((flops_of, traffic.bytes_of)):
        for visit, instruction, amount in measured_instructions(module, measure):
            named = named_in(module, instruction)
            scope = scopes.of(visit.op_name(named) or visit.scope, named.frame)
            rows[scope, phases.of(visit, instruction)][place] += amount
            exactness = exactness.combine(visit.exactness).combine(_known(instruction))
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
    flops, moved = sum(by_phase.values()), sum(bytes_by_phase.values())
    return DeviceCost(flops, moved, exactness, by_phase, kernels, by_scope, bytes_by_phase)


def named_in(module: Module, instruction: Instruction) -> Instruction:
    """What gives an instruction its name: itself, or of a fusion without one the last inside that has one."""
    if instruction.opcode != 'fusion' or instruction.op_name:
        return instruction
    inside = (each for called in module.calls(instruction) for each in called.instructions.values())
    return next((each for each in reversed([*inside]) if each.op_name), instruction)


def _add_boundary(
    rows: dict[tuple[str, Phase], list[int]], module: Module, traffic: Traffic, phases: PhaseFinder
) -> None:
    """Adds the bytes that reading arguments and writing results takes beyond what products move."""
    names: dict[Phase, set[tuple[str, str]]] = collections.defaultdict(set)
    for visit in computation_instances(module):
        for each in visit.computation.instructions.values():
            names[phases.of(visit, each)].add((visit.computation.name, each.name))
    first: Phase = 'forward' if 'backward' in names else 'other'
    # What the update reads too may be read once.
    of_update, of_all = traffic.boundary(names['update']), traffic.boundary(set().union(*names.values()))
    for phase, moved in ((first, of_all - of_update), ('update', of_update)):
        known = sum(
            amounts[1] for (_, of), amounts in rows.items() if (of == 'update') == (phase == 'update')
        )
        if moved > known:
            rows['', phase][1] += moved - known


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode in ('custom-call', 'fusion') and bool(_KERNELS.search(instruction.attributes))


def flops_of(visit: ComputationInstance, instruction: Instruction) -> int:
    """The floating-point operations of one instruction, without those of computations that it calls."""
    count = _COUNTS.get(instruction.opcode)
    return count(instruction, visit.computation.operands_of(instruction)) if count else 0


def _dot(instruction: Instruction, operands: list[Array]) -> int:
    return _product_over(integers(instruction.attribute('lhs_contracting_dims') or ''), instruction, operands)


def _product_over(contracted: list[int], instruction: Instruction, operands: list[Array]) -> int:
    if not contracted:
        return 0  # an elementwise product
    inner = math.prod(operands[0].dims[i] for i in contracted)
    return _product(math.prod(instruction.arrays[0].dims) * inner, operands)


def _of_library(instruction: Instruction, operands: list[Array]) -> int:
    """The operations of what a library computes, whose result is the first of its arrays."""
    if attention := _ATTENTION.search(instruction.attributes):
        return _attention(instruction, operands, 'Backward' in attention[1])
    called = _LIBRARY.search(instruction.attributes)
    if called is None:
        return 0
    if called[1] is None:
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        return _product_over(integers(found[1]) if found else [], instruction, operands)
    arrays = *operands[:2], instruction.arrays[0]
    given, kernel, result = (arrays[place] for place in _OF_CONVOLUTION.get(called[1], (0, 1, 2)))
    return _convolution(dataclasses.replace(instruction, arrays=(result,)), [given, kernel])


def _attention(instruction: Instruction, operands: list[Array], backward: bool) -> int:
    """Two products, or five: the scores anew, and gradients of queries, keys, values and weights.

    Of a causal mask, and of one of a window, what it leaves counts, as cuDNN skips the blocks that it leaves
    nothing of. Other masks are arrays, of which cuDNN skips nothing.
    """
    shape = _PAIRS.search(instruction.attributes)
    assert shape is not None  # XLA makes no call of cuDNN without it
    *heads, queries, keys = integers(shape[1])
    mask, window = _MASK.search(instruction.attributes), _WINDOW.search(instruction.attributes)
    ends = np.full(queries, keys)
    if mask and 'CAUSAL' in mask[1]:
        ends = np.minimum(np.arange(queries) + 1, keys)
    width = int(window[1]) if window else 0
    starts = np.maximum(np.arange(queries) + 1 - width, 0) if width else 0
    pairs = math.prod(heads) * int(np.maximum(ends - starts, 0).sum())
    queried, returned = operands[0].dims[-1], operands[2].dims[-1]
    return 2 * pairs * ((3 * queried + 2 * returned) if backward else queried + returned)


def _known(instruction: Instruction) -> Exactness:
    """How well the operations of an instruction are known: of attention to rows of other lengths, at most."""
    if instruction.opcode != 'custom-call' or not _ATTENTION.search(instruction.attributes):
        return Exactness.EXACT
    mask = _MASK.search(instruction.attributes)
    known = mask is not None and mask[1] in ('NO_MASK', 'CAUSAL')
    return Exactness.EXACT if known and not _PACKED.search(instruction.attributes) else Exactness.AT_MOST


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
    lengths = integers(instruction.attribute('fft_length') or '')
    complex_ = operands[0].dtype.startswith('c') and instruction.arrays[0].dtype.startswith('c')
    return fft_flops(operands[0].dims, lengths, complex_)


def _product(count: int, operands: list[Array]) -> int:
    return multiply_add_flops(count, all(array.dtype.startswith('c') for array in operands[:2]))


_COUNTS: dict[str, Callable[[Instruction, list[Array]], int]] = {
    'dot': _dot,
    'convolution': _convolution,
    'custom-call': _of_library,
    'fft': _fft,
}
