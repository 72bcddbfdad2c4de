"""The partitioner: edits a jaxpr to the one that each device runs on its blocks.

Equations keep their lines and scopes. They get variables of local shapes, and collectives in between where
the placements of operands are not those that an equation takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from scalax._jax.equations import (
    ANNOTATED_CALLS,
    CALLS,
    PLACES,
    RUN_ONCE,
    has_effects,
    jaxprs_in,
    opened,
    ragged_dim,
    shape_of,
    size_of,
    takes_arrays,
    takes_refs,
)
from scalax._jax.manual_axes import HAVE_SIZES, local_params, remade, with_inner
from scalax._jax.primitives import KERNEL, primitive_name
from scalax._jax.rewriting import with_results
from scalax._jaxpr.dim_rules import ELEMENTWISE, RULES, reshaped
from scalax._spmd.batch.batch_dims import sharded_part
from scalax._spmd.batch.replicated_parts import is_computed_by_block
from scalax._spmd.context import PartitionContext
from scalax._spmd.conversions import NEEDS_ALL_MICROBATCHES, JaxprEditor
from scalax._spmd.loops.control_flow import partition_call, partition_cond, partition_scan, partition_while
from scalax._spmd.operations.callbacks import CALLBACKS, inspect_placements, partition_callback
from scalax._spmd.operations.cudnn_attention import ATTENTION, attention_along_auto_axes
from scalax._spmd.operations.custom_partitioning import partition_custom
from scalax._spmd.operations.elementwise import write_pointwise
from scalax._spmd.operations.embedding_tables import is_indexed, local_lookup
from scalax._spmd.operations.local_sorts import local_group_operands, record_local_sort, write_local_rows
from scalax._spmd.operations.pallas_kernels import kernel_along_auto_axes, kernel_params
from scalax._spmd.operations.ragged_dot import local_group_sizes
from scalax._spmd.operations.slices import MAX_SENT_SLICES, local_slice
from scalax._spmd.operations.user_shard_maps import partition_shard_map
from scalax._spmd.placements.auto_shardings import AutoShardings
from scalax._spmd.placements.layouts import Layout
from scalax._spmd.placements.op_rules import POINTWISE, Op, Strategy, is_zero
from scalax._spmd.placements.placement import REPLICATE, Partial, Placements, Shard, shard_counts
from scalax._spmd.placements.repeated_casts import CAST_PRIMITIVES, alias_repeated_cast
from scalax._spmd.placements.state_casts import NARROW, SAME_STATE
from scalax._spmd.placements.strategy_costs import cheapest
from scalax._spmd.placements.user_constraints import partition_constraint
from scalax._spmd.values import (
    REDUCE_TO_ALL,
    REDUCE_TO_STATE,
    Argument,
    CannotPartition,
    PartitionedJaxpr,
    ReductionTarget,
    Value,
    is_replicated,
)

_CONTROL = {
    'scan': partition_scan,
    'while': partition_while,
    'cond': partition_cond,
    'shard_map': partition_shard_map,
    'inspect_sharding': inspect_placements,
    **dict.fromkeys(ANNOTATED_CALLS, partition_call),
    'custom_partitioning': partition_custom,
}
# The compiler partitions none of these along the axes that stay Auto inside.
_ALONG_AUTO_AXES = {KERNEL: kernel_along_auto_axes, **dict.fromkeys(ATTENTION, attention_along_auto_axes)}
# Others that run a jaxpr, whose operands are all gathered.
_RUN_ONCE = RUN_ONCE.keys() - CALLS.keys() - ANNOTATED_CALLS
# These may have effects: those of jaxprs inside them, or of callbacks to Python.
_WITH_EFFECTS = CALLS.keys() | _CONTROL.keys() | CALLBACKS
# These take or put rows by number.
_INDEXED = frozenset(('gather', 'scatter-add'))


class Partitioner(PartitionContext):
    """Partitions the jaxprs of a step. One that is used in several places alike is partitioned once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: dict[Any, PartitionedJaxpr] = {}
        self._inside: dict[Any, Partitioner] = {}

    def for_microbatches(
        self,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        microbatches: int,
    ) -> Partitioner:
        known = self.mesh, self.axes, self.auto, self.options
        inner = Partitioner(jaxpr, arguments, results, *known, microbatches=microbatches)
        inner.collective_writer.ids = self.collective_writer.ids
        return inner

    def partition(
        self,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Placements | ReductionTarget | None] | None = None,
        *,
        backward: bool = False,
        at: Any = None,
    ) -> PartitionedJaxpr:
        wanted = tuple(results or [None] * len(opened(jaxpr).outvars))
        key = self.axes, self.keeps_replicated, jaxpr, tuple(arguments), wanted, backward
        if key not in self._known:
            self._known[key] = _Partitioning(self, jaxpr, arguments, backward, at).partitioned(wanted)
        return self._known[key]

    def for_shard_map(
        self,
        equation: Any,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        left: Sequence[int],
        manual: Collection[str],
    ) -> PartitionContext:
        key = self.axes, id(equation), tuple(arguments)
        if key not in self._inside:
            sizes = {axis: size for axis, size in self.auto.sizes.items() if axis not in manual}
            auto = AutoShardings(jaxpr, [self.auto.along(sizes, atom) for atom in equation.invars], sizes)
            axes = [self.axes[i] for i in left]
            inner = Partitioner(jaxpr, arguments, results, self.mesh, axes, auto, self.options)
            inner.collective_writer.ids = self.collective_writer.ids
            self._inside[key] = inner
        return self._inside[key]


class _Partitioning(JaxprEditor):
    """The partitioning of one jaxpr."""

    def partitioned(self, results: Sequence[Placements | ReductionTarget | None]) -> PartitionedJaxpr:
        """Returns the jaxpr on blocks, and what is known of it."""
        inner = opened(self.jaxpr)
        for equation in inner.eqns:
            try:
                self._equation(equation)
            except CannotPartition:
                raise
            except Exception as error:
                raise CannotPartition(equation, f'{type(error).__name__}: {error}') from error
        values, self.converts_results = [*map(self.read, inner.outvars)], self.is_step
        atoms, placements = list[Any](), list[Placements]()
        for value, wanted in zip(values, results, strict=True):
            if wanted == REDUCE_TO_STATE and value.has_sum:
                layout = self.context.reduction_layouts.of(value.var)
                if layout is not None:
                    target = self.context.reduced(value.placements, layout, held=True)
                    self.convert_in_place(value, target, self.producer_of(value))
            target = wanted if isinstance(wanted, tuple) else value.placements
            if wanted == REDUCE_TO_ALL:
                target = tuple([REPLICATE if isinstance(x, Partial) else x for x in target])
            same = target == value.placements
            atoms.append(value.atom if same else self.convert(value, target, self.producer_of(value)))
            placements.append(target)
        eqns = _live(self.eqns, atoms)
        return PartitionedJaxpr(
            remade(self.jaxpr, [*self.microbatch_indices, *self.arguments], eqns, atoms, self.constants),
            tuple(placements),
            tuple([value.is_zero for value in values]),
            tuple([value.origin for value in values]),
            tuple(self.collectives),
            frozenset(self.gathered_arguments),
            self.sliced_arguments(eqns, atoms),
            bool(self.microbatch_indices),
        )

    def _equation(self, equation: Any) -> None:
        name = primitive_name(equation)
        if name in CAST_PRIMITIVES and alias_repeated_cast(self, equation):
            return
        if name in POINTWISE and not self.local_rows and write_pointwise(self, name, equation):
            return
        values = [*map(self.read, equation.invars)]
        if has_effects(equation) and name not in _WITH_EFFECTS:
            what, remedy = f'{name or equation.primitive} has effects', 'change that line'
            if takes_refs(equation):
                what = 'it changes an array in place (jax.new_ref)'
                remedy = 'return a new array, as x.at[i].set(y) and the carry of a loop do'
            raise CannotPartition(equation, what, remedy)
        if name == 'sort':
            record_local_sort(self, equation, values[0])
        if id(equation) in self.local_group_sizes:
            values = local_group_operands(self, equation, values, self.local_rows[id(equation)])
        self.reduce_shared_sums(values, equation)
        if id(equation) in self.local_rows and id(equation) not in self.local_group_sizes:
            write_local_rows(self, equation, values, self.local_rows[id(equation)])
        elif name in CALLS:
            partition_call(self, equation, values)
        elif name in _CONTROL:
            _CONTROL[name](self, equation, values)
        elif name in PLACES or name == 'reshard':
            partition_constraint(self, equation, values)
        elif name in CALLBACKS:
            partition_callback(self, equation, values)
        else:
            self._primitive(name, equation, values)

    def _primitive(self, name: str, equation: Any, values: Sequence[Value]) -> None:
        if name == 'rng_uniform':
            raise CannotPartition(equation, 'it draws other numbers on each device', 'draw with jax.random')
        if name in ELEMENTWISE or name == 'broadcast_in_dim':
            self._gather_repeated(equation, values)
        if all(value.is_replicated for value in values):
            self._replicated(name, equation, values)
            return
        strategies = self._strategies_of(name, equation, values)
        operands, results = _transposed(strategies)
        self.shards_results = not all(map(is_replicated, results))
        atoms = [
            self.convert(value, placements, equation)
            for value, placements in zip(values, operands, strict=True)
        ]
        self.shards_results = False
        outputs = [self.define(var, x) for var, x in zip(equation.outvars, results, strict=True)]
        made = [output.atom for output in outputs]
        if name in _INDEXED and (axes := self._axes_of_rows(equation, operands[0])):
            dim, names = axes
            function, key = local_lookup(equation, dim, names, [*map(shape_of, atoms)])
            self.eqns.append(with_results(self.code.equation(function, key, equation, atoms), made))
        elif name in _ALONG_AUTO_AXES and self.context.auto.sizes:
            self.eqns.append(_ALONG_AUTO_AXES[name](self.code, self.context.auto, equation, atoms, made))
        elif name == 'slice' and (dims := self._dims_added_up(operands[0], results[0])):
            function, key = local_slice(equation, dims, shape_of(atoms[0]))
            self.eqns.append(with_results(self.code.equation(function, key, equation, atoms), made))
        else:
            if name == 'ragged_dot_general' and id(equation) not in self.local_group_sizes:
                atoms[2] = self._sizes_of_groups(equation, atoms, operands[0])
            params = self._inner(equation) if name in _RUN_ONCE or _holds_jaxprs(name, equation) else {}
            if name in HAVE_SIZES:
                params = local_params(equation, [*map(shape_of, atoms)], [*map(shape_of, made)])
            elif name == KERNEL:
                params = kernel_params(self.code, equation, [*map(shape_of, atoms)], [*map(shape_of, made)])
            self.eqns.append(self.code.local(equation, atoms, made, **params))
        self._note(name, equation, values, outputs)
        if name in NARROW and outputs[0].is_state:
            outputs[0].narrow_producer = equation
            if name in CAST_PRIMITIVES:
                values[0].casts = (*values[0].casts, outputs[0])
        finals = zip(*[each.final or each.results for each in strategies], strict=True)
        for output, final in zip(outputs, finals, strict=True):
            if final != output.placements:
                self.convert_in_place(output, final, equation, 'examples')
        if name == 'reshape' and outputs[0].is_replicated:
            self._shard_again(equation, values[0], outputs[0])

    def _gather_repeated(self, equation: Any, values: Sequence[Value]) -> None:
        """Gathers state that an equation repeats for what is no part of the state of the step.

        Examples would meet the larger result, and all of that would be gathered.
        """
        [var], blocks = equation.outvars, [value for value in values if value.is_state]
        size = size_of(var)
        if not blocks or math.prod(blocks[0].shape) == size or self.context.reduction_layouts.is_sharded(var):
            return
        if all(value.is_replicated or value in blocks for value in values):
            for value in blocks:
                self.convert_in_place(value, self.context.replicated, equation)

    def _inner(self, equation: Any) -> dict[str, Any]:
        """Returns the parameters with the jaxprs of what every device runs alike."""

        def change(jaxpr: Any) -> Any:
            if not takes_arrays(jaxpr):  # a kernel
                return self.code.in_context(jaxpr)
            arguments = [Argument(self.context.replicated)] * len(opened(jaxpr).invars)
            ends = [self.context.replicated] * len(opened(jaxpr).outvars)
            return self.context.partition(jaxpr, arguments, ends, at=equation).jaxpr

        return with_inner(equation, change)

    def _sizes_of_groups(self, equation: Any, atoms: Sequence[Any], placements: Placements) -> Any:
        """Returns the sizes of groups of rows that are in a device's block, if it has not all rows."""
        rows = ragged_dim(equation)
        axes = [
            axis
            for axis, x in zip(self.context.axes, placements, strict=True)
            if isinstance(x, Shard) and x.dim == rows
        ]
        if not axes:
            return atoms[2]
        function, key = local_group_sizes(axes, shape_of(atoms[0])[rows])
        return self.emit(function, key, equation, atoms[2:])

    def _dims_added_up(self, before: Placements, after: Placements) -> dict[int, list[str]]:
        """Returns the dimensions of blocks whose slices are a sum, and the axes of the blocks."""
        dims = dict[int, list[str]]()
        for axis, x, result in zip(self.context.axes, before, after, strict=True):
            if isinstance(x, Shard) and isinstance(result, Partial):
                dims.setdefault(x.dim, []).append(axis)
        return dims

    def _axes_of_rows(self, equation: Any, placements: Placements) -> tuple[int, list[str]] | None:
        """Returns the dimension of rows of a table that is in blocks, and the axes of the blocks."""
        for each in placements:
            if isinstance(each, Shard) and is_indexed(equation, each.dim):
                axes = [axis for axis, x in zip(self.context.axes, placements, strict=True) if x == each]
                return each.dim, axes
        return None

    def _strategies_of(self, name: str, equation: Any, values: Sequence[Value]) -> list[Strategy]:
        """Returns how an equation runs along each axis."""
        strategies = self._strategies(equation, values)
        if any(each is None for each in strategies) and any(value.has_sum for value in values):
            self._reduce_for(name, equation, values, [i for i, x in enumerate(strategies) if x is None])
            strategies = self._strategies(equation, values)
        if self.context.microbatch_axis is not None and strategies[self.context.microbatch_axis] is None:
            raise CannotPartition(equation, NEEDS_ALL_MICROBATCHES)
        found = [each or self._gathering(equation, values) for each in strategies]
        if name == 'slice' and _has_sums(found) and self._is_gathered_anyway(values[0]):
            gathering = self._gathering(equation, values)
            found = [gathering if _has_sums([each]) else each for each in found]
        if self.context.is_mixed:
            axis = len(found)
            while axis and not self._all_divide(equation, found):
                axis -= 1
                if axis != self.context.microbatch_axis:
                    found[axis] = self._gathering(equation, values)
        chosen = cheapest(self, equation, values, found)
        return chosen if chosen == found or self._all_divide(equation, chosen) else found

    def _is_gathered_anyway(self, value: Value) -> bool:
        """Whether a value is gathered that is sliced: for another equation, or once for many slices."""
        if value.has_sum:
            return False
        slices = [
            eqn
            for eqn in opened(self.jaxpr).eqns
            if primitive_name(eqn) == 'slice' and eqn.invars[0] is value.var
        ]
        return len(slices) > MAX_SENT_SLICES or (self.context.replicated, False) in value.versions

    def _all_divide(self, equation: Any, strategies: Sequence[Strategy]) -> bool:
        """Whether the axes together split all operands and results evenly."""
        operands, results = _transposed(strategies)
        atoms = zip((*equation.invars, *equation.outvars), (*operands, *results), strict=True)
        return all(self.divides(shape_of(atom), placements) for atom, placements in atoms)

    def _shard_again(self, equation: Any, value: Value, output: Value) -> None:
        """Shards a reshape of examples that had to be gathered along a dimension that they are split into."""
        target, blocks = [*output.placements], self.context.blocks
        for axis, placement in enumerate(value.placements):
            if isinstance(placement, Shard) and not placement.is_state:
                for old, new in reshaped(equation):
                    dim = sharded_part(new, output.shape, blocks)
                    if placement.dim in old and dim is not None:
                        target[axis] = Shard(dim)
        if [*output.placements] != target:
            self.convert_in_place(output, tuple(target), equation)

    def _replicated(self, name: str, equation: Any, values: Sequence[Value]) -> None:
        """Writes an equation that all devices run alike; blocks of the batch are computed from the start."""
        context = self.context
        atoms = [value.atom for value in values]
        outputs = [self.define(var, context.replicated) for var in equation.outvars]
        params = self._inner(equation) if name in _RUN_ONCE or _holds_jaxprs(name, equation) else {}
        made = [output.atom for output in outputs]
        if name in _ALONG_AUTO_AXES and context.auto.sizes:
            self.eqns.append(_ALONG_AUTO_AXES[name](self.code, context.auto, equation, atoms, made))
        else:
            if name == KERNEL:
                shapes = [*map(shape_of, equation.invars)], [*map(shape_of, equation.outvars)]
                params = kernel_params(self.code, equation, *shapes)
            self.eqns.append(self.code.local(equation, atoms, made, **params))
        self._note(name, equation, values, outputs)
        if not is_computed_by_block(equation) or context.keeps_replicated:
            return
        [output] = outputs
        output.producer = equation, values
        target = context.batch_dims.placements(output.var, context.replicated)
        if not is_replicated(target):
            whole, atom = output.atom, self._part(output, target, equation)
            output.atom = atom
            output.set_placements(target)
            output.add_version((context.replicated, False), whole)

    def _note(self, name: str, equation: Any, values: Sequence[Value], outputs: Sequence[Value]) -> None:
        zeros = [value.is_zero for value in values]
        if any(zeros) and is_zero(equation, zeros):
            for output in outputs:
                output.is_zero = True
        origins = [value.origin for value in values if value.origin is not None]
        if origins:
            for output in outputs:
                if output.is_state or name in SAME_STATE:
                    output.origin = origins[0]

    def _strategies(self, equation: Any, values: Sequence[Value]) -> list[Strategy | None]:
        zeros, blocks = tuple([value.is_zero for value in values]), self.context.blocks
        layout = self.context.reduction_layouts.of(equation.outvars[0]) if equation.outvars else None
        wanted = [None] * len(self.context.axes) if layout is None else layout.placements
        is_update = self.context.is_update(equation, values)
        along_axes = zip(*[value.placements for value in values], strict=True)
        return [
            self.context.strategy(
                Op(
                    *(equation, placements, blocks, zeros, of_first, placement, is_update),
                    axis == self.context.microbatch_axis,
                )
            )
            for axis, (placements, of_first, placement) in enumerate(
                zip(along_axes, self._blocks_of(values[0]), wanted, strict=True)
            )
        ]

    def _blocks_of(self, value: Value) -> Sequence[int | None]:
        """Into how many blocks all axes split the dimension that each of them shards; None of all blocks."""
        if not self.context.is_mixed:
            return [None] * len(value.placements)
        counts = shard_counts(value.placements, self.context.sizes, len(value.shape))
        return [counts[x.dim] if isinstance(x, Shard) else None for x in value.placements]

    def _gathering(self, equation: Any, values: Sequence[Value]) -> Strategy:
        """The strategy of an equation that takes all of its operands."""
        return Strategy((REPLICATE,) * len(values), (REPLICATE,) * len(equation.outvars))

    def _reduce_for(self, name: str, equation: Any, values: Sequence[Value], axes: Sequence[int]) -> None:
        """Reduces the sums that an equation takes; if it is elementwise, to the blocks of another operand.

        Args:
            name: the name of its primitive.
            equation: the equation.
            values: its operands.
            axes: the axes, by number, along which it does not take sums.
        """
        for value in [value for value in values if value.has_sum]:
            before, target = value.placements, [*value.placements]
            for other in values if name in ELEMENTWISE else ():
                for axis in axes if other.shape == value.shape else ():
                    if isinstance(before[axis], Partial) and isinstance(other.placements[axis], Shard):
                        target[axis] = other.placements[axis]
            after = self.reduced_placements(value.var, before)
            if any(isinstance(a, Partial) and a != b for a, b in zip(before, target, strict=True)):
                after = self.context.reduced(tuple(target), None)
            # Along other axes the sum stays one.
            after = tuple([b if i in axes else a for i, (a, b) in enumerate(zip(before, after, strict=True))])
            if after != before:
                self.convert_in_place(value, after, equation)


def _has_sums(strategies: Sequence[Strategy]) -> bool:
    """Whether the first result is a sum along some axis."""
    return any(isinstance(each.results[0], Partial) for each in strategies)


def _holds_jaxprs(name: str, equation: Any) -> bool:
    """Whether a primitive without a rule runs jaxprs, as a function with a ``jax.vmap`` of its own does."""
    return name not in RULES and name != KERNEL and any(True for _ in jaxprs_in(equation))


def _transposed(
    strategies: Sequence[Strategy],
) -> tuple[Sequence[Placements], Sequence[Placements]]:
    """The placements of each operand, and of each result, of the strategies along all axes."""
    operands = [*zip(*[each.operands for each in strategies], strict=True)]
    results = [*zip(*[each.results for each in strategies], strict=True)]
    return operands, results


def _live(eqns: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The equations that have effects, or of which something is used: others may be beside their blocks."""
    needed, kept = {*map(id, results)}, list[Any]()
    for equation in reversed(eqns):
        if not needed.isdisjoint(map(id, equation.outvars)) or has_effects(equation):
            kept.append(equation)
            needed.update(map(id, equation.invars))
    return kept[::-1]
