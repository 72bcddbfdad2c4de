"""What is known of all jaxprs of a step while they are partitioned."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, Self

from jax.sharding import AbstractMesh

from scalax._jax.equations import Literal, shape_of
from scalax._jax.manual_axes import ManualCode
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.batch_dependence import Dependence
from scalax._jaxpr.dim_rules import dims_of
from scalax._spmd.batch.batch_dims import BatchDims
from scalax._spmd.batch.batch_sources import batch_sources
from scalax._spmd.options import DEFAULT, BatchPartitioning
from scalax._spmd.placements.auto_shardings import AutoShardings
from scalax._spmd.placements.collectives import CollectiveWriter
from scalax._spmd.placements.layouts import Layout
from scalax._spmd.placements.op_rules import Op, Strategy, strategy
from scalax._spmd.placements.placement import Partial, Placements, Shard
from scalax._spmd.placements.reduction_layouts import ReductionLayouts, reduced_placements
from scalax._spmd.values import Argument, PartitionedJaxpr, ReductionTarget, Value, is_replicated, replicated


class PartitionContext:
    """What is known of all jaxprs of a step.

    Args:
        jaxpr: the jaxpr of the step, open or closed.
        arguments: what is known of its arguments.
        results: the layouts in which its results are wanted; None where any will do.
        mesh: the mesh, in force, of Auto axes.
        axes: the mesh axes of the batch, from the major one to the minor one.
        auto: where values are along other mesh axes; None if there are none.
        options: what users choose.
        states: the layouts of the arguments that are state in blocks.
        microbatches: of the jaxpr of a layer in a pipeline, the number of microbatches. They stand for the
            last one of the axes, along which blocks come one after the other on one device, so that nothing
            can be exchanged.

    Attributes:
        mesh: the mesh.
        mesh_axes: the mesh axes of the batch and their sizes.
        axes: the same axes.
        sizes: the same sizes.
        blocks: into how many blocks they split a dimension together.
        code: makes equations.
        exchange: makes those of conversions.
        wanted: the layouts in which sums are wanted.
        batch_dims: the dimensions of the batch.
        replicated: the placements of what every device holds.
        auto: where values are along other mesh axes.
        is_mixed: whether the batch axes shard different dimensions of the batch, such as time.
        options: what users choose.
        in_turn: the number of the axis that microbatches stand for; None outside of pipelines.
        pipelines: the loops over layers that run as pipelines, by the ids of their equations.
        keeps_replicated: whether replicated values that have a dimension of the batch stay replicated.
    """

    def __init__(
        self,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        mesh: AbstractMesh,
        axes: Sequence[str],
        auto: AutoShardings | None = None,
        options: BatchPartitioning = DEFAULT,
        states: Sequence[Layout | None] = (),
        microbatches: int | None = None,
    ) -> None:
        self.mesh, self.options, self.pipelines = mesh, options, dict[int, Any]()
        self.mesh_axes = {axis: mesh.shape[axis] for axis in axes}
        self.keeps_replicated, self.microbatch_axis = False, None
        if microbatches is not None:
            self.microbatch_axis = len(axes) - 1
            self.mesh_axes[axes[-1]] = microbatches
        self.axes, self.sizes = tuple(axes), tuple(self.mesh_axes.values())
        self.blocks = math.prod(self.sizes)
        self.auto = auto or AutoShardings(jaxpr, [], {})
        self.code = ManualCode(mesh, self.auto.sizes)
        self.collective_writer = CollectiveWriter(
            self.code, self.axes, self.sizes, None, self.microbatch_axis
        )
        holds_sums = options.reduce_per_microbatch is False
        self.reduction_layouts = ReductionLayouts(jaxpr, results, states, holds_sums=holds_sums)
        self.batch_dims = BatchDims(jaxpr, [each.placements for each in arguments], self.sizes)
        if all(argument.is_state for argument in arguments):
            sharded = [not is_replicated(argument.placements) for argument in arguments]
            for source in batch_sources(jaxpr, sharded):
                numbers = [self.axes.index(axis) for axis in source.axes if axis in self.axes]
                self.batch_dims.add(source.var, source.dim, numbers)
        self.replicated = replicated(len(self.axes))
        self._of_products: dict[Any, Strategy | None] = {}
        self.is_mixed = any(len({*each.placements}) > 1 for each in arguments if not each.is_state)
        self._step = jaxpr, [not argument.is_state for argument in arguments]

    def along(self, axes: Sequence[int]) -> Self:
        """Returns what is known of all jaxprs along these of the batch axes alone, by number.

        Along the others, devices run what they are given without an exchange.
        """
        if len(axes) == len(self.axes):
            return self
        other = copy.copy(self)
        other.axes = tuple([self.axes[i] for i in axes])
        other.mesh_axes = {axis: self.mesh_axes[axis] for axis in other.axes}
        other.sizes = tuple(other.mesh_axes.values())
        other.blocks = math.prod(other.sizes)
        if self.microbatch_axis is not None:
            other.microbatch_axis = axes.index(self.microbatch_axis) if self.microbatch_axis in axes else None
        other.collective_writer = CollectiveWriter(
            self.code, other.axes, other.sizes, self.collective_writer.ids, other.microbatch_axis
        )
        other.reduction_layouts, other.batch_dims = (
            self.reduction_layouts.along(axes),
            self.batch_dims.along(axes),
        )
        other.replicated = replicated(len(axes))
        return other

    def keeping_replicated(self) -> Self:
        """Returns what is known of all jaxprs that devices run alike: replicated values stay replicated."""
        other = copy.copy(self)
        other.keeps_replicated = True
        return other

    def reduced(self, placements: Placements, layout: Layout | None, *, held: bool = False) -> Placements:
        """Returns placements whose sums are reduced, but for sums over microbatches."""
        after, i = reduced_placements(placements, layout, held=held), self.microbatch_axis
        if i is None or not isinstance(placements[i], Partial):
            return after
        return (*after[:i], placements[i], *after[i + 1 :])

    @functools.cached_property
    def _of_examples(self) -> Dependence:
        """The values that depend on examples."""
        return Dependence(*self._step)

    def strategy(self, op: Op) -> Strategy | None:
        """Returns what `op_rules.strategy` does; strategies of products, which layers repeat, are kept."""
        if primitive_name(op.equation) != 'dot_general':
            return strategy(op)
        atoms = *op.equation.invars, *op.equation.outvars
        key = dims_of(op.equation), tuple([(shape_of(x), x.aval.dtype) for x in atoms]), op[1:]
        if key not in self._of_products:
            self._of_products[key] = strategy(op)
        return self._of_products[key]

    def depends_on_examples(self, atom: Any) -> bool:
        """Returns whether a variable depends on examples."""
        return not isinstance(atom, Literal) and self._of_examples.of(atom)

    def is_update(self, equation: Any, values: Sequence[Value]) -> bool:
        """Whether an equation multiplies state that depends on gradients, as an optimizer does."""
        if primitive_name(equation) != 'dot_general' or not all(map(_has_no_examples, values)):
            return False
        return any(self.depends_on_examples(value.var) for value in values)

    def partition(
        self,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Placements | ReductionTarget | None] | None = None,
        *,
        backward: bool = False,
        at: Any = None,
    ) -> PartitionedJaxpr:
        """Returns a jaxpr on the blocks of each device.

        Args:
            jaxpr: the jaxpr, open or closed.
            arguments: what is known of its arguments.
            results: the placements that its results get; None leaves them where they are; so do `SETTLED`,
                unless they are sums whose layout is known, and `REDUCED`, unless they are sums.
            backward: whether it is called in a backward pass.
            at: the equation that has it inside.
        """
        raise NotImplementedError

    def for_shard_map(
        self,
        equation: Any,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        left: Sequence[int],
        manual: Collection[str],
    ) -> PartitionContext:
        """Returns what partitions the body of a `shard_map`, along some of the axes.

        Args:
            equation: the `shard_map`.
            jaxpr: its body.
            arguments: what is known of the arguments of the body.
            results: the layouts in which its results are wanted, along these axes.
            left: the axes, by number, from the major one to the minor one.
            manual: the axes that were Auto, and are manual in the body.
        """
        raise NotImplementedError

    def for_microbatches(
        self,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        microbatches: int,
    ) -> PartitionContext:
        """Returns what partitions the jaxpr of a layer in a pipeline.

        Args:
            jaxpr: the jaxpr.
            arguments: what is known of its arguments, with microbatches along the last axis.
            results: the layouts of its results.
            microbatches: how many microbatches there are.
        """
        raise NotImplementedError


def _has_no_examples(value: Value) -> bool:
    return all(not isinstance(x, Shard) or x.is_state for x in value.placements)
