"""Schedule of pipelines: runs a scan over layers on one microbatch after the other.

Outside of a pipeline the batch is sharded over the axis of stages, as over all batch axes. Inside, the body
of the scan is partitioned with microbatches in place of stages: `Shard` is the block of a microbatch,
`Partial` a sum over microbatches, and `Replicate` a value that is the same for all microbatches. Layers treat
microbatches independently; a layer that would communicate along this axis cannot run in a pipeline.

In a tick a stage runs a group of its layers on a microbatch, and sends the carry to the next stage, together
with the constants that have examples. Partial sums are not sent: each stage accumulates the sums of its
layers, and they become a partial sum over the stages.

With several repeats, a stage holds several groups of layers, and microbatches pass through all stages as
often. They go in groups of as many as there are stages, so that the first stage continues with what the last
stage sent in the tick before. Before its first microbatch a stage computes with real examples, and after its
last one it repeats that microbatch, because layers may turn zeros into NaN. Its writes in these
idle ticks are overwritten later, or are correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scalax._jax.equations import loop_of, open_jaxpr, scan_options
from scalax._jax.rewriting import bind_as_jit
from scalax._jaxpr.abstract_interpreter import LoopValues
from scalax._spmd.pipelines.summary import pipeline_scope
from scalax._spmd.pipelines.tick_assignment import microbatch_at
from scalax._spmd.placements.placement import REPLICATE, SUM, Placement, Shard
from scalax._spmd.values import PartitionedJaxpr


class PipelinedScan(NamedTuple):
    """A scan over layers that runs as a pipeline.

    Attributes:
        equation: the `scan`.
        placements: the placements along microbatches of the values of an iteration.
        axis: the mesh axis of the stages.
        num_stages: the number of stages.
        num_microbatches: the number of microbatches.
        num_repeats: the number of groups of layers on each stage.
        gathers_once: whether weights are gathered once, and not in each tick.
        line: the line of the user's code.
    """

    equation: Any
    placements: LoopValues[Placement]
    axis: str
    num_stages: int
    num_microbatches: int
    num_repeats: int
    gathers_once: bool
    line: str

    @property
    def is_batch_sharded(self) -> bool:
        """Whether the batch is sharded over the stages outside of the pipeline."""
        return self.num_microbatches % self.num_stages == 0

    @property
    def num_steps(self) -> int:
        """The number of steps of a stage: in each, it runs a group of its layers on a microbatch."""
        return self.num_repeats * self.num_microbatches

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return self.num_steps + self.num_stages - 1


class _Assignment(NamedTuple):
    """The work of a stage in a tick.

    Attributes:
        microbatch: the index of the microbatch.
        repeat: the repeat of the microbatch.
        is_idle: whether the stage is idle, so that its results are not used.
        is_done: whether the stage has computed all its microbatches.
    """

    microbatch: Any
    repeat: Any
    is_idle: Any
    is_done: Any


class Ticks:
    """A pipeline as a function of local shards, in manual code.

    Its operands are those of the scan, without sums that are initially zero.

    Args:
        pipeline: the pipeline.
        inner: the partitioned body of the scan.
        has_initial_sum: whether each value of the carry is a sum that is not initially zero.

    Attributes:
        group_size: the number of layers that a stage runs in a tick.
    """

    def __init__(
        self, pipeline: PipelinedScan, inner: PartitionedJaxpr, has_initial_sum: Sequence[bool]
    ) -> None:
        equation = pipeline.equation
        self._pipeline, self._inner, self._has_initial_sum = pipeline, inner, has_initial_sum
        self._loop, self._options = loop_of(equation), scan_options(equation)
        self._types = [var.aval for var in open_jaxpr(inner.jaxpr).outvars]
        self.group_size = (self._loop.length or 0) // (pipeline.num_stages * pipeline.num_repeats)
        self._options['unroll'] = max(1, min(int(self._options['unroll']), self.group_size))
        self._direction = -1 if self._options['reverse'] else 1
        self._first_stage, self._last_stage = (0, pipeline.num_stages - 1)[:: self._direction]
        # Constants with examples, and the carry without sums, are sent from stage to stage.
        placements = pipeline.placements
        self._sent_consts = [x for x in placements.consts if isinstance(x, Shard)]
        self._sent = [*self._sent_consts, *[x for x in placements.carry if x != SUM]]
        self.__name__ = 'pipeline'

    def __call__(self, *operands: Any) -> list[Any]:
        placements, num_carry = self._pipeline.placements, self._loop.num_carry
        operands_left = iter(operands)
        consts = [next(operands_left) for _ in placements.consts]
        init = [
            next(operands_left) if placement != SUM or has_sum else None
            for placement, has_sum in zip(placements.carry, self._has_initial_sum, strict=True)
        ]
        stacks = [*operands_left]
        const_pairs = [*zip(consts, placements.consts, strict=True)]
        inputs = [x for x, placement in const_pairs if isinstance(placement, Shard)]
        inputs += [x for x, placement in zip(init, placements.carry, strict=True) if placement != SUM]
        local_consts = [x for x, placement in const_pairs if not isinstance(placement, Shard)]
        buffers = self._run_ticks(inputs, local_consts, stacks)
        carry = [
            (x if first is None else x + first.astype(x.dtype))
            if placement == SUM
            else self._collect(x, placement)
            for x, first, placement in zip(buffers, init, placements.carry, strict=False)
        ]
        return [
            x.astype(aval.dtype) if x.dtype != aval.dtype else x
            for x, aval in zip([*carry, *buffers[num_carry:]], self._types, strict=True)
        ]

    def _run_ticks(
        self, inputs: Sequence[Any], local_consts: Sequence[Any], stacks: Sequence[Any]
    ) -> list[Any]:
        """Returns the buffers of a stage after all ticks: the carry of the last stage, sums, and ys.

        Args:
            inputs: the values that are sent from stage to stage, as they enter.
            local_consts: the other constants.
            stacks: the stacks.
        """
        placements, num_carry = self._pipeline.placements, self._loop.num_carry
        # The position in the pipeline: the number of ticks before the stage gets its first microbatch.
        position = self._direction * (jax.lax.axis_index(self._pipeline.axis) - self._first_stage)
        last_position = self._pipeline.num_stages - 1
        entering = [(self._inject(x, p), p) for x, p in zip(inputs, self._sent, strict=True)]

        def next_values(tick: Any, received: Sequence[Any], current: Sequence[Any]) -> list[Any]:
            """Returns the values that a stage computes with in a tick."""
            assignment, first = self._assignment(tick - position), self._assignment(tick)
            takes_input = (position == 0) & (assignment.repeat == 0)
            from_input = [self._microbatch_of(x, p, first.microbatch) for x, p in entering]
            values = [jnp.where(takes_input, *pair) for pair in zip(from_input, received, strict=True)]
            return [jnp.where(assignment.is_done, *pair) for pair in zip(current, values, strict=True)]

        def run_tick(
            state: tuple[list[Any], list[Any]], tick: Any
        ) -> tuple[tuple[list[Any], list[Any]], None]:
            current, buffers = state
            assignment = self._assignment(tick - position)
            leaving = self._assignment(tick - last_position)
            carry, ys = self._run_layers(current, local_consts, stacks, assignment)
            carry_buffers = [
                self._put(buffer, x, placement, leaving.microbatch)
                if isinstance(placement, Shard)
                else _accumulate(buffer, x, placement, assignment)
                for buffer, x, placement in zip(buffers, carry, placements.carry, strict=False)
            ]
            y_buffers = [
                self._put_in_stack(buffer, x, placement, assignment)
                for buffer, x, placement in zip(buffers[num_carry:], ys, placements.ys, strict=True)
            ]
            sent = [
                *current[: len(self._sent_consts)],
                *[x for x, placement in zip(carry, placements.carry, strict=True) if placement != SUM],
            ]
            received = [*map(self._send, sent)]
            return (next_values(tick + 1, received, current), [*carry_buffers, *y_buffers]), None

        first = [self._microbatch_of(x, placement, 0) for x, placement in entering]
        buffers = self._init_buffers(first[len(self._sent_consts) :])
        start = next_values(jnp.int32(0), first, first), buffers
        (_, buffers), _ = jax.lax.scan(run_tick, start, jnp.arange(self._pipeline.ticks))
        return buffers

    def _assignment(self, step: Any) -> _Assignment:
        """Returns the work of a stage in its step of this index; it is idle before step 0."""
        pipeline = self._pipeline
        last_step = pipeline.num_steps - 1
        clipped = jnp.clip(step, 0, last_step)
        microbatch, repeat = microbatch_at(clipped, pipeline.num_stages, pipeline.num_repeats)
        is_done = step > last_step
        return _Assignment(microbatch, repeat, (step < 0) | is_done, is_done)

    def _run_layers(
        self,
        current: Sequence[Any],
        local_consts: Sequence[Any],
        stacks: Sequence[Any],
        assignment: _Assignment,
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Runs a group of layers on a microbatch, and returns the carry and the ys."""
        placements, sent, local = self._pipeline.placements, iter(current), iter(local_consts)
        consts = [next(sent if isinstance(placement, Shard) else local) for placement in placements.consts]
        init = [
            jnp.zeros(aval.shape, aval.dtype) if placement == SUM else next(sent)
            for aval, placement in zip(self._types, placements.carry, strict=False)
        ]
        xs = [
            self._layer_group(self._microbatch_of(x, _in_stack(placement), assignment.microbatch), assignment)
            for x, placement in zip(stacks, placements.xs, strict=True)
        ]
        takes_index = self._inner.takes_microbatch_index
        index = [assignment.microbatch.astype('int32')] if takes_index else []

        def run_layer(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = [*bind_as_jit(self._inner.jaxpr, [*index, *consts, *carry, *xs], 'layer')]
            return results[: self._loop.num_carry], results[self._loop.num_carry :]

        return jax.lax.scan(run_layer, init, xs, self.group_size, **self._options)

    # Microbatches and groups of layers

    def _microbatch_of(self, x: Any, placement: Placement, microbatch: Any) -> Any:
        """Returns the part of a value that belongs to a microbatch."""
        if not isinstance(placement, Shard):
            return x
        size = x.shape[placement.dim] // self._pipeline.num_microbatches
        return jax.lax.dynamic_slice_in_dim(x, microbatch * size, size, placement.dim)

    def _put(self, buffer: Any, x: Any, placement: Shard, microbatch: Any) -> Any:
        """Writes the part that belongs to a microbatch into a buffer."""
        start = microbatch * x.shape[placement.dim]
        return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, placement.dim)

    def _layer_group(self, stack: Any, assignment: _Assignment) -> Any:
        """Returns the layers of a stack that a stage runs in a tick."""
        if self._pipeline.num_repeats == 1:
            return stack
        return jax.lax.dynamic_slice_in_dim(stack, self._group_start(assignment), self.group_size)

    def _group_start(self, assignment: _Assignment) -> Any:
        """Returns the index of the first layer of the group, among the layers of the stage."""
        last_group = self._pipeline.num_repeats - 1
        group = assignment.repeat if self._direction > 0 else last_group - assignment.repeat
        return group * self.group_size

    def _init_buffers(self, init: Sequence[Any]) -> list[Any]:
        """Returns the buffers before the first tick.

        Args:
            init: the initial carry of a microbatch, without sums.
        """
        placements, init_left, buffers = self._pipeline.placements, iter(init), []
        pairs = zip(self._types, [*placements.carry, *placements.ys], strict=True)
        for i, (aval, placement) in enumerate(pairs):
            is_carry = i < self._loop.num_carry
            first = next(init_left) if is_carry and placement != SUM else None
            if is_carry and placement == REPLICATE:
                buffers.append(first)
                continue
            shape, dtype = [*aval.shape], aval.dtype
            if isinstance(placement, Shard):
                shape[placement.dim] *= self._pipeline.num_microbatches
            layers = [] if is_carry else [self.group_size * self._pipeline.num_repeats]
            buffers.append(jnp.zeros((*layers, *shape), _sum_dtype(dtype) if placement == SUM else dtype))
        return buffers

    def _put_in_stack(self, buffer: Any, x: Any, placement: Placement, assignment: _Assignment) -> Any:
        """Writes the ys of a tick into the buffer of a stack."""
        start = self._group_start(assignment)
        if isinstance(placement, Shard):
            indices: list[Any] = [start, *[0] * (x.ndim - 1)]
            indices[placement.dim + 1] = assignment.microbatch * x.shape[placement.dim + 1]
            return jax.lax.dynamic_update_slice(buffer, x, indices)
        if self._pipeline.num_repeats == 1:
            return _accumulate(buffer, x, placement, assignment)
        group = _accumulate(self._layer_group(buffer, assignment), x, placement, assignment)
        return jax.lax.dynamic_update_slice_in_dim(buffer, group, start, 0)

    # Communication

    def _inject(self, x: Any, placement: Placement) -> Any:
        """Sends all microbatches of a value to the first stage. Each stage owns some of them."""
        if not isinstance(placement, Shard) or not self._pipeline.is_batch_sharded:
            return x
        axis = self._pipeline.axis
        with pipeline_scope('microbatches enter the pipeline', self._pipeline.line):
            parts = [
                jax.lax.ppermute(x, axis, [(owner, self._first_stage)])
                for owner in range(self._pipeline.num_stages)
            ]
        return jnp.concatenate(parts, placement.dim)

    def _collect(self, x: Any, placement: Placement) -> Any:
        """Sends a value of the last stage to the stages that own its microbatches, or to all stages."""
        pipeline, stage = self._pipeline, jax.lax.axis_index(self._pipeline.axis)
        if not isinstance(placement, Shard) or not pipeline.is_batch_sharded:
            return _broadcast(x, stage == self._last_stage, pipeline)
        size, collected = x.shape[placement.dim] // pipeline.num_stages, None
        for owner in range(pipeline.num_stages):
            part = jax.lax.slice_in_dim(x, owner * size, (owner + 1) * size, axis=placement.dim)
            with pipeline_scope('microbatches leave the pipeline', pipeline.line):
                received = jax.lax.ppermute(part, pipeline.axis, [(self._last_stage, owner)])
            collected = received if collected is None else jnp.where(stage == owner, received, collected)
        return collected

    def _send(self, x: Any) -> Any:
        """Sends a value to the next stage, and returns the one from the previous stage.

        With several repeats, the last stage sends to the first one.
        """
        num_stages = self._pipeline.num_stages
        permutation = [(stage, (stage + self._direction) % num_stages) for stage in range(num_stages)]
        if self._pipeline.num_repeats == 1:
            permutation.remove((self._last_stage, self._first_stage))
        with pipeline_scope('to the next stage', self._pipeline.line):
            return jax.lax.ppermute(x, self._pipeline.axis, permutation)


def _in_stack(placement: Placement) -> Placement:
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _accumulate(buffer: Any, x: Any, placement: Placement, assignment: _Assignment) -> Any:
    """Adds the sum of a tick to a buffer; a value that is the same for all examples replaces it."""
    if placement != SUM:
        return x
    return buffer + jnp.where(assignment.is_idle, 0, x).astype(buffer.dtype)


def _broadcast(x: Any, is_source: Any, pipeline: PipelinedScan) -> Any:
    """Returns the value of one stage on all stages."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _broadcast(jax.random.key_data(x), is_source, pipeline)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    summand = x.astype('uint8') if x.dtype == jnp.bool_ else x
    with pipeline_scope('microbatches leave the pipeline', pipeline.line):
        total = jax.lax.psum(jnp.where(is_source, summand, jnp.zeros_like(summand)), pipeline.axis)
    return total.astype(x.dtype)


def _sum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which sums over microbatches are accumulated: at least float32."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_narrow else dtype
