"""Conversions of values between placements, as the equations that take the values need them.

A conversion that was written before is used again, in the forward or in the backward pass. The dtype in which
a value is sent is chosen here, and each collective enters the list of the report with what it is for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from scalax._jax.equations import is_on_device, shape_of, size_of
from scalax._jax.manual_axes import local_params
from scalax._jax.primitives import primitive_name
from scalax._spmd.batch.replicated_parts import block_function, block_operand_dims
from scalax._spmd.editor import EditorBase
from scalax._spmd.placements.auto_shardings import NO_AXES, AutoDims
from scalax._spmd.placements.collectives import RESULT, SENDING_KINDS, What
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
from scalax._spmd.placements.state_casts import is_gathered_as_operands
from scalax._spmd.values import (
    CannotPartition,
    Origin,
    Value,
    is_replicated,
    without_state,
)

_PRODUCTS = frozenset(('conv_general_dilated', 'dot_general', 'ragged_dot_general'))


class JaxprEditor(EditorBase):
    """One jaxpr while it is partitioned, with conversions of its values."""

    def convert(
        self,
        value: Value,
        target: Placements,
        equation: Any,
        what: What | None = None,
        *,
        keeps_state: bool = False,
    ) -> Any:
        """Returns what stands for a value in other placements, for an equation.

        Args:
            value: the value.
            target: the placements.
            equation: the equation.
            what: what it is, if that is not known of the value.
            keeps_state: whether a backward pass takes the state that was gathered for the forward pass.
        """
        if target == value.placements:
            return value.atom
        if value.is_zero:
            target = tuple([REPLICATE if isinstance(x, Partial) else x for x in target])
        source, plain = without_state(value.placements), without_state(target)
        if plain == source:
            return value.atom
        again = self.context.options.reshard_after_forward and not keeps_state
        backward = again and value.is_state and self.is_backward(equation)
        key = plain, backward
        if backward and key not in value.versions and self._is_held(value, plain):
            value.add_version(key, value.versions[plain, False])
        if key not in value.versions:
            if self.context.is_mixed and not self.divides(value.shape, plain):
                raise CannotPartition(equation, f'{plain} split {value.shape} unevenly')
            whole = (self.context.replicated, False)
            is_part = not has_partial(plain) and not is_replicated(plain)
            if value.is_replicated or (whole in value.versions and is_part):
                atom = self._part(value, target, equation)
            elif is_replicated(plain) and is_gathered_as_operands(value, self.read, self.uses):
                maker = value.narrow_producer
                atoms = [self.convert(self.read(operand), plain, equation) for operand in maker.invars]
                atom = self.code.var(value.var, value.shape)
                params = local_params(maker, [*map(shape_of, atoms)], [value.shape])
                self.eqns.append(self.code.local(maker, atoms, [atom], **params))
            else:
                atom = value.atom
                if backward and (plain, False) in value.versions:
                    # XLA would merge the two gathers, and keep the gathered state in between.
                    atom = self._barrier(atom, equation)
                atom = self._exchange(value, atom, source, plain, equation, what)
            value.add_version(key, atom)
        atom = value.versions[key]
        if value.is_state:
            self._last_use[id(atom)] = self._bytes_gathered
        return atom

    def _is_held(self, value: Value, placements: Placements) -> bool:
        """Whether state that a forward pass gathered is held until the backward pass uses it.

        The passes gather state apart, so that none is held in between. But if the forward pass ends with
        it, and gathers less than its size behind it, a second gather would free nothing.
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
        said: What | None = None,
    ) -> Any:
        origin = value.origin
        what: What = 'examples'
        if said is not None:
            what = said
        elif value.has_sum:
            what, origin = 'sum', RESULT if self.converts_results else origin
            layout = self.context.reduction_layouts.of(value.var)
            if layout is not None and layout.path is None:
                origin = RESULT
            elif layout is not None:
                origin, what = layout.path, 'gradient'
        elif origin is not None or value.is_state:
            what = 'weight'
        if what == 'examples':
            origin = self._table_of(value, equation)
        auto, own = self._auto_dims(value, what), atom.aval.dtype
        dtype = self._sent_dtype(what, value, atom, equation)
        if dtype is not None:
            atom = self._cast(atom, dtype, equation)
        steps = redistribute(source, target)
        if steps and not is_on_device(value.var):
            raise CannotPartition(equation, 'it exchanges blocks of a value in the memory of the host')
        for step in steps:
            exchange = self.context.collective_writer
            shape = exchange.shape(step, shape_of(atom))
            if 0 in shape:  # no device has an element
                atom = self.emit(_reshaped(shape), ('empty', shape), equation, [atom])
                continue
            if step.kind == 'all_to_all':
                # XLA for CPUs may lay out the blocks that it sends differently, which it then refuses.
                atom = self.emit(jax.lax.optimization_barrier, 'barrier', equation, [atom])
            result = self.code.var(atom, shape)
            in_turn = self.context.microbatch_axis in step.axes
            if in_turn and step.kind in SENDING_KINDS:
                raise CannotPartition(equation, NEEDS_ALL_MICROBATCHES)
            numbers = [self.microbatch_index] if in_turn else []
            written = exchange.equation(step, equation, [atom, *numbers], result, auto)
            if step.kind in SENDING_KINDS:
                written, number = exchange.with_id(written, what)
                facts = self.is_backward(equation), number
                self._record(exchange.collective(step, equation, (atom, result), origin, what, facts))
            self.eqns.append(written)
            if step.kind == 'all_gather':
                self._record_gathered(value)
            atom = result
        if what == 'gradient' and not self.is_step:
            # XLA for GPUs would move the reduction to the next round of a loop, and hold the unreduced
            # gradients of a layer until then.
            atom = self._barrier(atom, equation)
        return atom if dtype is None else self._cast(atom, own, equation)

    def _table_of(self, value: Value, equation: Any) -> Origin:
        """Returns the state to whose blocks, or to those of its gradient, an equation brings examples.

        As a table whose rows, or the indices of which, an equation takes of other devices.
        """
        name = primitive_name(equation)
        if name in _PRODUCTS:
            others = [self.values.get(id(x)) for x in equation.invars]
            if states := [x for x in others if x is not None and x.is_state and x is not value]:
                return states[0].origin
        if name == 'gather':
            table = self.values.get(id(equation.invars[0]))
            return table.origin if table is not None and table.is_state and table is not value else None
        makes_gradient = name == 'scatter-add' or name in _PRODUCTS
        layout = self.context.reduction_layouts.of(equation.outvars[0]) if makes_gradient else None
        return None if layout is None else layout.path

    def _sent_dtype(self, what: What, value: Value, atom: Any, equation: Any) -> Any:
        """Returns the dtype in which a value is sent, as users choose; None if it keeps its own."""
        options = self.context.options
        if what == 'gradient':
            return options.reduce_dtype_for(atom.aval.dtype)
        if what != 'weight' or options.param_dtype is None:
            return None
        if any(x is value.var for x in equation.outvars):  # a result of the step, which meets no examples
            return None
        # An optimizer that needs all of a moment takes it as it is.
        operands = [self.values.get(id(x)) for x in equation.invars]
        meets_examples = any(x is not None and x.has_examples for x in operands)
        return options.param_dtype_for(atom.aval.dtype) if meets_examples else None

    def _cast(self, atom: Any, dtype: Any, equation: Any) -> Any:
        """Returns a value in another dtype."""
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

    def _part(self, value: Value, target: Placements, equation: Any) -> Any:
        """Returns each device's block of a replicated value, computed alone if that is possible."""
        if value.producer is None or has_partial(target):
            whole = value.versions.get((self.context.replicated, False), value.atom)
            atom = self._exchange(value, whole, self.context.replicated, target, equation)
            if value.argument is not None and not has_partial(target):
                first, slices = self._sliced.setdefault(value.argument, (target, []))
                if first == target:
                    slices += self.eqns[-1:]
            return atom
        made_by, operands = value.producer
        blocks: dict[int, list[int]] = {}
        for axis, placement in enumerate(target):
            if isinstance(placement, Shard):
                blocks.setdefault(placement.dim, []).append(axis)
        targets = [[*self.context.replicated] for _ in operands]
        for dim, axes in blocks.items():
            for i, source in block_operand_dims(made_by, dim).items():
                for axis in axes:
                    targets[i][axis] = Shard(source)
        atoms = [
            self.convert(operand, tuple(each), equation)
            for operand, each in zip(operands, targets, strict=True)
        ]
        sizes = self.context.sizes
        exchange = self.context.collective_writer
        block_of = [
            (dim, exchange.block(axes), math.prod(sizes[i] for i in axes)) for dim, axes in blocks.items()
        ]
        if (found := block_function(made_by, block_of)) is not None:
            function, key = found
            if any(self.context.microbatch_axis in axes for axes in blocks.values()):
                atoms.append(self.microbatch_index)
            return self.emit(function, key, made_by, atoms)
        shape = local_shape(value.shape, target, sizes)
        result = self.code.var(value.var, shape)
        params = local_params(made_by, [*map(shape_of, atoms)], [shape])
        self.eqns.append(self.code.local(made_by, atoms, [result], **params))
        return result

    def reduce(self, value: Value, equation: Any) -> None:
        """Reduces a sum, for all equations behind: to the layout in which it is wanted, or to all devices."""
        self.convert_in_place(value, self.reduced_placements(value.var, value.placements), equation)

    def reduced_placements(self, var: Any, placements: Placements) -> Placements:
        """Returns the placements of a variable whose sums are reduced.

        They are those of its state, or of the batch if it has a dimension of the batch; else the sums are
        reduced to all devices.
        """
        layout = self.context.reduction_layouts.of(var)
        found = self.context.reduced(placements, layout)
        if layout is not None or SUM not in placements:
            return found
        of_batch = self.context.batch_dims.placements(var, found)
        return tuple(
            [
                after if before == SUM and i != self.context.microbatch_axis else x
                for i, (before, x, after) in enumerate(zip(placements, found, of_batch, strict=True))
            ]
        )

    def convert_in_place(
        self, value: Value, target: Placements, equation: Any, what: What | None = None
    ) -> None:
        """Converts a value for all equations behind; *what* it is, if that is not known of the value."""
        atom = self.convert(value, target, equation, what)
        value.atom = atom
        value.set_placements(target)
        value.clear_versions()

    def reduce_shared_sums(self, values: Sequence[Value], equation: Any) -> None:
        """Reduces the sums among values that are used more than once: one reduction serves all uses."""
        for value in values:
            if value.has_sum and self.uses.count(value.var) > 1 and not self._is_contracted(value):
                self.reduce(value, equation)

    def _is_contracted(self, value: Value) -> bool:
        """Whether products alone take a sum, and make less of it: those are reduced instead.

        As of the gradient of a product of two small weights, of which either has a gradient.
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
    """The function of one operation that gives a value without elements another shape."""
    return jax.jit(lambda x: x.reshape(shape))


NEEDS_ALL_MICROBATCHES = 'it needs more than one microbatch'
"""Why an equation of a layer cannot run on microbatches."""


def has_partial(placements: Sequence[Placement]) -> bool:
    return any(isinstance(x, Partial) for x in placements)
