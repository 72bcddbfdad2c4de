"""The partitioning context: the properties of a step that all its jaxprs share."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self, TypeVar

from jax.sharding import AbstractMesh

from scalax._jax.equations import Literal, operation_key
from scalax._jax.foreign_primitives import lowering_error
from scalax._jax.manual_axes import ManualEquations
from scalax._jax.primitives import is_foreign, primitive_name
from scalax._jaxpr.batch_dependence import BatchDependence
from scalax._jaxpr.dim_rules import RULES as DIM_RULES
from scalax._spmd.batch.batch_sources import batch_sources
from scalax._spmd.batch.replicated_batch_dims import BatchDims
from scalax._spmd.options import DEFAULT, BatchPartitioning
from scalax._spmd.placements.auto_shardings import AutoShardings
from scalax._spmd.placements.collectives import CollectiveWriter
from scalax._spmd.placements.layouts import Layout
from scalax._spmd.placements.op_rules import RULES as OP_RULES
from scalax._spmd.placements.op_rules import Op, Strategy, strategy
from scalax._spmd.placements.placement import Partial, Placements, shards_examples
from scalax._spmd.placements.reduction_layouts import ReductionLayouts, reduced_placements
from scalax._spmd.values import (
    Argument,
    CannotPartition,
    PartitionedJaxpr,
    ReductionTarget,
    Value,
    is_replicated,
    replicated,
)

_T = TypeVar('_T')


class PartitionContext:
    """The properties of a step that all its jaxprs share.

    Args:
        jaxpr: the jaxpr of the step, open or closed.
        arguments: the properties of its arguments.
        results: the layouts of its results; None where any layout is fine.
        mesh: the active mesh, of Auto axes.
        axes: the mesh axes of the batch, from major to minor.
        auto: the shardings along the other mesh axes; None if there are none.
        options: the user's options.
        states: the layouts of the arguments that are sharded state.
        microbatches: for the jaxpr of a pipelined layer, the number of microbatches. They take the place of
            the last axis: its blocks run one after the other on one device, which can exchange nothing.

    Attributes:
        mesh: the mesh.
        mesh_axes: the mesh axes of the batch and their sizes.
        axes: the mesh axes of the batch.
        sizes: the sizes of these axes.
        blocks: the product of these sizes.
        code: makes equations.
        collective_writer: makes the equations of collectives.
        reduction_layouts: the layouts to which partial sums are reduced.
        batch_dims: the batch dimensions of values.
        replicated: the placements of a replicated value.
        auto: the shardings along the other mesh axes.
        is_mixed: whether the batch axes shard different dimensions, such as examples and time.
        options: the user's options.
        microbatch_axis: the index of the axis whose place microbatches take; None outside of pipelines.
        pipelines: the scans over layers that run as pipelines, by equation id.
        keeps_replicated: whether replicated values that have a batch dimension stay replicated.
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
        self.code = ManualEquations(mesh, self.auto.sizes)
        self.collective_writer = CollectiveWriter(
            self.code, self.axes, self.sizes, None, self.microbatch_axis
        )
        holds_sums = options.reduce_per_microbatch is False
        self.reduction_layouts = ReductionLayouts(jaxpr, results, states, holds_sums=holds_sums)
        self.batch_dims = BatchDims(jaxpr, [argument.placements for argument in arguments], self.sizes)
        if all(argument.is_state for argument in arguments):
            sharded = [not is_replicated(argument.placements) for argument in arguments]
            for source in batch_sources(jaxpr, sharded):
                axis_indices = [self.axes.index(axis) for axis in source.axes if axis in self.axes]
                self.batch_dims.add(source.var, source.dim, axis_indices)
        self.replicated = replicated(len(self.axes))
        self._repeated: dict[Any, Any] = {}
        self._lowering_errors: dict[int, Exception | None] = {}
        self.is_mixed = any(
            len({*argument.placements}) > 1 for argument in arguments if not argument.is_state
        )
        self._step = jaxpr, [not argument.is_state for argument in arguments]

    def along(self, axes: Sequence[int]) -> Self:
        """Returns the context restricted to some of the batch axes, which are given by index.

        Along the other axes, devices run independently.
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
        other.replicated, other._repeated = replicated(len(axes)), {}
        return other

    def keeping_replicated(self) -> Self:
        """Returns a context in which replicated values stay replicated."""
        other = copy.copy(self)
        other.keeps_replicated = True
        return other

    def reduced(self, placements: Placements, layout: Layout | None, *, held: bool = False) -> Placements:
        """Returns placements after partial sums are reduced, except for sums over microbatches."""
        after, i = reduced_placements(placements, layout, held=held), self.microbatch_axis
        if i is None or not isinstance(placements[i], Partial):
            return after
        return (*after[:i], placements[i], *after[i + 1 :])

    @functools.cached_property
    def _batch_dependence(self) -> BatchDependence:
        """The values that depend on examples."""
        return BatchDependence(*self._step)

    def require_lowering(self, name: str, equation: Any) -> None:
        """Raises an error if the primitive of another library does not lower inside of `shard_map`."""
        if name in DIM_RULES or name in OP_RULES or not is_foreign(equation):
            return
        if id(equation) not in self._lowering_errors:
            axes = {*self.mesh.axis_names} - {*self.auto.sizes}
            self._lowering_errors[id(equation)] = lowering_error(equation, self.mesh, axes)
        if (error := self._lowering_errors[id(equation)]) is not None:
            summary = f'{type(error).__name__}: {error}'.splitlines()[0]
            reason = f'{equation.primitive}, of another library, fails in jax.shard_map ({summary})'
            raise CannotPartition(equation, reason) from None

    def strategy(self, op: Op) -> Strategy | None:
        """Returns the strategy of `op_rules.strategy`."""
        return self.repeated((operation_key(op.equation), op[1:]), lambda: strategy(op))

    def repeated(self, key: Any, compute: Callable[[], _T]) -> _T:
        """Returns what *compute* returned for an equal key: layers repeat equations and placements."""
        try:
            return self._repeated[key]
        except KeyError:
            self._repeated[key] = result = compute()
            return result
        except TypeError:  # a parameter of an equation cannot be hashed
            return compute()

    def depends_on_examples(self, atom: Any) -> bool:
        """Returns whether a variable depends on examples."""
        return not isinstance(atom, Literal) and self._batch_dependence.of(atom)

    def is_update(self, equation: Any, values: Sequence[Value]) -> bool:
        """Returns whether an equation is a matmul of state that depends on gradients, as in an optimizer."""
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
        caller: Any = None,
    ) -> PartitionedJaxpr:
        """Partitions a jaxpr.

        Args:
            jaxpr: the jaxpr, open or closed.
            arguments: the properties of its arguments.
            results: the placements of its results. None keeps the placements of a result, and so do
                `REDUCE_TO_STATE` and `REDUCE_TO_ALL` unless it is a partial sum.
            backward: whether a backward pass calls it.
            caller: the equation that calls it.
        """
        raise NotImplementedError

    def for_shard_map(
        self,
        equation: Any,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        remaining_axes: Sequence[int],
        manual: Collection[str],
    ) -> PartitionContext:
        """Returns a context that partitions the body of a `shard_map` along the axes that it leaves out.

        Args:
            equation: the `shard_map`.
            jaxpr: its body.
            arguments: the properties of the arguments of the body.
            results: the layouts of its results along the remaining axes.
            remaining_axes: the indices of the batch axes that the `shard_map` leaves out.
            manual: the Auto axes that are manual in the body.
        """
        raise NotImplementedError

    def for_microbatches(
        self,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        microbatches: int,
    ) -> PartitionContext:
        """Returns a context that partitions the jaxpr of a pipelined layer.

        Args:
            jaxpr: the jaxpr.
            arguments: the properties of its arguments, with microbatches in place of the last axis.
            results: the layouts of its results.
            microbatches: the number of microbatches.
        """
        raise NotImplementedError


def _has_no_examples(value: Value) -> bool:
    return all(not shards_examples(x) for x in value.placements)
