"""The seconds of a step along the compiler's schedule: a second opinion beside the roofline.

XLA for GPUs writes into a program what its own models say of the time of each kernel (``exec_time_us``, with
the option `MODELLED`): tables of measured products, and models of how fusions read and write memory. Kernels
run one after the other, in the order of the schedule, and so do copies inside of the memory of a device: both
need that memory. Collectives and copies over the link to the host run beside them from where they start;
collectives wait for one another, and so do such copies, one way; where one ends the device waits for it. XLA
has no times for collectives, which take what NCCL expects (`nccl`), and none for that link, whose bandwidth
counts. Kernels without a model take what they do at least, and so do those to which it gives less, such as
products in batches; how much of that a GPU reaches was measured (`_REACHED`, `CUDNN`).

XLA has measured products of some types alone (`_MEASURED`). Others take the rate that it has measured of
bfloat16, but for too many operations: XLA counts the rows, the columns and what is summed in bytes of the
result (xla/service/gpu/model/matmul_interpolator.cc, ``ExtractDotSpec``). A product of bfloat16 that is added
up in float32 would take 64 times as long as one with results in bfloat16. Here such products take XLA's time
without those bytes.
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
from scalax._planning.program.call_tree import Visit, visits
from scalax._planning.program.counting import Phase
from scalax._planning.program.hlo import HOST, Array, Computation, Instruction, Module
from scalax._planning.program.module_scopes import Scopes
from scalax._planning.program.phases import PhaseFinder
from scalax._planning.program.provenance import Source, source_of

MODELLED = 'xla_gpu_collect_cost_model_stats'
"""The option with which XLA writes times into programs, which it does not change otherwise."""
_TIME = re.compile(r'"exec_time_us":([\d.e+-]+)[^{}]*?"name":"([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_F8 = ('f8e4m3fn', 'f8e5m2')
# Operands and results of products that XLA has measured: the keys of its default_matmul_perf_table.txtpb.
_MEASURED = {
    ('bf16', 'bf16', 'bf16'),
    ('f32', 'f32', 'f32'),
    *((one, two, 'bf16') for one in _F8 for two in _F8),
}
_NOT_KNOWN = 0.01  # what the model of products says of other custom fusions
# Measured on an H100 (docs/estimates.md, "Steps that ran"): the most that copies, sums and large products
# reach of the bytes of its memory, or of its operations, in a second.
_REACHED = 0.87
CUDNN = {'__cudnn$fmha': 3.0, '__cudnn$conv': 1.5}
"""Kernels of cuDNN, which XLA has no model of: how many times the least attention and convolutions took."""
# Where numbers are read apart from their neighbours, XLA counts a sector of 32 bytes for each. Caches keep
# sectors: transposes of attention, for which it has 16 times the least, took 1.3 to 3.9 times.
_APART = 3.0
_CALLS = ('call', 'conditional', 'while')
_DEVICE = 'device'
_LINK = 'link'

Collectives = Mapping[tuple[str, str], tuple[Kind, float]]
"""The names of a computation and of an instruction that is a collective, or starts it -> its kind, and the
seconds of one execution."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, or the wait for what is asynchronous, in one call.

    Attributes:
        name: as the compiler calls it, such as ``'loop_add_fusion.1'``; the name of a library's function; or
            ``'wait: all-gather'``.
        phase: the part of the step that it belongs to.
        scope: the module or named scope.
        source: the place in the user's program.
        count: how often it runs.
        seconds: the time of all its executions, by the compiler's model.
        bound: the least that it takes: of its operations, or of the bytes that it moves. None of a wait.
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
    """What a device, or a link beside it, is busy with for a while.

    Attributes:
        lane: ``'device'``, or what is busy beside it: ``'link'``, ``'to host'``, ``'from host'``.
        name: a kernel or a wait, as of a `Kernel`; a collective or a copy; or a loop or another call.
        phase: the part of the step that it belongs to.
        scope: the module or named scope.
        source: the place in the user's program.
        start: the seconds from the beginning of the call, or of the run of the loop that it is in.
        seconds: how long it takes, all runs of a loop together.
        bound: the least that it takes, as of a `Kernel`.
        times: the runs of a loop, one after the other.
        inside: what one of them consists of.
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
        kernels: what the device does in it, the longest first.
        spans: what runs when, in the order of the schedule.
    """

    seconds: float
    kernels: tuple[Kernel, ...]
    spans: tuple[Span, ...] = ()

    @property
    def waiting(self) -> float:
        """The seconds for which a device waits for collectives and copies."""
        return sum(each.seconds for each in self.kernels if each.name.startswith('wait'))


def schedule_of(
    module: Module, flops_rate: float, hbm_rate: float, host_rate: float, collectives: Collectives
) -> Schedule | None:
    """The time of one call of a program; None if the compiler has not written its times.

    Args:
        module: the optimized program.
        flops_rate: the operations of a device in a second, at most.
        hbm_rate: the bytes that it moves in a second, at most.
        host_rate: the bytes that it sends to its host in a second, and gets from there, at most.
        collectives: those of the program.
    """
    if not any(_TIME.search(each.attributes) for _, each in module.instructions()):
        return None
    clock = _Clock(module, flops_rate, hbm_rate, host_rate, collectives)
    seconds, spans = clock.run(clock.entry)
    sums: dict[tuple[str, Phase, str, Source], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
    for span, runs in _on_device(spans):
        alike = span.name, span.phase, span.scope, span.source
        one = 1, span.seconds, span.bound
        sums[alike] = [total + runs * each for total, each in zip(sums[alike], one, strict=True)]
    kernels = [Kernel(*alike, int(count), of_all, bound) for alike, (count, of_all, bound) in sums.items()]
    return Schedule(seconds, tuple(sorted(kernels, key=lambda row: -row.seconds)), spans)


def _on_device(spans: Iterable[Span], runs: int = 1) -> Iterator[tuple[Span, int]]:
    """The kernels and waits among some spans, inside of loops too, and how often each runs in a call."""
    for each in spans:
        if each.inside:
            yield from _on_device(each.inside, runs * each.times)
        elif each.lane == _DEVICE:
            yield each, runs


class _Clock:
    """The time of a device while it runs a program."""

    def __init__(
        self, module: Module, flops_rate: float, hbm_rate: float, host_rate: float, collectives: Collectives
    ) -> None:
        self._module, self._collectives = module, collectives
        self._flops_rate, self._hbm_rate, self._host_rate = flops_rate, hbm_rate, host_rate
        self._traffic, self._phases, self._scopes = Traffic(module), PhaseFinder(module), Scopes(module)
        self._inside: dict[tuple[str, ...], list[Visit]] = collections.defaultdict(list)
        self.entry, *inside = visits(module)
        for visit in inside:
            assert visit.parent is not None and visit.caller is not None
            self._inside[*_path(visit.parent), visit.caller.name].append(visit)

    def run(self, visit: Visit) -> tuple[float, tuple[Span, ...]]:
        """The seconds of one execution of a computation, and what it consists of."""
        now, spans = 0.0, list[Span]()
        busy: dict[str, float] = collections.defaultdict(float)  # what is used beside kernels -> until when
        begun: dict[str, tuple[Instruction, str, float]] = {}  # what it is, and when it ends
        for each in visit.computation.instructions.values():
            name, opcode = each.name, each.opcode
            first = each.operands[0].partition('#')[0] if each.operands else ''
            kind, link = self._collectives.get((visit.computation.name, name), ('', 0.0))
            if opcode in _CALLS:
                for times, (spent, inside) in self._called(visit, each):
                    span = self._span(visit, each, _DEVICE, each.name, now, now + times * spent)
                    spans += [dataclasses.replace(span, times=times, inside=inside)] if inside else []
                    now += times * spent
            elif opcode.endswith('-start') and (unit := _LINK if kind else self._to_or_from(visit, each)):
                start = max(now, busy[unit])
                busy[unit] = end = start + (link if kind else self._least(visit, each))
                begun[name] = each, kind or 'copy', end
                spans.append(self._span(visit, each, unit, kind or 'copy', start, end))
            elif opcode.endswith(('-update', '-done')) and first in begun:
                starting, what, end = begun[name] = begun[first]
                if opcode.endswith('-done') and end > now:
                    spans.append(self._span(visit, starting, _DEVICE, f'wait: {what}', now, end))
                    now = end
            elif kind:
                start = max(now, busy[_LINK])
                end = start + link
                spans.append(self._span(visit, each, _LINK, kind, start, end))
                spans.append(self._span(visit, each, _DEVICE, f'wait: {kind}', now, end))
                now = busy[_LINK] = end
            elif spent := self._seconds(visit.computation, each, least := self._least(visit, each)):
                spent = max(spent, least / _REACHED)
                called = _TARGET.search(each.attributes)
                named = called[1] if called else name
                kernel = self._span(visit, each, _DEVICE, named, now, now + spent)
                spans.append(dataclasses.replace(kernel, bound=least))
                now += spent
        return now, tuple(spans)

    def _called(self, visit: Visit, each: Instruction) -> list[tuple[int, tuple[float, tuple[Span, ...]]]]:
        """How often a loop, a call, or the longest of some branches runs, and one such run."""
        runs = [(inside.count // visit.count, self.run(inside)) for inside in self._visited(visit, each)]
        if each.opcode == 'conditional':
            runs = [max(runs, key=lambda run: run[1][0])] if runs else []
        return runs

    def _visited(self, visit: Visit, each: Instruction) -> list[Visit]:
        return self._inside.get((*_path(visit), each.name), [])

    def _span(self, visit: Visit, each: Instruction, lane: str, name: str, start: float, end: float) -> Span:
        phase, source = self._phases.of(visit, each), source_of(self._module, visit.computation, each)
        named = named_in(self._module, each)
        scope = self._scopes.of(visit.op_name(named) or visit.scope, named.frame)
        return Span(lane, name, phase, scope, source, start, end - start)

    def _to_or_from(self, visit: Visit, each: Instruction) -> str:
        """The way over the link to the host that something asynchronous goes; empty if it goes none."""
        moved = [one for inside, one in self._of(visit, each) if host_bytes(inside, one)]
        return ('to host' if moved[0].arrays[0].space == HOST else 'from host') if moved else ''

    def _least(self, visit: Visit, each: Instruction) -> float:
        """The seconds that an instruction takes at least."""
        flops, to_host = (
            sum(itertools.starmap(measure, self._of(visit, each))) for measure in (flops_of, host_bytes)
        )
        moved = self._traffic.bytes_of(visit, each)
        return max(flops / self._flops_rate, moved / self._hbm_rate, to_host / self._host_rate)

    def _of(self, visit: Visit, each: Instruction) -> Iterator[tuple[Visit, Instruction]]:
        """An instruction, and all that is inside of what it calls."""
        yield visit, each
        for inside in self._visited(visit, each):
            for one in inside.computation.instructions.values():
                yield from self._of(inside, one)

    def _seconds(self, computation: Computation, each: Instruction, least: float) -> float:
        """The seconds of a kernel by XLA's models; without one the least, or several times that."""
        found = {name: 1e-6 * float(time) for time, name in _TIME.findall(each.attributes)}
        is_custom = 'kind=kCustom' in each.attributes
        if is_custom and found.get('sol') == 1e-6 * _NOT_KNOWN:
            of_library = [
                self._seconds(called, one, least)
                for called in self._module.calls(each)
                for one in called.instructions.values()
                if one.opcode == 'custom-call'
            ]
            if of_library:
                return sum(of_library)
            found.pop('sol')
        if 'sol' not in found:
            times = next((times for name, times in CUDNN.items() if name in each.attributes), 1.0)
            return found.get('indexing-cost-model', times * least)
        product = self._product(computation, each) if is_custom or each.opcode == 'custom-call' else None
        if product is None:
            return min(found['sol'], _APART * least)
        is_measured = tuple(array.dtype for array in product) in _MEASURED
        return found['sol'] / (1 if is_measured else product[-1]._replace(dims=()).bytes ** 3)

    def _product(self, computation: Computation, each: Instruction) -> tuple[Array, ...] | None:
        """The operands and the result of a product that is all of a kernel."""
        if each.opcode == 'custom-call':
            return (*computation.operands_of(each)[:2], each.arrays[0])
        for called in self._module.calls(each):
            for one in called.instructions.values():
                if one.opcode == 'dot':
                    return (*called.operands_of(one), each.arrays[0])
        return None


def _path(visit: Visit) -> tuple[str, ...]:
    """The names of the computations and the calls that lead to one at its place of the call tree."""
    if visit.parent is None or visit.caller is None:
        return (visit.computation.name,)
    return *_path(visit.parent), visit.caller.name, visit.computation.name
