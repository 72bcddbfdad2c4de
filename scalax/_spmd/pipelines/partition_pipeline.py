"""Partitions the scans over layers that run as pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scalax._jax.equations import CALLS, loop_of, open_jaxpr
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import replace_jaxpr, without_prevent_cse
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.pipelines.layer_groups import reorder_layer_groups
from scalax._spmd.pipelines.schedule import PipelinedScan, Ticks
from scalax._spmd.placements.layouts import Layout, ShiftedDims, remap_layout
from scalax._spmd.placements.placement import REPLICATE, SUM, Partial, Placement, Placements, Shard, join
from scalax._spmd.values import (
    REDUCE_TO_STATE,
    Argument,
    CannotPartition,
    PartitionedJaxpr,
    ReductionTarget,
    Value,
)

_MAX_FIXPOINT_STEPS = 12


def partition_pipeline(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], pipeline: PipelinedScan
) -> None:
    """Partitions a scan over layers as a pipeline.

    Args:
        editor: the jaxpr that is partitioned.
        equation: the `scan`.
        values: its operands.
        pipeline: the pipeline.
    """
    _PipelinePartitioner(editor, equation, values, pipeline).run()


class _PipelinePartitioner:
    """Partitions one scan over layers. Arguments as for `partition_pipeline`."""

    def __init__(
        self, editor: JaxprEditor, equation: Any, values: Sequence[Value], pipeline: PipelinedScan
    ) -> None:
        self._editor, self._equation, self._pipeline = editor, equation, pipeline
        self._loop, self._context = loop_of(equation), editor.context
        self._consts, self._init, self._stacks = map(list, self._loop.split(values))
        along_microbatches = pipeline.placements
        pairs = zip(self._init, along_microbatches.carry, strict=True)
        editor.reduce_all([value for value, placement in pairs if placement != SUM], equation)
        editor.reduce_all([*self._consts, *self._stacks], equation)
        self._const_placements = [*map(self._inside, self._consts, along_microbatches.consts)]
        self._x_placements = [*map(self._element_placements, self._stacks, along_microbatches.xs)]
        self._carry_placements = [
            (SUM,) * len(self._context.axes) if placement == SUM else self._inside(value, placement)
            for value, placement in zip(self._init, along_microbatches.carry, strict=True)
        ]
        self._is_state = [value.origin is not None or value.is_state for value in self._stacks]

    def run(self) -> None:
        """Partitions the body, and writes the pipeline."""
        loop = self._loop
        inner = self._partition_body()
        # A value that is the same for all examples may still be computed for the examples of a microbatch.
        along_microbatches = [placements[-1] for placements in inner.placements]
        placements = self._pipeline.placements._replace(
            carry=along_microbatches[: loop.num_carry], ys=along_microbatches[loop.num_carry :]
        )
        self._pipeline = self._pipeline._replace(placements=placements)
        self._write(inner)

    # Placements

    def _outside(self, placements: Placements, along_microbatches: Placement) -> Placements:
        """Returns the placements outside of the pipeline of a value with these placements inside."""
        if isinstance(along_microbatches, Shard) and not self._pipeline.is_batch_sharded:
            along_microbatches = REPLICATE
        return (*placements[:-1], along_microbatches)

    def _inside(self, value: Value, along_microbatches: Placement) -> Placements:
        """Returns the placements of a constant or carry in the body. Examples are sharded along all axes."""
        others = value.placements[:-1]
        if isinstance(along_microbatches, Shard):
            others = tuple([x if isinstance(x, Shard) else along_microbatches for x in others])
        return (*others, along_microbatches)

    def _element_placements(self, value: Value, along_microbatches: Placement) -> Placements:
        """Returns the placements in the body of an element of a stack."""
        others: list[Placement] = []
        for x in value.placements[:-1]:
            element: Placement = REPLICATE
            if isinstance(x, Shard) and x.dim > 0 and not (self._pipeline.gathers_once and x.is_state):
                element = Shard(x.dim - 1, x.is_state)
            if isinstance(along_microbatches, Shard) and not isinstance(element, Shard):
                element = along_microbatches
            others.append(element)
        return (*others, along_microbatches)

    def _arguments(self) -> list[Argument]:
        """Returns the arguments of the body."""
        consts = zip(self._const_placements, self._consts, strict=True)
        return [
            *[Argument(placements, value.origin is not None) for placements, value in consts],
            *map(Argument, self._carry_placements),
            *map(Argument, self._x_placements, self._is_state),
        ]

    def _partition_body(self) -> PartitionedJaxpr:
        """Partitions the body, with the placements of the carry at a fixpoint."""
        loop, equation, context = self._loop, self._equation, self._context
        layouts = [
            _body_layout(context.reduction_layouts.of(var), i < loop.num_carry)
            for i, var in enumerate(equation.outvars)
        ]
        # The barriers of an outermost checkpoint are not needed: its forward pass ran in another loop.
        eqns = [
            without_prevent_cse(eqn) if primitive_name(eqn) in CALLS else eqn
            for eqn in open_jaxpr(loop.body).eqns
        ]
        body = replace_jaxpr(loop.body, eqns=eqns)
        body_context = context.for_microbatches(
            body, self._arguments(), layouts, self._pipeline.num_microbatches
        )
        is_backward = self._editor.is_backward(equation)

        def partition(results: Sequence[Placements | ReductionTarget | None]) -> PartitionedJaxpr:
            return body_context.partition(
                body, self._arguments(), results, backward=is_backward, caller=equation
            )

        y_target: ReductionTarget | None = None if self._pipeline.gathers_once else REDUCE_TO_STATE
        targets: list[Placements | ReductionTarget | None] = [None] * loop.num_carry
        targets += [y_target] * len(self._pipeline.placements.ys)
        for _ in range(_MAX_FIXPOINT_STEPS):
            inner = partition(targets)
            next_carry = [
                (*map(_join_carry, old[:-1], new[:-1]), SUM if old[-1] == SUM else join(old[-1], new[-1]))
                for old, new in zip(self._carry_placements, inner.placements, strict=False)
            ]
            gathered_consts = [i for i in inner.gathered_arguments if i < loop.num_consts]
            for i in gathered_consts:
                along_microbatches = self._const_placements[i][-1]
                self._const_placements[i] = (*(REPLICATE,) * (len(context.axes) - 1), along_microbatches)
            if next_carry == self._carry_placements and not gathered_consts:
                break
            self._carry_placements = next_carry
        else:
            raise CannotPartition(equation, 'the placements of the values that it carries do not converge')
        if [*inner.placements[: loop.num_carry]] != self._carry_placements:
            inner = partition([*self._carry_placements, *inner.placements[loop.num_carry :]])
        return inner

    # Equations

    def _write(self, inner: PartitionedJaxpr) -> None:
        """Writes the pipeline of a partitioned body."""
        editor, equation, pipeline, loop = self._editor, self._equation, self._pipeline, self._loop
        along_microbatches = pipeline.placements
        operands: list[Any] = []
        for value, placements, placement in zip(
            self._consts, self._const_placements, along_microbatches.consts, strict=True
        ):
            operands.append(editor.convert(value, self._outside(placements, placement), equation))
        has_initial_sum = [
            placement == SUM and not value.is_zero
            for value, placement in zip(self._init, along_microbatches.carry, strict=True)
        ]
        for value, placements, placement, has_sum in zip(
            self._init, self._carry_placements, along_microbatches.carry, has_initial_sum, strict=True
        ):
            if placement != SUM or has_sum:
                operands.append(editor.convert(value, self._outside(placements, placement), equation))
        for value, placements, is_state in zip(self._stacks, self._x_placements, self._is_state, strict=True):
            target = _stack_placements(placements, is_state=is_state)
            atom = editor.convert(value, target, equation, keeps_state=pipeline.gathers_once)
            operands.append(self._reorder_layers(atom))
        run_ticks = Ticks(pipeline, inner, has_initial_sum)
        call = editor.code.call_function(run_ticks, equation, operands)
        editor.eqns.append(call)
        result_placements = [
            *map(self._outside, self._carry_placements, along_microbatches.carry),
            *[
                _stack_placements(placements, is_state=not isinstance(placement, Shard))
                for placements, placement in zip(
                    inner.placements[loop.num_carry :], along_microbatches.ys, strict=True
                )
            ],
        ]
        results = zip(equation.outvars, call.outvars, result_placements, strict=True)
        for i, (var, atom, placements) in enumerate(results):
            if i >= loop.num_carry:
                atom = self._reorder_layers(atom, to_storage=True)
            editor.define(var, placements, atom)
        operand_values = [*self._consts, *self._init, *self._stacks]
        editor.include(inner, operand_values, pipeline.ticks * run_ticks.group_size)

    def _reorder_layers(self, atom: Any, *, to_storage: bool = False) -> Any:
        """Returns a stack with its layers on the stages that run them, or that store them.

        Each stack is exchanged once.
        """
        pipeline, reordered = self._pipeline, self._editor.reordered_stacks
        if pipeline.num_repeats == 1:
            return atom
        if not to_storage and id(atom) in reordered:
            return reordered[id(atom)][1]
        options = pipeline.axis, pipeline.num_stages, pipeline.num_repeats, pipeline.line
        function = jax.jit(lambda x: reorder_layer_groups(x, *options, to_storage=to_storage))
        key = 'reorder_layer_groups', options, to_storage
        result = self._editor.emit(function, key, self._equation, [atom])
        pair = (result, atom) if to_storage else (atom, result)
        reordered[id(pair[0])] = pair
        return result


def _join_carry(old: Placement, new: Placement) -> Placement:
    """Returns the placement of a carry with these placements before and after an iteration."""
    return new if isinstance(old, Partial) and not isinstance(new, Partial) else join(old, new)


def _body_layout(layout: Layout | None, is_carry: bool) -> Layout | None:
    """Returns the layout of a result in the body of the loop."""
    if layout is None:
        return None
    layout = layout._replace(placements=(*layout.placements[:-1], REPLICATE))
    return layout if is_carry else remap_layout(layout, ShiftedDims(-1))


def _stack_placements(placements: Placements, *, is_state: bool) -> Placements:
    """Returns the placements of a stack of elements with these placements."""
    others = [Shard(x.dim + 1, x.is_state) if isinstance(x, Shard) else x for x in placements[:-1]]
    return (*others, Shard(0, is_state))
