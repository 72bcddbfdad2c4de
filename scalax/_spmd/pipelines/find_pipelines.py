"""Finds the loops over layers that are sharded over an axis of stages, and can run as pipelines."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from scalax._core.pytree.paths import array_bytes
from scalax._core.pytree.spec_validation import unknown_axis_text
from scalax._jax import equations, rewriting
from scalax._jax.equations import (
    argument_names,
    is_on_device,
    loop_of,
    open_jaxpr,
    producers_of,
    scan_options,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.abstract_interpreter import LoopValues
from scalax._jaxpr.batch_dims import PARTIAL_SUM, BatchDim, BatchDimAnalysis, BatchValue, MixesExamples
from scalax._jaxpr.carry_accumulation import carry_increment
from scalax._jaxpr.dim_sharding import DimSharding, of_dims
from scalax._jaxpr.source_lines import line_of
from scalax._spmd.batch.batch_arguments import BatchArguments
from scalax._spmd.pipelines.config import Pipeline
from scalax._spmd.pipelines.find_layer_scans import LAYERS, ROWS, LayerScanFinder
from scalax._spmd.pipelines.loop_fission import fission_scan
from scalax._spmd.pipelines.microbatching import Microbatching
from scalax._spmd.pipelines.schedule import PipelinedScan
from scalax._spmd.pipelines.sink_constants import sink_constants
from scalax._spmd.pipelines.summary import PipelinedLoop, PipelinedLoops
from scalax._spmd.placements.placement import REPLICATE, Placement, Shard
from scalax._spmd.placements.placement import SUM as SUMMED
from scalax.errors import StagesError, StagesWarning, plural, shown, warn

# More of the ticks idle than this are worth a warning.
_IDLE = 0.5


def find_pipelines(
    jaxpr: Any, arguments: BatchArguments, sizes: Mapping[str, int], pipeline: Pipeline
) -> tuple[Any, Mapping[int, PipelinedScan], PipelinedLoops]:
    """Returns a jaxpr with loops over layers that can run as pipelines, these, and what plans say of them.

    Args:
        jaxpr: the closed jaxpr of a step.
        arguments: what is known of its arguments.
        sizes: the sizes of the mesh axes.
        pipeline: the pipeline that the user requests.

    Raises:
        StagesError: something has to be changed, in the model, the rules or the mesh.
    """
    _check_rounds(pipeline, sizes[pipeline.axis])
    jaxpr = rewriting.inline_and_sink_constants(jaxpr, (), containing='scan')
    rows = _rows_of(arguments)
    microbatching = _microbatching(jaxpr, arguments, rows, sizes, pipeline)
    marks = [*_marks(jaxpr, arguments, rows, pipeline.axis)]
    places = LayerScanFinder(jaxpr, marks)
    if not places.loops:
        raise StagesError(
            f'no loop runs over layers that are sharded over {pipeline.axis!r}, so nothing is a pipeline. '
            f'{_sharded(marks, argument_names(jaxpr))}\n'
            'What to do: stack the parameters of layers (jax.tree.map(lambda *x: jnp.stack(x), *layers)), '
            f'run them by jax.lax.scan, and shard the first dimension of the stacks over {pipeline.axis!r} '
            'in in_shardings.'
        )
    _warn_idle(microbatching, pipeline)
    times = _times(open_jaxpr(jaxpr), places.loops)
    staged = _Staged(places, microbatching, pipeline, argument_names(jaxpr), times)
    jaxpr = staged.jaxpr(jaxpr)
    if not staged.loops:
        raise StagesError(
            'no loop over layers takes the batch, as far as is known: '
            f'{", ".join(sorted({*map(line_of, places.loops.values())}))}\n'
            'What to do: see step.explain_propagation(...) of the function without a pipeline for where '
            'examples are gathered.'
        )
    return jaxpr, staged.pipelines, staged.loops


def has_several_stages(sizes: Mapping[str, int], pipeline: Pipeline) -> bool:
    """Returns whether the axis of stages has several devices; warns if it has one.

    Raises:
        StagesError: the mesh has no such axis.
    """
    if pipeline.axis not in sizes:
        raise StagesError(f'{pipeline}: {unknown_axis_text(pipeline.axis, sizes)}')
    if sizes[pipeline.axis] > 1:
        return True
    warn(
        f'{pipeline}: {pipeline.axis!r} has one device, so loops over layers run as they are\nWhat to do: '
        'give it more devices, or leave out pipeline=.',
        StagesWarning,
    )
    return False


def _times(jaxpr: Any, loops: Container[int], times: int = 1) -> Counter[int]:
    """How often some equations, by their id, run in one call of a jaxpr."""
    found = Counter[int]()
    for equation in jaxpr.eqns:
        if id(equation) in loops:
            found[id(equation)] += times
            continue
        rounds = loop_of(equation).length if primitive_name(equation) == 'scan' else None
        for inside in equations.inner_jaxprs(equation):
            found += _times(inside, loops, times * (rounds or 1))
    return found


def _rows_of(arguments: BatchArguments) -> dict[int, int]:
    """Which dimension has the rows, of each argument that is a batch: the first one that is sharded."""
    dims = {i: arguments.example_dim(i) for i in range(len(arguments.shardings))}
    return {i: dim for i, dim in dims.items() if dim is not None}


def _microbatching(
    jaxpr: Any,
    arguments: BatchArguments,
    rows: Mapping[int, int],
    sizes: Mapping[str, int],
    pipeline: Pipeline,
) -> Microbatching:
    """Returns how the batch is split into microbatches."""
    invars, names = open_jaxpr(jaxpr).invars, argument_names(jaxpr)
    found = {i: (shape_of(invars[i])[dim], arguments.shardings[i][dim]) for i, dim in rows.items()}
    if len({*found.values()}) > 1:
        listed = '\n'.join(
            f'  {names[i] if names else i}: {count} examples over {", ".join(axes)}'
            for i, (count, axes) in found.items()
        )
        raise StagesError(
            f'{pipeline}: arrays of the batch have different numbers of examples, or are sharded over '
            f'different mesh axes:\n{listed}\n'
            'What to do: give all of them the same number of examples and the same axes.'
        )
    [(count, axes)] = {*found.values()}
    devices = math.prod(sizes[axis] for axis in axes if axis != pipeline.axis)
    return Microbatching(count, pipeline.num_microbatches, sizes[pipeline.axis], devices)


def _marks(
    jaxpr: Any, arguments: BatchArguments, rows: Mapping[int, int], axis: str
) -> Iterator[DimSharding]:
    """What is known of the dimensions of the arguments, as for `LayerScanFinder`."""
    for i, var in enumerate(open_jaxpr(jaxpr).invars):
        ndim = len(shape_of(var))
        if i in rows:
            yield of_dims({rows[i]: (ROWS,)}, ndim)
            continue
        known = arguments.shardings[i], arguments.state_shardings[i]
        over = {dim: (LAYERS,) for sharding in known for dim, axes in enumerate(sharding) if axis in axes}
        yield of_dims({**({0: (str(i),)} if ndim else {}), **over}, ndim)


def _sharded(marks: Sequence[DimSharding], names: Sequence[str]) -> str:
    """Which arguments are sharded over the axis, for a message: of one rule, or of one loop, is the fault."""
    found = [
        f'{names[i] if names else f"argument {i}"} in dimension {dim}'
        for i, known in enumerate(marks)
        for dim, each in enumerate(known)
        if LAYERS in each
    ]
    if not found:
        return 'No argument but the batch is sharded over it by in_shardings.'
    return f'Beside the batch, in_shardings shard over it:\n{shown(found)}'


def _check_layers(
    equation: Any,
    places: LayerScanFinder,
    names: Sequence[str],
    microbatching: Microbatching,
    pipeline: Pipeline,
) -> None:
    """Raises StagesError about stacks that are sharded otherwise, or layers that do not divide."""
    loop, line = loop_of(equation), line_of(equation)
    _, _, stacks = loop.split(equation.invars)
    elsewhere = {int(mark) for stack in stacks for mark in (places.of(stack) or ((),))[0] if mark.isdigit()}
    if elsewhere:
        listed = ', '.join(names[i] if names else f'argument {i}' for i in sorted(elsewhere))
        raise StagesError(
            f'the loop over layers at {line} takes stacks that are sharded over {pipeline.axis!r} in their '
            f'first dimension, and others that are not: {listed}\n'
            f'What to do: shard the first dimension of all of them over {pipeline.axis!r}, or of none.'
        )
    groups = microbatching.stages * pipeline.num_repeats
    length = loop.length or 0
    if length % groups:
        raise StagesError(
            f'the loop at {line} has {plural(length, "layer")}, which do not divide by '
            f'{microbatching.stages} stages'
            f'{f" x {pipeline.num_repeats} repeats" if pipeline.num_repeats > 1 else ""}\n'
            f'What to do: choose a size of {pipeline.axis!r} and num_repeats whose product divides {length}.'
        )


def _check_rounds(pipeline: Pipeline, count: int) -> None:
    """Raises StagesError about microbatches that cannot pass through stages with several repeats."""
    if pipeline.num_repeats > 1 and pipeline.num_microbatches % count:
        raise StagesError(
            f'{pipeline}: with several repeats, microbatches pass through {count} stages {count} at a time\n'
            f'What to do: choose a multiple of {count}, or leave rounds out.'
        )


def _warn_idle(microbatching: Microbatching, pipeline: Pipeline) -> None:
    """Warns about a pipeline that is idle most of the time, or that leaves its axis idle outside of it."""
    ticks, idle = (
        pipeline.num_repeats * pipeline.num_microbatches + microbatching.stages - 1,
        microbatching.stages - 1,
    )
    faults = [f'each stage is idle in {idle} of {ticks} ticks'] if idle >= _IDLE * ticks else []
    if microbatching.owners == 1:
        faults.append(
            'outside of the pipeline, as in the embedding and the head, all stages compute the same'
        )
    if faults:
        warn(
            f'{pipeline}: {", and ".join(faults)}\nWhat to do: choose more microbatches, a multiple of the '
            f'{microbatching.stages} stages.',
            StagesWarning,
        )


class _Staged(rewriting.Rewriter):
    """A jaxpr whose loops over layers can run as pipelines.

    Attributes:
        loops: what plans say of the loops, and the loops as they were in the user's step.
        pipelines: the loops that run as pipelines, by the ids of their equations, which stay in the jaxpr.
    """

    def __init__(
        self,
        places: LayerScanFinder,
        microbatching: Microbatching,
        pipeline: Pipeline,
        names: Sequence[str],
        times: Counter[int],
    ) -> None:
        super().__init__(lambda equation: equation)
        self.loops: list[tuple[PipelinedLoop, Any]] = []
        self.pipelines: dict[int, PipelinedScan] = {}
        self._places, self._microbatching, self._stages = places, microbatching, pipeline
        self._names, self._times = names, times

    def jaxpr(self, jaxpr: Any) -> Any:
        inner, makers = open_jaxpr(jaxpr), producers_of(open_jaxpr(jaxpr))
        if not any(id(equation) in self._places.loops for equation in inner.eqns):
            return super().jaxpr(jaxpr)
        eqns: list[Any] = []
        for equation in inner.eqns:
            if id(equation) in self._places.loops:
                eqns += self._loops(sink_constants(jaxpr, makers, equation), equation)
            else:
                eqns.append(self._equation(equation))
        return rewriting.replace_jaxpr(jaxpr, eqns=eqns)

    def _loops(self, equation: Any, before: Any) -> list[Any]:
        """Returns the equations of a loop over layers: the loop, or its parts.

        *before* is the loop in the user's step.
        """
        loop, line, pipeline = loop_of(equation), line_of(equation), self._stages
        dims = [
            next((dim for dim, marks in enumerate(self._places.of(x)) if ROWS in marks), None)
            for x in equation.invars
        ]
        sizes = [shape_of(x)[dim] for x, dim in zip(equation.invars, dims, strict=True) if dim is not None]
        if not sizes:
            return [equation]
        _check_layers(equation, self._places, self._names, self._microbatching, pipeline)
        # In a microbatch there are fewer rows; rows and tokens in one dimension are more.
        count = self._microbatching.rows
        if any(size % count for size in sizes):
            count = min(sizes)
        microbatching = self._microbatching._replace(rows=count)
        divisor = microbatching.microbatches * microbatching.devices
        if count % divisor or any(size % count for size in sizes):
            raise StagesError(
                f'{plural(count, "example")} of the batch at the loop over layers at {line} do not divide by '
                f'{pipeline.num_microbatches} microbatches x {microbatching.devices} devices of a stage that '
                f'share it\nWhat to do: choose a batch of a multiple of {divisor} examples, or fewer '
                'microbatches.'
            )
        operands = [
            None if dim is None else BatchDim(dim, shape_of(x)[dim] // count)
            for x, dim in zip(equation.invars, dims, strict=True)
        ]
        rows = BatchDimAnalysis(count)
        try:
            _check_effects(loop.body)
            if not all(map(is_on_device, [*equation.invars, *equation.outvars])):
                why = 'layers offload values to host memory'
                raise MixesExamples(
                    equation, why, 'recompute them (jax.checkpoint) instead of offloading them'
                )
            try:
                facts = rows.loop_fixpoint(equation, operands)
                _check_sums(equation, facts.carry)
            except MixesExamples:
                parts = fission_scan(equation, rows, operands)
                if not parts:
                    raise
                return [*itertools.chain.from_iterable(self._part(part, before) for part in parts)]
        except MixesExamples as refused:
            raise StagesError(
                f'the loop over layers at {line} cannot run on microbatches: {refused}, at '
                f'{line_of(refused.equation, [*refused.calls, equation])}\n'
                f'What to do: {refused.instead}; or run without pipeline=.'
            ) from None
        described = _described(equation, facts, microbatching, pipeline, self._times[id(before)])
        self.loops.append((described, before))
        self.pipelines[id(equation)] = PipelinedScan(
            *(equation, _placements(facts), pipeline.axis, microbatching.stages, pipeline.num_microbatches),
            *(pipeline.num_repeats, pipeline.fsdp_gather == 'step', line),
        )
        return [equation]

    def _part(self, equation: Any, before: Any) -> list[Any]:
        """Returns the equations of a part of a loop, which plans list by itself."""
        if primitive_name(equation) != 'scan':
            return [equation]
        self._times[id(equation)] = self._times[id(before)]
        return self._loops(equation, equation)


def _placements(facts: LoopValues[BatchValue]) -> LoopValues[Placement]:
    """The placements along microbatches of the values of a round."""

    def placement(fact: BatchValue) -> Placement:
        return Shard(fact.dim) if isinstance(fact, BatchDim) else REPLICATE if fact is None else SUMMED

    return LoopValues(*[[*map(placement, each)] for each in facts])


def _described(
    equation: Any,
    facts: LoopValues[BatchValue],
    microbatching: Microbatching,
    pipeline: Pipeline,
    executions: int,
) -> PipelinedLoop:
    """What plans say of a loop over layers."""
    loop = loop_of(equation)
    constants, carried, stacks = loop.split(equation.invars)

    def size(variables: Sequence[Any], known: Sequence[BatchValue], kind: Any) -> int:
        pairs = zip(variables, known, strict=False)
        return sum(array_bytes(var.aval) for var, fact in pairs if isinstance(fact, kind))

    along, moving = size(constants, facts.consts, BatchDim), size(carried, facts.carry, BatchDim)
    same = size(carried, facts.carry, type(None))
    return PipelinedLoop(
        line=line_of(equation),
        axis=pipeline.axis,
        stages=microbatching.stages,
        num_microbatches=pipeline.num_microbatches,
        num_repeats=pipeline.num_repeats,
        layers=loop.length or 0,
        is_backward=bool(scan_options(equation)['reverse']),
        executions=executions,
        weights=size(stacks, facts.xs, type(None)),
        saved_activation_bytes=size(equation.outvars[loop.num_carry :], facts.ys, BatchDim),
        send_bytes=(along + moving) // pipeline.num_microbatches + same,
        io_bytes=(along + 2 * moving) // pipeline.num_microbatches,
    )


def _check_effects(jaxpr: Any) -> None:
    """Raises `MixesExamples` about a print or another effect, which each stage would repeat in each tick."""
    for each in open_jaxpr(jaxpr).eqns:
        if not each.effects:  # those inside of a kernel stay there
            continue
        for inside in equations.inner_jaxprs(each):
            _check_effects(inside)
        why = f'{primitive_name(each)} has an effect, which would happen more often'
        raise MixesExamples(
            each, why, 'leave it out, or give its values to the loop as outputs of the layers'
        )


def _check_sums(equation: Any, carried: Sequence[BatchValue]) -> None:
    """Raises `MixesExamples` about a sum over rows to which a layer does more than to add something."""
    loop = loop_of(equation)
    body = open_jaxpr(rewriting.inline_calls(loop.body, lambda call: True))
    _, state, _ = loop.split(body.invars)
    for var, out, fact in zip(state, body.outvars, carried, strict=False):
        if fact == PARTIAL_SUM and carry_increment(body, var, out) is None:
            why = 'layers read a sum over the batch that they carry'
            raise MixesExamples(
                equation, why, 'carry a sum for each example, and add up over the batch after the loop'
            )
