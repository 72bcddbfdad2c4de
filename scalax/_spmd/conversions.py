"""The jaxpr editor: converts values between placements for the equations that use them.

The editor reuses an earlier conversion of the same pass (forward or backward), chooses the dtype in which a
value is sent, and records each collective with its purpose for the report.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from scalax._jax.equations import is_on_device, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import resized_params
from scalax._spmd.batch.replicated_parts import block_function, block_operand_dims
from scalax._spmd.editor import EditorBase
from scalax._spmd.placements.auto_shardings import NO_AXES, AutoDims
from scalax._spmd.placements.collectives import RESULT, SENDING_KINDS, What
from scalax._spmd.placements.expert_moves import feature_split
from scalax._spmd.placements.op_rules import bytes_of
from scalax._spmd.placements.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Placements,
    Shard,
    local_shape,
    redistribute,
)
from scalax._spmd.placements.reduction_costs import ReductionCosts, is_wider_cast
from scalax._spmd.placements.state_casts import is_gathered_as_operands
from scalax._spmd.values import (
    CannotPartition,
    Origin,
    Value,
    is_replicated,
    without_state,
)

_CONTRACTIONS = frozenset(('conv_general_dilated', 'dot_general', 'ragged_dot_general'))


class JaxprEditor(EditorBase):
    """The partitioned version of one jaxpr, under construction, with conversions between placements."""

    def convert(
        self,
        value: Value,
        target: Placements,
        equation: Any,
        what: What | None = None,
        *,
        keeps_state: bool = False,
    ) -> Any:
        """Returns the atom that holds a value in other placements, for one equation.

        Args:
            value: the value.
            target: the placements.
            equation: the equation.
            what: what the value is; None infers it from the value.
            keeps_state: whether a backward pass uses the state that was gathered for the forward pass.
        """
        if target == value.placements:
            return value.atom
        if value.is_zero:
            target = tuple([REPLICATE if isinstance(x, Partial) else x for x in target])
        source, plain = without_state(value.placements), without_state(target)
        if plain == source:
            return value.atom
        regathers = self.context.options.reshard_after_forward and not keeps_state
        is_backward = regathers and value.is_state and self.is_backward(equation)
        key = plain, is_backward
        if is_backward and key not in value.versions and self._is_still_gathered(value, plain):
            value.add_version(key, value.versions[plain, False])
        if key not in value.versions:
            if self.context.is_mixed and not self.divides(value.shape, plain):
                raise CannotPartition(equation, f'{plain} split {value.shape} unevenly')
            replicated_key = (self.context.replicated, False)
            is_part = not has_partial(plain) and not is_replicated(plain)
            if value.is_replicated or (replicated_key in value.versions and is_part):
                atom = self._block_of(value, target, equation)
            elif is_replicated(plain) and is_gathered_as_operands(value, self.read, self.uses):
                producer = value.narrow_producer
                atoms = [self.convert(self.read(operand), plain, equation) for operand in producer.invars]
                atom = self.code.var(value.var, value.shape)
                params = resized_params(producer, [*map(shape_of, atoms)], [value.shape])
                self.eqns.append(self.code.localize(producer, atoms, [atom], **params))
            else:
                atom = value.atom
                if is_backward and (plain, False) in value.versions:
                    # XLA would merge the two gathers, and keep the gathered state in between.
                    atom = self._barrier(atom, equation)
                atom = self._exchange(value, atom, source, plain, equation, what)
            value.add_version(key, atom)
        atom = value.versions[key]
        if value.is_state:
            self._last_use[id(atom)] = self._bytes_gathered
        return atom

    def _is_still_gathered(self, value: Value, placements: Placements) -> bool:
        """Whether state gathered in the forward pass stays in memory until the backward pass uses it.

        Each pass usually gathers state for itself, so that no gathered state is held in between. But if the
        forward pass gathers less than its size afterwards, a second gather would save no memory.
        """
        atom = value.versions.get((placements, False))
        if atom is None:
            return False
        size = math.prod(shape_of(atom)) * atom.aval.dtype.itemsize
        return self._bytes_gathered - self._last_use[id(atom)] < size

    def _exchange(
        self,
        value: Value,
        atom: Any,
        source: Placements,
        target: Placements,
        equation: Any,
        known_what: What | None = None,
    ) -> Any:
        """Converts an atom of a value between placements, and records the collectives."""
        what, origin = self._purpose(value) if known_what is None else (known_what, value.origin)
        if what == 'examples':
            origin = self._indexed_state(value, equation)
        auto_dims, own_dtype = self._auto_dims(value, what), atom.aval.dtype
        dtype = self._communication_dtype(what, value, atom, equation)
        if dtype is not None:
            atom = self._cast(atom, dtype, equation)
        ops = redistribute(source, target)
        if ops and not is_on_device(value.var):
            raise CannotPartition(equation, 'it exchanges blocks of a value in host memory')
        for op in ops:
            writer = self.context.collective_writer
            shape = writer.shape(op, shape_of(atom))
            if 0 in shape:  # no device has an element
                atom = self.emit(_reshaped(shape), ('empty', shape), equation, [atom])
                continue
            split = None
            if op.kind == 'all_to_all':
                # XLA's CPU backend may choose different layouts for the blocks, and then rejects them.
                atom = self.emit(jax.lax.optimization_barrier, 'barrier', equation, [atom])
                if what == 'examples' and self.context.auto.sizes and not auto_dims:
                    split = feature_split(self, value, equation, op, shape_of(atom))
                if split is not None:
                    auto_dims = split.auto_dims
                    atom = atom if split.is_sum else self.constrain_auto(split.joined_spec, atom, equation)
            result = self.code.var(atom, shape)
            is_microbatched = self.context.microbatch_axis in op.axes
            if is_microbatched and op.kind in SENDING_KINDS:
                raise CannotPartition(equation, NEEDS_ALL_MICROBATCHES)
            microbatch_index = [self.microbatch_index] if is_microbatched else []
            written = writer.equation(op, equation, [atom, *microbatch_index], result, auto_dims)
            if op.kind in SENDING_KINDS:
                written, collective_id = writer.with_id(written, what)
                collective = writer.collective(
                    *(op, equation, (atom, result), origin, what),
                    is_backward=self.is_backward(equation),
                    collective_id=collective_id,
                )
                self._record(collective)
            self.eqns.append(written)
            if op.kind == 'all_gather':
                self._record_gathered(value)
            atom = result
            if split is not None:
                auto_dims = NO_AXES
                if split.result_spec is None:
                    atom = self.constrain_auto(split.joined_spec, atom, equation)
                else:
                    self.result_specs[id(equation)] = split.result_spec
        if what == 'gradient' and not self.is_step:
            # XLA's GPU backend would move the reduction to the next iteration of a loop, and hold the
            # unreduced gradients of a layer until then.
            atom = self._barrier(atom, equation)
        return atom if dtype is None else self._cast(atom, own_dtype, equation)

    def _purpose(self, value: Value) -> tuple[What, Origin]:
        """Returns what a value is, and the state that it is or becomes part of."""
        if value.has_sum:
            layout = self.context.reduction_layouts.of(value.var)
            if layout is None:
                return 'sum', RESULT if self.converts_results else value.origin
            return ('sum', RESULT) if layout.path is None else ('gradient', layout.path)
        is_weight = value.origin is not None or value.is_state
        return 'weight' if is_weight else 'examples', value.origin

    def _indexed_state(self, value: Value, equation: Any) -> Origin:
        """Returns the state to whose shards an equation moves examples, or to the shards of whose gradient.

        An example is an embedding table with sharded rows, to which the indices of examples are sent.
        """
        name = primitive_name(equation)
        if name in _CONTRACTIONS:
            others = [self.values.get(id(x)) for x in equation.invars]
            if states := [x for x in others if x is not None and x.is_state and x is not value]:
                return states[0].origin
        if name == 'gather':
            table = self.values.get(id(equation.invars[0]))
            return table.origin if table is not None and table.is_state and table is not value else None
        makes_gradient = name == 'scatter-add' or name in _CONTRACTIONS
        layout = self.context.reduction_layouts.of(equation.outvars[0]) if makes_gradient else None
        return None if layout is None else layout.path

    def _communication_dtype(self, what: What, value: Value, atom: Any, equation: Any) -> Any:
        """Returns the dtype in which the user's options send a value; None for the dtype of the value."""
        options = self.context.options
        if what == 'gradient':
            return options.reduce_dtype_for(atom.aval.dtype)
        if what != 'weight' or options.param_dtype is None:
            return None
        if any(x is value.var for x in equation.outvars):  # a result of the step
            return None
        # An optimizer gets entire moments in their own dtype.
        operands = [self.values.get(id(x)) for x in equation.invars]
        meets_examples = any(x is not None and x.has_examples for x in operands)
        return options.param_dtype_for(atom.aval.dtype) if meets_examples else None

    def _cast(self, atom: Any, dtype: Any, equation: Any) -> Any:
        """Casts a value."""
        function = functools.partial(jax.lax.convert_element_type, new_dtype=dtype)
        return self.emit(function, ('cast', str(dtype)), equation, [atom])

    def _auto_dims(self, value: Value, what: str) -> AutoDims:
        """Returns the Auto axes that shard each dimension of a value."""
        if not self.context.auto.sizes:
            return NO_AXES
        layout = self.context.reduction_layouts.of(value.var) if what == 'gradient' else None
        if layout is None:
            return self.context.auto.of(value.var)
        sharded = dict(layout.auto)
        return tuple([sharded.get(dim, ()) for dim in range(len(value.shape))])

    def _block_of(self, value: Value, target: Placements, equation: Any) -> Any:
        """Returns the block that each device has of a replicated value.

        The producer of the value computes the block alone if it can; otherwise, the block is sliced.
        """
        if value.producer is None or has_partial(target) or _has_outer_axes(target):
            entire_atom = value.versions.get((self.context.replicated, False), value.atom)
            atom = self._exchange(value, entire_atom, self.context.replicated, target, equation)
            if value.argument is not None and not has_partial(target):
                sliced_placements, slices = self._sliced.setdefault(value.argument, (target, []))
                if sliced_placements == target:
                    slices += self.eqns[-1:]
            return atom
        producer, operands = value.producer
        blocks: dict[int, list[int]] = {}
        for axis, placement in enumerate(target):
            if isinstance(placement, Shard):
                blocks.setdefault(placement.dim, []).append(axis)
        targets = [[*self.context.replicated] for _ in operands]
        for dim, axes in blocks.items():
            for i, source in block_operand_dims(producer, dim).items():
                for axis in axes:
                    targets[i][axis] = Shard(source)
        atoms = [
            self.convert(operand, tuple(operand_target), equation)
            for operand, operand_target in zip(operands, targets, strict=True)
        ]
        sizes = self.context.sizes
        writer = self.context.collective_writer
        dim_blocks = [
            (dim, writer.block(axes), math.prod(sizes[i] for i in axes)) for dim, axes in blocks.items()
        ]
        if (function_and_key := block_function(producer, dim_blocks)) is not None:
            function, key = function_and_key
            if any(self.context.microbatch_axis in axes for axes in blocks.values()):
                atoms.append(self.microbatch_index)
            return self.emit(function, key, producer, atoms)
        shape = local_shape(value.shape, target, sizes)
        result = self.code.var(value.var, shape)
        params = resized_params(producer, [*map(shape_of, atoms)], [shape])
        self.eqns.append(self.code.localize(producer, atoms, [result], **params))
        return result

    def reduce(self, value: Value, equation: Any) -> None:
        """Reduces a partial sum for all following equations, to the layout of its state or all devices."""
        self.convert_in_place(value, self.reduced_placements(value.var, value.placements), equation)

    def reduced_placements(self, var: Any, placements: Placements) -> Placements:
        """Returns the placements of a variable after its partial sums are reduced.

        Sums are scattered to the layout of the state that they become part of, or along a batch dimension;
        without either, they are reduced to all devices.
        """
        layout = self.context.reduction_layouts.of(var)
        reduced = self.context.reduced(placements, layout)
        if layout is not None or SUM not in placements:
            return reduced
        batch_placements = self.context.batch_dims.placements(var, reduced)
        return tuple(
            [
                after if before == SUM and i != self.context.microbatch_axis else x
                for i, (before, x, after) in enumerate(
                    zip(placements, reduced, batch_placements, strict=True)
                )
            ]
        )

    def convert_in_place(
        self, value: Value, target: Placements, equation: Any, what: What | None = None
    ) -> None:
        """Converts a value for all following equations.

        Args:
            value: the value.
            target: the placements.
            equation: the equation whose line the conversion gets.
            what: what the value is; None infers it from the value.
        """
        atom = self.convert(value, target, equation, what)
        value.atom = atom
        value.set_placements(target)
        value.clear_versions()

    def converted(self, value: Value, target: Placements, equation: Any) -> Value:
        """Returns a copy of a value in other placements, for one equation."""
        if target == value.placements:
            return value
        atom = self.convert(value, target, equation)
        return Value(value.var, target, atom, value.origin, is_zero=value.is_zero)

    def is_gathered_once(self, value: Value) -> bool:
        """Returns whether the options gather a value once for all passes, as early as possible."""
        return value.is_state and not self.context.options.reshard_after_forward

    def reduce_all(self, values: Sequence[Value], equation: Any) -> None:
        """Reduces the partial sums among values, for all following equations."""
        for value in values:
            if value.has_sum:
                self.reduce(value, equation)

    def reduce_shared_sums(self, values: Sequence[Value], equation: Any) -> None:
        """Reduces partial sums that are used more than once, so that one reduction serves all uses."""
        for value in values:
            if not value.has_sum or self.uses.count(value.var) == 1:
                continue
            if not (self._is_contracted(value) or self._reduces_results(value)):
                self.reduce(value, equation)

    def result_targets(self, equation: Any, values: Sequence[Value]) -> Sequence[Placement | None]:
        """Returns the placements to which the first result is reduced; None where that is not known."""
        if self._may_reduce_later(equation, values):
            return [SUM] * len(self.context.axes)
        layout = self.context.reduction_layouts.of(equation.outvars[0]) if equation.outvars else None
        return [None] * len(self.context.axes) if layout is None else layout.placements

    def _may_reduce_later(self, equation: Any, values: Sequence[Value]) -> bool:
        """Whether it is cheaper to reduce what is computed from the result than partial operands."""
        sums = [value for value in values if value.has_sum]
        if not sums or self.context.microbatch_axis is not None or is_wider_cast(equation):
            return False
        [result, *others] = equation.outvars
        if self.context.reduction_layouts.is_sharded(
            result
        ):  # a gradient takes less memory once it is reduced
            return False
        operand_bytes, cost = sum(bytes_of(value.var) for value in sums), self.reduction_costs.of(result)
        return not others and cost < bytes_of(result) and (cost <= operand_bytes or not operand_bytes)

    def _reduces_results(self, value: Value) -> bool:
        """Whether it is cheaper to reduce what is computed from a partial sum than the sum itself."""
        is_sharded = self.context.reduction_layouts.is_sharded(value.var)
        if is_sharded or self.context.microbatch_axis is not None:
            return False
        return self.reduction_costs.of_results(value.var) < bytes_of(value.var)

    @functools.cached_property
    def reduction_costs(self) -> ReductionCosts:
        """The bytes of reducing partial sums, or what is computed from them."""
        return ReductionCosts(self.jaxpr, self.context.depends_on_examples)

    def _is_contracted(self, value: Value) -> bool:
        """Whether all uses of a partial sum are matmuls with smaller results, which are then reduced instead.

        An example is the gradient of the product of two small weights, from which both gradients follow.
        """
        users = self.uses.equations(value.var)
        others = (True for equation in users if primitive_name(equation) != 'dot_general')
        if (
            self.uses.is_result(value.var)
            or any(others)
            or self.context.reduction_layouts.of(value.var) is not None
        ):
            return False
        sizes = {id(equation): size_of(equation.outvars[0]) for equation in users}
        return 2 * sum(sizes.values()) <= size_of(value.var)


def _reshaped(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Returns the function that reshapes a value without elements."""
    return jax.jit(lambda x: x.reshape(shape))


NEEDS_ALL_MICROBATCHES = 'it needs more than one microbatch at a time'
"""The reason why an equation of a pipelined layer cannot run on one microbatch at a time."""


def _has_outer_axes(placements: Sequence[Placement]) -> bool:
    """Whether shards over Auto axes contain any of the shards."""
    return any(isinstance(x, Shard) and x.outer_axes for x in placements)


def has_partial(placements: Sequence[Placement]) -> bool:
    """Returns whether any placement is `Partial`."""
    return any(isinstance(x, Partial) for x in placements)
