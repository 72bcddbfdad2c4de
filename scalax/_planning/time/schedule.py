"""The time of a step along the compiler's schedule, as a second estimate beside the roofline.

XLA for GPUs annotates a program with its own models of the time of each kernel (``exec_time_us``, with the
option `COST_MODEL_OPTION`): tables of measured matmuls, and models of how fusions access memory. Kernels, and
copies within the memory of a device, run in the order of the schedule, one after the other. Collectives and
copies over the link to the host run asynchronously from where they start; collectives wait for one another,
and so do copies in one direction. The device waits where an asynchronous operation ends. XLA has no times of
collectives, for which NCCL's model is used (`nccl`), or of the host link, for which its bandwidth is used. A
kernel without a model takes its lower bound by FLOPs and bytes; so does a kernel whose modeled time is lower,
such as a batched matmul. How much of a bound GPUs reach was measured (`_ACHIEVABLE`, `CUDNN_FACTORS`).

XLA has measured matmuls of some dtypes only (`_MEASURED_DTYPES`). It scales others from the measured rate of
bfloat16, but for too many FLOPs: it computes the rows, the columns and the contracted size from the bytes of
the result (xla/service/gpu/model/matmul_interpolator.cc, ``ExtractDotSpec``), so that a bfloat16 matmul with
a float32 result would take 64 times as long as one with a bfloat16 result. This module corrects that.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from scalax._planning.cost.collective_instances import Kind
from scalax._planning.cost.device_cost import flops_of, named_in
from scalax._planning.cost.hbm_traffic import Traffic
from scalax._planning.cost.host_transfers import host_bytes
from scalax._planning.program.call_tree import ComputationInstance, computation_instances
from scalax._planning.program.hlo import HOST, Array, Computation, Instruction, Module
from scalax._planning.program.module_scopes import Scopes
from scalax._planning.program.phase_finder import PhaseFinder
from scalax._planning.program.phases import Phase
from scalax._planning.program.provenance import Source, source_of

COST_MODEL_OPTION = 'xla_gpu_collect_cost_model_stats'
"""The option with which XLA writes modeled times into programs. It changes nothing else."""
_TIME = re.compile(r'"exec_time_us":([\d.e+-]+)[^{}]*?"name":"([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_F8 = ('f8e4m3fn', 'f8e5m2')
# Dtypes of the operands and the result in XLA's measurements: the keys of default_matmul_perf_table.txtpb.
_MEASURED_DTYPES = {
    ('bf16', 'bf16', 'bf16'),
    ('f32', 'f32', 'f32'),
    *((lhs, rhs, 'bf16') for lhs in _F8 for rhs in _F8),
}
_UNKNOWN_TIME = 0.01  # what the matmul model returns for other custom fusions
# Measured on an H100 (docs/estimates.md, "Steps that ran"): the fraction of the peak bandwidth or FLOP/s that
# copies, reductions and large matmuls reach at best.
_ACHIEVABLE = 0.87
CUDNN_FACTORS = {'__cudnn$fmha': 3.0, '__cudnn$conv': 1.5}
"""The time of cuDNN kernels, which XLA has no model of, as a multiple of their lower bound."""
# For scattered elements XLA counts a sector of 32 bytes each. Caches keep sectors, so transposes in
# attention, which it estimates at 16 times their lower bound, take 1.3 to 3.9 times.
_SCATTERED_FACTOR = 3.0
_CALLS = ('call', 'conditional', 'while')
_DEVICE = 'device'
_LINK = 'link'

Collectives = Mapping[tuple[str, str], tuple[Kind, float]]
"""The names of a computation and of an instruction that is or starts a collective -> its kind, and the
seconds of one execution."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, or the wait for an asynchronous operation, with all its executions in one call.

    Attributes:
        name: the compiler's name, such as ``'loop_add_fusion.1'``; the name of a library function; or
            ``'wait: all-gather'``.
        phase: the phase of the step.
        scope: the module or named scope.
        source: the location in the user's program.
        count: the number of executions.
        seconds: the time of all executions, by the compiler's model.
        bound: the lower bound of that time, by FLOPs and bytes; 0 for a wait.
    """

    name: str
    phase: Phase
    scope: str
    source: Source
    count: int
    seconds: float
    bound: float = 0.0


@dataclasses.dataclass(frozen=True)
class Span:
    """An interval in which a device, or a link beside it, is busy.

    Attributes:
        lane: ``'device'``, or a link that runs in parallel: ``'link'``, ``'to host'``, ``'from host'``.
        name: a kernel or a wait, as in `Kernel`; a collective or a copy; or a loop or another call.
        phase: the phase of the step.
        scope: the module or named scope.
        source: the location in the user's program.
        start: the seconds since the beginning of the call, or of the iteration of the enclosing loop.
        seconds: the duration; for a loop that of all iterations.
        bound: the lower bound of the duration, as in `Kernel`.
        times: the number of iterations of a loop.
        inside: the spans of one iteration.
    """

    lane: str
    name: str
    phase: Phase
    scope: str
    source: Source
    start: float
    seconds: float
    bound: float = 0.0
    times: int = 1
    inside: tuple[Span, ...] = ()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The time of a step along the compiler's schedule.

    Attributes:
        seconds: the time of one call.
        kernels: the kernels and waits of the device, the longest first.
        spans: the timeline, in the order of the schedule.
    """

    seconds: float
    kernels: tuple[Kernel, ...]
    spans: tuple[Span, ...] = ()

    @property
    def waiting(self) -> float:
        """The seconds that a device waits for collectives and copies."""
        return sum(kernel.seconds for kernel in self.kernels if kernel.name.startswith('wait'))


def schedule_of(
    module: Module, flops_rate: float, hbm_rate: float, host_rate: float, collectives: Collectives
) -> Schedule | None:
    """Returns the schedule of one call of a program; None if the program has no modeled times.

    Args:
        module: the optimized program.
        flops_rate: the peak FLOP/s of a device.
        hbm_rate: the memory bandwidth of a device.
        host_rate: the bandwidth of the link to its host, in each direction.
        collectives: the collectives of the program.
    """
    if not any(_TIME.search(instruction.attributes) for _, instruction in module.instructions()):
        return None
    simulator = _Simulator(module, flops_rate, hbm_rate, host_rate, collectives)
    seconds, spans = simulator.run(simulator.entry)
    sums: dict[tuple[str, Phase, str, Source], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
    for span, count in _device_spans(spans):
        row = sums[span.name, span.phase, span.scope, span.source]
        for i, amount in enumerate((1, span.seconds, span.bound)):
            row[i] += count * amount
    kernels = [Kernel(*key, int(count), total, bound) for key, (count, total, bound) in sums.items()]
    return Schedule(seconds, tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)), spans)


def _device_spans(spans: Iterable[Span], count: int = 1) -> Iterator[tuple[Span, int]]:
    """Yields the kernels and waits among spans, also inside loops, and how often each runs in a call."""
    for span in spans:
        if span.inside:
            yield from _device_spans(span.inside, count * span.times)
        elif span.lane == _DEVICE:
            yield span, count


class _Simulator:
    """Simulates a device that runs a program."""

    def __init__(
        self, module: Module, flops_rate: float, hbm_rate: float, host_rate: float, collectives: Collectives
    ) -> None:
        self._module, self._collectives = module, collectives
        self._flops_rate, self._hbm_rate, self._host_rate = flops_rate, hbm_rate, host_rate
        self._traffic, self._phases, self._scopes = Traffic(module), PhaseFinder(module), Scopes(module)
        self._called: dict[tuple[str, ...], list[ComputationInstance]] = collections.defaultdict(list)
        self.entry, *called = computation_instances(module)
        for instance in called:
            assert instance.parent is not None and instance.caller is not None
            self._called[*_path(instance.parent), instance.caller.name].append(instance)

    def run(self, instance: ComputationInstance) -> tuple[float, tuple[Span, ...]]:
        """Returns the seconds of one execution of a computation, and its spans."""
        now, spans = 0.0, list[Span]()
        busy_until: dict[str, float] = collections.defaultdict(float)  # for each lane except the device
        pending: dict[str, tuple[Instruction, str, float]] = {}  # its name, and when it ends
        for instruction in instance.computation.instructions.values():
            name, opcode = instruction.name, instruction.opcode
            first_operand = instruction.operands[0].partition('#')[0] if instruction.operands else ''
            kind, link_seconds = self._collectives.get((instance.computation.name, name), ('', 0.0))
            if opcode in _CALLS:
                for times, (seconds, inside) in self._called_runs(instance, instruction):
                    span = self._span(instance, instruction, _DEVICE, name, now, now + times * seconds)
                    spans += [dataclasses.replace(span, times=times, inside=inside)] if inside else []
                    now += times * seconds
            elif opcode.endswith('-start') and (
                lane := _LINK if kind else self._host_lane(instance, instruction)
            ):
                start = max(now, busy_until[lane])
                end = start + (link_seconds if kind else self._lower_bound(instance, instruction))
                busy_until[lane] = end
                pending[name] = instruction, kind or 'copy', end
                spans.append(self._span(instance, instruction, lane, kind or 'copy', start, end))
            elif opcode.endswith(('-update', '-done')) and first_operand in pending:
                starter, label, end = pending[name] = pending[first_operand]
                if opcode.endswith('-done') and end > now:
                    spans.append(self._span(instance, starter, _DEVICE, f'wait: {label}', now, end))
                    now = end
            elif kind:
                start = max(now, busy_until[_LINK])
                end = start + link_seconds
                spans.append(self._span(instance, instruction, _LINK, kind, start, end))
                spans.append(self._span(instance, instruction, _DEVICE, f'wait: {kind}', now, end))
                now = busy_until[_LINK] = end
            else:
                bound = self._lower_bound(instance, instruction)
                seconds = self._kernel_seconds(instance.computation, instruction, bound)
                if seconds:
                    seconds = max(seconds, bound / _ACHIEVABLE)
                    target = _TARGET.search(instruction.attributes)
                    label = target[1] if target else name
                    span = self._span(instance, instruction, _DEVICE, label, now, now + seconds)
                    spans.append(dataclasses.replace(span, bound=bound))
                    now += seconds
        return now, tuple(spans)

    def _called_runs(
        self, instance: ComputationInstance, call: Instruction
    ) -> list[tuple[int, tuple[float, tuple[Span, ...]]]]:
        """Returns the number and the time of the runs of a loop, a call, or the longest branch."""
        runs = [(inner.count // instance.count, self.run(inner)) for inner in self._inside(instance, call)]
        if call.opcode == 'conditional':
            runs = [max(runs, key=lambda run: run[1][0])] if runs else []
        return runs

    def _inside(self, instance: ComputationInstance, call: Instruction) -> list[ComputationInstance]:
        return self._called.get((*_path(instance), call.name), [])

    def _span(
        self,
        instance: ComputationInstance,
        instruction: Instruction,
        lane: str,
        name: str,
        start: float,
        end: float,
    ) -> Span:
        phase = self._phases.of(instance, instruction)
        source = source_of(self._module, instance.computation, instruction)
        named = named_in(self._module, instruction)
        scope = self._scopes.of(instance.op_name(named) or instance.scope, named.frame)
        return Span(lane, name, phase, scope, source, start, end - start)

    def _host_lane(self, instance: ComputationInstance, instruction: Instruction) -> str:
        """Returns the lane of an asynchronous copy over the link to the host; '' for other instructions."""
        copies = [copy for inner, copy in self._nested(instance, instruction) if host_bytes(inner, copy)]
        if not copies:
            return ''
        return 'to host' if copies[0].arrays[0].space == HOST else 'from host'

    def _lower_bound(self, instance: ComputationInstance, instruction: Instruction) -> float:
        """Returns a lower bound of the seconds of an instruction, from its FLOPs and bytes."""
        flops, over_link = (
            sum(itertools.starmap(measure, self._nested(instance, instruction)))
            for measure in (flops_of, host_bytes)
        )
        hbm_bytes = self._traffic.bytes_of(instance, instruction)
        return max(flops / self._flops_rate, hbm_bytes / self._hbm_rate, over_link / self._host_rate)

    def _nested(
        self, instance: ComputationInstance, instruction: Instruction
    ) -> Iterator[tuple[ComputationInstance, Instruction]]:
        """Yields an instruction, and all instructions of the computations that it calls."""
        yield instance, instruction
        for inner in self._inside(instance, instruction):
            for item in inner.computation.instructions.values():
                yield from self._nested(inner, item)

    def _kernel_seconds(self, computation: Computation, instruction: Instruction, bound: float) -> float:
        """Returns the seconds of a kernel by XLA's models; without a model a multiple of its lower bound."""
        attributes = instruction.attributes
        times = {name: 1e-6 * float(time) for time, name in _TIME.findall(attributes)}
        is_custom = 'kind=kCustom' in attributes
        if is_custom and times.get('sol') == 1e-6 * _UNKNOWN_TIME:
            library_calls = [
                self._kernel_seconds(called, item, bound)
                for called in self._module.calls(instruction)
                for item in called.instructions.values()
                if item.opcode == 'custom-call'
            ]
            if library_calls:
                return sum(library_calls)
            times.pop('sol')
        if 'sol' not in times:
            factor = next((factor for name, factor in CUDNN_FACTORS.items() if name in attributes), 1.0)
            return times.get('indexing-cost-model', factor * bound)
        is_matmul = is_custom or instruction.opcode == 'custom-call'
        matmul = self._matmul(computation, instruction) if is_matmul else None
        if matmul is None:
            return min(times['sol'], _SCATTERED_FACTOR * bound)
        if tuple(array.dtype for array in matmul) in _MEASURED_DTYPES:
            return times['sol']
        return times['sol'] / matmul[-1]._replace(dims=()).bytes ** 3

    def _matmul(self, computation: Computation, instruction: Instruction) -> tuple[Array, ...] | None:
        """Returns the operands and the result of the matmul of a kernel; None for other kernels."""
        if instruction.opcode == 'custom-call':
            return (*computation.operands_of(instruction)[:2], instruction.arrays[0])
        for called in self._module.calls(instruction):
            for item in called.instructions.values():
                if item.opcode == 'dot':
                    return (*called.operands_of(item), instruction.arrays[0])
        return None


def _path(instance: ComputationInstance) -> tuple[str, ...]:
    """Returns the names of the computations and calls from the entry to an instance."""
    if instance.parent is None or instance.caller is None:
        return (instance.computation.name,)
    return *_path(instance.parent), instance.caller.name, instance.computation.name
