"""The partitioner: rewrites a jaxpr of global arrays to the jaxpr that each device runs on its local shards.

Equations keep their source lines and scopes, and get variables of local shapes. Where the placements of an
operand differ from those that an equation needs, the partitioner inserts collectives.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from scalax._jax.equations import (
    ANNOTATED_CALLS,
    CALLS,
    RUN_ONCE,
    SHARDING_PARAMS,
    has_effects,
    inner_jaxprs,
    open_jaxpr,
    shape_of,
    size_of,
    takes_arrays,
    takes_refs,
)
from scalax._jax.manual_axes import params_with_jaxprs, rebuild_jaxpr
from scalax._jax.primitives import KERNEL, primitive_name
from scalax._jax.rewriting import OPS_WITH_SIZES, resized_params, with_results
from scalax._jaxpr.dim_rules import ELEMENTWISE, RULES, reshape_groups
from scalax._spmd.batch.replicated_batch_dims import sharded_part
from scalax._spmd.batch.replicated_parts import is_computed_by_block
from scalax._spmd.context import PartitionContext
from scalax._spmd.conversions import NEEDS_ALL_MICROBATCHES, JaxprEditor
from scalax._spmd.loops.control_flow import partition_call, partition_cond
from scalax._spmd.loops.scans import partition_scan
from scalax._spmd.loops.while_loops import partition_while
from scalax._spmd.operations.callbacks import CALLBACKS, inspect_placements, partition_callback
from scalax._spmd.operations.custom_partitioning import partition_custom
from scalax._spmd.operations.elementwise import operand_placements, write_pointwise
from scalax._spmd.operations.embedding_tables import is_indexed, local_lookup
from scalax._spmd.operations.local_sorts import (
    local_group_operands,
    record_local_sort,
    write_local_group_sizes,
    write_local_rows,
)
from scalax._spmd.operations.opaque_operations import OPAQUE, write_opaque
from scalax._spmd.operations.pallas_kernels import kernel_params
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
from scalax._spmd.uses import without_unused
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
# Other primitives with a jaxpr. All their operands are gathered.
_RUN_ONCE = RUN_ONCE.keys() - CALLS.keys() - ANNOTATED_CALLS
# These may have effects: of their inner jaxprs, or of Python callbacks.
_MAY_HAVE_EFFECTS = CALLS.keys() | _CONTROL.keys() | CALLBACKS
# These read or write rows by index.
_ROW_INDEXED = frozenset(('gather', 'scatter-add'))


class Partitioner(PartitionContext):
    """Partitions the jaxprs of a step.

    A jaxpr that is called several times with the same placements is partitioned once.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._partitioned: dict[Any, PartitionedJaxpr] = {}
        self._shard_map_partitioners: dict[Any, Partitioner] = {}

    def for_microbatches(
        self,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        microbatches: int,
    ) -> Partitioner:
        shared_options = self.mesh, self.axes, self.auto, self.options
        partitioner = Partitioner(jaxpr, arguments, results, *shared_options, microbatches=microbatches)
        partitioner.collective_writer.ids = self.collective_writer.ids
        return partitioner

    def partition(
        self,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Placements | ReductionTarget | None] | None = None,
        *,
        backward: bool = False,
        caller: Any = None,
    ) -> PartitionedJaxpr:
        targets = tuple(results or [None] * len(open_jaxpr(jaxpr).outvars))
        key = self.axes, self.keeps_replicated, jaxpr, tuple(arguments), targets, backward
        if key not in self._partitioned:
            self._partitioned[key] = _JaxprPartitioner(self, jaxpr, arguments, backward, caller).run(targets)
        return self._partitioned[key]

    def for_shard_map(
        self,
        equation: Any,
        jaxpr: Any,
        arguments: Sequence[Argument],
        results: Sequence[Layout | None],
        remaining_axes: Sequence[int],
        manual: Collection[str],
    ) -> PartitionContext:
        key = self.axes, id(equation), tuple(arguments)
        if key not in self._shard_map_partitioners:
            sizes = {axis: size for axis, size in self.auto.sizes.items() if axis not in manual}
            auto = AutoShardings(jaxpr, [self.auto.along(sizes, atom) for atom in equation.invars], sizes)
            axes = [self.axes[i] for i in remaining_axes]
            partitioner = Partitioner(jaxpr, arguments, results, self.mesh, axes, auto, self.options)
            partitioner.collective_writer.ids = self.collective_writer.ids
            self._shard_map_partitioners[key] = partitioner
        return self._shard_map_partitioners[key]


class _JaxprPartitioner(JaxprEditor):
    """Partitions one jaxpr."""

    def run(self, results: Sequence[Placements | ReductionTarget | None]) -> PartitionedJaxpr:
        """Partitions the jaxpr, and converts its results to the requested placements."""
        inner_jaxpr = open_jaxpr(self.jaxpr)
        for equation in inner_jaxpr.eqns:
            try:
                self._equation(equation)
            except CannotPartition:
                raise
            except Exception as error:
                raise CannotPartition(equation, f'{type(error).__name__}: {error}') from error
        values, self.converts_results = [*map(self.read, inner_jaxpr.outvars)], self.is_step
        atoms, placements = list[Any](), list[Placements]()
        for value, requested in zip(values, results, strict=True):
            if requested == REDUCE_TO_STATE and value.has_sum:
                layout = self.context.reduction_layouts.of(value.var)
                if layout is not None:
                    target = self.context.reduced(value.placements, layout, held=True)
                    self.convert_in_place(value, target, self.producer_of(value))
            target = requested if isinstance(requested, tuple) else value.placements
            if requested == REDUCE_TO_ALL:
                target = tuple([REPLICATE if isinstance(x, Partial) else x for x in target])
            same = target == value.placements
            atoms.append(value.atom if same else self.convert(value, target, self.producer_of(value)))
            placements.append(target)
        inputs, eqns = [*self.microbatch_indices, *self.arguments], without_unused(self.eqns, atoms)
        return PartitionedJaxpr(
            rebuild_jaxpr(self.jaxpr, inputs, eqns, atoms, self.constants),
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
        values = [self.values.get(id(x)) or self.read(x) for x in equation.invars]
        if has_effects(equation) and name not in _MAY_HAVE_EFFECTS:
            reason, remedy = f'{name or equation.primitive} has effects', 'change that line'
            if takes_refs(equation):
                reason = 'it changes an array in place (jax.new_ref)'
                remedy = 'return a new array, as x.at[i].set(y) and the carry of a loop do'
            raise CannotPartition(equation, reason, remedy)
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
        elif name in SHARDING_PARAMS or name == 'reshard':
            partition_constraint(self, equation, values)
        elif name in CALLBACKS:
            partition_callback(self, equation, values)
        else:
            self._primitive(name, equation, values)

    def _primitive(self, name: str, equation: Any, values: Sequence[Value]) -> None:
        if name == 'rng_uniform':
            reason = 'it draws different random numbers on each device'
            raise CannotPartition(equation, reason, 'use jax.random')
        if name in ELEMENTWISE or name == 'broadcast_in_dim':
            self._gather_broadcast_state(equation, values)
        self.context.require_lowering(name, equation)
        if all(value.is_replicated for value in values):
            self._replicated_primitive(name, equation, values)
            return
        strategies = self._choose_strategies(name, equation, values)
        operands, results = _transposed(strategies)
        self.shards_results = not all(map(is_replicated, results))
        atoms = [
            self.convert(value, placements, equation)
            for value, placements in zip(values, operands, strict=True)
        ]
        self.shards_results = False
        outputs = [self.define(var, x) for var, x in zip(equation.outvars, results, strict=True)]
        new_vars = [output.atom for output in outputs]
        if name in _ROW_INDEXED and (indexed_rows := self._indexed_rows(equation, operands[0])):
            function, key = local_lookup(equation, *indexed_rows, [*map(shape_of, atoms)])
            self.eqns.append(with_results(self.code.equation(function, key, equation, atoms), new_vars))
        elif name in OPAQUE and self.context.auto.sizes:
            write_opaque(self, equation, atoms, new_vars)
        elif name == 'slice' and (dims := self._summed_slice_dims(operands[0], results[0])):
            function, key = local_slice(equation, dims, shape_of(atoms[0]))
            self.eqns.append(with_results(self.code.equation(function, key, equation, atoms), new_vars))
        else:
            if name == 'ragged_dot_general' and id(equation) not in self.local_group_sizes:
                atoms[2] = write_local_group_sizes(self, equation, atoms, operands[0])
            params = self._inner_jaxpr_params(name, equation)
            if name in OPS_WITH_SIZES:
                params = resized_params(equation, [*map(shape_of, atoms)], [*map(shape_of, new_vars)])
            elif name == KERNEL:
                params = kernel_params(
                    self.code, equation, [*map(shape_of, atoms)], [*map(shape_of, new_vars)]
                )
            self.eqns.append(self.code.localize(equation, self.apart(name, atoms), new_vars, **params))
        self.constrain_result(equation, outputs[0])
        self._propagate_properties(name, equation, values, outputs)
        if name in NARROW and outputs[0].is_state:
            outputs[0].narrow_producer = equation
            if name in CAST_PRIMITIVES:
                values[0].casts = (*values[0].casts, outputs[0])
        if any(strategy.final for strategy in strategies):
            finals = zip(*[strategy.final or strategy.results for strategy in strategies], strict=True)
            for output, final in zip(outputs, finals, strict=True):
                if final != output.placements:
                    self.convert_in_place(output, final, equation, 'examples')
        if name == 'reshape' and outputs[0].is_replicated:
            self._reshard_reshaped(equation, values[0], outputs[0])

    def _gather_broadcast_state(self, equation: Any, values: Sequence[Value]) -> None:
        """Gathers state that an equation broadcasts, unless the result becomes part of the state of the step.

        Otherwise the larger result would be gathered, where it meets examples.
        """
        blocks = [value for value in values if value.is_state]
        if not blocks:
            return
        [var] = equation.outvars
        is_broadcast = math.prod(blocks[0].shape) != size_of(var)
        if not is_broadcast or self.context.reduction_layouts.is_sharded(var):
            return
        if all(value.is_replicated or value in blocks for value in values):
            for value in blocks:
                self.convert_in_place(value, self.context.replicated, equation)

    def _inner_jaxpr_params(self, name: str, equation: Any) -> dict[str, Any]:
        """Returns the parameters that hold jaxprs, with these jaxprs partitioned for replicated values."""
        if name not in _RUN_ONCE and not _has_inner_jaxprs(name, equation):
            return {}

        def change(jaxpr: Any) -> Any:
            if not takes_arrays(jaxpr):  # a kernel
                return self.code.localize_jaxpr(jaxpr)
            arguments = [Argument(self.context.replicated)] * len(open_jaxpr(jaxpr).invars)
            ends = [self.context.replicated] * len(open_jaxpr(jaxpr).outvars)
            return self.context.partition(jaxpr, arguments, ends, caller=equation).jaxpr

        return params_with_jaxprs(equation, change)

    def _summed_slice_dims(self, operand: Placements, result: Placements) -> dict[int, list[str]]:
        """Returns the dimensions whose slice is summed over devices, and the axes that shard each of them."""
        dims = dict[int, list[str]]()
        for axis, source, target in zip(self.context.axes, operand, result, strict=True):
            if isinstance(source, Shard) and isinstance(target, Partial):
                dims.setdefault(source.dim, []).append(axis)
        return dims

    def _indexed_rows(self, equation: Any, placements: Placements) -> tuple[int, list[str], int] | None:
        """Returns the indexed dimension of a table, the axes that shard it, and the number of outer blocks.

        Returns None if it is unsharded.
        """
        for placement in placements:
            if isinstance(placement, Shard) and is_indexed(equation, placement.dim):
                axes = [axis for axis, x in zip(self.context.axes, placements, strict=True) if x == placement]
                outer_sizes = [self.context.auto.sizes[axis] for axis in placement.outer_axes]
                return placement.dim, axes, math.prod(outer_sizes)
        return None

    def _choose_strategies(self, name: str, equation: Any, values: Sequence[Value]) -> list[Strategy]:
        """Returns the strategy of an equation along each axis."""
        strategies = self._rule_strategies(equation, values)
        if None in strategies and any(value.has_sum for value in values):
            self._reduce_operands(name, equation, values, [i for i, x in enumerate(strategies) if x is None])
            strategies = self._rule_strategies(equation, values)
        if self.context.microbatch_axis is not None and strategies[self.context.microbatch_axis] is None:
            raise CannotPartition(equation, NEEDS_ALL_MICROBATCHES)
        usual = [strategy or self._gather_all(equation, values) for strategy in strategies]
        if name == 'slice' and _has_sums(usual) and self._is_gathered_anyway(values[0]):
            gathering = self._gather_all(equation, values)
            usual = [gathering if _has_sums([strategy]) else strategy for strategy in usual]
        if self.context.is_mixed:
            axis = len(usual)
            while axis and not self._all_divide(equation, usual):
                axis -= 1
                if axis != self.context.microbatch_axis:
                    usual[axis] = self._gather_all(equation, values)
        best = cheapest(self, equation, values, usual)
        return best if best == usual or self._all_divide(equation, best) else usual

    def _is_gathered_anyway(self, value: Value) -> bool:
        """Whether a sliced value is gathered: for another equation, or because it has many slices."""
        if value.has_sum:
            return False
        slices = [
            equation
            for equation in open_jaxpr(self.jaxpr).eqns
            if primitive_name(equation) == 'slice' and equation.invars[0] is value.var
        ]
        return len(slices) > MAX_SENT_SLICES or (self.context.replicated, False) in value.versions

    def _all_divide(self, equation: Any, strategies: Sequence[Strategy]) -> bool:
        """Whether the shard counts divide the dimensions of all operands and results."""
        operands, results = _transposed(strategies)
        atoms = zip((*equation.invars, *equation.outvars), (*operands, *results), strict=True)
        return all(self.divides(shape_of(atom), placements) for atom, placements in atoms)

    def _reshard_reshaped(self, equation: Any, value: Value, output: Value) -> None:
        """Reshards the result of a reshape whose operand was gathered, along one of the split dimensions."""
        target, blocks = [*output.placements], self.context.blocks
        for axis, placement in enumerate(value.placements):
            if isinstance(placement, Shard) and not placement.is_state:
                for old_dims, new_dims in reshape_groups(equation):
                    dim = sharded_part(new_dims, output.shape, blocks)
                    if placement.dim in old_dims and dim is not None:
                        target[axis] = Shard(dim)
        if [*output.placements] != target:
            self.convert_in_place(output, tuple(target), equation)

    def _replicated_primitive(self, name: str, equation: Any, values: Sequence[Value]) -> None:
        """Writes an equation whose operands are replicated.

        If its result has a batch dimension, each device computes its block alone where that is possible.
        """
        context = self.context
        atoms = [value.atom for value in values]
        outputs = [self.define(var, context.replicated) for var in equation.outvars]
        params = self._inner_jaxpr_params(name, equation)
        new_vars = [output.atom for output in outputs]
        if name in OPAQUE and context.auto.sizes:
            write_opaque(self, equation, atoms, new_vars)
        else:
            if name == KERNEL:
                shapes = [*map(shape_of, equation.invars)], [*map(shape_of, equation.outvars)]
                params = kernel_params(self.code, equation, *shapes)
            self.eqns.append(self.code.localize(equation, self.apart(name, atoms), new_vars, **params))
            if name == 'conv_general_dilated':
                self.constrain_result(equation, outputs[0])
        self._propagate_properties(name, equation, values, outputs)
        if not is_computed_by_block(equation) or context.keeps_replicated:
            return
        [output] = outputs
        output.producer = equation, values
        target = context.batch_dims.placements(output.var, context.replicated)
        if not is_replicated(target):
            entire_atom, block = output.atom, self._block_of(output, target, equation)
            output.atom = block
            output.set_placements(target)
            output.add_version((context.replicated, False), entire_atom)

    def _propagate_properties(
        self, name: str, equation: Any, values: Sequence[Value], outputs: Sequence[Value]
    ) -> None:
        zeros = [value.is_zero for value in values]
        if any(zeros) and is_zero(equation, zeros):
            for output in outputs:
                output.is_zero = True
        origins = [value.origin for value in values if value.origin is not None]
        if origins:
            for output in outputs:
                if output.is_state or name in SAME_STATE:
                    output.origin = origins[0]

    def _rule_strategies(self, equation: Any, values: Sequence[Value]) -> list[Strategy | None]:
        zeros, blocks = tuple([value.is_zero for value in values]), self.context.blocks
        targets = self.result_targets(equation, values)
        is_update = self.context.is_update(equation, values)
        along_axes = zip(*operand_placements(equation, values, self.context.replicated), strict=True)
        return [
            self.context.strategy(
                Op(
                    *(equation, placements, blocks, zeros, of_first, placement, is_update),
                    axis == self.context.microbatch_axis,
                )
            )
            for axis, (placements, of_first, placement) in enumerate(
                zip(along_axes, self._shard_counts_of(values[0]), targets, strict=True)
            )
        ]

    def _shard_counts_of(self, value: Value) -> Sequence[int | None]:
        """Returns, for each axis, the shard count over all axes of the dimension that it shards.

        None stands for the product of all axes, as it is unless the axes shard different batch dimensions.
        """
        if not self.context.is_mixed:
            return [None] * len(value.placements)
        counts = shard_counts(value.placements, self.context.sizes, len(value.shape))
        return [counts[x.dim] if isinstance(x, Shard) else None for x in value.placements]

    def _gather_all(self, equation: Any, values: Sequence[Value]) -> Strategy:
        """Returns the strategy that gathers all operands."""
        return Strategy((REPLICATE,) * len(values), (REPLICATE,) * len(equation.outvars))

    def _reduce_operands(
        self, name: str, equation: Any, values: Sequence[Value], axes: Sequence[int]
    ) -> None:
        """Reduces partial operands of an equation; of an elementwise one, to the shards of other operands.

        Args:
            name: the name of its primitive.
            equation: the equation.
            values: its operands.
            axes: the indices of the axes along which it does not support partial operands.
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
            # Along the other axes the value stays partial.
            after = tuple([b if i in axes else a for i, (a, b) in enumerate(zip(before, after, strict=True))])
            if after != before:
                self.convert_in_place(value, after, equation)


def _has_sums(strategies: Sequence[Strategy]) -> bool:
    """Whether the first result is partial along some axis."""
    return any(isinstance(strategy.results[0], Partial) for strategy in strategies)


def _has_inner_jaxprs(name: str, equation: Any) -> bool:
    """Whether a primitive without a rule has inner jaxprs, as ``custom_vmap`` has."""
    return name not in RULES and name != KERNEL and any(True for _ in inner_jaxprs(equation))


def _transposed(
    strategies: Sequence[Strategy],
) -> tuple[Sequence[Placements], Sequence[Placements]]:
    """Transposes strategies by axis to the placements of each operand and of each result."""
    operands = [*zip(*[strategy.operands for strategy in strategies], strict=True)]
    results = [*zip(*[strategy.results for strategy in strategies], strict=True)]
    return operands, results
