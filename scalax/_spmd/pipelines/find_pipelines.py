"""Finds the scans over layers of a step that can run as pipelines, and checks that they can."""

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
from scalax._spmd.pipelines.find_layer_scans import BATCH, LAYERS, LayerScanFinder
from scalax._spmd.pipelines.loop_fission import fission_scan
from scalax._spmd.pipelines.microbatching import Microbatching
from scalax._spmd.pipelines.schedule import PipelinedScan
from scalax._spmd.pipelines.sink_constants import sink_constants
from scalax._spmd.pipelines.summary import PipelinedLoop, PipelinedLoops
from scalax._spmd.placements.placement import REPLICATE, SUM, Placement, Shard
from scalax.errors import PipelineError, PipelineWarning, plural, shown, warn

# A pipeline that is idle in a larger fraction of the ticks warns.
_MAX_IDLE_FRACTION = 0.5


def find_pipelines(
    jaxpr: Any, arguments: BatchArguments, sizes: Mapping[str, int], pipeline: Pipeline
) -> tuple[Any, Mapping[int, PipelinedScan], PipelinedLoops]:
    """Finds the scans over layers of a step that run as pipelines.

    Args:
        jaxpr: the closed jaxpr of a step.
        arguments: the batch and the shardings of its arguments.
        sizes: the sizes of the mesh axes.
        pipeline: the pipeline that the user requests.

    Returns:
        A jaxpr that computes the same, its scans that run as pipelines by equation id, and their summaries.

    Raises:
        PipelineError: something has to be changed, in the model, the rules or the mesh.
    """
    _check_microbatches(pipeline, sizes[pipeline.axis])
    jaxpr = rewriting.inline_and_sink_constants(jaxpr, (), containing='scan')
    batch_dims = _batch_dims(arguments)
    microbatching = _microbatching(jaxpr, arguments, batch_dims, sizes, pipeline)
    marks = [*_marks(jaxpr, arguments, batch_dims, pipeline.axis)]
    finder = LayerScanFinder(jaxpr, marks)
    if not finder.loops:
        raise PipelineError(
            f'no loop runs over layers that are sharded over {pipeline.axis!r}, so nothing is a pipeline. '
            f'{_sharded_arguments_text(marks, argument_names(jaxpr))}\n'
            'What to do: stack the parameters of layers (jax.tree.map(lambda *x: jnp.stack(x), *layers)), '
            f'run them by jax.lax.scan, and shard the first dimension of the stacks over {pipeline.axis!r} '
            'in in_shardings.'
        )
    _warn_if_idle(microbatching, pipeline)
    executions = _count_executions(open_jaxpr(jaxpr), finder.loops)
    rewriter = _PipelinePreparation(finder, microbatching, pipeline, argument_names(jaxpr), executions)
    jaxpr = rewriter.jaxpr(jaxpr)
    if not rewriter.loops:
        raise PipelineError(
            'no scan over layers consumes a batch-sharded value: '
            f'{", ".join(sorted({*map(line_of, finder.loops.values())}))}\n'
            'What to do: print step.explain_propagation(...) of the function without a pipeline to see where '
            'examples are gathered.'
        )
    return jaxpr, rewriter.pipelines, rewriter.loops


def has_several_stages(sizes: Mapping[str, int], pipeline: Pipeline) -> bool:
    """Returns whether the axis of stages has several devices; warns if it has one.

    Raises:
        PipelineError: the mesh has no such axis.
    """
    if pipeline.axis not in sizes:
        raise PipelineError(f'{pipeline}: {unknown_axis_text(pipeline.axis, sizes)}')
    if sizes[pipeline.axis] > 1:
        return True
    warn(
        f'{pipeline}: {pipeline.axis!r} has one device, so loops over layers run as they are\nWhat to do: '
        'give it more devices, or leave out pipeline=.',
        PipelineWarning,
    )
    return False


def _count_executions(jaxpr: Any, loops: Container[int], executions: int = 1) -> Counter[int]:
    """Returns how often some equations, by their ids, run in one call of a jaxpr."""
    counts = Counter[int]()
    for equation in jaxpr.eqns:
        if id(equation) in loops:
            counts[id(equation)] += executions
            continue
        length = loop_of(equation).length if primitive_name(equation) == 'scan' else None
        for inner in equations.inner_jaxprs(equation):
            counts += _count_executions(inner, loops, executions * (length or 1))
    return counts


def _batch_dims(arguments: BatchArguments) -> dict[int, int]:
    """Returns the batch dimensions: the index of an argument that is a batch -> its dimension of examples."""
    dims = {i: arguments.example_dim(i) for i in range(len(arguments.shardings))}
    return {i: dim for i, dim in dims.items() if dim is not None}


def _microbatching(
    jaxpr: Any,
    arguments: BatchArguments,
    batch_dims: Mapping[int, int],
    sizes: Mapping[str, int],
    pipeline: Pipeline,
) -> Microbatching:
    """Returns how the batch is split into microbatches."""
    invars, names = open_jaxpr(jaxpr).invars, argument_names(jaxpr)
    batches = {i: (shape_of(invars[i])[dim], arguments.shardings[i][dim]) for i, dim in batch_dims.items()}
    if len({*batches.values()}) > 1:
        listed = '\n'.join(
            f'  {names[i] if names else i}: {count} examples over {", ".join(axes)}'
            for i, (count, axes) in batches.items()
        )
        raise PipelineError(
            f'{pipeline}: arrays of the batch have different numbers of examples, or are sharded over '
            f'different mesh axes:\n{listed}\n'
            'What to do: give all of them the same number of examples and the same axes.'
        )
    [(count, axes)] = {*batches.values()}
    num_devices = math.prod(sizes[axis] for axis in axes if axis != pipeline.axis)
    return Microbatching(count, pipeline.num_microbatches, sizes[pipeline.axis], num_devices)


def _marks(
    jaxpr: Any, arguments: BatchArguments, batch_dims: Mapping[int, int], axis: str
) -> Iterator[DimSharding]:
    """Yields the marks of the dimensions of each argument, for `LayerScanFinder`."""
    for i, var in enumerate(open_jaxpr(jaxpr).invars):
        ndim = len(shape_of(var))
        if i in batch_dims:
            yield of_dims({batch_dims[i]: (BATCH,)}, ndim)
            continue
        shardings = arguments.shardings[i], arguments.state_shardings[i]
        layer_dims = {
            dim: (LAYERS,) for sharding in shardings for dim, axes in enumerate(sharding) if axis in axes
        }
        yield of_dims({**({0: (str(i),)} if ndim else {}), **layer_dims}, ndim)


def _sharded_arguments_text(marks: Sequence[DimSharding], names: Sequence[str]) -> str:
    """Lists the arguments that are sharded over the axis, for a message."""
    listed = [
        f'{names[i] if names else f"argument {i}"} in dimension {dim}'
        for i, argument_marks in enumerate(marks)
        for dim, dim_marks in enumerate(argument_marks)
        if LAYERS in dim_marks
    ]
    if not listed:
        return 'No argument but the batch is sharded over it by in_shardings.'
    return f'Beside the batch, in_shardings shard over it:\n{shown(listed)}'


def _check_layers(
    equation: Any,
    finder: LayerScanFinder,
    names: Sequence[str],
    microbatching: Microbatching,
    pipeline: Pipeline,
) -> None:
    """Raises PipelineError about stacks with other shardings, or a number of layers that is not divisible."""
    loop, line = loop_of(equation), line_of(equation)
    _, _, stacks = loop.split(equation.invars)
    first_dim_marks = [mark for stack in stacks for mark in (finder.of(stack) or ((),))[0]]
    unsharded = {int(mark) for mark in first_dim_marks if mark.isdigit()}
    if unsharded:
        listed = ', '.join(names[i] if names else f'argument {i}' for i in sorted(unsharded))
        raise PipelineError(
            f'the loop over layers at {line} takes stacks that are sharded over {pipeline.axis!r} in their '
            f'first dimension, and others that are not: {listed}\n'
            f'What to do: shard the first dimension of all of them over {pipeline.axis!r}, or of none.'
        )
    groups = microbatching.num_stages * pipeline.num_repeats
    length = loop.length or 0
    if length % groups:
        raise PipelineError(
            f'the loop at {line} has {plural(length, "layer")}, which are not divisible by '
            f'{microbatching.num_stages} stages'
            f'{f" x {pipeline.num_repeats} repeats" if pipeline.num_repeats > 1 else ""}\n'
            f'What to do: choose a size of {pipeline.axis!r} and num_repeats whose product divides {length}.'
        )


def _check_microbatches(pipeline: Pipeline, num_stages: int) -> None:
    """Raises PipelineError about a number of microbatches that is impossible with several repeats."""
    if pipeline.num_repeats > 1 and pipeline.num_microbatches % num_stages:
        raise PipelineError(
            f'{pipeline}: with several repeats, microbatches pass through {num_stages} stages {num_stages} '
            'at a time\n'
            f'What to do: choose a multiple of {num_stages}, or leave out num_repeats.'
        )


def _warn_if_idle(microbatching: Microbatching, pipeline: Pipeline) -> None:
    """Warns about a pipeline that is idle most of the time, or that replicates the batch outside of it."""
    idle = microbatching.num_stages - 1
    ticks = pipeline.num_repeats * pipeline.num_microbatches + idle
    faults = [f'each stage is idle in {idle} of {ticks} ticks'] if idle >= _MAX_IDLE_FRACTION * ticks else []
    if not microbatching.is_batch_sharded:
        faults.append(
            'outside of the pipeline, as in the embedding and the head, all stages compute the same'
        )
    if faults:
        warn(
            f'{pipeline}: {", and ".join(faults)}\nWhat to do: choose more microbatches, a multiple of the '
            f'{microbatching.num_stages} stages.',
            PipelineWarning,
        )


class _PipelinePreparation(rewriting.Rewriter):
    """Prepares a jaxpr, so that its scans over layers can run as pipelines.

    Attributes:
        loops: the summaries of the pipelines, with the equations of their loops in the user's step.
        pipelines: the pipelines, by the ids of their equations in the rewritten jaxpr.
    """

    def __init__(
        self,
        finder: LayerScanFinder,
        microbatching: Microbatching,
        pipeline: Pipeline,
        names: Sequence[str],
        executions: Counter[int],
    ) -> None:
        super().__init__(lambda equation: equation)
        self.loops: list[tuple[PipelinedLoop, Any]] = []
        self.pipelines: dict[int, PipelinedScan] = {}
        self._finder, self._microbatching, self._pipeline = finder, microbatching, pipeline
        self._names, self._executions = names, executions

    def jaxpr(self, jaxpr: Any) -> Any:
        inner, producers = open_jaxpr(jaxpr), producers_of(open_jaxpr(jaxpr))
        if not any(id(equation) in self._finder.loops for equation in inner.eqns):
            return super().jaxpr(jaxpr)
        eqns: list[Any] = []
        for equation in inner.eqns:
            if id(equation) in self._finder.loops:
                eqns += self._rewrite_loop(sink_constants(jaxpr, producers, equation), equation)
            else:
                eqns.append(self._equation(equation))
        return rewriting.replace_jaxpr(jaxpr, eqns=eqns)

    def _rewrite_loop(self, equation: Any, original: Any) -> list[Any]:
        """Returns the equations of a scan over layers: the scan, or the scans that it is split into.

        Args:
            equation: the scan.
            original: the scan in the user's step.
        """
        loop, line, pipeline = loop_of(equation), line_of(equation), self._pipeline
        dims = [*map(self._finder.batch_dim, equation.invars)]
        sizes = [shape_of(x)[dim] for x, dim in zip(equation.invars, dims, strict=True) if dim is not None]
        if not sizes:
            return [equation]
        _check_layers(equation, self._finder, self._names, self._microbatching, pipeline)
        microbatching = self._loop_microbatching(sizes, line)
        batch_values = [
            None if dim is None else BatchDim(dim, shape_of(x)[dim] // microbatching.num_examples)
            for x, dim in zip(equation.invars, dims, strict=True)
        ]
        analysis = BatchDimAnalysis(microbatching.num_examples)
        try:
            _check_effects(loop.body)
            if not all(map(is_on_device, [*equation.invars, *equation.outvars])):
                reason = 'layers offload values to host memory'
                instead = 'recompute them (jax.checkpoint) instead of offloading them'
                raise MixesExamples(equation, reason, instead)
            try:
                values = analysis.loop_fixpoint(equation, batch_values)
                _check_sums(equation, values.carry)
            except MixesExamples:
                parts = fission_scan(equation, analysis, batch_values)
                if not parts:
                    raise
                return [*itertools.chain.from_iterable(self._rewrite_part(x, original) for x in parts)]
        except MixesExamples as error:
            raise PipelineError(
                f'the loop over layers at {line} cannot run on microbatches: {error}, at '
                f'{line_of(error.equation, [*error.calls, equation])}\n'
                f'What to do: {error.instead}; or run without pipeline=.'
            ) from None
        summary = _summary(equation, values, microbatching, pipeline, self._executions[id(original)])
        self.loops.append((summary, original))
        self.pipelines[id(equation)] = PipelinedScan(
            equation=equation,
            placements=_microbatch_placements(values),
            axis=pipeline.axis,
            num_stages=microbatching.num_stages,
            num_microbatches=pipeline.num_microbatches,
            num_repeats=pipeline.num_repeats,
            gathers_once=pipeline.fsdp_gather == 'step',
            line=line,
        )
        return [equation]

    def _loop_microbatching(self, sizes: Sequence[int], line: str) -> Microbatching:
        """Returns how a scan splits its operands into microbatches.

        Args:
            sizes: the sizes of the batch dimensions of its operands.
            line: its source line.

        Raises:
            PipelineError: the number of examples is not divisible.
        """
        # In a loop over microbatches there are fewer examples. Merged with tokens, they have more elements.
        count = self._microbatching.num_examples
        if any(size % count for size in sizes):
            count = min(sizes)
        microbatching = self._microbatching._replace(num_examples=count)
        divisor = microbatching.num_microbatches * microbatching.num_devices
        if count % divisor or any(size % count for size in sizes):
            raise PipelineError(
                f'{plural(count, "example")} of the batch at the loop over layers at {line} are not '
                f'divisible by {microbatching.num_microbatches} microbatches x {microbatching.num_devices} '
                f'devices of a stage that share it\nWhat to do: choose a batch of a multiple of '
                f'{divisor} examples, or fewer microbatches.'
            )
        return microbatching

    def _rewrite_part(self, equation: Any, original: Any) -> list[Any]:
        """Returns the equations of a part of a loop. Plans list each scan by itself."""
        if primitive_name(equation) != 'scan':
            return [equation]
        self._executions[id(equation)] = self._executions[id(original)]
        return self._rewrite_loop(equation, equation)


def _microbatch_placements(values: LoopValues[BatchValue]) -> LoopValues[Placement]:
    """Returns the placements along microbatches of the values of an iteration."""

    def placement(value: BatchValue) -> Placement:
        return Shard(value.dim) if isinstance(value, BatchDim) else REPLICATE if value is None else SUM

    return LoopValues(*[[*map(placement, group)] for group in values])


def _summary(
    equation: Any,
    values: LoopValues[BatchValue],
    microbatching: Microbatching,
    pipeline: Pipeline,
    executions: int,
) -> PipelinedLoop:
    """Returns the summary of a pipeline for plans."""
    loop = loop_of(equation)
    consts, init, stacks = loop.split(equation.invars)

    def total_bytes(variables: Sequence[Any], batch_values: Sequence[BatchValue], kind: Any) -> int:
        pairs = zip(variables, batch_values, strict=False)
        return sum(array_bytes(var.aval) for var, value in pairs if isinstance(value, kind))

    const_bytes = total_bytes(consts, values.consts, BatchDim)
    carry_bytes = total_bytes(init, values.carry, BatchDim)
    replicated_carry_bytes = total_bytes(init, values.carry, type(None))
    return PipelinedLoop(
        line=line_of(equation),
        axis=pipeline.axis,
        stages=microbatching.num_stages,
        num_microbatches=pipeline.num_microbatches,
        num_repeats=pipeline.num_repeats,
        layers=loop.length or 0,
        is_backward=bool(scan_options(equation)['reverse']),
        executions=executions,
        weights=total_bytes(stacks, values.xs, type(None)),
        saved_activation_bytes=total_bytes(equation.outvars[loop.num_carry :], values.ys, BatchDim),
        send_bytes=(const_bytes + carry_bytes) // pipeline.num_microbatches + replicated_carry_bytes,
        io_bytes=(const_bytes + 2 * carry_bytes) // pipeline.num_microbatches,
    )


def _check_effects(jaxpr: Any) -> None:
    """Raises `MixesExamples` about a print or another effect, which each stage would repeat in each tick."""
    for equation in open_jaxpr(jaxpr).eqns:
        if not equation.effects:  # the effects of a kernel's equations stay inside the kernel
            continue
        for inner in equations.inner_jaxprs(equation):
            _check_effects(inner)
        reason = f'{primitive_name(equation)} has an effect, which would happen more often'
        instead = 'leave it out, or give its values to the loop as outputs of the layers'
        raise MixesExamples(equation, reason, instead)


def _check_sums(equation: Any, carry: Sequence[BatchValue]) -> None:
    """Raises `MixesExamples` about a sum over examples that layers use other than by adding to it."""
    loop = loop_of(equation)
    body = open_jaxpr(rewriting.inline_calls(loop.body, lambda call: True))
    _, carry_vars, _ = loop.split(body.invars)
    for var, result, value in zip(carry_vars, body.outvars, carry, strict=False):
        if value == PARTIAL_SUM and carry_increment(body, var, result) is None:
            reason = 'layers read a sum over the batch that they carry'
            instead = 'carry a sum for each example, and sum over the batch after the loop'
            raise MixesExamples(equation, reason, instead)
